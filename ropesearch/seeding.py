"""Named random streams: every draw in the project comes from one of these."""

import hashlib

import numpy as np


def stream(seed: int, name: str, *indices: int) -> np.random.Generator:
    """A fresh generator for the stream `name` (and the indices below it) of a run's seed.

    The same arguments give the same numbers on every machine and numpy version with PCG64; two names never share a
    stream. `seed` and `indices` are non-negative integers.
    """
    name_words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name_words.tolist(), *indices])))
