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
# So many steps are compared with those before, all by what they have gained over the start on their windows; as many
# windows make the mean derivatives that a step of full length needs.
NUM_COMPARED = 4
_GROWTH, _SHRINKAGE, _LEAST_PART = 1.25, 0.25, 1 / 64


class Descent:
    """Projected stochastic gradient steps on the logs of factors and attention factor, from `start`.

    The windows are visited in an order drawn anew for every pass, and the last derivatives of each window are kept: a
    step follows their mean (stochastic average gradient; Le Roux, Schmidt and Bach 2012), which lags behind but is
    hardly noisier than a full gradient. Each coordinate is divided by the root mean square of its derivatives over the
    windows, so a step is long where windows agree and short where they contradict each other; and as one window agrees
    with itself, the first steps are shorter.

    The length of steps needs no setting. `start_values` are the objective's nats per token of each window at the start,
    which is scored before a descent begins: so each step says what the point that it is made from has gained on its
    window, free of how hard that window is. Where a few steps together have gained more than any before, the length
    grows; where they have clearly gained less, the descent goes back to the best of them, with much shorter steps.

    After a step the logs are projected onto the space without its grid: in least squares, exactly.
    """

    def __init__(self, space: Space, start: Regime, start_values: NDArray[np.float64], seed: int, chain: int) -> None:
        self._space = space
        self._start_values = start_values
        self._seed, self._chain = seed, chain
        self._widest = space.geometry.inverse_frequencies() * space.target_length  # radians, without factors
        self._unit = np.array([1.0] * space.num_pairs + [_ATTENTION_PART if space.searches_attention else 0.0])
        self._length = self._first_length = _FIRST_PART * math.log(space.geometry.ratio(space.target_length))
        self._like = space.repair(start)
        self._point = self._projected(np.log([*start.factors, start.attention_factor]))
        self._num_steps = 0
        self._gradients: dict[int, NDArray[np.float64]] = {}
        self._compared: list[_Visit] = []
        self._best = _Visit(self._point, 0.0)
        self._is_first = True  # what is compared next

    @property
    def num_steps(self) -> int:
        """How many steps have been made."""
        return self._num_steps

    @property
    def part_of_first_length(self) -> float:
        """How long steps are now, as a part of the first one's length."""
        return self._length / self._first_length

    @property
    def window(self) -> int:
        """The window that the next step is made on."""
        num_windows = len(self._start_values)
        index, place = divmod(self.num_steps, num_windows)
        order = stream(self._seed, f"descent/{self._chain}", index).permutation(num_windows)
        return int(order[place])

    @property
    def regime(self) -> Regime:
        """Where the next step is made from; not on the space's grid."""
        return self._regime(self._point)

    @property
    def best(self) -> Regime:
        """The mean, in logs, of those compared steps' points that have gained most; not on the grid. The start, where
        none have gained anything.
        """
        return self._regime(self._best.point)

    def advance(self, step: Step) -> None:
        """Go on by what was found on `window` at `regime`."""
        by_factors = self._space.pull_back(np.array(step.gradient[:-1]), self._like)
        self._gradients[step.window] = np.append(by_factors, step.gradient[-1])
        self._compared.append(_Visit(self._point, step.nats_per_token - float(self._start_values[step.window])))
        if len(self._compared) == NUM_COMPARED:
            self._compare()
        gradients = np.array(list(self._gradients.values()))
        spread = np.sqrt((gradients**2).mean(axis=0))
        direction = np.divide(gradients.mean(axis=0), spread, out=np.zeros_like(spread), where=spread > 0)
        direction *= min(1.0, len(gradients) / NUM_COMPARED)
        longest = np.append(_TURN_RADIANS * np.exp(self._point[:-1]) / self._widest, np.inf) * self.part_of_first_length
        moved = self._point - np.clip(self._length * self._unit * direction, -longest, longest)
        self._point = self._projected(moved)
        self._num_steps += 1

    def forget(self, start_values: NDArray[np.float64]) -> None:
        """Go on from here with another objective, which has these values at the start: neither what was found on the
        windows nor how long steps were says anything of it.
        """
        self._start_values = start_values
        self._gradients.clear()
        self._compared.clear()
        self._length = self._first_length
        self._best = _Visit(self._point, math.inf)
        self._is_first = True

    def _compare(self) -> None:
        excesses = np.array([visit.excess for visit in self._compared])
        mean, error = float(excesses.mean()), float(excesses.std(ddof=1)) / math.sqrt(len(excesses))
        if mean < self._best.excess:
            self._length *= 1.0 if self._is_first else _GROWTH  # the first steps were shorter than that
            self._best = _Visit(np.mean([visit.point for visit in self._compared], axis=0), mean)
        elif mean > self._best.excess + error:
            self._length = max(_SHRINKAGE * self._length, _LEAST_PART * self._first_length)
            self._point = self._projected(self._best.point)
        self._is_first = False
        self._compared.clear()

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
    """A point, as logs, and the nats per token there on a window, or the mean over some, above those at the start."""

    point: NDArray[np.float64]
    excess: float
