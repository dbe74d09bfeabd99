"""The space that a configuration describes."""

from ropesearch.rope.geometry import Geometry
from ropesearch.search.config import SpaceConfig
from ropesearch.search.longrope2 import LongRoPE2Space
from ropesearch.search.monotone import MonotoneSpace
from ropesearch.search.space import Space


def make_space(geometry: Geometry, target_length: int, config: SpaceConfig) -> Space:
    """LongRoPE2's space where there is a critical pair, else LongRoPE's.

    Raises InputError when the configuration describes no space.
    """
    kind = MonotoneSpace if config.critical_pair is None else LongRoPE2Space
    return kind(geometry, target_length, config)
