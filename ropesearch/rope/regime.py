"""A regime: one table of a model and the greatest length it serves."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Factors, attention factor and retained tokens, and the greatest length in tokens they serve.

    `factors[i]` >= 1 divides the inverse frequency of pair i. `attention_factor` multiplies cos and sin. The first
    `retained_tokens` positions keep their unscaled angles and attention factor 1 (LongRoPE, Eq. 3 and its n-hat).

    Raises InputError when a value is not finite or out of range.
    """

    name: str
    max_length: int
    factors: tuple[float, ...]
    attention_factor: float = 1.0
    retained_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.factors:
            raise InputError(f"regime {self.name!r}: expected one factor per pair, got none")
        for pair, factor in enumerate(self.factors):
            if not (math.isfinite(factor) and factor >= 1):
                raise InputError(
                    f"regime {self.name!r}: expected finite factors of at least 1, got {factor!r} at pair {pair}"
                )
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise InputError(
                f"regime {self.name!r}: expected a finite attention_factor above 0, got {self.attention_factor!r}"
            )
        if self.max_length < 1:
            raise InputError(f"regime {self.name!r}: expected max_length of at least 1 token, got {self.max_length}")
        if not 0 <= self.retained_tokens <= self.max_length:
            raise InputError(
                f"regime {self.name!r}: expected retained_tokens from 0 to max_length = {self.max_length}, "
                f"got {self.retained_tokens}"
            )

    def is_same_table(self, other: "Regime") -> bool:
        """Whether it is the other one but for its name and greatest length."""
        return dataclasses.replace(other, name=self.name, max_length=self.max_length) == self


def inverse_frequencies(geometry: Geometry, factors: tuple[float, ...]) -> NDArray[np.float64]:
    """Inverse frequencies under `factors`, float64, shape (num_pairs,): the plain ones, each divided by its factor.

    The project's one way from factors to a table (LongRoPE, Eq. 3). Raises InputError when the number of factors is not
    the number of pairs.
    """
    if len(factors) != geometry.num_pairs:
        raise InputError(f"factors: expected one for each of the {geometry.num_pairs} pairs, got {len(factors)}")
    return geometry.inverse_frequencies() / np.asarray(factors, dtype=np.float64)
