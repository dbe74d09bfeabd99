import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna import Study
from optuna.trial import TrialState

from ropesearch.errors import InputError, NothingScoredError, ScoringError
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.objective import objective_of
from ropesearch.score.score import Score
from ropesearch.search.baselines import baseline_regimes
from ropesearch.search.config import BudgetConfig, EvolutionConfig, SelectionConfig
from ropesearch.search.once import guard_score, scored_once
from ropesearch.search.parameters import parameters
from ropesearch.search.presence import read_signs, working
from ropesearch.search.run import SearchResult
from ropesearch.search.storage import JOURNAL_NAME
from ropesearch.search.study import open_study
from ropesearch.search.trials import (
    CANDIDATE,
    GUARD,
    OWNER,
    ranked,
    recorded_candidate,
    recorded_regime,
    recorded_score,
    violation,
)
from ropesearch.search.worker import SearchEvent
from ropesearch.stopping import Stopped, Stopping
from tests.search.analytic import (
    BASELINES,
    FINGERPRINTS,
    TARGET_LENGTH,
    evaluate,
    make_geometry,
    make_sampler,
    make_score,
    run,
    search_in,
)

VOLATILE = {"owner", "seconds"}


def study_of(folder: Path) -> Study:
    return open_study(folder, FINGERPRINTS, make_sampler()).study


def contents(folder: Path) -> list[Any]:
    """Everything a study holds but times and owners, and who claimed what."""
    study = study_of(folder)
    trials = [
        (
            trial.number,
            trial.state,
            trial.values,
            trial.params,
            {key: value for key, value in trial.user_attrs.items() if key not in VOLATILE},
        )
        for trial in study.get_trials()
    ]
    return [*trials, {key: value for key, value in study.user_attrs.items() if not key.startswith("claim/")}]


class Killed(BaseException):
    """Stands for a worker's death: nothing of the search runs after it but the freeing of locks."""


