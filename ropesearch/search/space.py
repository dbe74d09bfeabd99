"""What all spaces of candidates have in common: attention factor, retained tokens, and the way from and to vectors.

Everything here is constructive: any vector and any regime leads to a candidate of the space, without rejection. A space
says what sequences of factors it holds (see monotone.py, longrope2.py).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.methods import attention_factor_formula
from ropesearch.rope.regime import Regime
from ropesearch.search.config import SpaceConfig, num_grid_steps

SEARCHED = "searched"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of a Space in whole grid steps, so that equal candidates are equal exactly.

    Pair i's factor is the one at factor_steps[i] on the space's factor grid, and likewise the attention factor where it
    is searched (0 where it is not). A step of -1 is that of a pair whose factor follows from those of the others.
    """

    factor_steps: tuple[int, ...]
    attention_steps: int
    retained_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The pairs at one end of the table that have the step `step`: at least `least` of them, at most `most`."""

    step: int
    least: int
    most: int

    @property
    def searched(self) -> bool:
        """Whether their number is searched."""
        return self.most > self.least


@dataclass(frozen=True, slots=True)
class Dimension:
    """One value of an encoded candidate, from `low` to `high`, on multiples of `step` from `low` unless that is None.

    With `choices` the value is a position in these.
    """

    name: str
    low: float
    high: float
    step: float | None = None
    choices: tuple[int, ...] = ()


class Space(ABC):
    """The candidates for one geometry and target length.

    Factors do not decrease with the pair, and those that are searched lie on a grid. The pairs of the ends `low` and
    `high` are not searched, and their numbers may be. The attention factor is a further dimension when the
    configuration says "search", and so are the retained tokens when there are several.

    Raises InputError when the configuration describes no space.
    """

    low: End
    high: End

    def __init__(self, geometry: Geometry, target_length: int, config: SpaceConfig) -> None:
        ratio = geometry.ratio(target_length)
        config.check(target_length)
        self.geometry = geometry
        self.target_length = target_length
        self.num_pairs = geometry.num_pairs
        self.factor_step = config.factor_step
        self._factors = self._factor_grid(ratio, config)
        self.searches_attention = config.attention_factor == "search"
        if self.searches_attention:
            self._attention = even_grid(
                "space.attention_factor_step", config.attention_factor_step, 1.0, config.attention_factor_max
            )
        else:
            self._attention = np.array([_held_attention(config.attention_factor, ratio, geometry.original_length)])
        self.retained_choices = tuple(sorted(config.retained_tokens))
        self._retained_position = {tokens: position for position, tokens in enumerate(self.retained_choices)}
        self.dimensions = self._dimensions(config)

    @abstractmethod
    def _factor_grid(self, ratio: float, config: SpaceConfig) -> NDArray[np.float64]:
        """All factors that a searched pair can have, ascending; sets `low` and `high`."""

    @property
    @abstractmethod
    def factor_spacing(self) -> float | None:
        """The distance of neighbouring factors, where all of them lie on an even grid from 1, else None."""

    @property
    @abstractmethod
    def inner_steps(self) -> tuple[int, int]:
        """The least and the greatest step of a pair between the two ends."""

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """How many sequences of factors there are, exactly."""

    @abstractmethod
    def moving_pairs(self, candidate: Candidate) -> slice:
        """The pairs of `candidate` whose steps may change while it keeps its numbers of held pairs."""

    @property
    @abstractmethod
    def least_moving_pairs(self) -> int:
        """The least number of `moving_pairs` that a candidate has."""

    @abstractmethod
    def curve(self, candidate: Candidate) -> NDArray[np.float64]:
        """The factors of all pairs, exactly as they are scored, float64, shape (num_pairs,)."""

    @abstractmethod
    def positions(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where factors (num_pairs,) lie on the factor grid, in steps; inverts `curve` for pairs that have a step."""

    @abstractmethod
    def project_logs(self, logs: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """The logs of factors of this space, but for its grid, nearest to (num_pairs,) finite values, in least squares
        over the pairs that move in `like`; the pairs that are held are those of `like`.
        """

    @abstractmethod
    def pull_back(self, gradient: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """Derivatives (num_pairs,) by the logs of factors, with those of factors that follow from others added to
        these; 0 for pairs that do not move in `like`.
        """

    @abstractmethod
    def repair_steps(self, positions: NDArray[np.float64]) -> tuple[int, ...]:
        """The factor steps of this space nearest to (num_pairs,) finite positions on the factor grid."""

    @abstractmethod
    def _decoded_steps(self, values: NDArray[np.float64]) -> tuple[int, ...]:
        """The factor steps of an encoded candidate, any real vector."""

    @abstractmethod
    def _repaired_steps(self, factors: NDArray[np.float64]) -> tuple[int, ...]:
        """The factor steps nearest to any factors (num_pairs,)."""

    @abstractmethod
    def _contains_steps(self, steps: tuple[int, ...]) -> bool:
        """Whether steps, one for each pair, are those of a candidate."""

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
        """All factors of a searched pair, ascending, float64, shape (max_factor_steps + 1,)."""
        return self._factors

    @property
    def attention_grid(self) -> NDArray[np.float64]:
        """All attention factors, ascending, float64, shape (max_attention_steps + 1,)."""
        return self._attention

    @property
    def free_pairs(self) -> slice:
        """The pairs whose factor is searched: all but those that always belong to an end."""
        return slice(self.low.least, self.num_pairs - self.high.least)

    @property
    def num_dimensions(self) -> int:
        """Length of an encoded candidate."""
        return len(self.dimensions)

    @property
    def num_candidates(self) -> int:
        """How many candidates there are, exactly: sequences times attention factors times retained tokens."""
        return self.num_sequences * len(self._attention) * len(self.retained_choices)

    def regime(self, candidate: Candidate) -> Regime:
        """The regime that `candidate` stands for, named "searched"; its floats print as they lie on the grid (3.07)."""
        return Regime(
            name=SEARCHED,
            max_length=self.target_length,
            factors=tuple(self.curve(candidate).tolist()),
            attention_factor=float(self._attention[candidate.attention_steps]),
            retained_tokens=candidate.retained_tokens,
        )

    def contains(self, candidate: Candidate) -> bool:
        """Whether `candidate` is a point of this space."""
        return (
            len(candidate.factor_steps) == self.num_pairs
            and self._contains_steps(candidate.factor_steps)
            and 0 <= candidate.attention_steps <= self.max_attention_steps
            and candidate.retained_tokens in self._retained_position
        )

    def encode(self, candidate: Candidate) -> NDArray[np.float64]:
        """float64 (num_dimensions,), the values of `dimensions`: factors, then attention factor and position of
        retained_tokens, if searched, then what else the space searches."""
        values = self.curve(candidate).tolist()
        if self.searches_attention:
            values.append(float(self._attention[candidate.attention_steps]))
        if len(self.retained_choices) > 1:
            values.append(float(self._retained_position[candidate.retained_tokens]))
        return np.array(values)

    def decode(self, vector: ArrayLike) -> Candidate:
        """The candidate nearest to any real vector of num_dimensions, in the order of `encode`; decode(encode(c)) == c.

        Factors are projected onto the non-decreasing sequences within the bounds, exactly and in least squares, and
        rounded to the grid; those of pairs that are held, or that follow from the others, do not matter. NaN counts as
        the smallest value, infinities as far outside.

        Raises InputError when the number of values is not num_dimensions.
        """
        values = np.asarray(vector, dtype=np.float64)
        if values.shape != (self.num_dimensions,):
            raise InputError(f"a candidate's vector: expected shape ({self.num_dimensions},), got {values.shape}")
        place = self.num_pairs
        attention_steps, position = 0, 0
        if self.searches_attention:
            attention_steps = int(nearest(self._attention, values[place : place + 1])[0])
            place += 1
        if len(self.retained_choices) > 1:
            position = nearest_position(len(self.retained_choices), values[place])
        return Candidate(self._decoded_steps(values), attention_steps, self.retained_choices[position])

    def repair(self, regime: Regime) -> Candidate:
        """The candidate nearest to any regime of this geometry, for example YaRN, whose factors lie off the grid.

        Raises InputError when the number of factors is not the number of pairs.
        """
        if len(regime.factors) != self.num_pairs:
            raise InputError(f"regime {regime.name!r}: expected {self.num_pairs} factors, got {len(regime.factors)}")
        retained = min(self.retained_choices, key=lambda tokens: (abs(tokens - regime.retained_tokens), tokens))
        attention = nearest(self._attention, np.array([regime.attention_factor]))
        return Candidate(self._repaired_steps(np.array(regime.factors)), int(attention[0]), retained)

    def _dimensions(self, config: SpaceConfig) -> tuple[Dimension, ...]:
        width = len(str(self.num_pairs - 1))
        found = [
            Dimension(f"factor_{pair:0{width}d}", 1.0, float(self._factors[-1]), self.factor_spacing)
            for pair in range(self.num_pairs)
        ]
        if self.searches_attention:
            highest = float(self._attention[-1])
            found.append(Dimension("attention_factor", 1.0, highest, config.attention_factor_step))
        if len(self.retained_choices) > 1:
            found.append(choice_dimension("retained_tokens", self.retained_choices))
        return tuple(found)


def choice_dimension(name: str, choices: tuple[int, ...]) -> Dimension:
    """A dimension whose value is a position in `choices`."""
    return Dimension(name, 0, len(choices) - 1, 1, choices)


def nearest(grid: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions on an ascending grid nearest to `values`, NaN going to the first."""
    middles = (grid[:-1] + grid[1:]) / 2
    return np.searchsorted(middles, np.nan_to_num(values, nan=grid[0], posinf=grid[-1], neginf=grid[0]))


def nearest_position(num_choices: int, value: float) -> int:
    """The position of `num_choices` nearest to any value."""
    return int(nearest(np.arange(num_choices, dtype=np.float64), np.array([value]))[0])


def finite(factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """`factors` with 1 for NaN and something far outside for infinities."""
    far = 1e300
    return np.nan_to_num(factors, nan=1.0, posinf=far, neginf=-far)


def even_grid(key: str, step: float, first: float, highest: float) -> NDArray[np.float64]:
    """first, first + step, ... up to `highest`, each the float that its decimal digits name."""
    num_steps = num_grid_steps(key, step, first, highest)
    exact, start = Fraction(repr(float(step))), Fraction(first)
    unit = exact.denominator * start.denominator
    offset, whole = start.numerator * exact.denominator, exact.numerator * start.denominator
    # A quotient of integers is rounded once, like a decimal literal.
    return np.array([(offset + position * whole) / unit for position in range(num_steps + 1)])


def _held_attention(value: str | float, ratio: float, original_length: int) -> float:
    if value in ("longrope", "yarn"):
        return attention_factor_formula(str(value), ratio, original_length)
    return float(value)
