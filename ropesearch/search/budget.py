"""When a search ends, as a function of what its study holds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.search.config import BudgetConfig
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.trials import COST, NUM_STEPS, PLAN, SECONDS, front, is_searched, recorded_candidate

_HOPELESS_FAILURES = 16  # trials in a row from the first, all failed: the rest would fail too


class Budget:
    """A BudgetConfig with the sampler's own end and the price of a trial.

    Raises InputError when a limit is not a number above 0, or too low for one candidate beside the baselines.
    """

    def __init__(
        self,
        config: BudgetConfig,
        sampler: CandidateSampler,
        cost_tokens: int,
        num_baselines: int,
        step_cost_tokens: int = 0,
    ) -> None:
        config.check()
        least = (num_baselines + 1) * cost_tokens + sampler.num_first_steps * step_cost_tokens
        if config.forward_equivalent_tokens is not None and config.forward_equivalent_tokens < least:
            num_steps = sampler.num_first_steps
            steps = f", and {num_steps} gradient steps of {step_cost_tokens}" if num_steps else ""
            raise InputError(
                f"budget.forward_equivalent_tokens: expected at least {least} ({num_baselines} baselines and one "
                f"candidate of {cost_tokens} tokens each{steps}), got {config.forward_equivalent_tokens}"
            )
        self._config = config
        self._sampler = sampler
        self._cost_tokens = cost_tokens
        self._num_baselines = num_baselines
        self._step_cost_tokens = step_cost_tokens

    def reached(self, trials: Sequence[FrozenTrial]) -> str | None:
        """Why no further candidate is asked, or None. Running trials count as if they were finished."""
        config = self._config
        num_candidates = max(0, len(trials) - self._num_baselines)
        if num_candidates >= self._sampler.num_candidates:
            return self._sampler.limit
        if config.num_trials is not None and num_candidates >= config.num_trials:
            return "num_trials"
        if config.forward_equivalent_tokens is not None:
            spent = sum(self._whole_cost(trial) for trial in trials)
            if spent + self.cost_of(self._sampler.plan(trials, len(trials))) > config.forward_equivalent_tokens:
                return "forward_equivalent_tokens"
        if config.minutes is not None and spent_seconds(trials) >= 60 * config.minutes:
            return "minutes"
        if config.patience_trials is not None and trials_without_improvement(trials) >= config.patience_trials:
            return "patience_trials"
        if (
            num_candidates >= self._sampler.space.num_candidates
            and num_known(trials) >= self._sampler.space.num_candidates
        ):
            return "every candidate of the space is in the study"
        first = trials[:_HOPELESS_FAILURES]
        if len(first) == _HOPELESS_FAILURES and all(trial.state is TrialState.FAIL for trial in first):
            return f"the first {_HOPELESS_FAILURES} trials failed"
        return None

    def _whole_cost(self, trial: FrozenTrial) -> int:
        """What a trial has cost when it is finished."""
        spent: int = trial.user_attrs.get(COST, 0)
        return spent if trial.state.is_finished() else max(spent, self.cost_of(trial.user_attrs.get(PLAN)))

    def cost_of(self, plan: Mapping[str, Any] | None) -> int:
        """Forward-equivalent tokens of a trial with that plan, or without one."""
        num_steps: int = 0 if plan is None else plan[NUM_STEPS]
        return self._cost_tokens + num_steps * self._step_cost_tokens

    def spent_fraction(self, trials: Sequence[FrozenTrial]) -> float:
        """How much of the budget is spent by finished trials, in [0, 1]; patience does not count."""
        config = self._config
        finished = [trial for trial in trials if trial.state.is_finished()]
        num_candidates = max(0, len(finished) - self._num_baselines)
        parts = [num_candidates / self._sampler.num_candidates]
        if config.num_trials is not None:
            parts.append(num_candidates / config.num_trials)
        if config.forward_equivalent_tokens is not None:
            parts.append(spent_tokens(finished) / config.forward_equivalent_tokens)
        if config.minutes is not None:
            parts.append(spent_seconds(finished) / (60 * config.minutes))
        return min(1.0, max(parts))


def spent_tokens(trials: Sequence[FrozenTrial]) -> int:
    """Forward-equivalent tokens of all scoring on the search split."""
    return sum(trial.user_attrs.get(COST, 0) for trial in trials)


def spent_seconds(trials: Sequence[FrozenTrial]) -> float:
    """Seconds of all scoring on the search split: active time, summed over workers."""
    return math.fsum(trial.user_attrs.get(SECONDS, 0.0) for trial in trials)


def trials_without_improvement(trials: Sequence[FrozenTrial]) -> int:
    """Finished candidates numbered after the best one, of two objectives after the last one on the front; all of them
    where none could be scored."""
    finished = [trial for trial in trials if is_searched(trial) and trial.state.is_finished()]
    last = max((trial.number for trial in front(finished)), default=-1)
    return sum(trial.number > last for trial in finished)


def num_known(trials: Sequence[FrozenTrial]) -> int:
    """Different candidates in the study."""
    return len({recorded_candidate(trial) for trial in trials} - {None})
