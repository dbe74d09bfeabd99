"""Candidates as points of R^n without bounds or order between coordinates, for samplers that know nothing of either.

Any real vector stands for a candidate. A standard normal vector stands for a random one: each coordinate is the normal
score of a uniform variable, so whatever a sampler assumes of bounded, independent or smooth coordinates holds here.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import log_ndtr, ndtr, ndtri, ndtri_exp

from ropesearch.errors import InputError
from ropesearch.search.space import Candidate, Space

_FAR = 37.0  # beyond it neither side of the normal distribution is in float64


class Coordinates:
    """The way between the candidates of a space and real vectors of `num_coordinates`.

    The factors of m pairs are m order statistics of the uniform distribution over [0, ln max_factor], rounded to the
    grid, so all non-decreasing sequences of log factors are equally likely. Their m + 1 spacings are independent
    exponential variables divided by the sum of these (Devroye 1986, ch. V.2); -ln Phi(x) of a normal x is exponential,
    it grows with x^2 / 2 on the left and vanishes on the right. Where the numbers of pairs at the ends are searched,
    each number is as likely as any other, and the factors between lie strictly between those of the ends. The same
    holds from the critical pair on, over [0, ln(max_factor / ratio)]. Attention factor and retained tokens are uniform
    over their choices.

    With `num_knots` only so many of the pairs between the ends, spread evenly, have coordinates: the log factors of the
    others are interpolated by monotone cubics (PCHIP, Fritsch and Butland 1984).

    The order is: number of pairs at the low end (at 1, or before the critical pair), at the high end, spacings,
    attention factor, retained tokens, each if searched.
    """

    def __init__(self, space: Space, num_knots: int | None = None) -> None:
        self.space = space
        self._num_free = len(range(space.num_pairs)[space.free_pairs])
        self._num_knots = self._num_free if num_knots is None else min(num_knots, self._num_free)
        self._num_genes = space.low.searched + space.high.searched
        self._lowest, self._highest = space.inner_steps
        logs = np.log(space.factor_grid)
        middles = np.log((space.factor_grid[:-1] + space.factor_grid[1:]) / 2)
        edges = np.concatenate([logs[:1], middles, logs[-1:]])[self._lowest : self._highest + 2]
        self._edges = (edges - edges[0]) / (edges[-1] - edges[0])  # of each step's cell, as parts of the whole range
        self.num_coordinates = (
            self._num_genes + self._num_knots + 1 + space.searches_attention + (len(space.retained_choices) > 1)
        )

    @property
    def _num_low_choices(self) -> int:
        return self.space.low.most - self.space.low.least + 1

    def _num_high_choices(self, num_low: int) -> int:
        return min(self.space.high.most - self.space.high.least, self._num_free - num_low) + 1

    def _knots(self, num_low: int, num_high: int) -> NDArray[np.int64]:
        """The pairs with coordinates, counted from the first between the ends."""
        num_inner = self._num_free - num_low - num_high
        places = np.linspace(0, num_inner - 1, min(self._num_knots, num_inner))
        return np.rint(places).astype(np.int64)

    @property
    def discrete(self) -> list[int]:
        """Positions of coordinates with few values: numbers of pairs at the ends, and retained tokens."""
        places = list(range(self._num_genes))
        return [*places, self.num_coordinates - 1] if len(self.space.retained_choices) > 1 else places

    def candidate(self, vector: ArrayLike) -> Candidate:
        """The candidate that any real vector (num_coordinates,) stands for; NaN counts as 0.

        Raises InputError when the number of values is not num_coordinates.
        """
        values = np.asarray(vector, dtype=np.float64)
        if values.shape != (self.num_coordinates,):
            raise InputError(f"coordinates: expected shape ({self.num_coordinates},), got {values.shape}")
        left = np.where(np.isnan(values), 0.0, values).tolist()
        space = self.space
        num_low = _choice(left.pop(0), self._num_low_choices) if space.low.searched else 0
        num_high = _choice(left.pop(0), self._num_high_choices(num_low)) if space.high.searched else 0
        knots = self._knots(num_low, num_high)
        first = min(num_low, self._num_knots - len(knots))
        spacings = _exponential(np.array(left[first : first + len(knots) + 1]))
        statistics = np.cumsum(spacings)[:-1] / spacings.sum()
        num_inner = self._num_free - num_low - num_high
        if 1 < len(knots) < num_inner:
            statistics = PchipInterpolator(knots, statistics)(np.arange(num_inner))
        steps = self._lowest + np.searchsorted(self._edges[1:-1], statistics, side="right")
        left = left[self._num_knots + 1 :]
        attention = _choice(left.pop(0), space.max_attention_steps + 1) if space.searches_attention else 0
        position = _choice(left.pop(0), len(space.retained_choices)) if left else 0
        factor_steps = (
            *[space.low.step] * (space.low.least + num_low),
            *steps.tolist(),
            *[space.high.step] * (space.high.least + num_high),
        )
        return Candidate(factor_steps, attention, space.retained_choices[position])

    def of(self, candidate: Candidate) -> NDArray[np.float64]:
        """float64 (num_coordinates,), all finite, with candidate(of(c)) == c unless there are knots.

        With knots that is a candidate near c, which has c's factors at the knots.
        Pairs of equal factors are spread evenly over their grid step, and other choices lie in the middle of theirs.
        Coordinates without a meaning for it, as pairs belong to an end, are 0.
        """
        space = self.space
        steps = np.array(candidate.factor_steps[space.free_pairs])
        num_low = int((steps == space.low.step).sum()) if space.low.searched else 0
        num_high = int((steps == space.high.step).sum()) if space.high.searched else 0
        values = []
        if space.low.searched:
            values.append(_middle(num_low, self._num_low_choices))
        if space.high.searched:
            values.append(_middle(num_high, self._num_high_choices(num_low)))
        cells, starts, counts = np.unique(
            steps[num_low : self._num_free - num_high] - self._lowest, return_index=True, return_counts=True
        )
        place = np.arange(counts.sum()) - np.repeat(starts, counts)
        low, high = np.repeat(self._edges[cells], counts), np.repeat(self._edges[cells + 1], counts)
        statistics = low + (place + 0.5) / np.repeat(counts, counts) * (high - low)
        knots = self._knots(num_low, num_high)
        spacings = np.diff(np.concatenate([[0.0], statistics[knots], [1.0]]))
        scores = ndtri_exp(-spacings * len(spacings))
        num_unused = self._num_knots - len(knots)
        first = min(num_low, num_unused)
        values += [*[0.0] * first, *scores.tolist(), *[0.0] * (num_unused - first)]
        if space.searches_attention:
            values.append(_middle(candidate.attention_steps, space.max_attention_steps + 1))
        if len(space.retained_choices) > 1:
            position = space.retained_choices.index(candidate.retained_tokens)
            values.append(_middle(position, len(space.retained_choices)))
        return np.array(values)


def _exponential(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard exponential variables, positive and finite, at normal scores."""
    variables: NDArray[np.float64] = -log_ndtr(np.clip(scores, -_FAR, _FAR))
    return variables


def _choice(score: float, num_choices: int) -> int:
    """Of equally likely choices the one at a normal score."""
    return min(int(ndtr(score) * num_choices), num_choices - 1)


def _middle(position: int, num_choices: int) -> float:
    """The normal score in the middle of a choice."""
    return float(ndtri((position + 0.5) / num_choices))
