"""LongRoPE's space: non-decreasing factors on a grid, pairs at either end held if asked."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from ropesearch.errors import InputError
from ropesearch.search.config import SpaceConfig
from ropesearch.search.space import Candidate, End, Space, even_grid, finite, nearest


class MonotoneSpace(Space):
    """All non-decreasing factors on a grid in [1, max_factor_over_ratio * ratio] (LongRoPE, Table 4).

    Of the retained pairs the first may be held at 1 and the last at the ratio, which then ends the grid.

    Where the numbers of retained pairs are searched, they are the numbers of pairs at 1 and at the ratio, and the pairs
    between lie strictly between. So these spaces hold the same candidates as one without retained pairs; a sampler
    moves differently in them (see coordinates.py and operators.py).

    Raises InputError when the configuration describes no space.
    """

    def _factor_grid(self, ratio: float, config: SpaceConfig) -> NDArray[np.float64]:
        num_at_one, searches_at_one = _retained_pairs("space.num_pairs_at_one", config.num_pairs_at_one, self.num_pairs)
        num_at_ratio, searches_at_ratio = _retained_pairs(
            "space.num_pairs_at_ratio", config.num_pairs_at_ratio, self.num_pairs
        )
        if num_at_one + num_at_ratio >= self.num_pairs:
            raise InputError(
                f"space.num_pairs_at_one, space.num_pairs_at_ratio: expected fewer than the {self.num_pairs} pairs "
                f"together, so that a factor is searched, got {num_at_one} and {num_at_ratio}"
            )
        grid = even_grid("space.factor_step", config.factor_step, 1.0, ratio * config.max_factor_over_ratio)
        if searches_at_ratio or num_at_ratio:
            if grid[-1] != ratio:  # the ratio itself is the last value, wherever the grid ends before it
                near = math.isclose(grid[-1], ratio, rel_tol=1e-12)
                grid = np.append(grid[:-1] if near else grid, ratio)
            if len(grid) < 3:
                raise InputError(
                    f"space.factor_step: expected a factor between 1 and the ratio {ratio:g}, got none with a step of "
                    f"{config.factor_step}; ask for a smaller step"
                )
        num_free = self.num_pairs - num_at_one - num_at_ratio
        self.low = End(0, num_at_one, num_at_one + searches_at_one * num_free)
        self.high = End(len(grid) - 1, num_at_ratio, num_at_ratio + searches_at_ratio * num_free)
        return grid

    @property
    def factor_spacing(self) -> float | None:
        """None where the ratio lies off the grid."""
        even = math.isclose(float(self._factors[-1]), 1 + self.max_factor_steps * self.factor_step)
        return self.factor_step if even else None

    @property
    def inner_steps(self) -> tuple[int, int]:
        """Without those of held pairs where the numbers of these are searched."""
        return int(self.low.searched), self.max_factor_steps - self.high.searched

    @property
    def num_sequences(self) -> int:
        """Multisets of as many grid values as there are free pairs."""
        return math.comb(self.least_moving_pairs + self.max_factor_steps, self.least_moving_pairs)

    def moving_pairs(self, candidate: Candidate) -> slice:
        """All free pairs."""
        return self.free_pairs

    @property
    def least_moving_pairs(self) -> int:
        """The number of free pairs."""
        return len(range(self.num_pairs)[self.free_pairs])

    def curve(self, candidate: Candidate) -> NDArray[np.float64]:
        """The grid's values at the candidate's steps."""
        return self._factors[list(candidate.factor_steps)]

    def positions(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolated linearly, and clipped to the grid."""
        return np.interp(factors, self._factors, np.arange(len(self._factors)))

    def project_logs(self, logs: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """As `Space.project_logs`; clipping an isotonic fit gives the exact projection onto cone and box."""
        ends = np.log(self._factors[[0, -1]])
        fitted = np.clip(isotonic_regression(logs[self.free_pairs]).x, *ends)
        return np.concatenate([np.full(self.low.least, ends[0]), fitted, np.full(self.high.least, ends[1])])

    def pull_back(self, gradient: NDArray[np.float64], like: Candidate) -> NDArray[np.float64]:
        """As `Space.pull_back`: no factor follows from others."""
        pulled = np.zeros_like(gradient)
        pulled[self.free_pairs] = gradient[self.free_pairs]
        return pulled

    def repair_steps(self, positions: NDArray[np.float64]) -> tuple[int, ...]:
        """Nearest in least squares over the free pairs."""
        fitted = isotonic_regression(positions[self.free_pairs]).x
        return self._with_held(np.rint(np.clip(fitted, 0, self.max_factor_steps)).astype(np.int64))

    def _decoded_steps(self, values: NDArray[np.float64]) -> tuple[int, ...]:
        return self._repaired_steps(values[: self.num_pairs])

    def _repaired_steps(self, factors: NDArray[np.float64]) -> tuple[int, ...]:
        """Clipping an isotonic fit gives the exact projection onto cone and box; that and rounding keep the order."""
        free = finite(factors[self.free_pairs])
        unit = max(1.0, float(np.abs(free).max()))  # sums of huge values must not overflow; the fit is homogeneous
        fitted = isotonic_regression(free / unit).x * unit if np.any(np.diff(free) < 0) else free
        return self._with_held(nearest(self._factors, np.clip(fitted, self._factors[0], self._factors[-1])))

    def _contains_steps(self, steps: tuple[int, ...]) -> bool:
        return (
            steps[0] >= 0
            and all(left <= right for left, right in pairwise(steps))
            and steps[-1] <= self.max_factor_steps
            and not any(steps[: self.low.least])
            and all(step == self.high.step for step in steps[self.num_pairs - self.high.least :])
        )

    def _with_held(self, free: NDArray[np.int64]) -> tuple[int, ...]:
        return (*[self.low.step] * self.low.least, *free.tolist(), *[self.high.step] * self.high.least)


def _retained_pairs(key: str, value: int | str, num_pairs: int) -> tuple[int, bool]:
    """How many pairs are held, and whether their number is searched."""
    if value == "search":
        return 0, True
    if int(value) >= num_pairs:
        raise InputError(f"{key}: expected 'search' or from 0 to {num_pairs - 1} of the {num_pairs} pairs, got {value}")
    return int(value), False
