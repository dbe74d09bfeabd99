"""ropesearch/search/racing.py: the test by scipy and by simulation, and searches that race."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy import stats

from ropesearch.errors import ScoringError
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.objective import Objective, objective_of
from ropesearch.score.score import Score
from ropesearch.search.config import (
    BudgetConfig,
    CMAESConfig,
    EvolutionConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    RacingMark,
    RandomConfig,
    SelectionConfig,
    TPEConfig,
)
from ropesearch.search.optimizers import make_sampler as sampler_of
from ropesearch.search.racing import CHANCE, LEAST_WINDOWS, Racing, Rule, race_rule
from ropesearch.search.run import SearchResult
from ropesearch.search.storage import JOURNAL_NAME
from ropesearch.search.trials import (
    PLAN,
    Step,
    candidate_json,
    is_searched,
    ranked,
    recorded_candidate,
    recorded_windows,
)
from ropesearch.search.worker import SearchEvent
from tests.search.analytic import BASELINES, EVOLUTION, SEEDS, distance, make_sampler, run, search_in
from tests.search.test_sampler import trial_of
from tests.search.test_worker import Killed, contents, study_of

NUM_WINDOWS = 8
COST_TOKENS = 16

Differences = list[float]
eighths = st.integers(-800, 800).map(lambda count: count / 8)
seen_and_all = st.integers(LEAST_WINDOWS, 15).flatmap(
    lambda seen: st.tuples(st.lists(eighths, min_size=seen, max_size=seen), st.integers(seen + 1, 64))
)


def p_value(differences: NDArray[np.float64], num_windows: int) -> float:
    """That of a t test of the windows seen against what the others would have to be for a mean of 0 over all."""
    seen, left = len(differences), num_windows - len(differences)
    needed = -differences.sum() / left
    spread = differences.std(ddof=1) * math.sqrt(1 / seen + 1 / left)
    return float(stats.t.sf((differences.mean() - needed) / spread, seen - 1))


GREEDY = Rule(1, 2, 1 / 3, 0.1)  # of optimizer=gradient


def careful(rank: int = 1) -> Rule:
    return Rule(rank, LEAST_WINDOWS, CHANCE)


def is_hopeless(differences: Any, num_windows: int) -> bool:
    return careful().stops(differences, num_windows)


@given(seen_and_all)
def test_it_is_a_t_test_of_the_mean_over_all_windows(given_values: tuple[Differences, int]) -> None:
    values, num_windows = given_values
    differences = np.array(values)
    assume(len(set(values)) > 1)
    expected = p_value(differences, num_windows)
    assume(abs(expected - CHANCE) > 1e-9)
    assert is_hopeless(differences, num_windows) == (expected < CHANCE)
    many = stats.ttest_1samp(differences, 0, alternative="greater").pvalue  # no end of windows: the plain t test
    assert p_value(differences, 10**9) == pytest.approx(many, rel=1e-5, abs=1e-12)


@given(seen_and_all)
def test_what_is_not_worse_so_far_is_never_stopped(given_values: tuple[Differences, int]) -> None:
    values, num_windows = given_values
    assert not is_hopeless(-np.abs(values), num_windows)
    differences = np.array(values)
    assume(differences.mean() <= 0)
    assert not is_hopeless(differences, num_windows)


@given(seen_and_all, st.randoms(use_true_random=False), eighths.map(abs))
def test_order_does_not_matter_and_worse_is_not_better(
    given_values: tuple[Differences, int], random: Any, more: float
) -> None:
    values, num_windows = given_values
    differences = np.array(values)
    assume(len(set(values)) == 1 or abs(p_value(differences, num_windows) - CHANCE) > 1e-9)
    stopped = is_hopeless(differences, num_windows)
    random.shuffle(values)
    assert is_hopeless(np.array(values), num_windows) == stopped
    if stopped:
        assert is_hopeless(differences + more, num_windows)


def test_ties_and_ends() -> None:
    worse = np.full(16, 0.5)
    assert not is_hopeless(np.zeros(8), 16)
    assert is_hopeless(worse[:LEAST_WINDOWS], 16)  # the same on each window
    assert not is_hopeless(worse[: LEAST_WINDOWS - 1], 16)
    assert not is_hopeless(worse, 16)  # all are scored: nothing is to be saved


@pytest.mark.parametrize(
    ("differences", "stopped"),
    [
        ([0.1], False),  # too few
        ([0.1, 0.2], True),
        ([0.0, 0.1, -0.01, -0.05], False),
        ([-0.2, 0.1, 0.2], False),  # a mean of 0.033 with a standard error of 0.120: t = 0.308 of 16, chance 0.39
        ([-0.1, 0.1, 0.2], True),  # 0.067 with 0.088: t = 0.840, chance 0.245
        ([-0.3, 0.1, 0.1], False),
    ],
)
def test_a_greedy_race_stops_what_is_likely_worse(differences: list[float], stopped: bool) -> None:
    assert GREEDY.stops(np.array(differences), 16) == stopped


@pytest.mark.parametrize(
    ("differences", "stopped"),
    [
        ([0.1], False),  # too few
        ([0.1, 0.1], True),
        ([-0.1, 0.1, 0.2, 0.2], False),  # a mean of 0.1 with a standard error of 0.0707: t = 1.461 of 16, chance 0.120
        ([0.0, 0.1, 0.2, 0.2], True),  # 0.125 with 0.0479: t = 2.697, chance 0.037
        ([-0.2, 0.1, 0.05, 0.05], False),
    ],
)
def test_a_greedy_race_looks_at_the_position_blocks_of_the_first_window(
    differences: list[float], stopped: bool
) -> None:
    """One of 16 windows: t = mean / error * sqrt(16 / 15)."""
    assert GREEDY.stops_at_first(np.array(differences), 16) == stopped
    assert not careful().stops_at_first(np.array(differences), 16)


BLOCKS = 4  # of a window of 8 tokens


def in_blocks(nats: list[float]) -> Score:
    """A window of blocks of two tokens; the first token is never scored."""
    return Score(nats=[nats], tokens=[[1, 2, 2, 2]], block_edges=[0, 2, 4, 6, 8])


def greedy_of(windows: list[Score], objective: Objective | None = None) -> Racing:
    return Racing(
        evaluate=lambda regime, window: windows[window],
        num_windows=NUM_WINDOWS,
        window_cost_tokens=8,
        objective=objective or Objective(),
        rule=GREEDY,
    )


UNWRITTEN: Any = trial_of(4, {}, None, TrialState.RUNNING)
MARK_TRIAL = trial_of(3, {"score": Score.joined([in_blocks([1, 2, 2, 2])] * NUM_WINDOWS).to_json()}, 1.0)


@pytest.mark.parametrize(
    ("nats", "gain", "num_windows"),
    [
        ([1.1, 2.2, 2.2, 2.2], 0.0, 1),  # worse everywhere
        ([0.6, 2.6, 2.4, 1.8], 0.0, 2),  # worse by 0.4 / 7, but not in each block: it takes another window
        ([0.9, 1.8, 1.8, 1.8], 0.0, NUM_WINDOWS),
        # Better by a tenth of a nat a token on each window, which the seven that are left would have gained too.
        ([0.9, 1.8, 1.8, 1.8], 0.014, NUM_WINDOWS),
        ([0.9, 1.8, 1.8, 1.8], 0.017, 2),  # 0.119, and 0.102 of six; the blocks differ too much to tell after one
        ([0.9, 1.8, 1.8, 1.8], 0.04, 1),
    ],
)
def test_a_move_has_to_promise_what_others_have_gained_for_as_much(
    nats: list[float], gain: float, num_windows: int
) -> None:
    racing = greedy_of([in_blocks(nats)] * NUM_WINDOWS)
    written: list[dict[str, Any]] = []
    found = racing.run(UNWRITTEN, BASELINES[0], MARK_TRIAL, gain, written.append)
    seen = recorded_windows(trial_of(4, {key: value for each in written for key, value in each.items()}, None))
    assert len(written) == num_windows and found["num_forward_equivalent_tokens"] == 8 * num_windows
    assert ("score" in found) is (num_windows == NUM_WINDOWS)
    if num_windows < NUM_WINDOWS:
        assert found["stopped_after"] == num_windows
        assert found["estimated_nats_per_token"] == pytest.approx(Score.joined([in_blocks(nats)]).nats_per_token)
    assert len(seen) == 0 or seen[0].nats.tolist() == [nats]


def test_with_weighted_lengths_or_a_guard_blocks_say_nothing_of_a_window() -> None:
    parts = objective_of(ScoringConfig(lengths=[4, 8], length_weights=[1, 3], num_blocks=4), 8, 2)
    racing = greedy_of([in_blocks([1.1, 2.2, 2.2, 2.2])] * NUM_WINDOWS, parts)
    found = racing.run(UNWRITTEN, BASELINES[0], MARK_TRIAL, 0.0, lambda values: None)
    assert found["stopped_after"] == 2


def test_what_moves_have_gained_is_that_of_moves_alone() -> None:
    """By the cost of all of them, those that were stopped or failed too; not what legs and baselines have gained."""
    racing = greedy_of([])
    leg = trial_of(4, {"method": "searched", "plan": {}, "num_forward_equivalent_tokens": 500}, 2.0)

    def moved(number: int, value: float | None, cost: int, state: TrialState = TrialState.COMPLETE, **more: Any) -> Any:
        return trial_of(number, {"method": "searched", "num_forward_equivalent_tokens": cost}, value, state, **more)

    baselines = [trial_of(number, {"method": "ntk"}, 5.0 - number / 4) for number in range(4)]
    assert racing.gain_of_a_window([*baselines, leg]) == 0.0
    moves = [
        moved(5, None, 8, TrialState.PRUNED),
        moved(6, 1.9, 64),
        moved(7, 2.5, 64),
        moved(8, None, 16, TrialState.FAIL),
    ]
    assert racing.gain_of_a_window([*baselines, leg, *moves]) == pytest.approx(0.1 * 8 / 152)
    running = moved(9, None, 8, TrialState.RUNNING)
    breaking = moved(10, 1.0, 64, excess=0.01)  # of a guard
    last = moved(11, 1.8, 64)
    found = racing.gain_of_a_window([*baselines, leg, *moves, running, breaking, last])
    assert found == pytest.approx(0.2 * 8 / 280)
    # The last that have cost as much as eight scores of eight windows of eight tokens: those from trial 7 on.
    others = [moved(number, None, 64, TrialState.PRUNED) for number in range(12, 18)]
    late = racing.gain_of_a_window([*baselines, leg, *moves, breaking, last, *others])
    assert late == pytest.approx(0.1 * 8 / 512)
    assert Racing.gain_of_a_window(dataclasses.replace(racing, rule=careful()), [*baselines, leg, *moves]) == 0.0


def test_a_greedy_race_is_against_the_best_of_all(folder: Path, result: SearchResult) -> None:
    baselines = [trial_of(number, {"method": "ntk"}, 1.0 + number / 4) for number in range(4)]
    worse = trial_of(4, {"method": "searched"}, 1.5)
    racing = greedy_of([])
    assert racing.mark([*baselines, worse]) is baselines[0]
    assert dataclasses.replace(racing, rule=careful(1)).mark([*baselines, worse]) is worse
    assert racing.mark([trial_of(0, {"method": "ntk"}, 1.0, excess=0.1)]) is None


@pytest.mark.parametrize("draw", ["normal", "heavy"])
def test_candidates_as_good_as_the_mark_are_seldom_stopped(draw: str) -> None:
    """Over all looks together, with a mean of exactly 0 over all windows: what is stopped then is stopped wrongly."""
    rng = np.random.default_rng(0)
    draws = {
        "normal": lambda: rng.standard_normal(16),
        "heavy": lambda: rng.standard_t(5, 16),
    }
    stopped = 0
    for _ in range(500):
        differences = draws[draw]()
        differences -= differences.mean()
        stopped += any(is_hopeless(differences[:seen], 16) for seen in range(1, 16))
    assert 75 < stopped < 150  # a fifth; a look alone has a chance of CHANCE


def window_score(regime: Regime, window: int) -> Score:
    """Windows that differ, and in which the candidates differ a little from their distance to the optimum."""
    noise = math.sin(1000 * sum(regime.factors) * (window + 1)) + math.cos(5000 * regime.attention_factor + window)
    nats_per_token = 1 + 0.2 * window + distance(regime) * (1 + 0.1 * noise) + 0.01 * (1 + noise)
    return Score(nats=[[2 * nats_per_token]], tokens=[[2]], block_edges=[0, 2])


def evaluate(regime: Regime, split: str) -> Score:
    return Score.joined([window_score(regime, window) for window in range(NUM_WINDOWS)])


def raced(
    folder: Path,
    rank: int = EVOLUTION.num_parents,  # of careful races
    window: Callable[[Regime, int], Score] = window_score,
    objective: Objective | None = None,
    **changes: Any,
) -> SearchResult:
    objective = objective or Objective()
    racing = Racing(
        evaluate=window,
        num_windows=NUM_WINDOWS,
        window_cost_tokens=COST_TOKENS // NUM_WINDOWS,
        objective=objective,
        rule=careful(rank),
    )
    return run(folder, **{"num_trials": 60, "score": evaluate, "racing": racing, "objective": objective, **changes})


def stopped_of(folder: Path) -> list[FrozenTrial]:
    return [trial for trial in study_of(folder).get_trials() if trial.state is TrialState.PRUNED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("raced")


@pytest.fixture(scope="module")
def result(folder: Path) -> SearchResult:
    return raced(folder)


def test_stopped_candidates_carry_what_was_scored_and_are_worse_than_their_mark(
    folder: Path, result: SearchResult
) -> None:
    trials = study_of(folder).get_trials()
    stopped = stopped_of(folder)
    assert 10 < len(stopped) == result.num_stopped < 50
    for trial in stopped:
        known = trial.user_attrs
        mark = trials[known["mark"]]
        before = [other for other in ranked(trials[: trial.number]) if is_searched(other)]
        assert mark.number == before[EVOLUTION.num_parents - 1].number
        assert trial.values is None and "score" not in known and "failure" not in known
        num_windows = known["stopped_after"]
        assert LEAST_WINDOWS <= num_windows < NUM_WINDOWS
        regime = make_sampler().space.regime(recorded_candidate(trial))  # type: ignore[arg-type]
        values = [window_score(regime, window).nats_per_token for window in range(NUM_WINDOWS)]
        kept = [Score.from_json(known[f"window_{window:03d}"]) for window in range(num_windows)]
        assert [score.nats_per_token for score in kept] == values[:num_windows]
        assert f"window_{num_windows:03d}" not in known
        assert known["num_forward_equivalent_tokens"] == num_windows * COST_TOKENS // NUM_WINDOWS
        differences = np.array(values) - Score.from_json(mark.user_attrs["score"]).window_nats / 2
        looks = [is_hopeless(differences[:seen], NUM_WINDOWS) for seen in range(1, num_windows + 1)]
        assert looks == [False] * (num_windows - 1) + [True]
        assert differences.mean() > 0  # none is stopped wrongly here
        assert known["estimated_nats_per_token"] == pytest.approx(mark.value + differences[:num_windows].mean(), 1e-12)


def test_without_a_false_stop_it_is_the_same_search(folder: Path, result: SearchResult, tmp_path: Path) -> None:
    whole = run(tmp_path, num_trials=60, score=evaluate)
    trials, others = study_of(folder).get_trials(), study_of(tmp_path).get_trials()
    assert [recorded_candidate(trial) for trial in trials] == [recorded_candidate(trial) for trial in others]
    for trial, other in zip(trials, others, strict=True):
        assert trial.state is TrialState.PRUNED or trial.values == other.values
        if trial.state is TrialState.PRUNED:
            assert "score" in other.user_attrs
    assert (result.regime, result.trial_number) == (whole.regime, whole.trial_number)
    assert [each.trial_number for each in result.finalists] == [each.trial_number for each in whole.finalists]
    assert whole.num_stopped == whole.num_saved_tokens == 0
    spent = result.num_forward_equivalent_tokens
    assert spent + result.num_saved_tokens == whole.num_forward_equivalent_tokens
    assert spent == sum(trial.user_attrs["num_forward_equivalent_tokens"] for trial in trials)


def test_stopped_candidates_are_no_results(folder: Path, result: SearchResult) -> None:
    numbers = {trial.number for trial in stopped_of(folder)}
    assert not numbers & {finalist.trial_number for finalist in result.finalists}
    assert not numbers & {number for number, _ in result.course}
    assert len(result.course) + len(numbers) == 60
    known = [str(candidate_json(candidate)) for trial in study_of(folder).get_trials()
             if (candidate := recorded_candidate(trial))]  # fmt: skip
    assert len(set(known)) == len(known) == 60


def test_baselines_and_the_first_candidates_are_scored_whole(folder: Path, result: SearchResult) -> None:
    trials = study_of(folder).get_trials()
    for trial in trials[: 4 + EVOLUTION.num_parents]:
        assert trial.state is TrialState.COMPLETE and "window_000" not in trial.user_attrs
    assert all("window_003" in trial.user_attrs for trial in trials[4 + EVOLUTION.num_parents :])


@pytest.mark.parametrize("num_calls", [0, 3, 9, 140])
def test_a_race_killed_within_a_window_goes_on_where_it_was(
    num_calls: int, folder: Path, result: SearchResult, tmp_path: Path
) -> None:
    calls: list[tuple[Regime, int]] = []

    def dying(regime: Regime, window: int) -> Score:
        if len(calls) == num_calls:
            raise Killed
        calls.append((regime, window))
        return window_score(regime, window)

    def counted(regime: Regime, window: int) -> Score:
        calls.append((regime, window))
        return window_score(regime, window)

    with pytest.raises(Killed):
        raced(tmp_path, window=dying)
    assert raced(tmp_path, window=counted).regime == result.regime
    assert contents(tmp_path) == contents(folder)
    assert len(set(calls)) == len(calls)  # no window twice


def test_a_race_cut_after_any_line_of_its_journal_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    raced(tmp_path / "whole", rank=1, num_trials=4)
    expected = contents(tmp_path / "whole")
    assert [trial.number for trial in stopped_of(tmp_path / "whole")] == [7]
    lines = (tmp_path / "whole" / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    asked = max(place for place, line in enumerate(lines) if b'"op_code":4' in line)
    for cut in range(asked, len(lines)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_bytes(b"".join(lines[:cut]) + lines[cut][:7])
        raced(folder, rank=1, num_trials=4)
        assert contents(folder) == expected, f"cut after {cut} of {len(lines)} lines"


def test_a_window_that_cannot_be_scored_fails_the_trial(tmp_path: Path) -> None:
    def failing(regime: Regime, window: int) -> Score:
        if window == 2:
            raise ScoringError("nats are not a number")
        return window_score(regime, window)

    result = raced(tmp_path, window=failing, num_trials=10)
    trials = study_of(tmp_path).get_trials()[4 + EVOLUTION.num_parents :]
    assert {trial.state for trial in trials} == {TrialState.FAIL} and result.num_failed == len(trials) == 6
    for trial in trials:
        assert trial.user_attrs["failure"] == "nats are not a number"
        assert trial.user_attrs["num_forward_equivalent_tokens"] == 3 * COST_TOKENS // NUM_WINDOWS


def test_events_tell_what_was_stopped(tmp_path: Path) -> None:
    events: list[SearchEvent] = []
    result = raced(tmp_path, on_event=events.append, num_trials=30)
    searched = [event for event in events if event.split == "search"]
    stopped = [event for event in searched if event.nats_per_token is None]
    assert [event.num_stopped for event in stopped] == list(range(1, result.num_stopped + 1)) and stopped
    assert all(event.failure is None for event in stopped)
    assert [event.num_finished for event in searched] == list(range(1, 35))


def test_patience_counts_stopped_candidates(tmp_path: Path) -> None:
    raced(tmp_path, rank=1, budget=BudgetConfig(patience_trials=6))
    trials = study_of(tmp_path).get_trials()
    best = next(trial for trial in ranked(trials) if is_searched(trial))
    assert len(trials) == best.number + 1 + 6
    assert any(trial.state is TrialState.PRUNED for trial in trials[best.number :])


GUARDED = objective_of(ScoringConfig(max_short_perplexity_increase=0.05, num_blocks=2), 4, 2)


def guarded_window(regime: Regime, window: int) -> Score:
    """As `window_score`, and the first half costs what the factors of the fast half are above 1."""
    short, long = 1 + 0.1 * float(np.log(regime.factors[:4]).sum()), window_score(regime, window).nats_per_token
    return Score(nats=[[2 * short, 2 * long]], tokens=[[2, 2]], block_edges=[0, 2, 4])


def test_with_a_guard_only_the_value_stops_and_only_against_a_mark_that_keeps_it(tmp_path: Path) -> None:
    def whole(regime: Regime, split: str) -> Score:
        return Score.joined([guarded_window(regime, window) for window in range(NUM_WINDOWS)])

    result = raced(tmp_path, window=guarded_window, score=whole, objective=GUARDED, num_trials=100)
    trials = study_of(tmp_path).get_trials()
    stopped = stopped_of(tmp_path)
    assert stopped and result.num_stopped == len(stopped)
    assert all(trial.constraints == {} for trial in stopped)
    for trial in stopped:
        mark = trials[trial.user_attrs["mark"]]
        assert max(mark.constraints.values()) <= 0
        regime = make_sampler().space.regime(recorded_candidate(trial))  # type: ignore[arg-type]
        assert GUARDED.value(whole(regime, "search")) > mark.values[0]
    unguarded = [trial for trial in trials if trial.state is TrialState.COMPLETE and not trial.constraints]
    assert unguarded == []


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (EvolutionConfig(num_parents=32), careful(8)),
        (RandomConfig(), careful(8)),
        (GradientConfig(), GREEDY),
        (TPEConfig(), None),
        (CMAESConfig(), None),
    ],
)
def test_which_candidate_is_the_mark_and_when_it_is_out_of_reach(
    optimizer: OptimizerConfig, expected: Rule | None
) -> None:
    sampler = make_sampler(optimizer=optimizer)
    found = {
        mark: race_rule(RacingConfig(mark=mark), SelectionConfig(num_finalists=8), sampler, Objective(), 16)
        for mark in RacingMark
    }
    assert found == {RacingMark.none: None, RacingMark.finalists: expected}
    for objective in (Objective(needle_weight=0.5), Objective(short_tokens=4)):
        assert race_rule(RacingConfig(), SelectionConfig(), sampler, objective, 5) is None
    least = LEAST_WINDOWS if expected is None else expected.least_windows
    assert race_rule(RacingConfig(), SelectionConfig(), sampler, Objective(), least) is None


def test_legs_of_a_descent_are_scored_whole(tmp_path: Path) -> None:
    def differentiate(regime: Regime, window: int, *guard_weight: float) -> Step:
        return Step(window=window, nats_per_token=1.0, gradient=(0.1,) * len(regime.factors) + (0.0,))

    folder = tmp_path / "gradient"
    space, config = make_sampler().space, GradientConfig(num_candidates=24)
    sampler = sampler_of(space, config, 0, SEEDS, len(BASELINES), NUM_WINDOWS, Objective(), RacingConfig())
    racing = Racing(
        evaluate=window_score, num_windows=NUM_WINDOWS, window_cost_tokens=2, objective=Objective(), rule=GREEDY
    )
    search_in(
        folder,
        sampler,
        evaluate,
        differentiate=differentiate,
        racing=racing,
        baselines=BASELINES,
        cost_tokens=COST_TOKENS,
        budget=BudgetConfig(),
        selection=SelectionConfig(num_finalists=3),
    )
    trials = study_of(folder).get_trials()[4:]
    legs = [trial for trial in trials if PLAN in trial.user_attrs]
    assert legs[0].number == 4 + 8 and all(trial.state is TrialState.COMPLETE for trial in legs)
    assert not any("mark" in trial.user_attrs for trial in legs)
    moves = [trial for trial in trials if PLAN not in trial.user_attrs]
    assert any(trial.state is TrialState.PRUNED for trial in moves)
