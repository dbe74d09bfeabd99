"""Optuna's tree-structured Parzen estimator."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.samplers import TPESampler as OptunaTPESampler
from optuna.trial import TrialState, create_trial

from ropesearch.rope.regime import Regime
from ropesearch.search.config import TPEConfig
from ropesearch.search.coordinates import Coordinates
from ropesearch.search.sampler import CandidateSampler, Past
from ropesearch.search.space import Candidate, Space

_STARTUP_DEVIATION = 0.5
_MARGIN = 1.0  # beyond the outermost coordinate that was scored


class TPESampler(CandidateSampler):
    """Optuna's TPESampler (Bergstra et al. 2011), one coordinate at a time (see coordinates.py).

    The coordinates are those of num_knots pairs: the estimator takes coordinates for independent, and the fewer there
    are, the more it learns of each.

    It is built anew for every proposal, from the study's scored and running candidates and a seed of its own, so it has
    no state. It is told ranks instead of values: all that it uses is their order, in which constraints come first.
    Until num_startup candidates are scored, candidates are drawn around the best of them.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "tpe"

    def __init__(self, space: Space, config: TPEConfig, seed: int, seeds: Sequence[Regime], num_baselines: int) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        config.check()
        self.config = config
        self._coordinates = Coordinates(space, config.num_knots)

    @property
    def num_candidates(self) -> int:
        """As configured."""
        return self.config.num_candidates

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        known = [self._coordinates.of(entry.candidate) for entry in past.scored]
        if len(known) < self.config.num_startup:
            best = known[0] if known else np.zeros(self._coordinates.num_coordinates)
            return self._coordinates.candidate(best + _STARTUP_DEVIATION * rng.standard_normal(len(best)))
        running = [self._coordinates.of(candidate) for candidate in past.running]
        lows, highs = np.min(known + running, axis=0) - _MARGIN, np.max(known + running, axis=0) + _MARGIN
        names = [f"{place:03d}" for place in range(len(lows))]
        box = {
            name: FloatDistribution(low, high)
            for name, low, high in zip(names, lows.tolist(), highs.tolist(), strict=True)
        }
        sampler = OptunaTPESampler(
            n_startup_trials=0, n_ei_candidates=self.config.num_draws, seed=int(rng.integers(2**32))
        )
        study = optuna.create_study(sampler=sampler)
        in_order = sorted(range(len(known)), key=lambda place: past.scored[place].number)
        study.add_trials(
            [
                create_trial(
                    params=dict(zip(names, known[place].tolist(), strict=True)), distributions=box, value=place
                )
                for place in in_order
            ]
            + [
                create_trial(
                    params=dict(zip(names, values.tolist(), strict=True)), distributions=box, state=TrialState.RUNNING
                )
                for values in running
            ]
        )
        drawn = study.ask(box).params
        return self._coordinates.candidate([drawn[name] for name in names])
