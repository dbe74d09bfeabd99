"""The regimes that a search has to beat: its first trials, which may lie outside the space, and its seeds."""

from collections.abc import Sequence

from ropesearch.rope import methods
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime

# What rows of a search and of its evaluation are named besides the tables that a user brings.
RESERVED_NAMES = ("unscaled", "unscaled_long", "linear", "ntk", "dynamic_ntk", "yarn", "searched")


def baseline_regimes(
    geometry: Geometry, target_length: int, unscaled: Regime | None = None, tables: Sequence[Regime] = ()
) -> list[Regime]:
    """Unscaled, linear, NTK and YaRN with its attention factor, then `tables`, each named after its method.

    `unscaled` is the checkpoint's own table for target_length tokens; None is the plain one. Names have to be distinct.
    """
    own = methods.identity(geometry, target_length) if unscaled is None else unscaled
    known = [method(geometry, target_length) for method in (methods.linear, methods.ntk, methods.yarn)]
    return [own, *known, *tables]


def seed_regimes(baselines: Sequence[Regime], tables: Sequence[Regime] = ()) -> list[Regime]:
    """What a search starts from: `tables`, then every other baseline that changes the plain table."""
    others = [regime for regime in baselines if regime not in tables]
    return [*tables, *(regime for regime in others if any(factor != 1 for factor in regime.factors))]
