"""ropesearch/search/gradient.py: the plan of descents, and workers that take its gradient steps."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError, ScoringError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.search import gradient
from ropesearch.search.config import BudgetConfig, GradientConfig, RacingConfig, RacingMark
from ropesearch.search.operators import NUM_STRETCHES, exchange
from ropesearch.search.optimizers import make_sampler as sampler_of
from ropesearch.search.run import SearchResult
from ropesearch.search.sampler import CandidateSampler, known_candidates
from ropesearch.search.space import Candidate
from ropesearch.search.storage import JOURNAL_NAME
from ropesearch.search.trials import (
    COST,
    FAILURE,
    METHOD,
    OWNER,
    PLAN,
    REGIME,
    SECONDS,
    Step,
    ranked,
    recorded_candidate,
    recorded_regime,
    recorded_steps,
    regime_json,
    step_key,
)
from tests.search.analytic import (
    BASELINES,
    NUM_WINDOWS,
    SEEDS,
    TARGET_LENGTH,
    differentiate,
    distance,
    evaluate,
    make_sampler,
    run,
)
from tests.search.test_sampler import carrying, changed, trial_of
from tests.search.test_worker import Killed, contents, same, study_of

GRADIENT = GradientConfig(num_starts=2)
SCORE_TOKENS, STEP_TOKENS = 16, 32
NUM_LEG_STEPS = 8  # more than there are windows
LEG_TOKENS = SCORE_TOKENS + NUM_LEG_STEPS * STEP_TOKENS
Differentiate = Callable[[Regime, int], Step]


def smooth(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
    """`differentiate` without failures."""
    try:
        return differentiate(regime, window)
    except ScoringError:
        return differentiate(Regime(name="x", max_length=9, factors=(*regime.factors[:-1], regime.factors[-1] + 2e-6),
                                    attention_factor=regime.attention_factor), window)  # fmt: skip


def scored(regime: Regime, split: str) -> Any:
    return evaluate(Regime(name="x", max_length=9, factors=regime.factors,
                           attention_factor=regime.attention_factor), split)  # fmt: skip


def descend(folder: Path, num_trials: int = 20, **changes: Any) -> SearchResult:
    return run(folder, num_trials, **({"optimizer": GRADIENT, "score": scored} | changes))


def trials_of(folder: Path) -> list[FrozenTrial]:
    found: list[FrozenTrial] = study_of(folder).get_trials()
    return found


def legs_of(trials: list[FrozenTrial]) -> dict[int, list[FrozenTrial]]:
    """Trials with gradient steps, by descent."""
    legs: dict[int, list[FrozenTrial]] = {}
    for trial in trials:
        if PLAN in trial.user_attrs:
            legs.setdefault(trial.user_attrs[PLAN]["chain"], []).append(trial)
    return legs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return descend(folder), folder


@pytest.fixture(scope="module")
def smoothly(tmp_path_factory: pytest.TempPathFactory) -> list[FrozenTrial]:
    """The trials of a search without failures."""
    folder = tmp_path_factory.mktemp("smooth")
    descend(folder, differentiate=smooth, score=scored)
    return trials_of(folder)


def test_until_all_baselines_are_scored_there_are_moves_of_the_best_of_them(
    uninterrupted: tuple[SearchResult, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make_sampler(optimizer=GRADIENT)
    done = trials_of(uninterrupted[1])[: len(BASELINES)]
    best = min(done[1:], key=lambda trial: trial.values[0])
    other = next(trial for trial in done[1:] if trial is not best)
    assert sampler.plan(done, len(done)) is not None
    monkeypatch.setattr(gradient, "move", lambda space, candidate, rng: moved.append(candidate) or candidate)
    for unfinished in (other, best):
        waiting = changed(unfinished, None, TrialState.RUNNING)
        trials = [waiting if trial is unfinished else trial for trial in done]
        assert sampler.plan(trials, len(done)) is None
        left = [trial for trial in trials[1:] if trial.state is TrialState.COMPLETE]
        first = min(left, key=lambda trial: trial.values[0])
        moved: list[Candidate] = []
        sampler.propose([*trials, trial_of(len(done), {}, None, TrialState.RUNNING)], len(done))
        assert set(moved) == {sampler.space.repair(recorded_regime(first, TARGET_LENGTH))}


def test_descents_begin_at_the_best_of_the_baselines(uninterrupted: tuple[SearchResult, Path]) -> None:
    trials = trials_of(uninterrupted[1])
    assert [trial.user_attrs[METHOD] for trial in trials[: len(BASELINES)]] == ["unscaled", "linear", "ntk", "yarn"]
    legs = legs_of(trials)
    starts = [trial.number for trial in ranked(trials) if trial.number in (1, 2, 3)]
    assert [legs[chain][0].user_attrs[PLAN]["start"] for chain in (0, 1)] == starts[:2]
    for chain, each in legs.items():
        (leg,) = each  # no guard is broken
        plan = leg.user_attrs[PLAN]
        assert (plan["legs"], plan["num_steps"]) == ([], NUM_LEG_STEPS)
        if chain > 1:
            assert plan["start"] == ranked(trials[: leg.number])[0].number
    assert all(PLAN not in trial.user_attrs for trial in trials[-3:])


def test_a_leg_is_taken_apart_first(smoothly: list[FrozenTrial]) -> None:
    """Stretch by stretch: what the descent has left and what it came to, nothing else."""
    trials = smoothly
    sampler = make_sampler(optimizer=GRADIENT)
    leg = legs_of(trials)[0][0]
    start = sampler.space.repair(recorded_regime(trials[leg.user_attrs[PLAN]["start"]], TARGET_LENGTH))
    came_to = recorded_candidate(leg)
    assert came_to is not None
    known = trials[: leg.number + 1]
    best = recorded_candidate(ranked(known)[0]) or start
    tried = []
    for number in range(leg.number + 1, leg.number + NUM_STRETCHES + 2):
        candidate = sampler.propose([*known, trial_of(number, {}, None, TrialState.RUNNING)], number)
        tried.append(candidate)
        known.append(trial_of(number, carrying(candidate), 99.0))
    expected = [exchange(sampler.space, best, came_to, start, part) for part in range(NUM_STRETCHES + 1)]
    new = [candidate for candidate in dict.fromkeys(expected) if candidate not in (best, start)]
    new = [candidate for candidate in new if candidate not in known_candidates(trials[: leg.number + 1], -1)]
    assert tried[: len(new)] == new and len(new) > 4


def test_moves_begin_at_the_best_of_all_be_it_a_baseline(
    smoothly: list[FrozenTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descent may end where it is worse than at its start."""
    trials = smoothly
    sampler = make_sampler(optimizer=GRADIENT)
    monkeypatch.setattr(gradient, "move", lambda space, candidate, rng: moved.append(candidate) or candidate)
    start = min(trials[1:4], key=lambda trial: trial.values[0])
    for value, best in ((start.values[0] + 1, start), (start.values[0] - 1, trials[4])):
        known = [*trials[:4], changed(trials[4], value)]
        for number in range(5, 5 + NUM_STRETCHES + 1):
            known.append(trial_of(number, carrying(Candidate((number,) * 8, 0, 0)), 99.0))
        moved: list[Candidate] = []
        sampler.propose([*known, trial_of(len(known), {}, None, TrialState.RUNNING)], len(known))
        assert set(moved) == {sampler.space.repair(recorded_regime(best, TARGET_LENGTH))}


