"""LongRoPE2's space: factors at or above the ratio from the critical pair on, and an NTK curve on its left."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from ropesearch.errors import InputError
from ropesearch.rope.methods import longrope2_curve
from ropesearch.search.config import SpaceConfig
from ropesearch.search.space import (
    Candidate,
    Dimension,
    End,
    Space,
    choice_dimension,
    even_grid,
    finite,
    nearest_position,
)

_FOLLOWS = -1  # step of a pair on the left of the critical pair


class LongRoPE2Space(Space):
    """The factors of LongRoPE2 (Shang et al. 2025, sec. 3.2 and Alg. 1), one critical pair or a choice of them.

    From the critical pair on, factors do not decrease and lie on a grid from the ratio to max_factor_over_ratio * ratio
    (the paper: 2). Those of the pairs before it, which have the step -1, are lambda_i = lambda_cp^(i / cp). The
    critical pair is held, or searched from the ten-turn pair to the theoretical critical pair (Eq. 7), the last pair at
    most; in the released code it is a constant of the search.

    The bound below is the paper's Eq. 10, applied from the critical pair on, as in Alg. 1. That no factor is below its
    left neighbour's is the paper's too; the released code wants each above it, which on a grid excludes plateaus.

    Few candidates of different critical pairs have the same factors, where a curve passes through the grid's values.

    Raises InputError when the configuration describes no space.
    """

    def _factor_grid(self, ratio: float, config: SpaceConfig) -> NDArray[np.float64]:
        first, last = self._critical_pairs(config.critical_pair)
        grid = even_grid("space.factor_step", config.factor_step, ratio, ratio * config.max_factor_over_ratio)
        self.low = End(_FOLLOWS, first, last)
        self.high = End(len(grid) - 1, 0, 0)
        return grid

    def _critical_pairs(self, value: int | str | None) -> tuple[int, int]:
        """The first and the last that a candidate may have."""
        last_pair = self.num_pairs - 1
        if value == "search":
            first, last = self.geometry.ten_turn_pair(), self.geometry.critical_pair()
            return min(first, last_pair), min(last, last_pair)
        pair = int(value or 0)
        if pair > last_pair:
            raise InputError(
                f"space.critical_pair: expected null, 'search' or a pair from 0 to {last_pair}, got {pair}"
            )
        return pair, pair

    @property
    def factor_spacing(self) -> float | None:
        """None: the factors before the critical pair lie on no grid."""
        return None

    @property
    def inner_steps(self) -> tuple[int, int]:
        """The whole grid."""
        return 0, self.max_factor_steps

    @property
    def num_sequences(self) -> int:
        """For each critical pair the multisets of as many grid values as there are pairs from it on."""
        numbers = [self.num_pairs - pair for pair in range(self.low.least, self.low.most + 1)]
        return sum(math.comb(number + self.max_factor_steps, number) for number in numbers)

    def moving_pairs(self, candidate: Candidate) -> slice:
        """The pairs from the critical pair on."""
        return slice(self.critical_pair(candidate), self.num_pairs)

    @property
    def least_moving_pairs(self) -> int:
        """The number of pairs from the last critical pair on."""
        return self.num_pairs - self.low.most

    def critical_pair(self, candidate: Candidate) -> int:
        """The first pair with a step."""
        return candidate.factor_steps.count(_FOLLOWS)

    def curve(self, candidate: Candidate) -> NDArray[np.float64]:
        """The grid's values from the critical pair on, and longrope2_curve before it."""
        critical_pair = self.critical_pair(candidate)
        right = self._factors[list(candidate.factor_steps[critical_pair:])]
        return np.array(longrope2_curve(self.geometry, critical_pair, right.tolist()))

    def positions(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Not clipped: below 0 for factors below the ratio."""
        found: NDArray[np.float64] = (factors - self._factors[0]) / self.factor_step
        return found

    def project_logs(self, logs: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """As `Space.project_logs`: from the critical pair of `like` on; the curve before it follows."""
        critical_pair = self.critical_pair(like)
        fitted = isotonic_regression(logs[critical_pair:]).x
        right = np.clip(fitted, *np.log(self._factors[[0, -1]]))
        left = right[0] * np.arange(critical_pair) / max(critical_pair, 1)
        return np.concatenate([left, right])

    def pull_back(self, gradient: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """As `Space.pull_back`: the log of pair i before the critical pair c is i / c of that of c."""
        critical_pair = self.critical_pair(like)
        pulled = gradient.copy()
        pulled[:critical_pair] = 0
        pulled[critical_pair] += gradient[:critical_pair] @ np.arange(critical_pair) / max(critical_pair, 1)
        return pulled

    def repair_steps(self, positions: NDArray[np.float64]) -> tuple[int, ...]:
        """Nearest in least squares from each critical pair on; of these the one whose whole curve is nearest in log
        factors, the first of equally near ones."""
        factors = self._factors[0] + positions * self.factor_step
        logs = np.log(np.clip(factors, 1.0, self._factors[-1]))
        found: tuple[int, ...] = ()
        least = math.inf
        for critical_pair in range(self.low.least, self.low.most + 1):
            steps = self._steps_from(critical_pair, positions)
            curve = self.curve(Candidate(steps, 0, 0))
            distance = float(((np.log(curve) - logs) ** 2).sum())
            if distance < least:
                found, least = steps, distance
        return found

    def encode(self, candidate: Candidate) -> NDArray[np.float64]:
        """As for every space, with the critical pair, counted from the first one, at the end if it is searched."""
        if not self.low.searched:
            return super().encode(candidate)
        return np.append(super().encode(candidate), self.critical_pair(candidate) - self.low.least)

    def _decoded_steps(self, values: NDArray[np.float64]) -> tuple[int, ...]:
        num_critical_pairs = self.low.most - self.low.least + 1
        critical_pair = self.low.least
        if self.low.searched:
            critical_pair += nearest_position(num_critical_pairs, values[-1])
        return self._steps_from(critical_pair, self.positions(finite(values[: self.num_pairs])))

    def _repaired_steps(self, factors: NDArray[np.float64]) -> tuple[int, ...]:
        return self.repair_steps(self.positions(finite(factors)))

    def _steps_from(self, critical_pair: int, positions: NDArray[np.float64]) -> tuple[int, ...]:
        """The steps nearest to positions from `critical_pair` on."""
        right = positions[critical_pair:]
        unit = max(1.0, float(np.abs(right).max()))  # sums of huge values must not overflow
        fitted = isotonic_regression(right / unit).x * unit if np.any(np.diff(right) < 0) else right
        steps = np.rint(np.clip(fitted, 0, self.max_factor_steps)).astype(np.int64)
        return (*[_FOLLOWS] * critical_pair, *steps.tolist())

    def _contains_steps(self, steps: tuple[int, ...]) -> bool:
        critical_pair = steps.count(_FOLLOWS)
        return (
            self.low.least <= critical_pair <= self.low.most
            and steps[0] >= _FOLLOWS
            and all(left <= right for left, right in pairwise(steps))
            and steps[-1] <= self.max_factor_steps
        )

    def _dimensions(self, config: SpaceConfig) -> tuple[Dimension, ...]:
        found = super()._dimensions(config)
        if not self.low.searched:
            return found
        return (*found, choice_dimension("critical_pair", tuple(range(self.low.least, self.low.most + 1))))
