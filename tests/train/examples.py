"""Micro-batches and texts for the tests of fine-tuning."""

from pathlib import Path
from typing import Any

import numpy as np

from ropesearch.data.mixture import LONG, SHORT, MicroBatch
from tests import toys

NUM_HELD_OUT = 4
# Of a corpus for the toys: few windows, so that many documents are left to train on.
CORPUS_WORDS = [
    "corpus.num_search_windows=4",
    "corpus.num_selection_windows=4",
    f"corpus.num_held_out_windows={NUM_HELD_OUT}",
]


def write_texts(folder: Path) -> Path:
    """120 texts of made-up words: every other one of 14 to 63 characters, the others of 250 to 1,300."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(2, 8))) for _ in range(300)]
    folder.mkdir(parents=True)
    for index in range(120):
        num_words = int(rng.integers(4, 9)) if index % 2 else int(rng.integers(60, 200))
        (folder / f"{index:03}.txt").write_text(" ".join(rng.choice(words, size=num_words))[:1300] + "\n")
    return folder


def packed(*lengths: int, num_tokens: int = toys.ORIGINAL_LENGTH, seed: int = 0) -> MicroBatch:
    """A short row of one sequence with documents of these lengths of random tokens; the rest is padding."""
    return _micro_batch(SHORT, lengths, num_tokens, seed)


def whole(num_tokens: int, seed: int = 0) -> MicroBatch:
    """A long row of random tokens."""
    return _micro_batch(LONG, (num_tokens,), num_tokens, seed)


def _micro_batch(regime: str, lengths: tuple[int, ...], num_tokens: int, seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    every = [*lengths, *([num_tokens - sum(lengths)] if sum(lengths) < num_tokens else [])]
    position_ids = np.concatenate([np.arange(length) for length in every])[None]
    is_scored = position_ids > 0
    is_scored[0, sum(lengths) :] = False
    return MicroBatch(
        regime=regime,
        bucket=0 if regime == SHORT else 1,
        token_ids=rng.integers(2, toys.VOCABULARY_TOKENS, size=(1, num_tokens)),
        position_ids=position_ids,
        is_scored=is_scored,
        num_scored=int(is_scored.sum()),
    )


def tensors(micro: MicroBatch) -> tuple[Any, Any, Any]:
    """token_ids, position_ids and is_scored of a micro-batch."""
    import torch

    return tuple(torch.from_numpy(each) for each in (micro.token_ids, micro.position_ids, micro.is_scored))  # type: ignore[return-value]