def raced_sampler(
    num_windows: int = 16,
    mark: RacingMark = RacingMark.finalists,
    objective: Objective | None = None,
    num_starts: int = 1,
) -> CandidateSampler:
    space, config = make_sampler().space, GradientConfig(num_starts=num_starts)
    racing = RacingConfig(mark=mark)
    return sampler_of(space, config, 0, SEEDS, len(BASELINES), num_windows, objective or Objective(), racing)


def after_moves(trials: list[FrozenTrial], num_moves: int, gained: float) -> list[FrozenTrial]:
    """The baselines, and moves of which one has gained so much."""
    space = make_sampler().space
    best = ranked(trials[:4])[0].values[0]
    known = [*trials[:4]]
    for number in range(4, 4 + num_moves):
        candidate = Candidate(tuple(10 * number + 20 * pair for pair in range(space.num_pairs)), number, 0)
        attributes = {**carrying(candidate), REGIME: regime_json(space.regime(candidate))}
        known.append(trial_of(number, attributes, best - gained if number == 8 else best + 1))
    return known


def test_raced_moves_come_before_the_first_leg_which_begins_at_the_best_baseline(smoothly: list[FrozenTrial]) -> None:
    sampler = raced_sampler()
    assert sampler.num_first_steps == 0
    for num_moves in range(8):
        trials = after_moves(smoothly, num_moves, 1.0)
        assert sampler.plan(trials, len(trials)) is None
    starts = [trial.number for trial in ranked(smoothly[:4]) if trial.number]
    trials = after_moves(smoothly, 8, 1.0)
    plan = sampler.plan(trials, 12)
    assert plan is not None and (plan["chain"], plan["start"], plan["num_steps"]) == (0, starts[0], 16)
    trials.append(trial_of(12, {METHOD: "searched", PLAN: plan}, None, TrialState.RUNNING))
    assert sampler.plan(trials, 13) is None
    other = raced_sampler(num_starts=2).plan(trials, 13)
    assert other is not None and (other["chain"], other["start"]) == (1, starts[1])


