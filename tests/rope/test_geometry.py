import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry


def make_geometry(rotary_dim: int = 128, rope_theta: float = 1e4, original_length: int = 4096) -> Geometry:
    return Geometry(
        model_type="llama",
        head_dim=rotary_dim,
        rotary_dim=rotary_dim,
        original_length=original_length,
        rope_theta=rope_theta,
    )


@pytest.mark.parametrize(
    ("rotary_dim", "rope_theta", "original_length", "critical_pair", "ten_turn_pair"),
    [
        pytest.param(96, 1e4, 2048, 31, 19, id="Phi-3-mini at 2,048"),
        pytest.param(128, 5e5, 8192, 35, 24, id="Llama-3-8B at 8,192"),
        pytest.param(96, 1e4, 4096, 34, 22, id="Phi-4-mini at 4,096"),
        pytest.param(128, 1e4, 4096, 46, 30, id="Llama-2 and Mistral at 4,096"),
        pytest.param(128, 1e6, 32768, 40, 29, id="Qwen2.5 at 32,768"),
    ],
)
def test_critical_and_ten_turn_pair_of_known_models(
    rotary_dim: int, rope_theta: float, original_length: int, critical_pair: int, ten_turn_pair: int
) -> None:
    geometry = make_geometry(rotary_dim, rope_theta, original_length)
    assert (geometry.critical_pair(), geometry.ten_turn_pair()) == (critical_pair, ten_turn_pair)


@given(
    num_pairs=st.integers(1, 128),
    rope_theta=st.floats(2.0, 1e8),
    original_length=st.integers(2, 2**21),
)
def test_critical_pairs_are_where_turns_fall_below_one_and_ten(
    num_pairs: int, rope_theta: float, original_length: int
) -> None:
    geometry = make_geometry(2 * num_pairs, rope_theta, original_length)
    turns = geometry.turns()
    for pair, num_turns in ((geometry.critical_pair(), 1), (geometry.ten_turn_pair(), 10)):
        assert (turns[pair:] < num_turns * (1 + 1e-9)).all()
        assert (turns[:pair] > num_turns * (1 - 1e-9)).all()


def test_periods_and_turns_entry_by_entry() -> None:
    geometry = make_geometry(rotary_dim=8, rope_theta=10000.0, original_length=4096)
    frequencies = [1.0, 0.1, 0.01, 0.001]
    np.testing.assert_allclose(geometry.inverse_frequencies(), frequencies, rtol=1e-14)
    np.testing.assert_allclose(geometry.periods_tokens(), [2 * math.pi / f for f in frequencies], rtol=1e-14)
    np.testing.assert_allclose(geometry.turns(), [4096 * f / (2 * math.pi) for f in frequencies], rtol=1e-14)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rotary_dim": 7}, "rotary_dim: expected an even number of at least 2, got 7"),
        ({"rotary_dim": 0}, "got 0"),
        ({"rotary_dim": 130}, "expected at most head_dim = 128, got 130"),
        ({"original_length": 1}, "original_length: expected at least 2 tokens, got 1"),
        ({"rope_theta": 1.0}, "rope_theta: expected a finite number above 1, got 1.0"),
        ({"rope_theta": float("nan")}, "got nan"),
    ],
)
def test_impossible_geometries_are_refused(changes: dict[str, float], expected: str) -> None:
    values = {"head_dim": 128, "rotary_dim": 128, "original_length": 4096, "rope_theta": 1e4} | changes
    with pytest.raises(InputError, match=expected):
        Geometry(model_type="llama", **values)  # type: ignore[arg-type]


def test_ratio() -> None:
    assert make_geometry(original_length=64).ratio(96) == 1.5
    with pytest.raises(InputError, match="expected more than original_length = 64 tokens, got 64"):
        make_geometry(original_length=64).ratio(64)


def test_rope_and_model_config_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ropesearch.rope.methods, ropesearch.model.config\n"
        "sys.exit(', '.join({'torch', 'transformers', 'scipy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
