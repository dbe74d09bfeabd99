"""CMA-ES, replayed from the study."""

from collections.abc import Sequence
from typing import ClassVar

import cmaes
import numpy as np
from numpy.typing import NDArray

from ropesearch.rope.regime import Regime
from ropesearch.search.config import CMAESConfig
from ropesearch.search.coordinates import Coordinates
from ropesearch.search.sampler import CandidateSampler, Past, Scored
from ropesearch.search.space import Candidate, Space
from ropesearch.seeding import stream

# Spacings of equal factors lie far out, where a move changes nothing: the mean begins no further out than this.
_FLAT = 1.0


class CMAESSampler(CandidateSampler):
    """CMA-ES (Hansen 2016) on a space's coordinates (see coordinates.py), from the `cmaes` package.

    It begins near the best seed that is scored, its plateaus slightly tilted. A generation is the next num_population
    scored candidates by number, so failed ones leave no gap. There is no state: all generations are replayed for every
    proposal, each candidate drawn again from its own stream. Where that does not give the candidate that was scored
    (one was known already, or other workers had finished meanwhile), its coordinates are told instead. A coordinate
    with few values is drawn afresh with probability 1 / num_population, or it would freeze (compare the CMA-ES with
    margin, Hamano et al. 2022). Where the strategy has converged, it begins again at the best candidate.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "cmaes"

    def __init__(
        self, space: Space, config: CMAESConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        config.check()
        self.config = config
        self._coordinates = Coordinates(space)

    @property
    def num_candidates(self) -> int:
        """As configured."""
        return self.config.num_candidates

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        strategy = self._replayed(past)
        return self._coordinates.candidate(self._asked(strategy, index))

    def _replayed(self, past: Past) -> cmaes.CMA:
        """The strategy after all whole generations of the study."""
        seeds = [entry for entry in past.scored if entry.candidate in self.seeds]
        told = sorted((entry for entry in past.scored if entry.candidate not in self.seeds), key=lambda x: x.number)
        start = seeds[0].candidate if seeds else next(iter(self.seeds), None)
        strategy = self._begun(start)
        num_population = self.config.num_population
        worst = max((entry.value for entry in past.scored), default=0.0)
        for first in range(0, len(told) - num_population + 1, num_population):
            generation = told[first : first + num_population]
            strategy.tell([(self._told(strategy, entry), _penalised(entry, worst)) for entry in generation])
            if strategy.should_stop():
                strategy = self._begun(min(told[: first + num_population]).candidate)
        return strategy

    def _begun(self, start: Candidate | None) -> cmaes.CMA:
        num_coordinates = self._coordinates.num_coordinates
        mean = np.zeros(num_coordinates) if start is None else np.minimum(self._coordinates.of(start), _FLAT)
        return cmaes.CMA(mean=mean, sigma=self.config.initial_sigma, population_size=self.config.num_population, seed=0)

    def _told(self, strategy: cmaes.CMA, entry: Scored) -> NDArray[np.float64]:
        asked = self._asked(strategy, entry.number - self._num_baselines)
        same = self._coordinates.candidate(asked) == entry.candidate
        return asked if same else self._coordinates.of(entry.candidate)

    def _asked(self, strategy: cmaes.CMA, index: int) -> NDArray[np.float64]:
        """The strategy's draw for candidate `index`."""
        rng = stream(self._seed, self.name, index)
        strategy.reseed_rng(int(rng.integers(2**32)))
        vector: NDArray[np.float64] = strategy.ask()
        for place in self._coordinates.discrete:
            if rng.random() < 1 / self.config.num_population:
                vector[place] = rng.standard_normal()
        return vector


def _penalised(entry: Scored, worst: float) -> float:
    """A value that orders like the rank: whatever violates a constraint comes after all that does not."""
    violation = entry.rank[0]
    return worst + violation if violation > 0 else entry.value
