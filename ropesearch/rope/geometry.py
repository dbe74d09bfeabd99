"""The rotary geometry of a model: how many pairs there are, and how fast each of them turns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropesearch.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRope:
    """The rotary base of one kind of layer, in models whose layer kinds differ."""

    rope_theta: float
    rescaled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a model's rotary embedding is made of, before any rescaling.

    `rotary_dim` counts the rotated channels of a head (twice the number of pairs); `original_length` is the trained
    length in tokens; `rope_theta` is the plain base. `layer_types` is None where all layers share one table.

    Raises InputError when the numbers cannot belong to a rotary embedding.
    """

    model_type: str
    head_dim: int
    rotary_dim: int
    original_length: int
    rope_theta: float
    layer_types: Mapping[str, LayerRope] | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InputError(f"rotary_dim: expected an even number of at least 2, got {self.rotary_dim}")
        if self.rotary_dim > self.head_dim:
            raise InputError(f"rotary_dim: expected at most head_dim = {self.head_dim}, got {self.rotary_dim}")
        if self.original_length < 2:
            raise InputError(f"original_length: expected at least 2 tokens, got {self.original_length}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise InputError(f"rope_theta: expected a finite number above 1, got {self.rope_theta}")

    @property
    def num_pairs(self) -> int:
        """Number of rotated 2-planes of a head; pair 0 turns fastest."""
        return self.rotary_dim // 2

    def ratio(self, target_length: int) -> float:
        """target_length / original_length; InputError when it is not above 1."""
        if target_length <= self.original_length:
            raise InputError(
                f"target_length: expected more than original_length = {self.original_length} tokens, "
                f"got {target_length}; ask for a longer target, "
                "or give model.original_length if the model was trained on shorter inputs"
            )
        return target_length / self.original_length

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Radians per token of each pair, float64, shape (num_pairs,): theta^(-2 i / rotary_dim) (RoFormer)."""
        return self.rope_theta ** -(2.0 * np.arange(self.num_pairs) / self.rotary_dim)

    def periods_tokens(self) -> NDArray[np.float64]:
        """Tokens that each pair needs for one turn, float64, shape (num_pairs,)."""
        return 2 * np.pi / self.inverse_frequencies()

    def turns(self) -> NDArray[np.float64]:
        """Turns of each pair within original_length, float64, shape (num_pairs,)."""
        return self.original_length / self.periods_tokens()

    def critical_pair(self) -> int:
        """First pair that does not finish one turn in training: the theoretical d_tcd / 2 of LongRoPE2, Eq. 7."""
        return self._first_pair_below(num_turns=1)

    def ten_turn_pair(self) -> int:
        """First pair of fewer than ten turns in training: where LongRoPE2 (Alg. 1) starts to look for its d_rcd."""
        return self._first_pair_below(num_turns=10)

    def _first_pair_below(self, num_turns: int) -> int:
        argument = self.original_length / (2 * math.pi * num_turns)
        pair = math.ceil(self.num_pairs * math.log(argument) / math.log(self.rope_theta))
        return min(max(pair, 0), self.num_pairs)
