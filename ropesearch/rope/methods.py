"""The known ways to stretch a rotary embedding, each as factors and an attention factor.

A method's factor is the plain inverse frequency divided by the method's: blends of frequencies are inverted here, once.
"""

from collections.abc import Sequence
from math import isfinite, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime


def identity(geometry: Geometry, target_length: int) -> Regime:
    """The checkpoint as it is: every factor 1. Named "unscaled"."""
    return Regime(name="unscaled", max_length=target_length, factors=(1.0,) * geometry.num_pairs)


def linear(geometry: Geometry, target_length: int) -> Regime:
    """Position interpolation (Chen et al. 2023): every factor is the ratio."""
    ratio = geometry.ratio(target_length)
    return Regime(name="linear", max_length=target_length, factors=(ratio,) * geometry.num_pairs)


def ntk(geometry: Geometry, target_length: int) -> Regime:
    """NTK-aware interpolation: theta times ratio^(d / (d - 2)), so factors run from 1 to the ratio."""
    factors = _raised_theta(geometry, geometry.ratio(target_length))
    return Regime(name="ntk", max_length=target_length, factors=factors)


def dynamic_ntk(geometry: Geometry, target_length: int, length: int) -> Regime:
    """Dynamic NTK: the table in force when a sequence has `length` tokens, with the ratio as its `factor`.

    Matches transformers' `dynamic` type (modeling_rope_utils.py) where max_position_embeddings is original_length; at
    `length` <= original_length all factors are 1. Raises InputError when `length` is not from 1 to target_length.
    """
    ratio = geometry.ratio(target_length)
    if not 1 <= length <= target_length:
        raise InputError(f"length: expected 1 to target_length = {target_length} tokens, got {length}")
    growth = ratio * max(length, geometry.original_length) / geometry.original_length - (ratio - 1)
    return Regime(name="dynamic_ntk", max_length=target_length, factors=_raised_theta(geometry, growth))


def ntk_by_parts(
    geometry: Geometry, target_length: int, beta_fast: float = 32, beta_slow: float = 1, truncate: bool = True
) -> Regime:
    """NTK-by-parts (YaRN, sec. 3.2): YaRN's factors with attention factor 1. Arguments and errors as in `yarn`."""
    factors = _blended_by_turns(geometry, geometry.ratio(target_length), beta_fast, beta_slow, truncate)
    return Regime(name="ntk_by_parts", max_length=target_length, factors=factors)


def yarn(
    geometry: Geometry, target_length: int, beta_fast: float = 32, beta_slow: float = 1, truncate: bool = True
) -> Regime:
    """YaRN (Peng et al. 2023): pairs of over `beta_fast` turns stay, those of under `beta_slow` get the ratio.

    `truncate` rounds the two ends of the ramp outwards to whole pairs. Matches the `yarn` type of transformers
    (modeling_rope_utils.py), its clamp at rotary_dim - 1 included. Attention factor 0.1 ln(ratio) + 1.
    Raises InputError unless beta_fast >= beta_slow > 0.
    """
    ratio = geometry.ratio(target_length)
    return Regime(
        name="yarn",
        max_length=target_length,
        factors=_blended_by_turns(geometry, ratio, beta_fast, beta_slow, truncate),
        attention_factor=attention_factor_formula("yarn", ratio, geometry.original_length),
    )


