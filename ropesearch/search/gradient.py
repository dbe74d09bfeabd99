"""Gradient search: a stochastic descent, and moves of the best before and after it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.config import GradientConfig, RacingConfig, SelectionConfig
from ropesearch.search.descent import NUM_COMPARED, Descent
from ropesearch.search.operators import NUM_STRETCHES, exchange, move
from ropesearch.search.racing import race_rule
from ropesearch.search.sampler import CandidateSampler, Past, StepAsked, known_candidates
from ropesearch.search.space import Candidate, Space
from ropesearch.search.trials import (
    COST,
    GUARD_WEIGHT,
    METHOD,
    NUM_STEPS,
    PLAN,
    SCORE,
    is_searched,
    rank,
    ranked,
    recorded_candidate,
    recorded_plan,
    recorded_regime,
    recorded_steps,
    violation,
)

_NUM_FIRST_MOVES = 8  # before the first leg
_LEAST_STEPS = 8  # of a leg
_MOST_LEGS = 8  # of a descent that breaks its guard
_SLOW_PART = 0.25  # moves that gain no more than this part of what a leg gained are slow
_NUM_TRIES = 8  # draws of a move, at most, until one is new
_CHAIN, _START, _LEGS = "chain", "start", "legs"


class GradientSampler(CandidateSampler):
    """Projected stochastic gradient on the logs of factors and attention factor (see descent.py), and moves.

    The seeds are not scored again: descents begin at the best scored of the seed regimes among the baselines. A trial
    is a leg of a descent: as many gradient steps as there are windows (eight at least, in fours), each on one of them,
    then what has gained most on the way, on the grid, as the candidate. So only full windows make a score, and a step's
    derivatives are kept in its trial: the descent is replayed from the study for every proposal, and goes on wherever
    it was stopped.

    One leg is what a descent is worth: moves gain more for the cost of a second. Only where the objective has a guard,
    and the leg has broken it, another follows, which takes the guard's short tokens into what it descends by, with a
    weight that doubles while it is broken, for eight legs at most. `num_starts` descents begin at the best starts. With
    several workers, one that finds all descents at work begins the next at once. A further one begins at the best of
    all, where none has begun yet, when the moves gain little beside what the last leg gained.

    Moves change a block of pairs of the best (see operators.move). They try what gradients do not see: other retained
    tokens, the fast pairs, whose angles wrap, and other minima of pairs that turn about once in a window. Raced, most
    cost a tenth of a score; so, without a guard, some come before the first leg, which costs five. It begins at the
    baseline all the same, from where it gains more, and what both have found is put together after it: stretch by
    stretch, the best gets what the leg came to, or the best before it, as a leg gains by most pairs and loses by some.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "gradient"

    def __init__(
        self,
        space: Space,
        config: GradientConfig,
        seed: int,
        seeds: Sequence[Regime],
        num_baselines: int,
        num_windows: int,
        objective: Objective,
        racing: RacingConfig,
    ) -> None:
        super().__init__(space, seed, [], num_baselines)
        config.check()
        self.config = config
        self._start_names = {regime.name for regime in seeds}
        if config.num_starts > max(1, len(self._start_names)):
            raise InputError(
                f"optimizer.num_starts: expected at most {len(self._start_names)}, the baselines that a descent can "
                f"begin at ({', '.join(regime.name for regime in seeds)}), got {config.num_starts}"
            )
        self._start_candidates = list(dict.fromkeys(space.repair(regime) for regime in seeds))
        self.objective = objective
        is_raced = race_rule(racing, SelectionConfig(), self, objective, num_windows) is not None
        self._num_first_moves = _NUM_FIRST_MOVES if is_raced and objective.guarded_tokens is None else 0
        self._num_leg_steps = max(num_windows, _LEAST_STEPS) // NUM_COMPARED * NUM_COMPARED

    @property
    def num_candidates(self) -> int:
        """As configured."""
        return self.config.num_candidates

    @property
    def may_stop(self) -> bool:
        """Moves may; the legs of descents are never raced."""
        return True

    @property
    def is_greedy(self) -> bool:
        """Moves are made from the best."""
        return True

    @property
    def num_first_steps(self) -> int:
        """Those of a leg, where there is a seed to begin at and no moves come first."""
        return self._num_leg_steps if self._start_names and not self._num_first_moves else 0

    def plan(self, trials: Sequence[FrozenTrial], number: int) -> dict[str, Any] | None:
        """The leg of a descent that trial `number` is: its chain, where that began and the legs before; None where no
        descent is to be begun or gone on with.
        """
        if number < self._num_baselines or not all(
            trial.state.is_finished() for trial in trials[: self._num_baselines]
        ):
            return None  # of several workers, those that are there before the best baseline is known make moves
        chains = _chains(trials[:number])
        for legs in chains.values():
            if _goes_on(legs):
                numbers = [leg.number for leg in legs]
                return {**legs[0].user_attrs[PLAN], _LEGS: numbers, GUARD_WEIGHT: _guard_weight(legs)}
        start = self._next_start(trials[:number], chains)
        if start is None:
            return None
        first = {_CHAIN: len(chains), _START: start.number, NUM_STEPS: self._num_leg_steps}
        return {**first, _LEGS: [], GUARD_WEIGHT: 0.0}

    def _next_start(
        self, trials: Sequence[FrozenTrial], chains: Mapping[int, Sequence[FrozenTrial]]
    ) -> FrozenTrial | None:
        """The trial that a descent after these begins at; None where none is to be begun now."""
        if len(chains) >= self.config.num_starts:
            if not _moves_are_slow(trials, chains[max(chains)][-1]):
                return None
            best = ranked(trials)[0]
            return None if any(legs[0].user_attrs[PLAN][_START] == best.number for legs in chains.values()) else best
        if len(trials) - self._num_baselines < self._num_first_moves:
            return None
        return next(iter(self._starts(trials)[len(chains) :]), None)

    def _starts(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """The scored seed regimes, best first."""
        return [trial for trial in ranked(trials) if trial.user_attrs[METHOD] in self._start_names]

    def next_step(self, trials: Sequence[FrozenTrial], number: int) -> StepAsked | None:
        """The next step of trial `number`'s leg."""
        plan = recorded_plan(trials, number) or self.plan(trials, number)
        if plan is None:
            return None
        steps = recorded_steps(trials[number])
        if len(steps) >= plan[NUM_STEPS]:
            return None
        descent = self._replayed(trials, plan, [*plan[_LEGS], number])
        return StepAsked(len(steps), descent.regime, descent.window, plan[GUARD_WEIGHT])

    def propose(self, trials: Sequence[FrozenTrial], number: int) -> Candidate:
        """As all samplers; the candidate of a leg is the best that its descent has come to."""
        plan = recorded_plan(trials, number)
        if plan is None:
            return self._exchanged(trials, number) or super().propose(trials, number)
        best = self._replayed(trials, plan, [*plan[_LEGS], number]).best
        return self._new(self.space.repair(best), known_candidates(trials, number))

    def _exchanged(self, trials: Sequence[FrozenTrial], number: int) -> Candidate | None:
        """The best with a stretch of what the last leg came to, or of the best before it; None where all were tried."""
        chains = _chains(trials[:number])
        legs = chains[max(chains)] if chains else []
        candidate = recorded_candidate(legs[-1]) if legs else None
        if candidate is None or legs[-1].state is not TrialState.COMPLETE:
            return None
        begun = legs[0].number
        moved = [trial for trial in ranked(trials[:begun]) if is_searched(trial)]
        before = self._candidate(min([trials[legs[0].user_attrs[PLAN][_START]], *moved], key=rank))
        best = self._candidate(ranked(trials)[0])
        known = known_candidates(trials, number)
        for part in range(number - legs[-1].number - 1, NUM_STRETCHES + 1):
            exchanged = exchange(self.space, best, candidate, before, part)
            if exchanged not in known and exchanged not in (best, before):
                return exchanged
        return None

    def _candidate(self, trial: FrozenTrial) -> Candidate:
        """What a scored trial is in the space."""
        return recorded_candidate(trial) or self.space.repair(recorded_regime(trial, self.space.target_length))

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        if past.scored and (not past.baselines or past.scored[0].rank < rank(past.baselines[0])):
            best = past.scored[0].candidate
        elif past.baselines:
            best = self._candidate(past.baselines[0])
        else:
            best = [*self._start_candidates, self.space.decode(np.ones(self.space.num_dimensions))][0]
        for _ in range(_NUM_TRIES):
            moved = move(self.space, best, rng)
            if moved not in past.known and moved != best:
                break
        return moved

    def _replayed(self, trials: Sequence[FrozenTrial], plan: dict[str, Any], legs: Sequence[int]) -> Descent:
        start = recorded_regime(trials[plan[_START]], self.space.target_length)
        score = Score.from_json(trials[plan[_START]].user_attrs[SCORE])
        guard_weight = 0.0
        values = self.objective.window_values(score)
        descent = Descent(self.space, start, values, self._seed, plan[_CHAIN])
        for leg in legs:
            before, guard_weight = guard_weight, trials[leg].user_attrs.get(PLAN, plan)[GUARD_WEIGHT]
            if guard_weight != before:
                descent.forget(self.objective.window_values(score, guard_weight))
            for step in recorded_steps(trials[leg]):
                descent.advance(step)
        return descent


def _goes_on(legs: Sequence[FrozenTrial]) -> bool:
    """Whether a descent has another leg: none is at work or has failed, and the last one broke the guard, as not
    too many have done before it.
    """
    are_done = all(leg.state is TrialState.COMPLETE for leg in legs)
    return are_done and violation(legs[-1]) > 0 and len(legs) < _MOST_LEGS


def _guard_weight(legs: Sequence[FrozenTrial]) -> float:
    """The weight of the short tokens of an objective's guard in the next leg: more with every leg that broke it."""
    num_broken = sum(violation(leg) > 0 for leg in legs)
    return 2.0 ** (num_broken - 1) if num_broken else 0.0


def _chains(trials: Sequence[FrozenTrial]) -> dict[int, list[FrozenTrial]]:
    """The legs of each descent among the trials, in order."""
    chains: dict[int, list[FrozenTrial]] = {}
    for trial in trials:
        if PLAN in trial.user_attrs:
            chains.setdefault(trial.user_attrs[PLAN][_CHAIN], []).append(trial)
    return dict(sorted(chains.items()))


def _moves_are_slow(trials: Sequence[FrozenTrial], leg: FrozenTrial) -> bool:
    """Whether the last moves, for as much as a leg costs, have gained no more than a part of what the leg gained."""
    leg_cost_tokens = leg.user_attrs.get(COST, 0)
    if leg.state is not TrialState.COMPLETE or violation(leg) > 0 or not leg_cost_tokens:
        return False
    before = ranked(trials[: leg.number])
    gained = before[0].values[0] - leg.values[0] if before else 0.0
    cost_tokens = 0
    for moves in range(leg.number + 1, len(trials))[::-1]:
        cost_tokens += trials[moves].user_attrs.get(COST, 0)
        if cost_tokens >= leg_cost_tokens:
            since = ranked(trials[:moves])[0].values[0] - ranked(trials)[0].values[0]
            return bool(since <= _SLOW_PART * max(gained, 0.0))
    return False