def test_what_the_first_moves_and_the_leg_have_found_is_put_together(smoothly: list[FrozenTrial]) -> None:
    """Whichever is the best gets stretches of the other; the baseline's where no move was better."""
    sampler = raced_sampler()
    leg = legs_of(smoothly)[0][0]
    came_to = recorded_candidate(leg)
    start = ranked(smoothly[:4])[0]
    assert came_to is not None and start.number
    for gained, leg_gained in ((1.0, 2.0), (2.0, 1.0), (-1.0, 1.0), (-1.0, -1.0)):
        trials = after_moves(smoothly, 8, gained)
        before = recorded_candidate(trials[8]) if gained > 0 else None
        before = before or sampler.space.repair(recorded_regime(start, TARGET_LENGTH))
        plan = sampler.plan(trials, 12)
        attributes = {**leg.user_attrs, METHOD: "searched", PLAN: plan}
        trials.append(trial_of(12, attributes, start.values[0] - leg_gained))
        best = came_to if leg_gained > max(gained, 0.0) else before
        expected = [exchange(sampler.space, best, came_to, before, part) for part in range(NUM_STRETCHES + 1)]
        known = known_candidates(trials, -1)
        first = next(candidate for candidate in expected if candidate not in known and candidate != before)
        assert sampler.propose([*trials, trial_of(13, {}, None, TrialState.RUNNING)], 13) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"mark": RacingMark.none},
        {"num_windows": 2},
        {"objective": Objective(needle_weight=0.5)},
        {"objective": Objective(guarded_tokens=4)},
    ],
)
def test_where_moves_are_not_raced_or_there_is_a_guard_a_leg_comes_first(
    smoothly: list[FrozenTrial], changes: dict[str, Any]
) -> None:
    sampler = raced_sampler(**changes)
    assert sampler.num_first_steps > 0
    plan = sampler.plan(smoothly[:4], 4)
    assert plan is not None and plan["start"] == next(trial.number for trial in ranked(smoothly[:4]) if trial.number)


def test_more_descents_than_baselines_are_refused() -> None:
    expected = r"optimizer.num_starts: expected at most 3, .* \(linear, ntk, yarn\), got 4"
    with pytest.raises(InputError, match=expected):
        make_sampler(optimizer=GradientConfig(num_starts=4))


def test_each_step_is_kept_and_each_window_visited_in_a_leg(uninterrupted: tuple[SearchResult, Path]) -> None:
    for trial in (leg for legs in legs_of(trials_of(uninterrupted[1])).values() for leg in legs):
        steps = recorded_steps(trial)
        assert trial.intermediate_values == {place: step.nats_per_token for place, step in enumerate(steps)}
        if trial.state is TrialState.COMPLETE:
            assert Counter(step.window for step in steps) == dict.fromkeys(range(NUM_WINDOWS), 4)


