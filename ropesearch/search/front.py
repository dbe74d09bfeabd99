"""Two objectives: which scored trials no other beats in both, and the order by which a sampler spreads along them.

The order is that of NSGA-II (Deb et al. 2002, "A Fast and Elitist Multiobjective Genetic Algorithm", sec. III and VI):
fronts of points that none of the rest dominates, and within a front those first that have most room around them. A
point that violates its constraints is dominated by every point that does so less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from ropesearch.rope.regime import Regime
from ropesearch.search.trials import GUARD, METHOD, front, recorded_regime


@dataclass(frozen=True, slots=True)
class Point:
    """A scored trial of a study with two objectives, both in nats per token of the search windows.

    `excess_nats` is by how much it exceeds what the objective's guard allows, None without one. `on_front` says that
    no scored trial is better in one objective and at least as good in the other, whatever the guard.
    """

    trial_number: int
    method: str
    regime: Regime
    long_nats_per_token: float
    short_nats_per_token: float
    excess_nats: float | None
    on_front: bool


def points(trials: Sequence[FrozenTrial], max_length: int) -> list[Point]:
    """The scored trials of a study with two objectives, by number."""
    on_front = {trial.number for trial in front(trials, guarded=False)}
    return [
        Point(
            trial_number=trial.number,
            method=trial.user_attrs[METHOD],
            regime=recorded_regime(trial, max_length),
            long_nats_per_token=trial.values[0],
            short_nats_per_token=trial.values[1],
            excess_nats=trial.constraints.get(GUARD),
            on_front=trial.number in on_front,
        )
        for trial in trials
        if trial.state is TrialState.COMPLETE
    ]


def crowded_order(values: NDArray[np.float64], violations: NDArray[np.float64]) -> list[int]:
    """Indices of points from best to worst: by front, then by crowding distance, the greatest first, then by index.

    values: float64 (num_points, num_objectives), the less the better; violations: float64 (num_points,), at least 0.
    """
    ranks = non_domination_ranks(values, violations)
    distances = np.empty(len(values))
    for rank in np.unique(ranks):
        members = np.flatnonzero(ranks == rank)
        distances[members] = crowding_distances(values[members])
    return [int(index) for index in np.lexsort((-distances, ranks))]


def non_domination_ranks(values: NDArray[np.float64], violations: NDArray[np.float64]) -> NDArray[np.int64]:
    """The front of each point, int64 (num_points,), 0 the best: the points that none outside fronts before dominates.

    Point a dominates b where a violates less; or where both violate nothing, a is nowhere worse and somewhere better.
    """
    no_worse = (values[:, None] <= values[None]).all(axis=2)
    better = (values[:, None] < values[None]).any(axis=2)
    kept = (violations[:, None] == 0) & (violations[None] == 0)
    dominates = np.where(kept, no_worse & better, violations[:, None] < violations[None])
    ranks = np.full(len(values), -1, dtype=np.int64)
    num_dominators = dominates.sum(axis=0)
    for rank in range(len(values)):
        members = (ranks < 0) & (num_dominators == 0)
        ranks[members] = rank
        num_dominators -= dominates[members].sum(axis=0)
        if (ranks >= 0).all():
            break
    return ranks


def crowding_distances(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each point of one front the sum over objectives of the way between its two neighbours, as a part of the
    front's extent; infinite for points at an end. float64 (num_points,), from float64 (num_points, num_objectives)."""
    distances = np.zeros(len(values))
    for column in values.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        extent = ordered[-1] - ordered[0]
        distances[order[[0, -1]]] = np.inf
        if extent > 0:
            distances[order[1:-1]] += (ordered[2:] - ordered[:-2]) / extent
    return distances
