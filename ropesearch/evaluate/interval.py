"""Is a difference between two scores more than the choice of documents? A paired bootstrap over documents."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ropesearch.errors import InputError
from ropesearch.seeding import stream

_NUM_RESAMPLES = 10_000
_NUM_DRAWS_AT_ONCE = 1 << 22  # bounds memory: 32 MiB of indices


class ByWindow(Protocol):
    """What `Score` and `Evaluation` have in common: nats and tokens of each window, one window a document."""

    @property
    def window_nats(self) -> ArrayLike: ...

    @property
    def window_tokens(self) -> ArrayLike: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A difference in nats per token and its two-sided interval at `confidence`."""

    difference: float
    low: float
    high: float
    confidence: float


def paired_interval(score_a: ByWindow, score_b: ByWindow, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Nats per token of a minus those of b on the same windows, with a percentile bootstrap interval over documents.

    Documents are drawn with replacement 10,000 times, both scores on the same draw (Efron and Tibshirani 1993, ch. 13;
    paired as in Koehn 2004); a draw's difference is its summed nats over its summed tokens. Below 0, a is better. The
    draws are those of `stream(seed, "bootstrap")`.

    Raises InputError when the two do not have the same windows with the same tokens, or fewer than 2.
    """
    nats_a, nats_b = (np.asarray(score.window_nats, dtype=np.float64) for score in (score_a, score_b))
    tokens_a, tokens_b = (np.asarray(score.window_tokens, dtype=np.int64) for score in (score_a, score_b))
    if not (nats_a.shape == nats_b.shape == tokens_a.shape and np.array_equal(tokens_a, tokens_b)):
        raise InputError("paired interval: expected two scores of the same windows, got different windows or tokens")
    num_windows = len(tokens_a)
    if num_windows < 2:
        raise InputError(f"paired interval: expected at least 2 windows of different documents, got {num_windows}")
    if not 0 < confidence < 1:
        raise InputError(f"confidence: expected a number between 0 and 1, got {confidence}")
    nats = nats_a - nats_b
    random = stream(seed, "bootstrap")
    differences = []
    num_left = _NUM_RESAMPLES
    while num_left:
        num_rows = min(num_left, max(1, _NUM_DRAWS_AT_ONCE // num_windows))
        drawn = random.integers(num_windows, size=(num_rows, num_windows))
        differences.append(nats[drawn].sum(axis=1) / tokens_a[drawn].sum(axis=1))
        num_left -= num_rows
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(differences), [tail, 1 - tail])
    return Interval(
        difference=float(nats.sum() / tokens_a.sum()), low=float(low), high=float(high), confidence=confidence
    )
