"""LongRoPE's evolution as an Optuna sampler, a pure function of (study, seed, trial number)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.search.config import EvolutionConfig
from ropesearch.search.operators import cross, mutate, nearest_new
from ropesearch.search.parameters import distributions, parameters
from ropesearch.search.space import Candidate, Space
from ropesearch.search.trials import recorded_candidate
from ropesearch.seeding import stream

_NUM_TRIES = 8


class EvolutionSampler(BaseSampler):
    """LongRoPE's evolutionary search (Ding et al. 2024, sec. 3.3 and Alg. 1).

    The first num_population candidates are `seeds`, projected onto the space (linear interpolation, NTK and the true
    YaRN, see `seed_regimes`), and mutants of these. Every generation then has num_mutations mutants and num_crossovers
    crossovers of the num_parents best of everything finished, each pair touched with mutation_probability.

    It differs from the paper where that saves evaluations: mutation and crossover are constructive, and half of each
    are made for a loss that is smooth along the pairs (see operators.py); better parents are drawn more often, in the
    first population too; attention factor and retained tokens are genes; no candidate is proposed twice.

    With one worker it is generational: parents come from the trials numbered before the generation. While a trial with
    a lower number is still running, as with several workers, parents come from everything that is finished, and nothing
    ever waits. Failed trials have no children. Each candidate has a random stream of its own, so the proposal depends
    on the study's content, the seed and the number only. `num_baselines` trials come before the first candidate.

    Raises InputError when the configuration cannot be run, or there is no seed.
    """

    def __init__(
        self, space: Space, config: EvolutionConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        _check(config)
        self.space = space
        self.config = config
        self._seed = seed
        self._num_baselines = num_baselines
        self._distributions = distributions(space)
        if not seeds:
            raise InputError("seeds: expected at least one regime to start from, got none")
        self._seeds = list(dict.fromkeys(space.repair(regime) for regime in seeds))

    @property
    def num_candidates(self) -> int:
        """Candidates from the first population to the last generation."""
        return self.config.num_population + self.config.num_generations * self._num_children

    @property
    def _num_children(self) -> int:
        return self.config.num_mutations + self.config.num_crossovers

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters of the space."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal for `trial` as parameters; the one it already carries, if it was begun before."""
        recorded = recorded_candidate(trial)
        candidate = recorded or self.propose(study.get_trials(deepcopy=False), trial.number)
        return parameters(self.space, candidate)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never right here: the parameters of a candidate depend on each other."""
        raise InputError(f"parameter {param_name!r}: expected one of the space's, {', '.join(self._distributions)}")

    def propose(self, trials: Sequence[FrozenTrial], number: int) -> Candidate:
        """The candidate of trial `number`, new among the candidates of `trials`.

        Raises InputError when every candidate of the space is already there.
        """
        index = number - self._num_baselines
        rng = stream(self._seed, "evolution", index)
        others = [(trial, recorded_candidate(trial)) for trial in trials if trial.number != number]
        known = {candidate for _, candidate in others if candidate is not None}
        finished = [
            (trial.values[0], trial.number, candidate)
            for trial, candidate in others
            if candidate is not None and trial.state is TrialState.COMPLETE and trial.values
        ]
        place = (index - self.config.num_population) % self._num_children
        waiting = any(trial.number < number and not trial.state.is_finished() for trial in trials)
        if index < self.config.num_population:
            if index < len(self._seeds) and self._seeds[index] not in known:
                return self._seeds[index]
            parents = [entry for entry in finished if entry[2] in self._seeds]
        else:
            first = number - place
            parents = finished if waiting else [entry for entry in finished if entry[1] < first]
        parents = sorted(parents, key=lambda entry: entry[:2])[: self.config.num_parents]
        ranked = [candidate for _, _, candidate in parents] or self._seeds
        crosses = index >= self.config.num_population and place >= self.config.num_mutations and len(ranked) > 1
        for attempt in range(_NUM_TRIES):
            probability = min(1.0, self.config.mutation_probability * 2 ** (attempt / 4))
            if crosses and attempt < _NUM_TRIES // 2:
                better, worse = _two_ranks(len(ranked), rng)
                candidate = cross(self.space, ranked[better], ranked[worse], probability, rng)
            else:
                parent = ranked[_rank(len(ranked), rng)]
                candidate = mutate(self.space, parent, probability, 1 + attempt // 2, rng)
            if candidate not in known:
                return candidate
        new = nearest_new(self.space, candidate, known)
        if new is None:
            raise InputError(
                f"the space is exhausted: all its {self.space.num_candidates} candidates are in the study; "
                "ask for fewer trials or a finer grid"
            )
        return new


def _rank(num_parents: int, rng: np.random.Generator) -> int:
    """A rank, 0 the best, better ones more often: half of the draws are in the best eighth."""
    return int(num_parents * rng.random() ** 3)


def _two_ranks(num_parents: int, rng: np.random.Generator) -> tuple[int, int]:
    """Two different ranks, the better one first."""
    first = _rank(num_parents, rng)
    second = int(rng.integers(num_parents - 1))
    second += second >= first
    return min(first, second), max(first, second)


def _check(config: EvolutionConfig) -> None:
    for name, least in (("num_population", 1), ("num_parents", 2), ("num_mutations", 0), ("num_crossovers", 0)):
        if getattr(config, name) < least:
            raise InputError(f"optimizer.{name}: expected at least {least}, got {getattr(config, name)}")
    if config.num_generations < 0:
        raise InputError(f"optimizer.num_generations: expected at least 0, got {config.num_generations}")
    if config.num_mutations + config.num_crossovers < 1:
        raise InputError(
            "optimizer.num_mutations, optimizer.num_crossovers: expected at least one child per generation, got none"
        )
    probability = config.mutation_probability
    if not (math.isfinite(probability) and 0 < probability <= 1):
        raise InputError(f"optimizer.mutation_probability: expected more than 0 and at most 1, got {probability}")
