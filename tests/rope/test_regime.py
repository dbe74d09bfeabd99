import numpy as np
import pytest

from ropesearch.errors import InputError
from ropesearch.rope.regime import Regime, inverse_frequencies
from tests.rope.test_geometry import make_geometry


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"factors": ()}, "expected one factor per pair, got none"),
        ({"factors": (1.0, 0.999999)}, "got 0.999999 at pair 1"),
        ({"factors": (float("nan"), 1.0)}, "got nan at pair 0"),
        ({"factors": (1.0, float("inf"))}, "got inf at pair 1"),
        ({"attention_factor": 0.0}, "expected a finite attention_factor above 0, got 0.0"),
        ({"attention_factor": float("nan")}, "got nan"),
        ({"max_length": 0}, "expected max_length of at least 1 token, got 0"),
        ({"retained_tokens": -1}, "expected retained_tokens from 0 to max_length = 128, got -1"),
        ({"retained_tokens": 129}, "got 129"),
    ],
)
def test_impossible_regimes_are_refused(changes: dict[str, object], expected: str) -> None:
    values: dict[str, object] = {"name": "x", "max_length": 128, "factors": (1.0, 2.0)} | changes
    with pytest.raises(InputError, match=expected):
        Regime(**values)  # type: ignore[arg-type]


def test_factors_divide_the_plain_inverse_frequencies() -> None:
    geometry = make_geometry(rotary_dim=8, rope_theta=10000.0)
    table = inverse_frequencies(geometry, (1.0, 2.0, 4.0, 5.0))
    np.testing.assert_allclose(table, [1.0, 0.05, 0.0025, 0.0002], rtol=1e-14)


def test_as_many_factors_as_pairs() -> None:
    with pytest.raises(InputError, match="expected one for each of the 4 pairs, got 1"):
        inverse_frequencies(make_geometry(rotary_dim=8), (2.0,))
