"""The space of candidates: non-decreasing factors on a grid, retained pairs, an attention factor, retained tokens.

Everything here is constructive: any vector and any regime leads to a candidate of the space, without rejection.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.methods import attention_factor_formula
from ropesearch.rope.regime import Regime
from ropesearch.search.config import SpaceConfig, num_grid_steps

SEARCHED = "searched"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of a Space in whole grid steps, so that equal candidates are equal exactly.

    Pair i's factor is 1 + factor_steps[i] * factor_step, and likewise the attention factor where it is searched (0
    where it is not).
    """

    factor_steps: tuple[int, ...]
    attention_steps: int
    retained_tokens: int


class Space:
    """The candidates for one geometry and target length (LongRoPE, Table 4).

    Factors lie on a grid in [1, max_factor_over_ratio * ratio] and do not decrease with the pair. Of the retained pairs
    the first may be held at 1 and the last at the ratio, which then ends the grid. The attention factor is a further
    dimension when the configuration says "search", and so are the retained tokens when there are several.

    Where the numbers of retained pairs are searched, they are the numbers of pairs at 1 and at the ratio, and the pairs
    between lie strictly between. So these spaces hold the same candidates as one without retained pairs; a sampler
    moves differently in them (see scores.py and operators.py).

    Raises InputError when the configuration describes no space.
    """

    def __init__(self, geometry: Geometry, target_length: int, config: SpaceConfig) -> None:
        ratio = geometry.ratio(target_length)
        config.check(target_length)
        self.geometry = geometry
        self.target_length = target_length
        self.num_pairs = geometry.num_pairs
        self.num_pairs_at_one, self.searches_pairs_at_one = _retained_pairs(
            "space.num_pairs_at_one", config.num_pairs_at_one, self.num_pairs
        )
        self.num_pairs_at_ratio, self.searches_pairs_at_ratio = _retained_pairs(
            "space.num_pairs_at_ratio", config.num_pairs_at_ratio, self.num_pairs
        )
        if self.num_pairs_at_one + self.num_pairs_at_ratio >= self.num_pairs:
            raise InputError(
                f"space.num_pairs_at_one, space.num_pairs_at_ratio: expected fewer than the {self.num_pairs} pairs "
                f"together, so that a factor is searched, got {self.num_pairs_at_one} and {self.num_pairs_at_ratio}"
            )
        self._factors = _grid("space.factor_step", config.factor_step, ratio * config.max_factor_over_ratio)
        if self.searches_pairs_at_ratio or self.num_pairs_at_ratio:
            if self._factors[-1] != ratio:  # the ratio itself is the last value, wherever the grid ends before it
                near = math.isclose(self._factors[-1], ratio, rel_tol=1e-12)
                self._factors = np.append(self._factors[:-1] if near else self._factors, ratio)
            if len(self._factors) < 3:
                raise InputError(
                    f"space.factor_step: expected a factor between 1 and the ratio {ratio:g}, got none with a step of "
                    f"{config.factor_step}; ask for a smaller step"
                )
        self.factor_step = config.factor_step
        self.attention_step = config.attention_factor_step
        self.searches_attention = config.attention_factor == "search"
        if self.searches_attention:
            self._attention = _grid(
                "space.attention_factor_step", config.attention_factor_step, config.attention_factor_max
            )
        else:
            self._attention = np.array([_held_attention(config.attention_factor, ratio, geometry.original_length)])
        self.retained_choices = tuple(sorted(config.retained_tokens))
        self._retained_position = {tokens: position for position, tokens in enumerate(self.retained_choices)}

    @property
    def max_factor_steps(self) -> int:
        """The grid step of the largest factor."""
        return len(self._factors) - 1

    @property
    def max_attention_steps(self) -> int:
        """The grid step of the largest attention factor; 0 where it is not searched."""
        return len(self._attention) - 1

    @property
    def factor_grid(self) -> NDArray[np.float64]:
        """All factors of a pair, ascending, float64, shape (max_factor_steps + 1,)."""
        return self._factors

    @property
    def attention_grid(self) -> NDArray[np.float64]:
        """All attention factors, ascending, float64, shape (max_attention_steps + 1,)."""
        return self._attention

    @property
    def free_pairs(self) -> slice:
        """The pairs whose factor is searched: all but those held at 1 and at the ratio."""
        return slice(self.num_pairs_at_one, self.num_pairs - self.num_pairs_at_ratio)

    @property
    def num_dimensions(self) -> int:
        """Length of an encoded candidate: pairs, and one each for a searched attention factor and retained tokens."""
        return self.num_pairs + self.searches_attention + (len(self.retained_choices) > 1)

    @property
    def num_candidates(self) -> int:
        """How many candidates there are, exactly: sequences times attention factors times retained tokens."""
        num_free = len(range(self.num_pairs)[self.free_pairs])
        sequences = math.comb(num_free + self.max_factor_steps, num_free)
        return sequences * len(self._attention) * len(self.retained_choices)

    def regime(self, candidate: Candidate) -> Regime:
        """The regime that `candidate` stands for, named "searched"; its floats print as they lie on the grid (3.07)."""
        return Regime(
            name=SEARCHED,
            max_length=self.target_length,
            factors=tuple(self._factors[list(candidate.factor_steps)].tolist()),
            attention_factor=float(self._attention[candidate.attention_steps]),
            retained_tokens=candidate.retained_tokens,
        )

    def contains(self, candidate: Candidate) -> bool:
        """Whether `candidate` is a point of this space."""
        steps = candidate.factor_steps
        return (
            len(steps) == self.num_pairs
            and steps[0] >= 0
            and all(left <= right for left, right in pairwise(steps))
            and steps[-1] <= self.max_factor_steps
            and not any(steps[: self.num_pairs_at_one])
            and all(step == self.max_factor_steps for step in steps[self.num_pairs - self.num_pairs_at_ratio :])
            and 0 <= candidate.attention_steps <= self.max_attention_steps
            and candidate.retained_tokens in self._retained_position
        )

    def encode(self, candidate: Candidate) -> NDArray[np.float64]:
        """float64 (num_dimensions,): factors, then attention factor and position of retained_tokens, if searched."""
        values = self._factors[list(candidate.factor_steps)].tolist()
        if self.searches_attention:
            values.append(float(self._attention[candidate.attention_steps]))
        if len(self.retained_choices) > 1:
            values.append(float(self._retained_position[candidate.retained_tokens]))
        return np.array(values)

    def decode(self, vector: ArrayLike) -> Candidate:
        """The candidate nearest to any real vector of num_dimensions, in the order of `encode`; decode(encode(c)) == c.

        Factors are projected onto the non-decreasing sequences within the bounds, exactly and in least squares, and
        rounded to the grid; those of pairs that are held do not matter. NaN counts as the smallest value, infinities as
        far outside.

        Raises InputError when the number of values is not num_dimensions.
        """
        values = np.asarray(vector, dtype=np.float64)
        if values.shape != (self.num_dimensions,):
            raise InputError(f"a candidate's vector: expected shape ({self.num_dimensions},), got {values.shape}")
        attention_steps, position = 0, 0
        if self.searches_attention:
            attention_steps = int(_nearest(self._attention, values[self.num_pairs : self.num_pairs + 1])[0])
        if len(self.retained_choices) > 1:
            position = int(_nearest(np.arange(len(self.retained_choices), dtype=np.float64), values[-1:])[0])
        return Candidate(self._project(values[: self.num_pairs]), attention_steps, self.retained_choices[position])

    def repair(self, regime: Regime) -> Candidate:
        """The candidate nearest to any regime of this geometry, for example YaRN, whose factors lie off the grid.

        Raises InputError when the number of factors is not the number of pairs.
        """
        if len(regime.factors) != self.num_pairs:
            raise InputError(f"regime {regime.name!r}: expected {self.num_pairs} factors, got {len(regime.factors)}")
        retained = min(self.retained_choices, key=lambda tokens: (abs(tokens - regime.retained_tokens), tokens))
        attention = _nearest(self._attention, np.array([regime.attention_factor]))
        return Candidate(self._project(np.array(regime.factors)), int(attention[0]), retained)

    def repair_steps(self, steps: NDArray[np.float64]) -> tuple[int, ...]:
        """The non-decreasing grid steps nearest to (num_pairs,) finite steps, with the held pairs at their factors."""
        fitted = isotonic_regression(steps[self.free_pairs]).x
        return self._with_held(np.rint(np.clip(fitted, 0, self.max_factor_steps)).astype(np.int64))

    def _project(self, factors: NDArray[np.float64]) -> tuple[int, ...]:
        """Nearest non-decreasing grid steps. Clipping an isotonic fit gives the exact projection onto cone and box;
        both and the rounding keep the order."""
        lowest, highest = float(self._factors[0]), float(self._factors[-1])
        far = 1e300
        finite = np.nan_to_num(factors[self.free_pairs], nan=lowest, posinf=far, neginf=-far)
        unit = max(1.0, float(np.abs(finite).max()))  # sums of huge values must not overflow; the fit is homogeneous
        fitted = isotonic_regression(finite / unit).x * unit if np.any(np.diff(finite) < 0) else finite
        return self._with_held(_nearest(self._factors, np.clip(fitted, lowest, highest)))

    def _with_held(self, free: NDArray[np.int64]) -> tuple[int, ...]:
        held = [0] * self.num_pairs_at_one, [self.max_factor_steps] * self.num_pairs_at_ratio
        return (*held[0], *free.tolist(), *held[1])


