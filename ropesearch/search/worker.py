"""A worker: the loop that asks, scores and tells, until the study's budget is spent.

Any number of workers may share a study, and any of them may be killed at any moment. All state is in the study. A trial
belongs to the worker it names; when that one is dead (see presence.py), another takes the trial over as it stands. Both
what is asked and what is written happens under the study's lock, by the owner: a worker that was taken for dead and
comes back finds that it has lost its trial, and leaves it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from optuna import Trial
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import ScoringError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.budget import Budget
from ropesearch.search.once import POLL_SECONDS, GuardReference, guard_score, no_guard_score
from ropesearch.search.parameters import distributions, parameters, suggest
from ropesearch.search.presence import Presence
from ropesearch.search.racing import Racing
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.selection import SELECTION, Finalist
from ropesearch.search.space import SEARCHED, Candidate
from ropesearch.search.study import OpenStudy
from ropesearch.search.trials import (
    CANDIDATE,
    COST,
    FAILURE,
    GUARD,
    MARK,
    METHOD,
    OWNER,
    PLAN,
    REGIME,
    REUSED_FROM,
    SCORE,
    SECONDS,
    STOPPED_AFTER,
    Step,
    candidate_json,
    ranked,
    recorded_plan,
    recorded_regime,
    recorded_score,
    recorded_steps,
    regime_json,
    step_key,
)
from ropesearch.stopping import finishing, raise_if_lost

SEARCH = "search"

_log = logging.getLogger(__name__)

Evaluate = Callable[[Regime, str], Score]
Differentiate = Callable[[Regime, int, float], Step]


class _Lost(Exception):
    """The trial has another owner by now."""


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """Something finished, for whoever shows progress.

    `split` says which windows it was scored on; `nats_per_token` is None when it failed, and then `failure` says why,
    and for a candidate that racing stopped, `num_stopped` so far. The best is the best of all trials so far, baselines
    included. `spent_fraction` is of the budget, or of the finalists, in [0, 1].
    """

    split: str
    trial_number: int
    method: str
    nats_per_token: float | None
    failure: str | None
    best_nats_per_token: float | None
    best_method: str | None
    num_finished: int
    spent_fraction: float
    num_stopped: int = 0


@dataclass(slots=True)
class _Pace:
    """How long the trial at hand still takes, by what this worker's tokens took so far."""

    done_tokens: int = 0
    done_seconds: float = 0.0
    left_tokens: int = 0
    since_seconds: float = 0.0

    def begin(self, left_tokens: int) -> None:
        self.left_tokens, self.since_seconds = left_tokens, time.monotonic()

    def advance(self, num_tokens: int) -> None:
        now = time.monotonic()
        self.done_tokens += num_tokens
        self.done_seconds += now - self.since_seconds
        self.left_tokens, self.since_seconds = self.left_tokens - num_tokens, now

    def seconds_left(self) -> float:
        if not self.done_tokens:
            return math.inf
        whole = self.left_tokens * self.done_seconds / self.done_tokens
        return whole - (time.monotonic() - self.since_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    opened: OpenStudy
    sampler: CandidateSampler
    evaluate: Evaluate
    differentiate: Differentiate | None
    racing: Racing | None
    cost_tokens: int
    step_cost_tokens: int
    limits: Budget
    baselines: Sequence[Regime]
    objective: Objective
    guard_reference: GuardReference | None
    presence: Presence
    grace_seconds: float
    on_event: Callable[[SearchEvent], None]
    pace: _Pace = field(default_factory=_Pace)

    def work(self) -> None:
        """Score trials until the budget is spent and nothing is running any more."""
        while True:
            raise_if_lost()
            with self.opened.store.exclusive():
                trials = self.opened.trials()
                trial = self._adopt(trials)
                if trial is None and self._goes_on(trials):
                    trial = self._begin(trials)
            if trial is not None:
                self._work_on(trial)
            elif all(other.state.is_finished() for other in trials):
                return
            else:
                time.sleep(POLL_SECONDS)  # other workers are at their last trials, and may die

    def _goes_on(self, trials: Sequence[FrozenTrial]) -> bool:
        """Whether another trial is to be begun now."""
        return len(trials) < len(self.baselines) or not self.limits.reached(trials)

    def _adopt(self, trials: Sequence[FrozenTrial], number: int | None = None) -> Trial | None:
        """Take over the first unfinished trial (or that of `number`) whose worker is dead. Needs the exclusive lock."""
        for trial in trials:
            if trial.state.is_finished() or number not in (None, trial.number):
                continue
            owner = trial.user_attrs.get(OWNER)  # none has a trial that another program asked for
            if owner is None or not self.presence.is_alive(owner):
                if owner is not None:
                    _log.info("trial %d: taken over from worker %s", trial.number, owner)
                    self.presence.bury(owner)
                return self._own(Trial(self.opened.study, trial._trial_id))
        return None

    def _begin(self, trials: Sequence[FrozenTrial]) -> Trial:
        """A new trial after these, written at once with who scores it and what is scored. Needs the exclusive lock."""
        number = len(trials)
        content, candidate = self._content(trials, number)
        space = self.sampler.space
        template = FrozenTrial(
            number=number,
            trial_id=-1,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=datetime.now(),
            datetime_complete=None,
            params={} if candidate is None else parameters(space, candidate),
            distributions={} if candidate is None else distributions(space),
            user_attrs={OWNER: self.presence.id, **content},
            system_attrs={},
            intermediate_values={},
        )
        study = self.opened.study
        return Trial(study, study._storage.create_new_trial(study._study_id, template))

    def _own(self, trial: Trial) -> Trial:
        """Write into an unfinished trial that this worker scores it and, unless it is there yet, what is scored. Needs
        the exclusive lock.
        """
        content: dict[str, Any] = {}
        if REGIME not in trial.user_attrs:
            content, _ = self._content(self.opened.trials(), trial.number)
        with self.opened.store.together():
            for key, value in {OWNER: self.presence.id, **content}.items():
                trial.set_user_attr(key, value)
            if CANDIDATE in trial.user_attrs:
                suggest(self.sampler.space, trial)  # for Optuna's dashboard and its own samplers
        return trial

    def _content(self, trials: Sequence[FrozenTrial], number: int) -> tuple[dict[str, Any], Candidate | None]:
        """Attributes that say what is scored in trial `number`, or which gradient steps come first; none as long as
        some of these are left. And the candidate, if it is one.
        """
        if number < len(self.baselines):
            regime = self.baselines[number]
            return {METHOD: regime.name, REGIME: regime_json(regime)}, None
        if recorded_plan(trials, number):
            if self.sampler.next_step(trials, number) is not None:
                return {}, None
        elif plan := self.sampler.plan(trials, number):
            return {METHOD: SEARCHED, PLAN: plan}, None
        candidate = self.sampler.propose(trials, number)
        regime = self.sampler.space.regime(candidate)
        return {CANDIDATE: candidate_json(candidate), METHOD: regime.name, REGIME: regime_json(regime)}, candidate

    def _finish(self, trial: Trial) -> None:
        """Score an owned trial, as far as racing lets it, or take over the score of the same regime; tell the study."""
        if REGIME not in trial.user_attrs and FAILURE not in trial.user_attrs:
            trial = self._stepped(trial)
        recorded = trial.user_attrs
        if not {SCORE, STOPPED_AFTER, FAILURE} & set(recorded):
            twin = self._twin(trial.number, recorded[REGIME])
            with_outcome = self._scored(trial) if twin is None else self._reused(twin, trial)
            self._record(trial, with_outcome)
            recorded = {**recorded, **with_outcome}
        if SCORE in recorded:
            score = Score.from_json(recorded[SCORE])
            is_reference = trial.number == 0 and self.guard_reference is None
            excess = self.objective.excess_nats(score, score if is_reference else self._unscaled_score())
            with self._owning(trial):
                if excess is not None and GUARD not in trial.constraints:
                    trial.set_constraint(GUARD, excess)
                self.opened.study.tell(trial, self.objective.values(score))
            self._report(SEARCH, trial.number, recorded[METHOD], score, None)
        elif STOPPED_AFTER in recorded:
            with self._owning(trial):
                self.opened.study.tell(trial, state=TrialState.PRUNED)
            self._report(SEARCH, trial.number, recorded[METHOD], None, None)
        else:
            with self._owning(trial):
                self.opened.study.tell(trial, state=TrialState.FAIL)
            self._report(SEARCH, trial.number, recorded[METHOD], None, recorded[FAILURE])

    def _work_on(self, trial: Trial) -> None:
        """Finish an owned trial, or leave it where it was lost to another worker meanwhile.

        A scheduler's signal stops this at once, and the trial is free to be taken over with all that it holds so far,
        unless it is nearly done.
        """
        known = trial.user_attrs
        self.presence.show(trial=trial.number)
        self.pace.begin(self.limits.cost_of(known.get(PLAN)) - known.get(COST, 0))
        with finishing(lambda: self.pace.seconds_left() < self.grace_seconds), suppress(_Lost):
            self._finish(trial)
        self.presence.show(trial=None)

    @contextmanager
    def _owning(self, trial: Trial) -> Iterator[None]:
        """Hold the study's lock, and be the owner of a trial that is not finished; raises _Lost where it is not so."""
        with self.opened.store.exclusive():
            now = self.opened.study._storage.get_trial(trial._trial_id)
            if now.state.is_finished() or now.user_attrs.get(OWNER) != self.presence.id:
                _log.warning("trial %d was taken over by another worker, to which this one had seemed dead", now.number)
                raise _Lost
            yield

    def _record(self, trial: Trial, values: Mapping[str, Any], reports: Mapping[int, float] | None = None) -> None:
        """Write attributes of an owned trial, and intermediate values by step."""
        if FAILURE in values:
            raise_if_lost()  # which may be what has failed
        self.pace.advance(max(0, values.get(COST, 0) - trial.user_attrs.get(COST, 0)))
        with self._owning(trial), self.opened.store.together():
            for key, value in values.items():
                trial.set_user_attr(key, value)
            for step, value in (reports or {}).items():
                trial.report(value, step)
        raise_if_lost()

    def _stepped(self, trial: Trial) -> Trial:
        """Make the gradient steps that are left of an owned trial; returns it with the candidate that follows, or with
        the reason why none does.
        """
        while (asked := self.sampler.next_step(self.opened.trials(), trial.number)) is not None:
            started = time.perf_counter()
            try:
                if self.differentiate is None:
                    raise ScoringError("no gradients are given to this search")
                step = self.differentiate(asked.regime, asked.window, asked.guard_weight)
                found: dict[str, Any] = {step_key(asked.place): step.to_json()}
            except ScoringError as error:
                found = {FAILURE: str(error)}
            outcome = {**self._spent(trial, started), COST: (asked.place + 1) * self.step_cost_tokens, **found}
            self._record(trial, outcome, {} if FAILURE in found else {asked.place: step.nats_per_token})
            if FAILURE in outcome:
                return trial
            self._report(SEARCH, trial.number, SEARCHED, None, None)
        with self._owning(trial):
            return self._own(Trial(self.opened.study, trial._trial_id))  # which asks the sampler anew

    def _raced(self, trial: Trial, regime: Regime) -> dict[str, Any] | None:
        """What a race makes of a trial; None where it does not race, or there is nothing to race against yet."""
        if self.racing is None or trial.user_attrs[METHOD] != SEARCHED or PLAN in trial.user_attrs:
            return None
        trials = self.opened.trials()
        begun = trial.user_attrs.get(MARK)
        mark = self.racing.mark(trials) if begun is None else trials[begun]
        if mark is None:
            return None
        gain = self.racing.gain_of_a_window(trials[: trial.number])
        return self.racing.run(trial, regime, mark, gain, lambda values: self._record(trial, values))

    def _scored(self, trial: Trial) -> dict[str, Any]:
        regime = recorded_regime(trial, self.sampler.space.target_length)
        raced = self._raced(trial, regime)
        if raced is not None:
            return raced
        started = time.perf_counter()
        try:
            outcome: dict[str, Any] = {SCORE: self.evaluate(regime, SEARCH).to_json()}
        except ScoringError as error:
            outcome = {FAILURE: str(error)}
        _log.info("trial %d: scored by worker %s", trial.number, self.presence.id)
        return {**self._spent(trial, started), COST: self._step_costs(trial) + self.cost_tokens, **outcome}

    def _spent(self, trial: Trial, started: float) -> dict[str, float]:
        return {SECONDS: trial.user_attrs.get(SECONDS, 0.0) + time.perf_counter() - started}

    def _step_costs(self, trial: Trial) -> int:
        # Reckoned, not added up: a kill may leave what was spent written, and what came of it not.
        return len(recorded_steps(trial)) * self.step_cost_tokens

    def _reused(self, twin: FrozenTrial, trial: Trial) -> dict[str, Any]:
        seconds = trial.user_attrs.get(SECONDS, 0.0)
        cost_tokens = self._step_costs(trial)
        return {REUSED_FROM: twin.number, SECONDS: seconds, COST: cost_tokens, SCORE: twin.user_attrs[SCORE]}

    def _twin(self, number: int, regime: Mapping[str, Any]) -> FrozenTrial | None:
        """A scored trial of exactly the same regime, waited for while an earlier one is still being scored.

        Twins are a baseline that lies on the grid and the candidate that was made from it. An earlier twin whose worker
        died is scored here first, so that no regime is scored twice.
        """
        while True:
            others = [trial for trial in self.opened.trials() if trial.number != number]
            twins = [trial for trial in others if trial.user_attrs.get(REGIME) == regime]
            for twin in twins:
                if twin.state is TrialState.COMPLETE:
                    return twin
            running = [twin for twin in twins if twin.number < number and not twin.state.is_finished()]
            if not running:
                return None
            self._adopt_or_wait(running[0].number)

    def _unscaled_score(self) -> Score | None:
        """What the guard is measured against, where the objective has one: the score of `guard_reference` or, without
        it, of trial 0; waited for while another worker is at it.
        """
        if self.objective.guarded_tokens is None:
            return None
        if self.guard_reference is not None:
            return guard_score(self.opened, SEARCH, self.guard_reference, self.presence)
        while True:
            trial = self.opened.trials()[0]
            if trial.state is TrialState.COMPLETE:
                return recorded_score(trial)
            if trial.state is TrialState.FAIL:
                raise no_guard_score(SEARCH, trial.user_attrs.get(FAILURE))
            self._adopt_or_wait(0)

    def _adopt_or_wait(self, number: int) -> None:
        """Finish an earlier trial whose worker died, or wait a little for the one that is at it."""
        with self.opened.store.exclusive():
            adopted = self._adopt(self.opened.trials(), number)
        if adopted is not None:
            self._work_on(adopted)
        else:
            time.sleep(POLL_SECONDS)

    def report_finalist(self, finalist: Finalist, fraction: float) -> None:
        """Tell that a finalist was scored on the selection windows."""
        number, score = finalist.trial_number, finalist.selection_score
        self._report(SELECTION, number, finalist.method, score, finalist.failure, fraction)

    def _report(
        self,
        split: str,
        number: int,
        method: str,
        score: Score | None,
        failure: str | None,
        fraction: float | None = None,
    ) -> None:
        trials = self.opened.trials()
        best = ranked(trials)[:1]
        spent_fraction = self.limits.spent_fraction(trials) if fraction is None else fraction
        self.presence.show(phase=f"{split} windows", fraction=spent_fraction)
        self.on_event(
            SearchEvent(
                split=split,
                trial_number=number,
                method=method,
                nats_per_token=None if score is None else self.objective.value(score),
                failure=failure,
                best_nats_per_token=best[0].values[0] if best else None,
                best_method=best[0].user_attrs[METHOD] if best else None,
                num_finished=sum(trial.state.is_finished() for trial in trials),
                num_stopped=sum(trial.state is TrialState.PRUNED for trial in trials),
                spent_fraction=spent_fraction,
            )
        )