def dying_after(num_calls: int, score: Callable[[Regime, str], Score] = evaluate) -> Callable[[Regime, str], Score]:
    left = [num_calls]

    def scored(regime: Regime, split: str) -> Score:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return score(regime, split)

    return scored


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, list[Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return run(folder), contents(folder)


def same(result: SearchResult, other: SearchResult) -> bool:
    return (result.regime, result.trial_number, result.method, result.num_trials, result.num_failed) == (
        other.regime,
        other.trial_number,
        other.method,
        other.num_trials,
        other.num_failed,
    )


def test_baselines_come_first_as_they_are_and_then_the_seeds(tmp_path: Path) -> None:
    run(tmp_path, num_trials=5)
    trials = study_of(tmp_path).get_trials()
    assert [trial.user_attrs["method"] for trial in trials] == ["unscaled", "linear", "ntk", "yarn"] + ["searched"] * 5
    geometry = make_geometry()
    expected = [
        method(geometry, TARGET_LENGTH) for method in (methods.identity, methods.linear, methods.ntk, methods.yarn)
    ]
    assert [recorded_regime(trial, TARGET_LENGTH) for trial in trials[:4]] == expected
    assert baseline_regimes(geometry, TARGET_LENGTH) == expected
    assert trials[3].params == {}


def test_a_trial_carries_exactly_what_was_scored(tmp_path: Path) -> None:
    seen: list[tuple[Regime, Score]] = []

    def watched(regime: Regime, split: str) -> Score:
        score = evaluate(regime, split)
        if split == "search":
            seen.append((regime, score))
        return score

    run(tmp_path, score=watched)
    trials = [trial for trial in study_of(tmp_path).get_trials() if trial.state is TrialState.COMPLETE]
    own = [trial for trial in trials if "reused_from" not in trial.user_attrs]
    assert len(own) == len(seen) > 20
    space = make_sampler().space
    for trial, (regime, score) in zip(own, seen, strict=True):
        assert recorded_regime(trial, TARGET_LENGTH) == regime
        found = recorded_score(trial)
        assert found is not None
        assert found.to_json() == score.to_json()
        assert trial.value == score.nats_per_token
        assert trial.user_attrs["num_forward_equivalent_tokens"] == 16
        assert trial.user_attrs["seconds"] >= 0
        candidate = recorded_candidate(trial)
        if candidate is not None:
            assert space.regime(candidate) == regime
            assert trial.params == parameters(space, candidate)


@pytest.mark.parametrize("ends", ["ignored", "failed"])
def test_a_signal_that_a_library_swallows_stops_the_worker_all_the_same(ends: str, tmp_path: Path) -> None:
    """At the end of the trial at hand, whose score counts; a failure that the signal made does not."""
    calls: list[str] = []

    def swallowing(regime: Regime, split: str) -> Score:
        calls.append(split)
        if len(calls) == 3:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Stopped as error:
                if ends == "failed":
                    raise ScoringError("the device stopped") from error
        return evaluate(regime, split)

    with Stopping("again").listening(until_the_end=False), pytest.raises(Stopped, match="SIGTERM"):
        run(tmp_path, 6, score=swallowing)
    trials = study_of(tmp_path).get_trials()
    assert len(calls) == len(trials) == 3 and trials[2].state is TrialState.RUNNING
    assert ("score" in trials[2].user_attrs) is (ends == "ignored") and "failure" not in trials[2].user_attrs
    run(tmp_path / "whole", 6, score=evaluate)
    run(tmp_path, 6, score=evaluate)
    assert contents(tmp_path) == contents(tmp_path / "whole")


def test_failures_are_states_with_a_reason(uninterrupted: tuple[SearchResult, list[Any]]) -> None:
    result, held = uninterrupted
    failed = [entry for entry in held[:-1] if entry[1] is TrialState.FAIL]
    assert len(failed) == result.num_failed >= 3
    for _, _, values, _, attributes in failed:
        assert values is None
        assert attributes["failure"] == "nats are not a number"
        assert "score" not in attributes


def test_a_baseline_on_the_grid_is_not_scored_again(tmp_path: Path) -> None:
    calls: Counter[tuple[str, tuple[float, ...], float]] = Counter()

    def counted(regime: Regime, split: str) -> Score:
        calls[split, regime.factors, regime.attention_factor] += 1
        return evaluate(regime, split)

    run(tmp_path, score=counted)
    run(tmp_path, score=counted)
    assert set(calls.values()) == {1}
    trials = study_of(tmp_path).get_trials()
    assert trials[4].user_attrs["reused_from"] == 1  # linear is the first seed
    assert trials[4].user_attrs["num_forward_equivalent_tokens"] == 0
    assert trials[4].value == trials[1].value


def test_the_result_says_what_was_found(uninterrupted: tuple[SearchResult, list[Any]]) -> None:
    result, held = uninterrupted
    assert (result.method, result.num_trials, result.stopped_because) == ("searched", 34, "num_trials")
    assert list(result.search_scores) == ["unscaled", "linear", "ntk", "yarn", "searched"]
    best = min((entry[2][0], entry[0]) for entry in held[4:-1] if entry[2])
    assert result.search_scores["searched"].nats_per_token == best[0]
    assert result.trial_number == best[1]  # both splits rank alike here
    assert [finalist.method for finalist in result.finalists].count("searched") == 3
    assert {finalist.method for finalist in result.finalists} == {"searched", "unscaled", "linear", "ntk", "yarn"}
    selected = [finalist.selection_score.nats_per_token for finalist in result.finalists if finalist.selection_score]
    assert selected == sorted(selected)
    assert result.finalists[0].regime == result.regime
    assert result.num_forward_equivalent_tokens == 16 * 33  # one score was reused


def test_the_search_score_shown_is_that_of_the_candidate_that_is_best_on_the_selection_windows(tmp_path: Path) -> None:
    def reversed_there(regime: Regime, split: str) -> Score:
        found = evaluate(regime, split)
        return make_score(1 / found.nats_per_token) if split == "selection" else found

    result = run(tmp_path, score=reversed_there)
    searched = [finalist for finalist in result.finalists if finalist.method == "searched"]
    assert len(searched) == 3 and searched[0].search_score.nats_per_token > searched[1].search_score.nats_per_token
    assert result.search_scores["searched"].nats_per_token == searched[0].search_score.nats_per_token


def test_a_baseline_that_wins_on_the_selection_windows_is_the_result(tmp_path: Path) -> None:
    def overfitted(regime: Regime, split: str) -> Score:
        return make_score(1.0) if split == "selection" and regime.name == "ntk" else evaluate(regime, split)

    result = run(tmp_path, score=overfitted)
    assert (result.method, result.trial_number) == ("ntk", 2)
    assert result.regime == methods.ntk(make_geometry(), TARGET_LENGTH)


@pytest.mark.parametrize("num_calls", [0, 1, 3, 4, 5, 11, 20, 30, 33, 35, 39])
def test_a_search_stopped_within_a_scoring_goes_on_as_if_nothing_had_happened(
    num_calls: int, tmp_path: Path, uninterrupted: tuple[SearchResult, list[Any]]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, score=dying_after(num_calls))
    result = run(tmp_path)
    assert same(result, uninterrupted[0])
    assert contents(tmp_path) == uninterrupted[1]


@pytest.mark.parametrize("num_trials", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_search_cut_after_any_line_of_its_journal_goes_on_as_if_nothing_had_happened(
    num_trials: int, tmp_path: Path
) -> None:
    run(tmp_path / "whole", num_trials=num_trials)
    expected = contents(tmp_path / "whole")
    lines = (tmp_path / "whole" / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for cut in range(len(lines)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_bytes(b"".join(lines[:cut]) + lines[cut][:7])
        run(folder, num_trials=num_trials)
        assert contents(folder) == expected, f"cut after {cut} of {len(lines)} lines"


def test_an_interrupt_leaves_a_trial_that_is_taken_over(tmp_path: Path) -> None:
    def interrupted(regime: Regime, split: str) -> Score:
        if regime.name == "yarn":
            raise KeyboardInterrupt
        return evaluate(regime, split)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, score=interrupted)
    trials = study_of(tmp_path).get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 3 + [TrialState.RUNNING]
    owner = trials[3].user_attrs[OWNER]
    run(tmp_path)
    taken = study_of(tmp_path).get_trials()[3]
    assert taken.state is TrialState.COMPLETE and taken.user_attrs[OWNER] != owner


@pytest.mark.parametrize("finishes", [False, True], ids=["while it runs", "and finishes"])
def test_a_worker_that_had_seemed_dead_leaves_its_trial_to_the_new_owner(finishes: bool, tmp_path: Path) -> None:
    """It was suspended within a scoring for longer than its lease; another worker took the trial over."""
    calls: list[str] = []

    def scoring(regime: Regime, split: str) -> Score:
        if regime.name == "yarn" and split == "search" and not calls:
            calls.append("suspended")
            study = study_of(tmp_path)
            study._storage.set_trial_user_attr(study.get_trials()[3]._trial_id, OWNER, "another")
            if finishes:
                other = study.get_trials()[3]
                study._storage.set_trial_user_attr(other._trial_id, "score", make_score(0.5).to_json())
                study.tell(3, 0.5)
        return evaluate(regime, split)

    result = run(tmp_path, score=scoring)
    trial = study_of(tmp_path).get_trials()[3]
    assert trial.state is TrialState.COMPLETE and result.num_trials == 34
    if finishes:  # as the other one told it
        assert trial.value == 0.5 and trial.user_attrs[OWNER] == "another"
    else:  # "another" has no sign of life, so it is taken over again, and scored anew
        assert trial.value == evaluate(BASELINES[3], "search").nats_per_token and trial.user_attrs[OWNER] != "another"


def test_a_signal_is_heeded_by_a_worker_that_loses_its_trial_meanwhile(tmp_path: Path) -> None:
    num_calls = 0

    def scoring(regime: Regime, split: str) -> Score:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            signal.raise_signal(signal.SIGTERM)
            study = study_of(tmp_path)
            running = next(trial for trial in study.get_trials() if not trial.state.is_finished())
            study._storage.set_trial_user_attr(running._trial_id, OWNER, "another")
        return evaluate(regime, split)

    stopping = Stopping("again")
    with stopping.listening(until_the_end=False), pytest.raises(Stopped, match="SIGTERM"):
        run(tmp_path, score=scoring, grace_seconds=3600.0)
    assert num_calls == 6


def test_a_schedulers_signal_lets_a_trial_be_finished_that_is_nearly_done(tmp_path: Path) -> None:
    """The pace is known from the trials before; a grace of hours is enough for any, one of nothing for none."""
    for grace_seconds, num_done in ((3600.0, 6), (0.0, 5)):
        folder = tmp_path / str(grace_seconds)
        stopping = Stopping("again")
        num_calls = 0

        def scoring(regime: Regime, split: str) -> Score:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 6:
                signal.raise_signal(signal.SIGTERM)
            time.sleep(0.01)
            return evaluate(regime, split)

        with stopping.listening(until_the_end=False), pytest.raises(Stopped, match="SIGTERM"):
            run(folder, score=scoring, grace_seconds=grace_seconds)
        trials = [trial for trial in study_of(folder).get_trials() if "reused_from" not in trial.user_attrs]
        assert sum(trial.state is TrialState.COMPLETE for trial in trials) == num_done
        assert [sign["because"] for sign in read_signs(folder)] == ["SIGTERM"]
        assert stopping.exit_code == 75


def test_a_trial_without_owner_or_candidate_is_taken_over(
    tmp_path: Path, uninterrupted: tuple[SearchResult, list[Any]]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, score=dying_after(12))
    study = study_of(tmp_path)
    study.tell(study.get_trials()[-1].number, state=TrialState.FAIL)
    asked = study.ask()  # and killed here
    assert asked.user_attrs == {}
    result = run(tmp_path)
    assert result.num_trials == 34
    adopted = study_of(tmp_path).get_trials()[asked.number]
    assert adopted.state.is_finished() and CANDIDATE in adopted.user_attrs


def test_a_recorded_score_is_not_scored_again_after_a_kill(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, score=dying_after(10))
    opened = open_study(tmp_path, FINGERPRINTS, make_sampler())
    running = opened.study.get_trials()[-1]
    assert running.state is TrialState.RUNNING
    score = make_score(0.125)
    opened.study._storage.set_trial_user_attr(running._trial_id, "score", score.to_json())
    run(tmp_path)
    finished = study_of(tmp_path).get_trials()[running.number]
    assert finished.value == 0.125


@pytest.mark.parametrize(
    ("budget", "reason", "num_candidates"),
    [
        (BudgetConfig(num_trials=7), "num_trials", 7),
        (BudgetConfig(forward_equivalent_tokens=16 * 10), "forward_equivalent_tokens", 7),  # linear is reused
        (BudgetConfig(forward_equivalent_tokens=16 * 11 - 1), "forward_equivalent_tokens", 7),
        (BudgetConfig(minutes=1e-9), "minutes", 0),
    ],
)
def test_budgets_end_a_search_exactly(budget: BudgetConfig, reason: str, num_candidates: int, tmp_path: Path) -> None:
    result = run(tmp_path, budget=budget)
    assert (result.stopped_because, result.num_trials) == (reason, 4 + num_candidates)
    again = run(tmp_path, budget=budget)
    assert (again.stopped_because, again.num_trials) == (reason, 4 + num_candidates)


def test_patience_counts_candidates_since_the_best(tmp_path: Path) -> None:
    run(tmp_path, budget=BudgetConfig(patience_trials=9))
    values = [trial.value for trial in study_of(tmp_path).get_trials()[4:]]
    best = min((value, number) for number, value in enumerate(values) if value is not None)[1]
    assert len(values) == best + 1 + 9
    for end in range(1, len(values)):
        shown = [(value, number) for number, value in enumerate(values[:end]) if value is not None]
        assert end - 1 - min(shown)[1] < 9


def test_without_a_budget_the_generations_end_it(tmp_path: Path) -> None:
    evolution = EvolutionConfig(num_population=6, num_parents=3, num_mutations=2, num_crossovers=1, num_generations=3)
    result = search_in(
        tmp_path,
        make_sampler(optimizer=evolution),
        evaluate,
        baselines=BASELINES,
        cost_tokens=1,
        budget=BudgetConfig(),
        selection=SelectionConfig(),
    )
    assert (result.stopped_because, result.num_trials) == ("num_generations", 4 + 6 + 3 * 3)


def test_an_exhausted_space_ends_the_search(tmp_path: Path) -> None:
    sampler = make_sampler(factor_step=5.0, attention_factor=1.1)
    assert sampler.space.num_candidates == 9
    result = search_in(
        tmp_path,
        sampler,
        lambda regime, split: make_score(1 + sum(regime.factors)),
        baselines=BASELINES,
        cost_tokens=1,
        budget=BudgetConfig(num_trials=500),
        selection=SelectionConfig(),
    )
    assert result.num_trials == 4 + 9
    assert result.stopped_because == "every candidate of the space is in the study"


def test_a_larger_budget_goes_on_with_a_finished_search(
    tmp_path: Path, uninterrupted: tuple[SearchResult, list[Any]]
) -> None:
    run(tmp_path, num_trials=13)
    assert same(run(tmp_path), uninterrupted[0])
    assert contents(tmp_path)[:-1] == uninterrupted[1][:-1]


def test_nothing_scored_is_an_error_of_its_own(tmp_path: Path) -> None:
    calls: list[str] = []

    def failing(regime: Regime, split: str) -> Score:
        calls.append(split)
        raise ScoringError("out of memory")

    with pytest.raises(NothingScoredError, match="none of 16 trials could be scored: out of memory"):
        run(tmp_path, score=failing)  # and a hopeless search does not use up its budget
    with pytest.raises(NothingScoredError, match="none of 16 trials"):
        run(tmp_path, score=failing)
    assert len(calls) == 16


def test_finalists_that_all_fail_are_an_error_too(tmp_path: Path) -> None:
    def failing(regime: Regime, split: str) -> Score:
        if split == "selection":
            raise ScoringError("out of memory")
        return evaluate(regime, split)

    with pytest.raises(NothingScoredError, match="none of 7 finalists"):
        run(tmp_path, score=failing)


def test_a_finalist_that_fails_comes_last(tmp_path: Path) -> None:
    def failing(regime: Regime, split: str) -> Score:
        if split == "selection" and regime.name == "searched":
            raise ScoringError("out of memory")
        return evaluate(regime, split)

    result = run(tmp_path, score=failing)
    assert result.method == "yarn"
    assert [finalist.failure for finalist in result.finalists] == [None] * 4 + ["out of memory"] * 3


def test_other_errors_are_not_swallowed(tmp_path: Path) -> None:
    def broken(regime: Regime, split: str) -> Score:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, score=broken)


def test_events_tell_progress(tmp_path: Path) -> None:
    events: list[SearchEvent] = []
    result = run(tmp_path, on_event=events.append)
    searched = [event for event in events if event.split == "search"]
    assert [event.trial_number for event in searched] == list(range(34))
    assert [event.num_finished for event in searched] == list(range(1, 35))
    assert searched[3].spent_fraction == 0 and searched[18].spent_fraction == 0.5 and searched[-1].spent_fraction == 1
    bests = [event.best_nats_per_token for event in searched]
    assert bests == sorted(bests, reverse=True)  # type: ignore[type-var]
    assert {event.failure for event in searched if event.nats_per_token is None} == {"nats are not a number"}
    assert len(events) - len(searched) == len(result.finalists)


GUARDED = objective_of(ScoringConfig(max_short_perplexity_increase=0.05), 8, 4)


def guarded(regime: Regime, split: str) -> Score:
    """As `evaluate`, and the first half costs what the factors of the fast half are above 1."""
    long = evaluate(regime, split).nats_per_token
    short = 1 + 0.1 * sum(np.log(regime.factors[:4]))
    return Score(nats=[[4 * short, 4 * long]], tokens=[[4, 4]], block_edges=[0, 4, 8])


def short_increase(regime: Regime) -> float:
    return float(np.expm1(0.1 * sum(np.log(regime.factors[:4]))))


def test_a_guard_changes_the_result(tmp_path: Path) -> None:
    free = run(tmp_path / "free", score=guarded, num_trials=60)
    assert free.num_candidates_in_guard is None and free.finalists[0].excess_nats is None
    result = run(tmp_path / "guarded", score=guarded, num_trials=60, objective=GUARDED)
    assert short_increase(free.regime) > 0.08  # it binds
    assert short_increase(result.regime) <= 0.05
    trials = study_of(tmp_path / "guarded").get_trials()
    kept = 0
    for trial in trials:
        if trial.state is not TrialState.COMPLETE:
            assert trial.constraints == {}
            continue
        increase = short_increase(recorded_regime(trial, TARGET_LENGTH))
        assert trial.constraints == {GUARD: pytest.approx(np.log1p(increase) - np.log(1.05), abs=1e-12)}
        assert violation(trial) == max(0, trial.constraints[GUARD])
        kept += trial.number >= 4 and increase <= 0.05
    assert 3 < result.num_candidates_in_guard == kept < 50  # type: ignore[operator]
    order = [violation(trial) > 0 for trial in ranked(trials)]
    assert order == sorted(order) and any(order)
    first = ranked(trials)[0]
    assert first.values[0] > min(trial.values[0] for trial in trials if trial.values)  # not the least value
    excesses = [finalist.excess_nats for finalist in result.finalists if finalist.selection_score]
    assert [excess > 0 for excess in excesses if excess is not None] == sorted(excess > 0 for excess in excesses)  # type: ignore[operator]
    # More of the later candidates keep the guard than without it: the sampler follows.
    later = [recorded_regime(trial, TARGET_LENGTH) for trial in study_of(tmp_path / "free").get_trials()[34:]]
    guided = [recorded_regime(trial, TARGET_LENGTH) for trial in trials[34:]]
    within = [sum(short_increase(regime) <= 0.05 for regime in regimes) for regimes in (later, guided)]
    assert within[1] > within[0]


def test_a_guarded_search_goes_on_after_a_kill_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", score=guarded, objective=GUARDED)
    for num_calls in (0, 1, 17):
        folder = tmp_path / str(num_calls)
        with pytest.raises(Killed):
            run(folder, score=dying_after(num_calls, guarded), objective=GUARDED)
        assert same(run(folder, score=guarded, objective=GUARDED), whole)
        assert contents(folder) == contents(tmp_path / "whole")
        constraints = [
            [trial.constraints for trial in study_of(each).get_trials()] for each in (folder, tmp_path / "whole")
        ]
        assert constraints[0] == constraints[1]


def test_where_no_candidate_keeps_the_guard_the_result_says_so(tmp_path: Path) -> None:
    def strict(regime: Regime, split: str) -> Score:
        short = 1.0 if regime.name == "unscaled" else 2.0
        return Score(nats=[[4 * short, 4.0]], tokens=[[4, 4]], block_edges=[0, 4, 8])

    result = run(tmp_path, score=strict, objective=GUARDED)
    assert (result.method, result.num_candidates_in_guard) == ("unscaled", 0)
    assert result.finalists[0].method == "unscaled"


@pytest.mark.parametrize("split", ["search", "selection"])
def test_a_guard_without_the_unscaled_score_is_an_error(split: str, tmp_path: Path) -> None:
    def failing(regime: Regime, of: str) -> Score:
        if regime.name == "unscaled" and of == split:
            raise ScoringError("out of memory")
        return guarded(regime, of)

    with pytest.raises(NothingScoredError, match=f"unscaled model could not be scored on the {split} windows"):
        run(tmp_path, score=failing, objective=GUARDED)


def short_reference(split: str) -> Score:
    """Of the first half alone, and half a nat better there than trial 0."""
    return Score(nats=[[4 * 0.5]], tokens=[[4]], block_edges=[0, 4])


def test_a_guard_can_be_measured_against_another_score_than_trial_0s(tmp_path: Path) -> None:
    """As for a checkpoint whose own table depends on the length: made once a split, whatever is killed when."""
    calls: Counter[str] = Counter()

    def reference(split: str) -> Score:
        calls[split] += 1
        return short_reference(split)

    arguments: dict[str, Any] = {"score": guarded, "objective": GUARDED, "guard_reference": reference}
    result = run(tmp_path / "whole", **arguments)
    assert calls == {"search": 1, "selection": 1}
    for trial in study_of(tmp_path / "whole").get_trials():
        if trial.state is TrialState.COMPLETE:
            regime = recorded_regime(trial, TARGET_LENGTH)
            excess = 0.5 + np.log1p(short_increase(regime)) - np.log(1.05)  # trial 0's too
            assert trial.constraints == {GUARD: pytest.approx(excess, abs=1e-12)}
    scored = [finalist for finalist in result.finalists if finalist.selection_score]
    assert [finalist.excess_nats for finalist in scored] == pytest.approx(
        [0.5 + np.log1p(short_increase(finalist.regime)) - np.log(1.05) for finalist in scored], abs=1e-12
    )
    assert result.num_candidates_in_guard == 0
    assert result.num_forward_equivalent_tokens == run(tmp_path / "as before").num_forward_equivalent_tokens
    assert same(run(tmp_path / "whole", **arguments), result) and calls == {"search": 1, "selection": 1}

    for num_calls in (0, 1):
        folder = tmp_path / str(num_calls)
        calls.clear()
        left = [num_calls]

        def dying(split: str, left: list[int] = left) -> Score:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return reference(split)

        with pytest.raises(Killed):
            run(folder, **(arguments | {"guard_reference": dying}))
        assert same(run(folder, **arguments), result)
        assert calls == {"search": 1, "selection": 1}
        assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("split", ["search", "selection"])
def test_a_guard_without_that_score_is_an_error_and_is_not_tried_again(split: str, tmp_path: Path) -> None:
    def failing(of: str) -> Score:
        if of == split:
            raise ScoringError("out of memory")
        return short_reference(of)

    expected = f"unscaled model could not be scored on the {split} windows, .*: out of memory; ask without"
    for reference in (failing, short_reference):
        with pytest.raises(NothingScoredError, match=expected):
            run(tmp_path, score=guarded, objective=GUARDED, guard_reference=reference)


def test_workers_wait_for_a_score_that_another_one_makes(tmp_path: Path) -> None:
    opened = open_study(tmp_path, FINGERPRINTS, make_sampler())
    started, may_end = threading.Event(), threading.Event()
    calls = []

    def slow(split: str) -> Score:
        calls.append(split)
        started.set()
        assert may_end.wait(60)
        return short_reference(split)

    with ThreadPoolExecutor(2) as pool, working(tmp_path, 60) as one, working(tmp_path, 60) as other:
        first = pool.submit(guard_score, opened, "search", slow, one)
        assert started.wait(60)
        second = pool.submit(guard_score, opened, "search", slow, other)
        assert scored_once(opened, "guard_reference/search", lambda: pytest.fail("scored twice"), other) is None
        may_end.set()
        expected = short_reference("search").to_json()
        assert first.result(60).to_json() == second.result(60).to_json() == expected and calls == ["search"]


def test_a_weighted_objective_is_what_trials_are_worth(tmp_path: Path) -> None:
    objective = objective_of(ScoringConfig(lengths=[4, 8], length_weights=[3.0, 1.0]), 8, 4)
    result = run(tmp_path, score=guarded, objective=objective)
    for trial in study_of(tmp_path).get_trials():
        score = recorded_score(trial)
        if score is not None:
            short, whole = score.nats[0, 0] / 4, score.nats.sum() / 8
            assert trial.value == pytest.approx((3 * short + whole) / 4, rel=1e-15)
    values = [objective.value(each.selection_score) for each in result.finalists if each.selection_score]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": BudgetConfig(num_trials=0)}, "budget.num_trials"),
        ({"budget": BudgetConfig(minutes=float("nan"))}, "budget.minutes"),
        ({"budget": BudgetConfig(forward_equivalent_tokens=16 * 5 - 1)}, "at least 80"),
        ({"selection": SelectionConfig(num_finalists=0)}, "num_finalists"),
    ],
)
def test_impossible_limits_are_refused_before_anything_is_asked(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", **changes)
    assert study_of(tmp_path / "run").get_trials() == []


def start(folder: Path, num_trials: int, delay: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tests.search.analytic", str(folder), str(num_trials), str(delay)])


def kill_and_restart(folder: Path, num_kills: int, num_workers: int, num_trials: int) -> None:
    """Kill workers at random moments of their work, then let them finish."""
    moments = random.Random(num_kills)
    workers = [start(folder, num_trials, 0.05) for _ in range(num_workers)]
    for _ in range(num_kills):
        begun = (folder / "calls").stat().st_size if (folder / "calls").exists() else 0
        deadline = time.monotonic() + 60
        while not (folder / "calls").exists() or (folder / "calls").stat().st_size == begun:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        victim = moments.randrange(num_workers)
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start(folder, num_trials, 0.05)
    for worker in workers:
        assert worker.wait(timeout=120) == 0


def check_calls(folder: Path, num_kills: int) -> None:
    """Every scoring ended once; only those that a kill cut short were begun again."""
    calls = Counter((folder / "calls").read_text().splitlines())
    ended = {call.removeprefix("end "): number for call, number in calls.items() if call.startswith("end ")}
    begun = {call.removeprefix("begin "): number for call, number in calls.items() if call.startswith("begin ")}
    assert set(ended) == set(begun)
    # A kill between a scoring's end and the writing of its score repeats that scoring, and cannot but.
    assert sum(begun.values()) - len(begun) <= num_kills
    assert sum(ended.values()) - len(ended) <= num_kills


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_worker_goes_on_as_if_nothing_had_happened(num_kills: int, tmp_path: Path) -> None:
    num_trials = 30 if num_kills < 10 else 150
    run(tmp_path / "whole", num_trials=num_trials)
    folder = tmp_path / "killed"
    folder.mkdir()
    kill_and_restart(folder, num_kills, num_workers=1, num_trials=num_trials)
    assert contents(folder) == contents(tmp_path / "whole")
    check_calls(folder, num_kills)
    assert {sign["because"] for sign in read_signs(folder)} <= {"done", "lost"}


@pytest.mark.parametrize("num_kills", [0, 2, pytest.param(20, marks=pytest.mark.slow)])
def test_two_workers_share_a_search(num_kills: int, tmp_path: Path) -> None:
    num_trials = 30 if num_kills < 10 else 150
    kill_and_restart(tmp_path, num_kills, num_workers=2, num_trials=num_trials)
    trials = study_of(tmp_path).get_trials()
    assert len(trials) == 4 + num_trials
    assert all(trial.state.is_finished() for trial in trials)
    found = [str(trial.user_attrs[CANDIDATE]) for trial in trials[4:]]
    assert len(set(found)) == num_trials
    check_calls(tmp_path, num_kills)
    if num_kills == 0:
        assert len({trial.user_attrs[OWNER] for trial in trials}) == 2
