"""What all samplers have in common: each is an Optuna sampler and a pure function of (study, seed, trial number)."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.search.operators import nearest_new
from ropesearch.search.parameters import distributions, parameters
from ropesearch.search.space import Candidate, Space
from ropesearch.search.trials import ESTIMATE, rank, ranked, recorded_candidate
from ropesearch.seeding import stream


class Scored(NamedTuple):
    """A scored candidate: its rank (see trials.rank; the less the better), trial number, and a value an objective."""

    rank: tuple[float, ...]
    number: int
    values: tuple[float, ...]
    candidate: Candidate

    @property
    def value(self) -> float:
        """Of the only, or the first, objective."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Past:
    """What a study holds besides the trial that a candidate is proposed for.

    `scored` is best first; `stopped` are those that racing stopped, by what they looked like then, best first too.
    `baselines` are the scored trials of baselines, best first. `known` are all candidates, failed and running ones too,
    `running` those that are being scored. `waiting` says whether a trial with a lower number is still running.
    """

    scored: Sequence[Scored]
    stopped: Sequence[Scored]
    baselines: Sequence[FrozenTrial]
    known: Collection[Candidate]
    running: Sequence[Candidate]
    waiting: bool


class StepAsked(NamedTuple):
    """A gradient step that is asked for: its place in the trial, regime, search window, and the guard's weight."""

    place: int
    regime: Regime
    window: int
    guard_weight: float


class CandidateSampler(BaseSampler):
    """A sampler of candidates. Subclasses say what to propose after the seeds.

    The first candidates are `seeds`, projected onto the space. `num_baselines` trials come before the first candidate.
    Every candidate has a random stream of its own, and nothing is kept outside the study: so a proposal depends on the
    study's content, the seed and the trial's number only. No candidate is proposed twice. Failed trials are known, and
    nothing is inferred from them; a trial that is still running is not waited for.
    """

    name: ClassVar[str]
    limit: ClassVar[str] = "num_candidates"  # the key that ends a search without a budget

    def __init__(self, space: Space, seed: int, seeds: Sequence[Regime], num_baselines: int) -> None:
        self.space = space
        self.seeds = list(dict.fromkeys(space.repair(regime) for regime in seeds))
        self._seed = seed
        self._num_baselines = num_baselines
        self._distributions = distributions(space)

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """How many candidates the search has when nothing else ends it."""

    @property
    def may_stop(self) -> bool:
        """Whether candidates may be stopped before their last window; not where the values of all are needed."""
        return False

    @property
    def is_greedy(self) -> bool:
        """Whether candidates are made from the best one alone, so that one which is likely worse is of no use."""
        return False

    @abstractmethod
    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        """What to propose as candidate `index` (0 is the first after the baselines); known ones are replaced."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters of the space."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal for `trial` as parameters; the one it already carries, if it was begun before; none yet where
        gradient steps come first.
        """
        recorded = recorded_candidate(trial)
        if recorded is None:
            trials = study.get_trials(deepcopy=False)
            if self.next_step(trials, trial.number) is not None:
                return {}
            recorded = self.propose(trials, trial.number)
        return parameters(self.space, recorded)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never right here: the parameters of a candidate depend on each other."""
        raise InputError(f"parameter {param_name!r}: expected one of the space's, {', '.join(self._distributions)}")

    @property
    def num_first_steps(self) -> int:
        """How many gradient steps come before the first candidate."""
        return 0

    def plan(self, trials: Sequence[FrozenTrial], number: int) -> dict[str, Any] | None:
        """What has to be done before the candidate of trial `number` is known, as JSON values with a NUM_STEPS among
        them, for the trial's attribute PLAN; None where the candidate follows at once.
        """
        return None

    def next_step(self, trials: Sequence[FrozenTrial], number: int) -> StepAsked | None:
        """The gradient step that trial `number`, which carries its plan, has to make next; None where all are made."""
        return None

    def propose(self, trials: Sequence[FrozenTrial], number: int) -> Candidate:
        """The candidate of trial `number`, new among the candidates of `trials`.

        Raises InputError when every candidate of the space is already there.
        """
        index = number - self._num_baselines
        known = known_candidates(trials, number)
        if index < len(self.seeds) and self.seeds[index] not in known:
            return self.seeds[index]
        candidates = {trial.number: recorded_candidate(trial) for trial in trials if trial.number != number}
        scored = []
        for trial in ranked(trials):
            candidate = candidates.get(trial.number)
            if candidate is not None:
                scored.append(Scored(rank(trial), trial.number, tuple(trial.values), candidate))
        stopped = [
            Scored((0.0, estimate, trial.number), trial.number, (estimate,), candidate)
            for trial in trials
            if (estimate := trial.user_attrs.get(ESTIMATE)) is not None
            and (candidate := candidates.get(trial.number)) is not None
        ]
        running = [trial for trial in trials if trial.number != number and not trial.state.is_finished()]
        past = Past(
            scored=scored,
            stopped=sorted(stopped),
            baselines=[trial for trial in ranked(trials) if candidates.get(trial.number) is None],
            known=known,
            running=[candidate for trial in running if (candidate := candidates[trial.number]) is not None],
            waiting=any(trial.number < number for trial in running),
        )
        return self._new(self._draw(past, index, stream(self._seed, self.name, index)), known)

    def _new(self, candidate: Candidate, known: Collection[Candidate]) -> Candidate:
        """The candidate, or the nearest that is not known. InputError when all are."""
        new = nearest_new(self.space, candidate, known)
        if new is None:
            raise InputError(
                f"the space is exhausted: all its {self.space.num_candidates} candidates are in the study; "
                "ask for fewer trials or a finer grid"
            )
        return new


def known_candidates(trials: Sequence[FrozenTrial], number: int) -> set[Candidate]:
    """The candidates of all trials but `number`, failed and running ones too."""
    candidates = (recorded_candidate(trial) for trial in trials if trial.number != number)
    return {candidate for candidate in candidates if candidate is not None}
