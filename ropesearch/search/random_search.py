"""Independent random candidates."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ropesearch.rope.regime import Regime
from ropesearch.search.config import RandomConfig
from ropesearch.search.coordinates import Coordinates
from ropesearch.search.sampler import CandidateSampler, Past
from ropesearch.search.space import Candidate, Space


class RandomSampler(CandidateSampler):
    """Independent draws after the seeds, uniform over non-decreasing sequences of log factors (see coordinates.py).

    Raises InputError when num_candidates is below 1.
    """

    name: ClassVar[str] = "random"

    def __init__(
        self, space: Space, config: RandomConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        config.check()
        self.config = config
        self._coordinates = Coordinates(space)

    @property
    def num_candidates(self) -> int:
        """As configured."""
        return self.config.num_candidates

    @property
    def may_stop(self) -> bool:
        """Nothing is inferred from any."""
        return True

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        return self._coordinates.candidate(rng.standard_normal(self._coordinates.num_coordinates))