def _nearest(grid: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions on an ascending grid nearest to `values`, NaN going to the first."""
    middles = (grid[:-1] + grid[1:]) / 2
    return np.searchsorted(middles, np.nan_to_num(values, nan=grid[0], posinf=grid[-1], neginf=grid[0]))


def _grid(key: str, step: float, highest: float) -> NDArray[np.float64]:
    """1, 1 + step, ... up to `highest`, each the float that its decimal digits name."""
    exact, num_steps = Fraction(repr(float(step))), num_grid_steps(key, step, 1.0, highest)
    whole, unit = exact.numerator, exact.denominator  # a quotient of integers is rounded once, like a decimal literal
    return np.array([(unit + position * whole) / unit for position in range(num_steps + 1)])


def _held_attention(value: str | float, ratio: float, original_length: int) -> float:
    if value in ("longrope", "yarn"):
        return attention_factor_formula(str(value), ratio, original_length)
    return float(value)


def _retained_pairs(key: str, value: int | str, num_pairs: int) -> tuple[int, bool]:
    """How many pairs are held, and whether their number is searched."""
    if value == "search":
        return 0, True
    if int(value) >= num_pairs:
        raise InputError(f"{key}: expected 'search' or from 0 to {num_pairs - 1} of the {num_pairs} pairs, got {value}")
    return int(value), False
