"""A search from its study to its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import TrialState

from ropesearch.errors import NothingScoredError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.budget import Budget, spent_seconds, spent_tokens
from ropesearch.search.config import BudgetConfig, SelectionConfig
from ropesearch.search.front import Point, points
from ropesearch.search.once import GuardReference
from ropesearch.search.presence import Presence
from ropesearch.search.racing import Racing
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.selection import Finalist, choose_finalists, score_finalists
from ropesearch.search.space import SEARCHED
from ropesearch.search.study import OpenStudy
from ropesearch.search.trials import (
    COST,
    FAILURE,
    METHOD,
    is_searched,
    ranked,
    recorded_score,
    violation,
)
from ropesearch.search.worker import Differentiate, Evaluate, SearchEvent, Worker

_NATS_PER_TOKEN = Objective()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search came to.

    `regime` is the finalist with the least nats per token on the selection windows, and `method` and `trial_number` say
    which it is: "searched", or the name of a baseline that no candidate could beat. `search_scores` holds the scores of
    the baselines and of the candidate that is best on the selection windows, by method; `finalists` all that were
    scored on the selection windows, best first; `course` the number and nats per token of every scored candidate, in
    order. Tokens, seconds and failures are counted over the trials on the search windows, on which one score costs
    `num_tokens_of_a_score`; racing stopped `num_stopped` candidates, which saved `num_saved_tokens`.
    `num_candidates_in_guard` says how many candidates keep the objective's guard there, None without one. `points` are
    all scored trials by both objectives, where there are two.
    """

    regime: Regime
    trial_number: int
    method: str
    search_scores: Mapping[str, Score]
    finalists: Sequence[Finalist]
    course: Sequence[tuple[int, float]]
    num_trials: int
    num_failed: int
    num_forward_equivalent_tokens: int
    stopped_because: str
    num_stopped: int = 0
    num_saved_tokens: int = 0
    num_tokens_of_a_score: int = 0
    scoring_seconds: float = 0.0
    objective: Objective = _NATS_PER_TOKEN
    num_candidates_in_guard: int | None = None
    points: Sequence[Point] = ()

    @property
    def front(self) -> list[Point]:
        """The points that no other dominates, by the first objective."""
        members = [point for point in self.points if point.on_front]
        return sorted(members, key=lambda point: point.long_nats_per_token)


def run_search(
    opened: OpenStudy,
    sampler: CandidateSampler,
    evaluate: Evaluate,
    *,
    differentiate: Differentiate | None = None,
    racing: Racing | None = None,
    baselines: Sequence[Regime],
    cost_tokens: int,
    step_cost_tokens: int = 0,
    budget: BudgetConfig,
    selection: SelectionConfig,
    presence: Presence,
    grace_seconds: float = 0.0,
    objective: Objective = _NATS_PER_TOKEN,
    guard_reference: GuardReference | None = None,
    on_event: Callable[[SearchEvent], None] = lambda event: None,
) -> SearchResult:
    """Work on the search of an open study until it is finished, as the worker that `presence` is; begin it, join it,
    or go on with it as needed.

    A trial that takes less than `grace_seconds` more is finished when a scheduler's signal comes.

    With `racing`, candidates are scored window by window, and stopped when they are hopeless (see racing.py); baselines
    and candidates that took gradient steps are not.

    `baselines`, with distinct names, are the first trials, as many as the sampler was told. `evaluate(regime, split)`
    scores a regime on the "search" or "selection" windows and raises ScoringError when it cannot; a score on the search
    windows costs `cost_tokens` forward-equivalent tokens, and `objective` makes a value of it. `differentiate(regime,
    window, guard_weight)` gives the objective on one search window, with the tokens of its guard added by a weight, and
    its derivatives, for samplers that ask for them, and raises ScoringError likewise; it costs `step_cost_tokens`. A
    guard of the objective is a constraint of the trial, measured against trial 0, the unscaled model, or against what
    `guard_reference(split)` scores (or raises ScoringError for): once for each split, kept in the study, in no budget.
    A finished search is only read.

    Raises:
        InputError: a limit is out of range, or the study is damaged.
        NothingScoredError: no trial, or none of the finalists, could be scored, or with a guard not what it is
            measured against.
    """
    space = sampler.space
    selection.check()
    limits = Budget(budget, sampler, cost_tokens, len(baselines), step_cost_tokens)
    worker = Worker(
        opened=opened,
        sampler=sampler,
        evaluate=evaluate,
        differentiate=differentiate,
        racing=racing,
        cost_tokens=cost_tokens,
        step_cost_tokens=step_cost_tokens,
        limits=limits,
        baselines=baselines,
        objective=objective,
        guard_reference=guard_reference,
        presence=presence,
        grace_seconds=grace_seconds,
        on_event=on_event,
    )
    worker.work()
    trials = opened.trials()
    scored = ranked(trials)
    if not scored:
        reasons = sorted({str(trial.user_attrs.get(FAILURE)) for trial in trials})
        raise NothingScoredError(f"none of {len(trials)} trials could be scored: {'; '.join(reasons)}")
    chosen = choose_finalists(trials, selection, space.target_length)
    finalists = score_finalists(opened, chosen, evaluate, worker.report_finalist, objective, presence, guard_reference)
    best_candidates = [finalist.trial_number for finalist in finalists if finalist.method == SEARCHED][:1]
    shown = [trial for trial in trials if not is_searched(trial) or trial.number in best_candidates]
    scores = {trial.user_attrs[METHOD]: recorded_score(trial) for trial in shown}
    winner = finalists[0]
    stopped = [trial for trial in trials if trial.state is TrialState.PRUNED]
    return SearchResult(
        regime=winner.regime,
        trial_number=winner.trial_number,
        method=winner.method,
        search_scores={method: score for method, score in scores.items() if score is not None},
        finalists=finalists,
        course=sorted((trial.number, trial.values[0]) for trial in scored if is_searched(trial)),
        num_trials=len(trials),
        num_failed=sum(trial.state is TrialState.FAIL for trial in trials),
        num_stopped=len(stopped),
        num_saved_tokens=sum(cost_tokens - trial.user_attrs[COST] for trial in stopped),
        num_forward_equivalent_tokens=spent_tokens(trials),
        num_tokens_of_a_score=cost_tokens,
        scoring_seconds=spent_seconds(trials),
        stopped_because=limits.reached(trials) or "",
        objective=objective,
        num_candidates_in_guard=None
        if objective.guarded_tokens is None
        else sum(is_searched(trial) and violation(trial) == 0 for trial in scored),
        points=points(trials, space.target_length) if objective.num_values > 1 else (),
    )
