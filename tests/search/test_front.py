"""ropesearch/search/front.py and what follows from a second objective: the front, its order, a search along it."""

import json
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective, Part
from ropesearch.score.score import Score
from ropesearch.search.budget import trials_without_improvement
from ropesearch.search.config import BudgetConfig
from ropesearch.search.front import crowded_order, crowding_distances, non_domination_ranks
from ropesearch.search.run import SearchResult
from ropesearch.search.space import SEARCHED
from ropesearch.search.study import open_study
from ropesearch.search.trials import GUARD, METHOD, front, violation
from tests.search import analytic

TWO = Objective(parts=(Part(length=8, weight=1.0, start=4),), short_tokens=4)
VALUES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30)
VIOLATIONS = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0]), min_size=30, max_size=30)


def dominates(a: tuple[float, ...], b: tuple[float, ...], violation_a: float = 0, violation_b: float = 0) -> bool:
    """Deb et al. 2002, definition 1 (sec. VI)."""
    if violation_a or violation_b:
        return violation_a < violation_b
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


@given(VALUES, VIOLATIONS)
def test_ranks_peel_off_one_front_after_the_other(values: list[tuple[int, int]], violations: list[float]) -> None:
    expected, left, rank = {}, set(range(len(values))), 0
    while left:
        members = {
            b for b in left if not any(dominates(values[a], values[b], violations[a], violations[b]) for a in left)
        }
        expected |= dict.fromkeys(members, rank)
        left, rank = left - members, rank + 1
    found = non_domination_ranks(np.array(values, dtype=float), np.array(violations[: len(values)]))
    assert found.tolist() == [expected[index] for index in range(len(values))]


def test_crowding_is_the_way_between_neighbours() -> None:
    """By hand: extents 10 and 8; ends are infinite in either objective."""
    values = np.array([[0, 8], [10, 0], [1, 6], [4, 5], [9, 1.0]])
    found = crowding_distances(values)
    assert found.tolist()[:2] == [np.inf, np.inf]
    assert found[2:] == pytest.approx([(4 - 0) / 10 + (8 - 5) / 8, (9 - 1) / 10 + (6 - 1) / 8, (10 - 4) / 10 + 5 / 8])
    assert crowding_distances(np.array([[1.0, 2.0]])).tolist() == [np.inf]
    assert crowding_distances(np.array([[1.0, 2.0]] * 3)).tolist() == [np.inf, 0.0, np.inf]


def test_the_order_is_by_front_then_by_room_then_by_number() -> None:
    values = np.array([[5, 5.0], [0, 8], [1, 6], [4, 5], [9, 1], [10, 0], [7, 9]])
    assert crowded_order(values, np.zeros(7)) == [1, 5, 3, 4, 2, 0, 6]
    violations = np.array([0, 0.5, 0, 0, 0.25, 0, 0])
    assert crowded_order(values, violations) == [2, 5, 3, 0, 6, 4, 1]


def trials_of(values: list[tuple[float, ...]], violations: list[float] | None = None) -> list[FrozenTrial]:
    study = optuna.create_study(directions=["minimize"] * len(values[0]))
    for index, each in enumerate(values):
        trial = study.ask()
        trial.set_user_attr(METHOD, SEARCHED)
        if violations is not None:
            trial.set_constraint(GUARD, violations[index])
        study.tell(trial, each)
    return study.get_trials()


@given(VALUES)
def test_the_front_is_optunas(values: list[tuple[float, ...]]) -> None:
    """Except for equal points, of which the first one counts."""
    trials = trials_of(values)
    study = optuna.create_study(directions=["minimize"] * 2)
    study.add_trials(trials)
    best = {tuple(trial.values): trial.number for trial in reversed(study.best_trials)}
    found = front(trials)
    assert {tuple(trial.values): trial.number for trial in found} == best
    assert [trial.values[0] for trial in found] == sorted(trial.values[0] for trial in found)
    assert trials_without_improvement(trials) == len(values) - 1 - max(best.values())


def test_the_front_within_the_guard_and_of_one_objective() -> None:
    values = [(1.0, 9.0), (2.0, 5.0), (3.0, 4.0), (2.5, 6.0), (9.0, 1.0)]
    trials = trials_of(values, [0.5, -0.1, 0.0, 0.0, -1.0])
    assert [trial.number for trial in front(trials)] == [1, 2, 4]
    assert [trial.number for trial in front(trials, guarded=False)] == [0, 1, 2, 4]
    assert [trial.number for trial in front(trials_of(values, [0.5, 0.2, 0.3, 0.2, 1.0]))] == [1]
    one = trials_of([(2.0,), (1.0,), (1.0,), (3.0,)])
    assert [trial.number for trial in front(one)] == [1] and front([]) == []
    assert trials_without_improvement(one) == 2


def evaluate(regime: Regime, split: str) -> Score:
    """Long inputs want the ramp of `analytic.distance`, short ones factors of 1: the two are at odds."""
    price = float((np.log(regime.factors) ** 2).sum()) + 20 * (regime.attention_factor - 1.0) ** 2
    nats = 4 * np.array([[price, 1.0 + analytic.distance(regime)]])
    return Score(nats=nats, tokens=np.full((1, 2), 4), block_edges=np.array([0, 4, 8]))


