"""Racing: a candidate is scored window by window, and stopped when it is clearly worse than the one that it must reach.

The idea is that of racing algorithms (Maron and Moore 1994, "Hoeffding races"; Birattari et al. 2002, "A racing
algorithm for configuring metaheuristics"). Here only the last of the candidates that can be the result is raced
against. A stopped candidate is never finished; but how much worse than the mark it was so far is kept, as an evolution
takes parents from more candidates than can be the result.

The question, asked after every window, is whether the mean over all windows will be worse than the mark's. With the
first k of n windows as a sample of the n, that is a one-sided paired t test with the correction for a finite population
(Cochran 1977, Sampling Techniques, sec. 2.6): t = mean / (deviation / sqrt k) * sqrt(n / (n - k)), with k - 1 degrees
of freedom.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from optuna import Trial
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import t as student

from ropesearch.errors import ScoringError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.config import RacingConfig, RacingMark, SelectionConfig
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.trials import (
    COST,
    ESTIMATE,
    FAILURE,
    MARK,
    PLAN,
    SCORE,
    SECONDS,
    STOPPED_AFTER,
    is_searched,
    ranked,
    recorded_windows,
    violation,
    window_key,
)

# See benchmarks/racing.py for what they were chosen by. CHANCE is that of one look at a candidate as good as the mark.
LEAST_WINDOWS = 4
CHANCE = 0.05
# Of a greedy search: what is likely worse than the best is dropped, as another move costs little more than certainty.
_GREEDY_LEAST_WINDOWS = 2
_GREEDY_CHANCE = 1 / 3
_GREEDY_FIRST_CHANCE = 0.1
_NUM_LAST_SCORINGS = 8  # the last moves are those that have cost as much as so many candidates scored whole


class Rule(NamedTuple):
    """When a race ends early: against the `rank`th best (from 1), from `least_windows` on, where the test's chance for
    a candidate as good as that to look so bad is below `chance`; with `first_chance` after the first window already,
    by the same test on its position blocks. A greedy race is against the best of all, baselines included.
    """

    rank: int
    least_windows: int
    chance: float
    first_chance: float | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether it is of candidates that are made from the best alone."""
        return self.first_chance is not None

    def stops(self, differences: NDArray[np.float64], num_windows: int) -> bool:
        """Whether a candidate is stopped that is worse than the mark by `differences` on its first windows, of
        `num_windows` in all; never after the last one.
        """
        num_seen = len(differences)
        if not self.least_windows <= num_seen < num_windows:
            return False
        return _is_worse(differences, num_seen / num_windows, self.chance)

    def stops_at_first(self, differences: NDArray[np.float64], num_windows: int) -> bool:
        """Whether a candidate is stopped after one of `num_windows`, on whose position blocks it is worse than the mark
        by `differences`, which have the window's as their mean.
        """
        if self.first_chance is None or len(differences) < 2 or num_windows < 2:
            return False
        return _is_worse(differences, 1 / num_windows, self.first_chance)


