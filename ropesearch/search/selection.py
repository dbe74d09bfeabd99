"""The finalists: the best candidates and the baselines, scored again on windows that did not guide the search."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from optuna.trial import FrozenTrial

from ropesearch.errors import InputError, NothingScoredError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.config import SelectionConfig
from ropesearch.search.once import POLL_SECONDS, GuardReference, guard_score, no_guard_score, scored_once
from ropesearch.search.presence import Presence
from ropesearch.search.study import OpenStudy
from ropesearch.search.trials import front, identity, is_searched, ranked, recorded_regime, recorded_score

SELECTION = "selection"


@dataclass(frozen=True, slots=True)
class Finalist:
    """A trial with its scores on search and selection windows; `failure` says why there is none on the latter.

    `excess_nats` is by how many nats per token it exceeds what the objective's guard allows on the selection windows.
    """

    trial_number: int
    method: str
    regime: Regime
    search_score: Score
    selection_score: Score | None = None
    failure: str | None = None
    excess_nats: float | None = None


def choose_finalists(trials: Sequence[FrozenTrial], config: SelectionConfig, max_length: int) -> list[Finalist]:
    """The best num_finalists searched trials and every scored baseline, by search score.

    Of a study with two objectives, only trials on the front of the searched ones can be the best.
    """
    scored = ranked(trials)
    searched = [trial for trial in scored if is_searched(trial)]
    if searched and len(searched[0].values) > 1:
        searched = front(searched)
    best = searched[: config.num_finalists]
    chosen = ranked([*best, *(trial for trial in scored if not is_searched(trial))])
    finalists = []
    for trial in chosen:
        score = recorded_score(trial)
        if score is None:
            raise InputError(f"trial {trial.number} is finished without a score: the study was not written by a search")
        regime = recorded_regime(trial, max_length)
        finalists.append(Finalist(trial_number=trial.number, method=regime.name, regime=regime, search_score=score))
    return finalists


def score_finalists(
    opened: OpenStudy,
    finalists: Sequence[Finalist],
    evaluate: Callable[[Regime, str], Score],
    on_scored: Callable[[Finalist, float], None],
    objective: Objective,
    presence: Presence,
    guard_reference: GuardReference | None = None,
) -> list[Finalist]:
    """Score finalists on the selection windows, best first; those that could not be scored come last. `on_scored` gets
    each with the fraction that is done.

    Each score is kept in the study when it is known, under the exact values of its regime, so nothing is scored twice:
    not after a kill, not for two finalists with the same values, and not by two workers (each claims what it scores).
    Those that break the objective's guard there come after all that keep it. Equal scores are ordered by search score,
    then by trial number, so a baseline wins against a candidate that is the same.

    The guard is measured against the score that `guard_reference` gives for a split, or without it against trial 0.

    Raises NothingScoredError when none could be scored, or with a guard not what it is measured against.
    """
    waiting = list(finalists)
    done: list[Finalist] = []
    while waiting:
        left = []
        for finalist in waiting:
            scored = _scored(opened, finalist, evaluate, presence)
            if scored is None:
                left.append(finalist)
                continue
            done.append(scored)
            on_scored(scored, len(done) / len(finalists))
        if len(left) == len(waiting):
            time.sleep(POLL_SECONDS)  # all that is left is being scored by other workers, which may die
        waiting = left
    if all(finalist.selection_score is None for finalist in done):
        reasons = sorted({str(finalist.failure) for finalist in done})
        raise NothingScoredError(
            f"none of {len(done)} finalists could be scored on the selection windows: {'; '.join(reasons)}"
        )
    if objective.guarded_tokens is not None:
        if guard_reference is not None:
            unscaled = guard_score(opened, SELECTION, guard_reference, presence)
        else:
            unscaled = _score_of_trial_0(done)
        done = [
            finalist
            if finalist.selection_score is None
            else replace(finalist, excess_nats=objective.excess_nats(finalist.selection_score, unscaled))
            for finalist in done
        ]
    return sorted(done, key=lambda finalist: _order(finalist, objective))


def _scored(
    opened: OpenStudy, finalist: Finalist, evaluate: Callable[[Regime, str], Score], presence: Presence
) -> Finalist | None:
    """The finalist with its outcome, or None while another worker is at it."""
    key = f"{SELECTION}/{identity(finalist.regime)}"
    recorded = scored_once(opened, key, lambda: evaluate(finalist.regime, SELECTION), presence)
    if recorded is None:
        return None
    if "failure" in recorded:
        return replace(finalist, failure=recorded["failure"])
    return replace(finalist, selection_score=Score.from_json(recorded["score"]))


def _score_of_trial_0(done: Sequence[Finalist]) -> Score:
    first = next((finalist for finalist in done if finalist.trial_number == 0), None)
    if first is None or first.selection_score is None:
        raise no_guard_score(SELECTION, "no trial 0" if first is None else first.failure)
    return first.selection_score


def _order(finalist: Finalist, objective: Objective) -> tuple[bool, float, float, float, int]:
    score = finalist.selection_score
    return (
        score is None,
        max(0.0, finalist.excess_nats or 0.0),
        0.0 if score is None else objective.value(score),
        objective.value(finalist.search_score),
        finalist.trial_number,
    )