def test_costs_are_those_of_the_steps_and_the_score(uninterrupted: tuple[SearchResult, Path]) -> None:
    result, folder = uninterrupted
    trials = trials_of(folder)
    for trial in trials:
        num_steps = len(recorded_steps(trial))
        failed_in_a_step = trial.user_attrs.get(FAILURE) == "a gradient is not finite"
        expected = (num_steps + failed_in_a_step) * STEP_TOKENS + (not failed_in_a_step) * SCORE_TOKENS
        assert trial.user_attrs[COST] == expected or trial.user_attrs["reused_from"] < trial.number
        assert trial.user_attrs[SECONDS] > 0
    assert result.num_forward_equivalent_tokens == sum(trial.user_attrs[COST] for trial in trials)


def test_seconds_are_added_up_over_steps(tmp_path: Path) -> None:
    spent: list[float] = []

    def slow(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        started = time.perf_counter()
        time.sleep(0.02)
        step = smooth(regime, window)
        spent.append(time.perf_counter() - started)
        return step

    descend(tmp_path, 1, differentiate=slow)
    (leg,) = legs_of(trials_of(tmp_path))[0]
    assert len(spent) == NUM_LEG_STEPS and leg.user_attrs[SECONDS] >= sum(spent)


def test_it_comes_to_the_optimum(tmp_path: Path) -> None:
    result = descend(tmp_path, 20, differentiate=smooth, score=scored)
    assert result.method == "searched"
    start = min(distance(regime) for regime in BASELINES)
    assert distance(result.regime) < 0.03 * start


def test_a_failed_step_is_a_state_and_ends_its_descent(tmp_path: Path) -> None:
    calls: list[int] = []

    def failing(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        calls.append(window)
        if len(calls) == NUM_LEG_STEPS + 2:
            raise ScoringError("out of memory with a gradient over a whole window: 2 GiB")
        return smooth(regime, window)

    descend(tmp_path, 8, differentiate=failing, score=scored)
    legs = legs_of(trials_of(tmp_path))
    (first,), (second,) = legs[0], legs[1]
    assert first.state is TrialState.COMPLETE and second.state is TrialState.FAIL
    assert second.user_attrs[FAILURE].startswith("out of memory with a gradient")
    assert second.user_attrs[COST] == 2 * STEP_TOKENS and len(recorded_steps(second)) == 1
    assert "candidate" not in second.user_attrs and second.params == {}
    assert set(legs) == {0, 1} and len(trials_of(tmp_path)) == 12


def test_without_gradients_the_moves_alone_are_left(tmp_path: Path) -> None:
    result = descend(tmp_path, 6, differentiate=None)
    trials = trials_of(tmp_path)
    failed = [trial for trial in trials if trial.user_attrs.get(FAILURE) == "no gradients are given to this search"]
    assert len(failed) == GRADIENT.num_starts and result.num_trials == 10
    assert any(trial.state is TrialState.COMPLETE for trial in trials[6:])


@pytest.mark.parametrize("budget_tokens", [4 * 16 + LEG_TOKENS, 5 * 16 + LEG_TOKENS - 1, 600, 720])
def test_the_budget_in_tokens_is_never_exceeded(budget_tokens: int, tmp_path: Path) -> None:
    limited = BudgetConfig(forward_equivalent_tokens=budget_tokens)
    result = descend(tmp_path, differentiate=smooth, budget=limited)
    assert result.stopped_because == "forward_equivalent_tokens"
    assert result.num_forward_equivalent_tokens <= budget_tokens < result.num_forward_equivalent_tokens + LEG_TOKENS
    num_legs = sum(map(len, legs_of(trials_of(tmp_path)).values()))
    assert num_legs == min(2, (budget_tokens - 4 * SCORE_TOKENS) // LEG_TOKENS)
    again = descend(tmp_path, differentiate=smooth, budget=limited)
    assert same(result, again)


def dying(num_calls: int, made: Counter[str]) -> tuple[Callable[[Regime, str], Any], Differentiate]:
    """Scoring and gradient steps of a worker that dies within call `num_calls`; `made` counts those that end."""
    left = [num_calls]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(regime: Regime, of: Any, *rest: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            made[f"{of} {regime.factors} {regime.attention_factor} {regime.name}"] += 1
            return function(regime, of, *rest)

        return call

    return counted(scored), counted(differentiate)


def test_killed_within_any_step_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: tuple[SearchResult, Path]
) -> None:
    made: Counter[str] = Counter()
    result = None
    for num_kills in range(200):  # each worker makes one call, and dies within the next
        score, step = dying(1, made)
        try:
            result = descend(tmp_path, score=score, differentiate=step)
            break
        except Killed:
            assert num_kills < 199
    assert result is not None and same(result, uninterrupted[0])
    assert contents(tmp_path) == contents(uninterrupted[1])
    assert set(made.values()) == {1}


@pytest.mark.parametrize("num_trials", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_cut_after_any_line_of_its_journal_it_goes_on_as_if_nothing_had_happened(
    num_trials: int, tmp_path: Path
) -> None:
    descend(tmp_path / "whole", num_trials)
    expected = contents(tmp_path / "whole")
    assert sum(map(len, legs_of(trials_of(tmp_path / "whole")).values())) >= 2
    lines = (tmp_path / "whole" / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for cut in range(len(lines)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_bytes(b"".join(lines[:cut]) + lines[cut][:7])
        descend(folder, num_trials)
        assert contents(folder) == expected, f"cut after {cut} of {len(lines)} lines"


def started(folder: Path, num_trials: int) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "tests.search.analytic", str(folder), str(num_trials), "0.1", "gradient"]
    return subprocess.Popen(words)


def test_two_workers_take_two_starts_and_a_dead_ones_leg_is_adopted(tmp_path: Path) -> None:
    """The first worker is killed within its second step; the second, at the other descent, finishes that leg."""
    (tmp_path / "hold").touch()
    first, second = started(tmp_path, 12), started(tmp_path, 12)

    def until(found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not found():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def num_lines(*beginnings: str) -> int:
        path = tmp_path / "calls"
        return sum(line.startswith(beginnings) for line in path.read_text().splitlines()) if path.exists() else 0

    try:
        until(lambda: num_lines("ready") == 2)
        (tmp_path / "hold").unlink()
        # Steps are named by their window, scores by their split: two steps are under way.
        until(lambda: num_lines("begin 0", "begin 1") >= num_lines("end 0", "end 1") + 2)
        first.send_signal(signal.SIGKILL)
        first.wait()
        running = [trial for trial in trials_of(tmp_path) if PLAN in trial.user_attrs]
        assert len({trial.user_attrs[OWNER] for trial in running}) == 2
        assert second.wait(timeout=240) == 0
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    trials = trials_of(tmp_path)
    assert len(trials) == 16 and all(trial.state.is_finished() for trial in trials)
    legs = legs_of(trials)
    assert len({each[0].user_attrs[PLAN]["start"] for each in legs.values()}) == len(legs) == 2
    for each in legs.values():
        windows = [step.window for leg in each for step in recorded_steps(leg)]
        assert [sorted(windows[place : place + 2]) for place in range(0, len(windows) - 1, 2)] == [[0, 1]] * (
            len(windows) // 2
        )
    lines = (tmp_path / "calls").read_text().splitlines()
    ended = Counter(line.removeprefix("end ") for line in lines if line.startswith("end "))
    begun = Counter(line.removeprefix("begin ") for line in lines if line.startswith("begin "))
    assert set(begun) == set(ended)
    assert sum(begun.values()) - len(begun) <= 1  # what the kill cut short


def test_a_worker_that_finds_a_descent_at_work_begins_the_next(smoothly: list[FrozenTrial]) -> None:
    """And goes on with neither when all starts are taken."""
    trials = smoothly[:5]
    trials[4] = changed(trials[4], None, TrialState.RUNNING)
    sampler = make_sampler(optimizer=GRADIENT)
    plan = sampler.plan(trials, 5)
    assert plan is not None and plan["chain"] == 1 and plan["legs"] == []
    assert plan["start"] != trials[4].user_attrs[PLAN]["start"]
    other = changed(trials[4], None, TrialState.RUNNING)
    other.number, other.user_attrs = 5, {METHOD: "searched", PLAN: plan}
    assert sampler.plan([*trials, other], 6) is None


def test_a_broken_guard_weighs_more_with_every_leg(smoothly: list[FrozenTrial]) -> None:
    """The weight is that of the next leg's steps, and what was found under another weight is forgotten."""
    trials = smoothly
    sampler = make_sampler(optimizer=GRADIENT)
    first = trials[4]
    assert legs_of(trials)[0][0].number == 4
    plan = sampler.plan(trials[:5], 5)
    assert plan is not None and (plan["chain"], plan["legs"], plan["guard_weight"]) == (1, [], 0.0)  # it is not broken
    broken = [*trials[:4], trial_of(4, first.user_attrs, first.value, excess=0.01)]
    plan = sampler.plan(broken, 5)
    assert plan is not None and (plan["chain"], plan["legs"], plan["guard_weight"]) == (0, [4], 1.0)
    asked = sampler.next_step([*broken, trial_of(5, {PLAN: plan}, None, TrialState.RUNNING)], 5)
    free = sampler.next_step([*broken, trial_of(5, {PLAN: {**plan, "guard_weight": 0.0}}, None, TrialState.RUNNING)], 5)
    assert asked is not None and free is not None
    assert (asked.guard_weight, free.guard_weight) == (1.0, 0.0)
    assert (asked.place, asked.window, asked.regime) == (0, free.window, free.regime)
    steps = {step_key(place): smooth(asked.regime, window).to_json() for place, window in enumerate((0, 1))}
    broken.append(trial_of(5, {**first.user_attrs, **steps, PLAN: plan}, first.value, excess=0.02))
    plan = sampler.plan(broken, 6)
    assert plan is not None and (plan["chain"], plan["legs"], plan["guard_weight"]) == (0, [4, 5], 2.0)


def test_a_descent_begins_at_the_best_when_moves_gain_little(smoothly: list[FrozenTrial]) -> None:
    """For as much as the leg has cost, at most a quarter of what it has gained."""
    trials = smoothly
    sampler = make_sampler(optimizer=GradientConfig())
    start = ranked(trials[:4])[0].values[0]
    leg = changed(trials[4], start - 1.0)
    assert leg.user_attrs[COST] == LEG_TOKENS == 272

    def planned(*moves: tuple[float | None, int]) -> Any:
        known = [*trials[:4], leg]
        for value, cost in moves:
            state = TrialState.PRUNED if value is None else TrialState.COMPLETE
            attributes = {**trials[-1].user_attrs, COST: cost}
            known.append(trial_of(len(known), attributes, value and start - value, state))
        return sampler.plan(known, len(known))

    assert planned() is None
    assert planned((None, 256), (None, 15)) is None
    plan = planned((None, 256), (None, 16))
    assert plan == {"chain": 1, "start": 4, "num_steps": NUM_LEG_STEPS, "legs": [], "guard_weight": 0.0}
    assert planned((None, 256), (1.26, 16)) is None
    assert planned((None, 256), (1.25, 16))["start"] == 6
    assert planned((1.9, 16), (None, 272))["start"] == 5  # what moves have gained before does not count
    leg = changed(trials[4], start + 0.1)  # it has gained nothing, so moves are slow when they gain nothing
    assert planned((None, 256), (1e-6, 16)) is None
    assert planned((None, 256), (None, 16)) is None  # and it began at the best already
    assert planned((1e-6, 16), (None, 272))["start"] == 5


def test_no_descent_begins_at_the_best_while_one_is_at_work_or_after_one_that_failed(
    smoothly: list[FrozenTrial],
) -> None:
    trials = smoothly
    sampler = make_sampler(optimizer=GradientConfig())
    moves = [trial_of(number, {**trials[-1].user_attrs, COST: 272}, None, TrialState.PRUNED) for number in (5, 6)]
    for state in (TrialState.RUNNING, TrialState.FAIL):
        assert sampler.plan([*trials[:4], changed(trials[4], None, state), *moves], 7) is None