def _is_worse(differences: NDArray[np.float64], part: float, chance: float) -> bool:
    """The test: `differences` are this part of all, in (0, 1)."""
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if mean <= 0 or deviation == 0:
        return mean > 0
    num_seen = len(differences)
    return bool(student.sf(mean / deviation * math.sqrt(num_seen / (1 - part)), num_seen - 1) < chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """What a race needs. `evaluate(regime, window)` gives the score of one search window alone, of `num_windows` that
    are taken in order, and costs `window_cost_tokens`; it raises ScoringError when it cannot. `objective` makes values
    of them. The mark is the candidate that has the rule's rank when a new one is begun.

    A greedy race asks for more than to be better than the mark: what is left of a score would have gained something
    if it were spent on other moves, as much as the last ones have gained for it, and a candidate has to promise that.
    """

    evaluate: Callable[[Regime, int], Score]
    num_windows: int
    window_cost_tokens: int
    objective: Objective
    rule: Rule

    def mark(self, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
        """The trial to race against; None while fewer have finished.

        None also where that one breaks the objective's guard: a candidate that is worse and breaks it less comes first.
        """
        entrants = [trial for trial in ranked(trials) if self.rule.is_greedy or is_searched(trial)]
        marks = entrants[self.rule.rank - 1 : self.rule.rank]
        return marks[0] if marks and violation(marks[0]) == 0 else None

    def gain_of_a_window(self, trials: Sequence[FrozenTrial]) -> float:
        """What the last moves of a greedy search have gained, in nats per token, for the cost of a window; else 0."""
        if not self.rule.is_greedy:
            return 0.0
        best, moves = math.inf, []
        for trial in trials:
            gained = 0.0
            if trial.state is TrialState.COMPLETE and violation(trial) == 0 and trial.values[0] < best:
                gained = best - trial.values[0] if best < math.inf else 0.0
                best = trial.values[0]
            if is_searched(trial) and PLAN not in trial.user_attrs and trial.state.is_finished():
                moves.append((gained, trial.user_attrs.get(COST, 0)))
        sum_gained, cost_tokens = 0.0, 0
        for gained, tokens in reversed(moves):
            if cost_tokens >= _NUM_LAST_SCORINGS * self.num_windows * self.window_cost_tokens:
                break
            sum_gained, cost_tokens = sum_gained + gained, cost_tokens + tokens
        return sum_gained * self.window_cost_tokens / cost_tokens if cost_tokens else 0.0

    def run(
        self,
        trial: Trial,
        regime: Regime,
        mark: FrozenTrial,
        gain_of_a_window: float,
        record: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Score the windows that are left of a trial one by one, each given to `record` at once as attributes of the
        trial; returns those that say how it ended: the whole score, after how many windows the trial was stopped, or
        why it failed.
        """
        mark_score = Score.from_json(mark.user_attrs[SCORE])
        mark_values = self.objective.window_values(mark_score)
        scores = recorded_windows(trial)
        while len(scores) < self.num_windows:
            if scores:
                seen = Score.joined(scores)
                differences = self.objective.window_values(seen) - mark_values[: len(scores)]
                asked = gain_of_a_window * (self.num_windows - len(scores))
                if self._stops(differences, seen, mark_score, asked):
                    estimate = self.objective.value(mark_score) + differences.mean()
                    cost_tokens = len(scores) * self.window_cost_tokens
                    return {COST: cost_tokens, ESTIMATE: float(estimate), STOPPED_AFTER: len(scores)}
            started = time.perf_counter()
            try:
                score = self.evaluate(regime, len(scores))
                outcome: dict[str, Any] = {MARK: mark.number, window_key(len(scores)): score.to_json()}
            except ScoringError as error:
                outcome = {FAILURE: str(error)}
            seconds = trial.user_attrs.get(SECONDS, 0.0) + time.perf_counter() - started
            # Reckoned, not added up: a kill may leave a window written, and what it has cost not.
            outcome = {SECONDS: seconds, COST: (len(scores) + 1) * self.window_cost_tokens, **outcome}
            if FAILURE in outcome:
                return outcome
            record(outcome)
            scores.append(score)
        return {COST: len(scores) * self.window_cost_tokens, SCORE: Score.joined(scores).to_json()}

    def _stops(self, differences: NDArray[np.float64], seen: Score, mark: Score, asked: float) -> bool:
        """Whether a candidate is stopped that is worse than the mark by `differences` on the windows seen, where it has
        to be better by `asked`; after one window by its blocks, where these make its value.
        """
        if len(differences) == 1 and not self.objective.parts:
            return self.rule.stops_at_first(_block_shares(seen) - _block_shares(mark) + asked, self.num_windows)
        return self.rule.stops(differences + asked, self.num_windows)


def _block_shares(score: Score) -> NDArray[np.float64]:
    """The nats per token of a score's first window as the mean of its position blocks' shares, float64, of the blocks
    that were scored.
    """
    nats, tokens = score.nats[0], score.tokens[0]
    scored = tokens > 0
    shares: NDArray[np.float64] = nats[scored] * scored.sum() / tokens.sum()
    return shares


def race_rule(
    config: RacingConfig, selection: SelectionConfig, sampler: CandidateSampler, objective: Objective, num_windows: int
) -> Rule | None:
    """The rule by which new candidates are raced; None where nothing is: when that is asked, for samplers that need the
    values of all candidates, for two objectives, which have a front and no last of the best, for needles, whose windows
    are not alike, and for too few windows to stop before the last.
    """
    if config.mark is RacingMark.none or not sampler.may_stop or not objective.has_like_windows:
        return None
    if sampler.is_greedy:
        rule = Rule(1, _GREEDY_LEAST_WINDOWS, _GREEDY_CHANCE, _GREEDY_FIRST_CHANCE)
    else:
        rule = Rule(selection.num_finalists, LEAST_WINDOWS, CHANCE)
    return rule if num_windows > rule.least_windows else None
