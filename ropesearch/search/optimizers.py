"""The sampler that a configuration asks for."""

from collections.abc import Sequence

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.search.blockwise import BlockwiseSampler
from ropesearch.search.cmaes import CMAESSampler
from ropesearch.search.config import (
    BlockwiseConfig,
    CMAESConfig,
    EvolutionConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    RandomConfig,
    TPEConfig,
)
from ropesearch.search.evolution import EvolutionSampler
from ropesearch.search.gradient import GradientSampler
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
    num_windows: int,
    objective: Objective,
    racing: RacingConfig,
) -> CandidateSampler:
    """The sampler for a config; `seeds` are its first candidates, `num_baselines` the trials before them,
    `num_windows` how many windows the search has, `objective` makes a value of their scores, and `racing` says whether
    candidates are raced.

    Raises InputError when the configuration cannot be run.
    """
    match config:
        case EvolutionConfig():
            return EvolutionSampler(space, config, seed, seeds, num_baselines)
        case RandomConfig():
            return RandomSampler(space, config, seed, seeds, num_baselines)
        case TPEConfig():
            return TPESampler(space, config, seed, seeds, num_baselines)
        case CMAESConfig():
            return CMAESSampler(space, config, seed, seeds, num_baselines)
        case GradientConfig():
            return GradientSampler(space, config, seed, seeds, num_baselines, num_windows, objective, racing)
        case BlockwiseConfig():
            return BlockwiseSampler(space, config, seed, seeds, num_baselines)
    raise InputError(f"optimizer: expected the config of a known sampler, got {type(config).__name__}")
