"""A score: the nats and tokens of windows, by window and by position block. Sums are kept to the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropesearch.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Nats (float64) and scored tokens (int64), both of shape (num_windows, num_blocks), read-only.

    Block b holds the tokens at positions block_edges[b] .. block_edges[b + 1] - 1 of a window; `block_edges` is int64,
    of shape (num_blocks + 1,), from 0 to the window's length. Blocks without a scored token hold 0 nats and 0 tokens.

    `answered` says for each window that ends in an answer, of which only that was scored, whether each of its tokens
    was the model's most likely one; None stands for a window without an answer. It is empty where none has one.

    Raises InputError when shapes do not fit, a number is not finite or negative, or a window has no scored token.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    block_edges: NDArray[np.int64]
    answered: Sequence[bool | None] = ()

    def __post_init__(self) -> None:
        for name, kind in (("nats", np.float64), ("tokens", np.int64), ("block_edges", np.int64)):
            object.__setattr__(self, name, _frozen_array(name, getattr(self, name), kind))
        edges = self.block_edges
        if edges.ndim != 1 or len(edges) < 2 or edges[0] != 0 or not (np.diff(edges) > 0).all():
            raise InputError(f"score: expected block edges that rise from 0, got {edges.tolist()}")
        num_blocks = len(edges) - 1
        for name, array in (("nats", self.nats), ("tokens", self.tokens)):
            if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] != num_blocks:
                raise InputError(f"score: expected {name} of shape (num_windows, {num_blocks}), got {array.shape}")
        if self.nats.shape != self.tokens.shape:
            raise InputError(f"score: expected tokens of the nats' shape {self.nats.shape}, got {self.tokens.shape}")
        if not np.isfinite(self.nats).all() or (self.nats < 0).any():
            raise InputError("score: expected finite nats of at least 0")
        if (self.tokens < 0).any() or (self.tokens > np.diff(edges)).any():
            raise InputError("score: expected from 0 tokens to the length of its block in every block")
        if (self.tokens.sum(axis=1) < 1).any():
            raise InputError("score: expected at least one scored token in every window")
        if (self.nats[self.tokens == 0] != 0).any():
            raise InputError("score: expected 0 nats in blocks without a scored token")
        _check_answered(self.answered, len(self.nats))
        object.__setattr__(self, "answered", tuple(self.answered))

    @property
    def total_nats(self) -> float:
        """Nats of all windows together (correctly rounded sum)."""
        return math.fsum(self.nats.ravel().tolist())

    @property
    def total_tokens(self) -> int:
        """Scored tokens of all windows together."""
        return int(self.tokens.sum())

    @property
    def nats_per_token(self) -> float:
        """Token-weighted mean: total_nats / total_tokens."""
        return self.total_nats / self.total_tokens

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token); infinity where that is beyond float64."""
        return perplexity(self.total_nats, self.total_tokens)

    @property
    def window_nats(self) -> NDArray[np.float64]:
        """Nats of each window, float64, shape (num_windows,)."""
        sums: NDArray[np.float64] = self.nats.sum(axis=1)
        return sums

    @property
    def window_tokens(self) -> NDArray[np.int64]:
        """Scored tokens of each window, int64, shape (num_windows,)."""
        sums: NDArray[np.int64] = self.tokens.sum(axis=1)
        return sums

    def of_windows(self, *, with_answer: bool) -> "Score | None":
        """The score of those windows that end in an answer, or of the others; None where there are none."""
        rows = [index for index in range(len(self.nats)) if self.has_answer(index) is with_answer]
        if not rows:
            return None
        answered = [self.answered[index] for index in rows] if with_answer else ()
        return Score(self.nats[rows], self.tokens[rows], self.block_edges, answered)

    def windows(self) -> "list[Score]":
        """The score of each window alone."""
        rows = [slice(index, index + 1) for index in range(len(self.nats))]
        return [Score(self.nats[row], self.tokens[row], self.block_edges, self.answered[row]) for row in rows]

    def has_answer(self, index: int) -> bool:
        """Whether that window ends in an answer."""
        return bool(self.answered) and self.answered[index] is not None

    @classmethod
    def joined(cls, scores: Sequence["Score"]) -> "Score":
        """The score of the windows of `scores`, of which there is at least one, in their order.

        Raises InputError when their blocks differ, or some have answers and others none.
        """
        edges = scores[0].block_edges
        if not all(np.array_equal(score.block_edges, edges) for score in scores):
            raise InputError("score: expected scores of the same position blocks, got different ones")
        nats, tokens = (np.concatenate(arrays) for arrays in zip(*((s.nats, s.tokens) for s in scores), strict=True))
        return cls(nats, tokens, edges, [answered for score in scores for answered in score.answered])

    def to_json(self) -> dict[str, Any]:
        """The score as JSON values; `from_json` gives back exactly the same numbers."""
        return {
            "block_edges": self.block_edges.tolist(),
            "nats": self.nats.tolist(),
            "tokens": self.tokens.tolist(),
            **({"answered": list(self.answered)} if self.answered else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> "Score":
        """The score that `to_json` wrote; InputError when `value` is not one."""
        if not isinstance(value, Mapping):
            raise InputError(f"score: expected a JSON object, got {type(value).__name__}")
        keys = {"block_edges", "nats", "tokens"}
        if set(value) - {"answered"} != keys:
            raise InputError(f"score: expected the keys {sorted(keys)}, got {sorted(map(str, value))}")
        return cls(value["nats"], value["tokens"], value["block_edges"], value.get("answered", ()))


def perplexity(nats: float, tokens: int) -> float:
    """exp(nats / tokens), infinity where that is beyond float64. `tokens` is at least 1."""
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


def _check_answered(answered: Any, num_windows: int) -> None:
    if not isinstance(answered, (list, tuple)) or (answered and len(answered) != num_windows):
        raise InputError(f"score: expected answered empty or for each of {num_windows} windows, got {answered}")
    if not all(each is None or isinstance(each, bool) for each in answered):
        raise InputError(f"score: expected true, false or none for each window's answer, got {answered}")


def _frozen_array(name: str, values: ArrayLike, kind: type[np.float64] | type[np.int64]) -> NDArray[Any]:
    """A read-only copy of `values` with dtype `kind`; InputError when that would change a value."""
    try:
        given = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"score: expected {name} as an array of numbers, got {error}") from None
    whole = given.dtype.kind in "iu"
    if not (whole or (given.dtype.kind == "f" and kind is np.float64)):
        expected = "numbers" if kind is np.float64 else "whole numbers"
        raise InputError(f"score: expected {name} as an array of {expected}, got {given.dtype}")
    array = np.array(given, dtype=kind)
    array.flags.writeable = False
    return array
