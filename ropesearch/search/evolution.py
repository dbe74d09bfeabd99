"""LongRoPE's evolution."""

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import numpy as np

from ropesearch.rope.regime import Regime
from ropesearch.search.config import EvolutionConfig
from ropesearch.search.front import crowded_order
from ropesearch.search.operators import cross, mutate
from ropesearch.search.sampler import CandidateSampler, Past, Scored
from ropesearch.search.space import Candidate, Space

_NUM_TRIES = 8


class EvolutionSampler(CandidateSampler):
    """LongRoPE's evolutionary search (Ding et al. 2024, sec. 3.3 and Alg. 1).

    The first num_population candidates are the seeds (of the paper: linear interpolation, NTK and YaRN, the true one)
    and mutants of these. Every generation then has num_mutations mutants and num_crossovers crossovers of the
    num_parents best so far, each pair touched with mutation_probability.

    It differs from the paper where that saves evaluations: mutation and crossover are constructive, and half of each
    are made for a loss that is smooth along the pairs (see operators.py); better parents are drawn more often, in the
    first population too; attention factor, retained tokens and retained pairs are genes.

    With one worker it is generational: parents come from the trials numbered before the generation. While a trial with
    a lower number is still running, as with several workers, parents come from everything that is finished, and nothing
    ever waits. Failed trials have no children. Those that racing stopped are ordered by what they looked like then, of
    a share of the windows: too little to be the result, and enough for a parent.

    Of a study with two objectives the num_parents best are those of NSGA-II (see front.py), and parents are drawn as
    there, by binary tournament, so that the children spread along the front.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "evolution"
    limit: ClassVar[str] = "num_generations"

    def __init__(
        self, space: Space, config: EvolutionConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        config.check()
        self.config = config

    @property
    def num_candidates(self) -> int:
        """Candidates from the first population to the last generation."""
        return self.config.num_population + self.config.num_generations * self._num_children

    @property
    def may_stop(self) -> bool:
        """Those that cannot be the result are parents by what they looked like."""
        return True

    @property
    def _num_children(self) -> int:
        return self.config.num_mutations + self.config.num_crossovers

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        entries = sorted([*past.scored, *past.stopped])
        place = (index - self.config.num_population) % self._num_children
        if index < self.config.num_population:
            parents = [entry for entry in entries if entry.candidate in self.seeds]
        else:
            first = self._num_baselines + index - place
            parents = [entry for entry in entries if past.waiting or entry.number < first]
        draw_rank = better_rank
        if parents and len(parents[0].values) > 1:
            parents, draw_rank = _crowded(parents), _tournament
        ranked = [entry.candidate for entry in parents[: self.config.num_parents]] or self.seeds
        if not ranked:
            ranked = [self.space.decode(np.ones(self.space.num_dimensions))]
        crosses = index >= self.config.num_population and place >= self.config.num_mutations
        return offspring(self.space, ranked, past.known, crosses, self.config.mutation_probability, rng, draw_rank)


def better_rank(num_parents: int, rng: np.random.Generator) -> int:
    """A rank, 0 the best, better ones more often: half of the draws are in the best eighth."""
    return int(num_parents * rng.random() ** 3)


def offspring(
    space: Space,
    ranked: Sequence[Candidate],
    known: Collection[Candidate],
    crosses: bool,
    mutation_probability: float,
    rng: np.random.Generator,
    draw_rank: Callable[[int, np.random.Generator], int] = better_rank,
) -> Candidate:
    """A mutant of one of the parents `ranked`, best first, or a crossover of two, if there are two; not known, unless
    that fails several times. `draw_rank` draws a parent's rank.
    """
    for attempt in range(_NUM_TRIES):
        probability = min(1.0, mutation_probability * 2 ** (attempt / 4))
        if crosses and len(ranked) > 1 and attempt < _NUM_TRIES // 2:
            better, worse = _two_ranks(len(ranked), rng, draw_rank)
            candidate = cross(space, ranked[better], ranked[worse], probability, rng)
        else:
            parent = ranked[draw_rank(len(ranked), rng)]
            candidate = mutate(space, parent, probability, 1 + attempt // 2, rng)
        if candidate not in known:
            break
    return candidate


def _tournament(num_parents: int, rng: np.random.Generator) -> int:
    """The better of two ranks drawn alike."""
    return int(rng.integers(num_parents, size=2).min())


def _crowded(parents: Sequence[Scored]) -> list[Scored]:
    """Parents in the order of NSGA-II, equal ones by number."""
    entries = sorted(parents, key=lambda entry: entry.number)
    values = np.array([entry.values for entry in entries])
    return [entries[index] for index in crowded_order(values, np.array([entry.rank[0] for entry in entries]))]


def _two_ranks(
    num_parents: int, rng: np.random.Generator, draw_rank: Callable[[int, np.random.Generator], int]
) -> tuple[int, int]:
    """Two different ranks, the better one first."""
    first = draw_rank(num_parents, rng)
    second = int(rng.integers(num_parents - 1))
    second += second >= first
    return min(first, second), max(first, second)