def llama3(geometry: Geometry, factor: float, low_freq_factor: float, high_freq_factor: float) -> Regime:
    """Llama 3.1's table: transformers' `llama3` type (modeling_rope_utils.py). Serves original_length * factor tokens.

    Pairs of more than `high_freq_factor` turns stay, of fewer than `low_freq_factor` get `factor`; between, inverse
    frequencies are blended linearly in the number of turns. Raises InputError for factor < 1 or bounds out of order.
    """
    if not (isfinite(factor) and factor >= 1):
        raise InputError(f"llama3: expected a finite factor of at least 1, got {factor}")
    if not (isfinite(high_freq_factor) and 0 < low_freq_factor < high_freq_factor):
        raise InputError(
            "llama3: expected 0 < low_freq_factor < high_freq_factor, "
            f"got low_freq_factor = {low_freq_factor} and high_freq_factor = {high_freq_factor}"
        )
    kept = np.clip((geometry.turns() - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return Regime(
        name="llama3",
        max_length=int(geometry.original_length * factor),
        factors=_at_least_one(1 / (kept + (1 - kept) / factor)),
    )


def longrope(
    geometry: Geometry,
    target_length: int,
    factors: Sequence[float],
    attention_factor: float | None = None,
    retained_tokens: int = 0,
) -> Regime:
    """LongRoPE (Ding et al. 2024, Eq. 3) with the given factors; attention_factor None is the "longrope" formula's.

    Raises InputError when there is not one factor per pair, or a value is out of range.
    """
    if len(factors) != geometry.num_pairs:
        raise InputError(f"factors: expected one for each of the {geometry.num_pairs} pairs, got {len(factors)}")
    if attention_factor is None:
        ratio = geometry.ratio(target_length)
        attention_factor = attention_factor_formula("longrope", ratio, geometry.original_length)
    return Regime(
        name="longrope",
        max_length=target_length,
        factors=tuple(float(factor) for factor in factors),
        attention_factor=attention_factor,
        retained_tokens=retained_tokens,
    )


def longrope2_curve(
    geometry: Geometry, critical_pair: int, factors_from_critical: Sequence[float]
) -> tuple[float, ...]:
    """Factors of all pairs from those of critical_pair on; on its left, lambda_i = lambda_cp^(i / cp) (LongRoPE2).

    The left side is the table of the NTK method whose theta gives the critical pair its factor. Raises InputError when
    critical_pair is not a pair, when there is not one factor for each pair from it on, or when one is below 1.
    """
    if not 0 <= critical_pair < geometry.num_pairs:
        raise InputError(f"critical_pair: expected 0 to {geometry.num_pairs - 1}, got {critical_pair}")
    num_expected = geometry.num_pairs - critical_pair
    if len(factors_from_critical) != num_expected:
        raise InputError(
            f"factors_from_critical: expected {num_expected}, one for each pair from {critical_pair} on, "
            f"got {len(factors_from_critical)}"
        )
    right = tuple(float(factor) for factor in factors_from_critical)
    if not all(isfinite(factor) and factor >= 1 for factor in right):
        raise InputError(f"factors_from_critical: expected finite factors of at least 1, got {list(right)}")
    # max() keeps the empty left side of critical_pair = 0 from dividing by zero.
    left = _at_least_one(right[0] ** (np.arange(critical_pair) / max(critical_pair, 1)))
    return left + right


def attention_factor_formula(name: str, ratio: float, original_length: int) -> float:
    """The attention factor that a paper gives for a ratio: 1 at ratios up to 1.

    "longrope": sqrt(1 + ln ratio / ln original_length), as in LongRoPE's released code; "yarn": 0.1 ln(ratio) + 1.
    Raises InputError for another name.
    """
    if name not in ("longrope", "yarn"):
        raise InputError(f"attention factor: expected 'longrope' or 'yarn', got {name!r}")
    if ratio <= 1:
        return 1.0
    return sqrt(1 + log(ratio) / log(original_length)) if name == "longrope" else 0.1 * log(ratio) + 1


def _raised_theta(geometry: Geometry, growth: float) -> tuple[float, ...]:
    """Factors of theta * growth^(d / (d - 2)): growth^(2 i / (d - 2)), which is growth at the last pair."""
    # A single pair keeps its frequency: it does not depend on theta.
    last_pair = max(geometry.num_pairs - 1, 1)
    return _at_least_one(growth ** (np.arange(geometry.num_pairs) / last_pair))


def _blended_by_turns(
    geometry: Geometry, ratio: float, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, ...]:
    """YaRN's factors: inverse frequencies blended from f (ramp 0) to f / ratio (ramp 1), linearly in the pair."""
    if not (isfinite(beta_fast) and beta_fast >= beta_slow > 0):
        raise InputError(
            f"yarn: expected beta_fast >= beta_slow > 0 turns, got beta_fast = {beta_fast} and beta_slow = {beta_slow}"
        )

    def pair_of(num_turns: float) -> float:
        argument = geometry.original_length / (2 * pi * num_turns)
        return geometry.num_pairs * log(argument) / log(geometry.rope_theta)

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    # transformers clamps the pair index by the number of channels, not of pairs; tables in the wild follow it.
    low, high = max(low, 0.0), min(high, geometry.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(geometry.num_pairs) - low) / (high - low), 0, 1)
    return _at_least_one(1 / ((1 - ramp) + ramp / ratio))


def _at_least_one(factors: NDArray[np.float64]) -> tuple[float, ...]:
    """As a tuple; a factor that rounding left just below 1 becomes 1."""
    return tuple(np.maximum(factors, 1.0).tolist())