def run(folder: Path, objective: Objective, num_trials: int, seed: int = 0, **changes: object) -> SearchResult:
    changes = {"objective": objective, "fingerprints": {"objective": objective.to_json(), "seed": seed}} | changes
    return analytic.run(folder, num_trials, seed, evaluate, **changes)


def both(folder: Path) -> NDArray[np.float64]:
    """Both values of every trial of a study, whatever its objective."""
    study = open_study(folder, fingerprints_of(folder), analytic.make_sampler()).study
    scores = [Score.from_json(trial.user_attrs["score"]) for trial in study.get_trials()]
    return np.array([TWO.values(score) for score in scores])


def fingerprints_of(folder: Path) -> dict[str, object]:
    line = next(line for line in (folder / "study.journal").read_text().splitlines() if "fingerprints" in line)
    found: dict[str, object] = json.loads(line)["user_attr"]["fingerprints"]
    return found


def covered(values: NDArray[np.float64], corner: tuple[float, float]) -> float:
    """The area between the points and a corner that is worse: the hypervolume of two objectives."""
    area, height = 0.0, corner[1]
    for first, second in sorted(values.tolist()):
        if first < corner[0] and second < height:
            area += (corner[0] - first) * (height - second)
            height = second
    return area


def test_a_search_with_two_objectives_spreads_along_the_front(tmp_path: Path) -> None:
    """Against the same evolution with one objective, at the same cost: for every seed its trials cover more area."""
    corner = (20.0, 20.0)
    for seed in range(3):
        run(tmp_path / f"one{seed}", Objective(parts=TWO.parts), 120, seed)
        run(tmp_path / f"two{seed}", TWO, 120, seed)
        one, two = (both(tmp_path / f"{name}{seed}") for name in ("one", "two"))
        assert covered(two, corner) > 1.2 * covered(one, corner)
        assert len({*map(tuple, two)}) > 100


def test_what_a_study_with_two_objectives_comes_to(tmp_path: Path) -> None:
    result = run(tmp_path, TWO, 60)
    study = open_study(tmp_path, fingerprints_of(tmp_path), analytic.make_sampler()).study
    assert len(study.directions) == 2
    trials = study.get_trials()
    assert len(result.points) == sum(trial.state is TrialState.COMPLETE for trial in trials) == 64
    best = {tuple(trial.values) for trial in study.best_trials}
    assert {(point.long_nats_per_token, point.short_nats_per_token) for point in result.front} == best
    assert len(best) > 5 and result.front[0].long_nats_per_token == min(trial.values[0] for trial in trials)
    for point in result.points:
        assert [point.long_nats_per_token, point.short_nats_per_token] == TWO.values(evaluate(point.regime, "search"))
    # The result: of the searched front's members the best by the first objective (selection windows agree here).
    searched = [trial for trial in trials if trial.number >= 4]
    assert result.trial_number == min(searched, key=lambda trial: trial.values).number
    on_front = {trial.number for trial in front(searched)}
    assert {each.trial_number for each in result.finalists if each.method == SEARCHED} < on_front
    assert result.course[0][1] == trials[4].values[0]
    again = run(tmp_path, TWO, 60)
    assert (again.points, again.trial_number) == (result.points, result.trial_number)


def test_with_a_guard_the_result_is_the_best_of_the_front_within_it(tmp_path: Path) -> None:
    guarded = Objective(parts=TWO.parts, short_tokens=4, guarded_tokens=4, tolerance_nats=3.0)
    result = run(tmp_path, guarded, 60)
    unscaled = result.points[0].short_nats_per_token
    within = [point for point in result.front if point.short_nats_per_token <= unscaled + 3.0]
    beyond = [point for point in result.front if point.short_nats_per_token > unscaled + 3.0]
    assert beyond and result.trial_number == within[0].trial_number
    for point in result.points:
        assert point.excess_nats == pytest.approx(point.short_nats_per_token - unscaled - 3.0)
    study = open_study(tmp_path, fingerprints_of(tmp_path), analytic.make_sampler()).study
    assert sum(violation(trial) > 0 for trial in study.get_trials()) > 3


def test_patience_counts_from_the_last_member_of_the_front(tmp_path: Path) -> None:
    run(tmp_path, TWO, 500, budget=BudgetConfig(num_trials=500, patience_trials=4))
    study = open_study(tmp_path, fingerprints_of(tmp_path), analytic.make_sampler()).study
    trials = study.get_trials()
    last = max(trial.number for trial in front(trials[4:]))
    assert len(trials) == last + 1 + 4 < 504


def test_proposals_are_pure_with_two_objectives(tmp_path: Path) -> None:
    """Cut anywhere and gone on with, the study is the same."""
    run(tmp_path / "whole", TWO, 40)
    for num_trials in (9, 23, 40):
        run(tmp_path / "pieces", TWO, num_trials)
    assert both(tmp_path / "whole").tolist() == both(tmp_path / "pieces").tolist()


def test_equal_points_without_extent_are_not_divided_by_zero() -> None:
    with np.errstate(all="raise"):
        assert crowded_order(np.ones((4, 2)), np.zeros(4)) == [0, 3, 1, 2]
