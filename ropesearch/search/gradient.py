"""Gradient search: stochastic descents, each scored on all windows now and then, then moves of the best."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from ropesearch.rope.regime import Regime
from ropesearch.search.config import GradientConfig
from ropesearch.search.descent import Descent
from ropesearch.search.operators import move
from ropesearch.search.sampler import CandidateSampler, Past, StepAsked, known_candidates
from ropesearch.search.space import Candidate, Space
from ropesearch.search.trials import (
    GUARD_WEIGHT,
    METHOD,
    NUM_STEPS,
    PLAN,
    rank,
    ranked,
    recorded_plan,
    recorded_regime,
    recorded_steps,
    violation,
)

# A descent ends with the leg in which its steps have become this much shorter than the first.
_LEAST_PART = 0.5
_NUM_TRIES = 8  # draws of a move, at most, until one is new
_CHAIN, _START, _LEGS = "chain", "start", "legs"


class GradientSampler(CandidateSampler):
    """Projected stochastic gradient on the logs of factors and attention factor (see descent.py).

    The seeds are not scored again: descents begin at the best scored of the seed regimes among the baselines. A trial
    is a leg of a descent: as many gradient steps as there are windows, each on one of them, then the mean of the last
    iterates, on the grid, as the candidate. So only full windows make a score, and a step's derivatives are kept in its
    trial: the descent is replayed from the study for every proposal, and goes on wherever it was stopped.

    Where the objective has a guard, a descent that breaks it takes its short tokens into what it descends by, with a
    weight that doubles while it is broken.

    A descent ends when its steps had to be shortened, when a leg has failed, or when it is worse than the first descent
    was after as many legs. The next one begins at the next best start, up to `num_starts`. With several workers, one
    that finds all descents at work begins the next at once.

    What is left of num_candidates are moves of the best of all (see operators.move), kept when they are better. They
    try what gradients do not see: other retained tokens, the fast pairs, whose angles wrap, and other minima of pairs
    that turn about once in a window. Raced, most moves cost a fifth of a score.

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
    ) -> None:
        super().__init__(space, seed, [], num_baselines)
        config.check()
        self.config = config
        self._start_names = {regime.name for regime in seeds}
        self._start_candidates = list(dict.fromkeys(space.repair(regime) for regime in seeds))
        self._num_windows = num_windows

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
        """Those of a leg, where there is a seed to begin at."""
        return self._num_windows if self._start_names else 0

    def plan(self, trials: Sequence[FrozenTrial], number: int) -> dict[str, Any] | None:
        """The leg of a descent that trial `number` is: its chain, where that began and the legs before; None where no
        descent is to be begun or gone on with.
        """
        if number < self._num_baselines or not all(
            trial.state.is_finished() for trial in trials[: self._num_baselines]
        ):
            return None  # of several workers, those that are there before the best baseline is known make moves
        chains: dict[int, list[FrozenTrial]] = {}
        for trial in trials:
            if trial.number < number and PLAN in trial.user_attrs:
                chains.setdefault(trial.user_attrs[PLAN][_CHAIN], []).append(trial)
        for chain, legs in sorted(chains.items()):
            if self._goes_on(trials, legs, chains[0] if chain else legs):
                numbers = [leg.number for leg in legs]
                return {**legs[0].user_attrs[PLAN], _LEGS: numbers, GUARD_WEIGHT: _guard_weight(legs)}
        used = {legs[0].user_attrs[PLAN][_START] for legs in chains.values()}
        starts = [trial for trial in ranked(trials) if trial.user_attrs[METHOD] in self._start_names]
        left = [trial.number for trial in starts if trial.number not in used]
        if left and len(chains) < self.config.num_starts:
            first = {_CHAIN: len(chains), _START: left[0], NUM_STEPS: self._num_windows}
            return {**first, _LEGS: [], GUARD_WEIGHT: 0.0}
        return None

    def _goes_on(
        self, trials: Sequence[FrozenTrial], legs: Sequence[FrozenTrial], first_legs: Sequence[FrozenTrial]
    ) -> bool:
        """Whether a descent has another leg: none is at work or has failed, the steps are not short yet, and after as
        many legs it is no worse than the first descent was.
        """
        if not all(leg.state is TrialState.COMPLETE for leg in legs):
            return False
        counterparts = first_legs[: len(legs)]
        scored = len(counterparts) == len(legs) and counterparts[-1].state is TrialState.COMPLETE
        if scored and rank(legs[-1])[:2] > rank(counterparts[-1])[:2]:
            return False
        descent = self._replayed(trials, legs[0].user_attrs[PLAN], [leg.number for leg in legs])
        return descent.part_of_first_length > _LEAST_PART

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
        """As all samplers; the candidate of a leg is the mean of its descent's last iterates."""
        plan = recorded_plan(trials, number)
        if plan is None:
            return super().propose(trials, number)
        average = self._replayed(trials, plan, [*plan[_LEGS], number]).average
        return self._new(self.space.repair(average), known_candidates(trials, number))

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        if past.scored:
            best = past.scored[0].candidate
        else:
            starts = [trial for trial in past.baselines if trial.user_attrs[METHOD] in self._start_names]
            regimes = [recorded_regime(trial, self.space.target_length) for trial in starts]
            unscored = [*self._start_candidates, self.space.decode(np.ones(self.space.num_dimensions))]
            best = [*map(self.space.repair, regimes), *unscored][0]
        for _ in range(_NUM_TRIES):
            moved = move(self.space, best, rng)
            if moved not in past.known and moved != best:
                break
        return moved

    def _replayed(self, trials: Sequence[FrozenTrial], plan: dict[str, Any], legs: Sequence[int]) -> Descent:
        start = recorded_regime(trials[plan[_START]], self.space.target_length)
        descent = Descent(self.space, start, self._num_windows, self._seed, plan[_CHAIN])
        guard_weight = 0.0
        for leg in legs:
            before, guard_weight = guard_weight, trials[leg].user_attrs.get(PLAN, plan)[GUARD_WEIGHT]
            if guard_weight != before:
                descent.forget()
            for step in recorded_steps(trials[leg]):
                descent.advance(step)
        return descent


def _guard_weight(legs: Sequence[FrozenTrial]) -> float:
    """The weight of the short tokens of an objective's guard in the next leg: more with every leg that broke it."""
    num_broken = sum(violation(leg) > 0 for leg in legs)
    return 2.0 ** (num_broken - 1) if num_broken else 0.0
