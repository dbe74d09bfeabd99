"""LongRoPE's evolution."""

import math
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.search.config import EvolutionConfig
from ropesearch.search.operators import cross, mutate
from ropesearch.search.sampler import CandidateSampler, Past, check_at_least
from ropesearch.search.space import Candidate, Space

_NUM_TRIES = 8


class EvolutionSampler(CandidateSampler):
    """LongRoPE's evolutionary search (Ding et al. 2024, sec. 3.3 and Alg. 1).

    The first num_population candidates are the seeds (of the paper: linear interpolation, NTK and YaRN, the true one)
    and mutants of these. Every generation then has num_mutations mutants and num_crossovers crossovers of the
    num_parents best of everything finished, each pair touched with mutation_probability.

    It differs from the paper where that saves evaluations: mutation and crossover are constructive, and half of each
    are made for a loss that is smooth along the pairs (see operators.py); better parents are drawn more often, in the
    first population too; attention factor, retained tokens and retained pairs are genes.

    With one worker it is generational: parents come from the trials numbered before the generation. While a trial with
    a lower number is still running, as with several workers, parents come from everything that is finished, and nothing
    ever waits. Failed trials and those that racing stopped have no children.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "evolution"
    limit: ClassVar[str] = "num_generations"

    def __init__(
        self, space: Space, config: EvolutionConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        _check(config)
        self.config = config

    @property
    def num_candidates(self) -> int:
        """Candidates from the first population to the last generation."""
        return self.config.num_population + self.config.num_generations * self._num_children

    @property
    def num_parents(self) -> int:
        """As configured."""
        return self.config.num_parents

    @property
    def _num_children(self) -> int:
        return self.config.num_mutations + self.config.num_crossovers

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        place = (index - self.config.num_population) % self._num_children
        if index < self.config.num_population:
            parents = [entry for entry in past.scored if entry.candidate in self.seeds]
        else:
            first = self._num_baselines + index - place
            parents = [entry for entry in past.scored if past.waiting or entry.number < first]
        ranked = [entry.candidate for entry in parents[: self.config.num_parents]] or self.seeds
        if not ranked:
            ranked = [self.space.decode(np.ones(self.space.num_dimensions))]
        crosses = index >= self.config.num_population and place >= self.config.num_mutations
        return offspring(self.space, ranked, past.known, crosses, self.config.mutation_probability, rng)


def offspring(
    space: Space,
    ranked: Sequence[Candidate],
    known: Collection[Candidate],
    crosses: bool,
    mutation_probability: float,
    rng: np.random.Generator,
) -> Candidate:
    """A mutant of one of the parents `ranked`, best first, or a crossover of two, if there are two; not known, unless
    that fails several times. The better a parent, the more often it is drawn.
    """
    for attempt in range(_NUM_TRIES):
        probability = min(1.0, mutation_probability * 2 ** (attempt / 4))
        if crosses and len(ranked) > 1 and attempt < _NUM_TRIES // 2:
            better, worse = _two_ranks(len(ranked), rng)
            candidate = cross(space, ranked[better], ranked[worse], probability, rng)
        else:
            parent = ranked[_rank(len(ranked), rng)]
            candidate = mutate(space, parent, probability, 1 + attempt // 2, rng)
        if candidate not in known:
            break
    return candidate


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
    for name in ("num_mutations", "num_crossovers", "num_generations"):
        check_at_least(name, getattr(config, name), 0)
    check_at_least("num_population", config.num_population, 1)
    check_at_least("num_parents", config.num_parents, 2)
    if config.num_mutations + config.num_crossovers < 1:
        raise InputError(
            "optimizer.num_mutations, optimizer.num_crossovers: expected at least one child per generation, got none"
        )
    probability = config.mutation_probability
    if not (math.isfinite(probability) and 0 < probability <= 1):
        raise InputError(f"optimizer.mutation_probability: expected more than 0 and at most 1, got {probability}")
