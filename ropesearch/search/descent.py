"""Where a gradient search stands after some stochastic steps, each on one search window."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropesearch.rope.regime import Regime
from ropesearch.search.space import SEARCHED, Space
from ropesearch.search.trials import Step
from ropesearch.seeding import stream

# The first steps' lengths: this part of the way from 1 to the ratio, in logs, for a factor; the log of the attention
# factor moves a tenth of that, as YaRN's 1 + 0.1 ln ratio does.
_FIRST_PART = 0.05
_ATTENTION_PART = 0.1
# A first step turns the angle at the end of a window by no more than this, before the projection: beyond, a derivative
# says nothing of the loss.
_TURN_RADIANS = 3.0
# What a visit of the same windows has gained, over what their derivatives had promised: a parabola gives 1 for small
# steps and 1/2 at its minimum. Between the two bounds the steps are right.
_TIMID, _BOLD = 0.7, 0.3
_GROWTH, _SHRINKAGE = 1.5, 0.5
# Iterates of this last part of the steps are averaged.
_AVERAGED_PART = 1 / 3


class Descent:
    """Projected stochastic gradient steps on the logs of factors and attention factor, from `start`.

    The windows are visited in an order drawn anew for every pass, and the last derivatives of each window are kept: a
    step follows their mean (stochastic average gradient; Le Roux, Schmidt and Bach 2012), which lags behind but is
    hardly noisier than a full gradient. Each coordinate is divided by the root mean square of its derivatives over the
    windows, so a step is long where windows agree and short where they contradict each other. The length of steps needs
    no setting: whenever half of the windows have been visited again, what they have gained is held against what their
    derivatives had promised (a trust region's test; on the same windows, so that it does not matter which they are),
    and the length grows or shrinks.

    After a step the logs are projected onto the space without its grid: in least squares, exactly.
    """

    def __init__(self, space: Space, start: Regime, num_windows: int, seed: int, chain: int) -> None:
        self._space = space
        self._num_windows = num_windows
        self._seed, self._chain = seed, chain
        self._widest = space.geometry.inverse_frequencies() * space.target_length  # radians, without factors
        self._unit = np.array([1.0] * space.num_pairs + [_ATTENTION_PART if space.searches_attention else 0.0])
        self._length = self._first_length = _FIRST_PART * math.log(space.geometry.ratio(space.target_length))
        self._like = space.repair(start)
        self._point = self._projected(np.log([*start.factors, start.attention_factor]))
        self._points: list[NDArray[np.float64]] = []
        self._seen: dict[int, _Visit] = {}
        self._promised = self._gained = 0.0
        self._num_revisits = 0

    @property
    def num_steps(self) -> int:
        """How many steps have been made."""
        return len(self._points)

    @property
    def part_of_first_length(self) -> float:
        """How long steps are now, as a part of the first one's length."""
        return self._length / self._first_length

    @property
    def window(self) -> int:
        """The window that the next step is made on."""
        index, place = divmod(self.num_steps, self._num_windows)
        order = stream(self._seed, f"descent/{self._chain}", index).permutation(self._num_windows)
        return int(order[place])

    @property
    def regime(self) -> Regime:
        """Where the next step is made from; not on the space's grid."""
        return self._regime(self._point)

    @property
    def average(self) -> Regime:
        """The mean of the last iterates, in logs; not on the grid. Before the first step, the start."""
        num_averaged = math.ceil(_AVERAGED_PART * self.num_steps)
        return self._regime(np.mean(self._points[-num_averaged:], axis=0) if num_averaged else self._point)

    def advance(self, step: Step) -> None:
        """Go on by what was found on `window` at `regime`."""
        by_factors = self._space.pull_back(np.array(step.gradient[:-1]), self._like)
        visit = _Visit(self._point, step.nats_per_token, np.append(by_factors, step.gradient[-1]))
        before = self._seen.get(step.window)
        self._seen[step.window] = visit
        if before is not None:
            self._compare(before, visit)
        gradients = np.array([each.gradient for each in self._seen.values()])
        spread = np.sqrt((gradients**2).mean(axis=0))
        direction = np.divide(gradients.mean(axis=0), spread, out=np.zeros_like(spread), where=spread > 0)
        longest = np.append(_TURN_RADIANS * np.exp(self._point[:-1]) / self._widest, np.inf) * self.part_of_first_length
        moved = self._point - np.clip(self._length * self._unit * direction, -longest, longest)
        self._point = self._projected(moved)
        self._points.append(self._point)

    def forget(self) -> None:
        """Go on from here with another objective: what was found on the windows says nothing of it."""
        self._seen.clear()
        self._promised = self._gained = 0.0
        self._num_revisits = 0

    def _compare(self, before: "_Visit", now: "_Visit") -> None:
        self._promised += float(before.gradient @ (before.point - now.point))
        self._gained += before.nats_per_token - now.nats_per_token
        self._num_revisits += 1
        if self._num_revisits < max(2, self._num_windows // 2):
            return
        kept = self._gained / self._promised if self._promised > 0 else 0.0
        self._length *= _GROWTH if kept > _TIMID else _SHRINKAGE if kept < _BOLD else 1.0
        self._promised = self._gained = 0.0
        self._num_revisits = 0

    def _projected(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        attention = np.clip(logs[-1], *np.log(self._space.attention_grid[[0, -1]]))
        return np.append(self._space.project_logs(logs[:-1], self._like), attention)

    def _regime(self, logs: NDArray[np.float64]) -> Regime:
        values = np.exp(logs)
        return Regime(
            name=SEARCHED,
            max_length=self._space.target_length,
            factors=tuple(np.maximum(values[:-1], 1.0).tolist()),
            attention_factor=float(values[-1]),
            retained_tokens=self._like.retained_tokens,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """What was found on a window, and where: logs of factors and attention factor, and the derivatives by them."""

    point: NDArray[np.float64]
    nats_per_token: float
    gradient: NDArray[np.float64]
