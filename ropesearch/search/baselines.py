"""The methods that a search has to beat; they are its first trials and lie outside the space."""

from ropesearch.rope import methods
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime

_METHODS = (methods.identity, methods.linear, methods.ntk, methods.yarn)
NUM_BASELINES = len(_METHODS)


def baseline_regimes(geometry: Geometry, target_length: int) -> list[Regime]:
    """Unscaled, linear, NTK and YaRN with its attention factor, each named after its method: trials 0 to 3."""
    return [method(geometry, target_length) for method in _METHODS]
