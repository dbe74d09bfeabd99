"""The sampler that a configuration asks for."""

from collections.abc import Sequence

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.search.cmaes import CMAESSampler
from ropesearch.search.config import OPTIMIZERS, CMAESConfig, EvolutionConfig, OptimizerConfig, RandomConfig, TPEConfig
from ropesearch.search.evolution import EvolutionSampler
from ropesearch.search.random_search import RandomSampler
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.space import Space
from ropesearch.search.tpe import TPESampler


def make_sampler(
    space: Space,
    config: OptimizerConfig,
    seed: int,
    seeds: Sequence[Regime],
    num_baselines: int,
    num_objectives: int = 1,
) -> CandidateSampler:
    """The sampler for a config; `seeds` are its first candidates, `num_baselines` the trials before them.

    Raises InputError when the configuration cannot be run, or not with so many objectives.
    """
    if num_objectives > 1 and not isinstance(config, EvolutionConfig):
        name = next((name for name, kind in OPTIMIZERS.items() if type(config) is kind), type(config).__name__)
        raise InputError(
            f"optimizer: expected evolution, which can spread along the front of {num_objectives} objectives, got "
            f"{name}; ask for optimizer=evolution, or without objective.two_objectives"
        )
    match config:
        case EvolutionConfig():
            return EvolutionSampler(space, config, seed, seeds, num_baselines)
        case RandomConfig():
            return RandomSampler(space, config, seed, seeds, num_baselines)
        case TPEConfig():
            return TPESampler(space, config, seed, seeds, num_baselines)
        case CMAESConfig():
            return CMAESSampler(space, config, seed, seeds, num_baselines)
    raise InputError(f"optimizer: expected the config of a known sampler, got {type(config).__name__}")
