"""Factors and attention factors against transformers' own functions, entry by entry, and against published tables."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime, inverse_frequencies
from tests.rope.test_geometry import make_geometry

# rotary_dim, rope_theta, ratio, original_length
GRID = [
    pytest.param(128, 1e4, 16, 4096, id="Llama-2"),
    pytest.param(128, 5e5, 16, 8192, id="Llama-3"),
    pytest.param(96, 1e4, 32, 4096, id="Phi-4-mini"),
    pytest.param(128, 1e6, 4, 32768, id="Qwen2.5"),
    pytest.param(64, 5e5, 32, 8192, id="small head"),
    pytest.param(256, 1e6, 8, 8192, id="large head"),
    pytest.param(64, 1e4, 1.5, 4096, id="ratio no integer"),
    pytest.param(64, 1e3, 16, 32768, id="ramp ends beyond the last pair"),
    pytest.param(64, 10.0, 4, 2**20, id="both ramp ends beyond the last channel"),
    pytest.param(8, 1e4, 8, 4096, id="tiny head"),
    pytest.param(8, 1e4, 8, 64, id="ramp starts below pair 0"),
    pytest.param(8, 1e4, 4, 6, id="both ramp ends at pair 0"),
    pytest.param(4, 1e4, 4, 128, id="two pairs"),
]


class _DoublePrecisionTorch:
    """torch, as transformers' rope functions see it, with float64 where they ask for float32."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def transformers_table(
    rope_type: str, geometry: Geometry, target_length: int, length: int | None = None, **parameters: Any
) -> tuple[np.ndarray, np.ndarray, float]:
    """Inverse frequencies by transformers, the same by its code in double precision, and the attention factor."""
    import torch
    from transformers import LlamaConfig, modeling_rope_utils

    ratio = target_length / geometry.original_length
    values = {"rope_type": rope_type, "rope_theta": geometry.rope_theta, "factor": ratio}
    if rope_type in ("yarn", "longrope", "llama3"):
        values["original_max_position_embeddings"] = geometry.original_length
    config = LlamaConfig(
        hidden_size=2 * geometry.head_dim,
        num_attention_heads=2,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.original_length if rope_type == "dynamic" else target_length,
        rope_parameters=values | parameters,
    )
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    single, attention_factor = function(config, torch.device("cpu"), seq_len=length)
    with mock.patch.object(modeling_rope_utils, "torch", _DoublePrecisionTorch()):
        double, _ = function(config, torch.device("cpu"), seq_len=length)
    return single.double().numpy(), double.double().numpy(), float(attention_factor)


def assert_same(
    regime: Regime,
    geometry: Geometry,
    reference: tuple[np.ndarray, np.ndarray, float],
    tolerance_single: float = 1e-6,
    tolerance_double: float = 1e-12,
) -> None:
    single, double, attention_factor = reference
    table = inverse_frequencies(geometry, regime.factors)
    np.testing.assert_allclose(table, single, rtol=tolerance_single, atol=0)
    np.testing.assert_allclose(table, double, rtol=tolerance_double, atol=0)
    assert regime.attention_factor == pytest.approx(attention_factor, rel=1e-6)


@pytest.mark.parametrize(("rotary_dim", "rope_theta", "ratio", "original_length"), GRID)
class TestParityWithTransformers:
    def test_linear(self, rotary_dim: int, rope_theta: float, ratio: float, original_length: int) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        target = int(ratio * original_length)
        assert_same(methods.linear(geometry, target), geometry, transformers_table("linear", geometry, target))

    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_dynamic_ntk(
        self, rotary_dim: int, rope_theta: float, ratio: float, original_length: int, share: float
    ) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        target = int(ratio * original_length)
        length = original_length + int(share * (target - original_length))
        for asked in (length, original_length // 2):
            reference = transformers_table("dynamic", geometry, target, length=asked)
            assert_same(methods.dynamic_ntk(geometry, target, asked), geometry, reference)

    def test_ntk_is_theta_raised(self, rotary_dim: int, rope_theta: float, ratio: float, original_length: int) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        raised = rope_theta * ratio ** (rotary_dim / (rotary_dim - 2))
        regime = methods.ntk(geometry, int(ratio * original_length))
        expected = [raised ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
        np.testing.assert_allclose(inverse_frequencies(geometry, regime.factors), expected, rtol=1e-12)
        assert regime.attention_factor == 1

    @pytest.mark.parametrize("truncate", [True, False])
    @pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32, 1), (128, 2), (4, 4), (1.5, 0.5)])
    def test_yarn_and_ntk_by_parts(
        self,
        rotary_dim: int,
        rope_theta: float,
        ratio: float,
        original_length: int,
        beta_fast: float,
        beta_slow: float,
        truncate: bool,
    ) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        target = int(ratio * original_length)
        betas: dict[str, Any] = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
        reference = transformers_table("yarn", geometry, target, **betas)
        regime = methods.yarn(geometry, target, **betas)
        # Between pairs, transformers' float32 ramp loses up to log2(ratio) bits of the blend; in double it does not.
        assert_same(regime, geometry, reference, tolerance_single=1e-6 if truncate else 3e-6)
        by_parts = methods.ntk_by_parts(geometry, target, **betas)
        assert (by_parts.factors, by_parts.attention_factor) == (regime.factors, 1.0)

    def test_longrope(self, rotary_dim: int, rope_theta: float, ratio: float, original_length: int) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        target = int(ratio * original_length)
        factors = [1 + 1.37 * pair**1.1 for pair in range(geometry.num_pairs)]
        choices: list[dict[str, Any]] = [{}, {"attention_factor": 1.05}]
        for given_factor in choices:
            reference = transformers_table(
                "longrope", geometry, target, short_factor=factors, long_factor=factors, **given_factor
            )
            # This function rounds its exponents to float32 by name, in double precision too.
            assert_same(methods.longrope(geometry, target, factors, **given_factor), geometry, reference, 1e-6, 1e-6)

    @pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 32.0), (3.0, 3.001)])
    def test_llama3(
        self, rotary_dim: int, rope_theta: float, ratio: float, original_length: int, low: float, high: float
    ) -> None:
        geometry = make_geometry(rotary_dim, rope_theta, original_length)
        regime = methods.llama3(geometry, ratio, low, high)
        reference = transformers_table(
            "llama3",
            geometry,
            int(ratio * original_length),
            factor=float(ratio),
            low_freq_factor=low,
            high_freq_factor=high,
        )
        assert_same(regime, geometry, reference)
        assert regime.max_length == int(ratio * original_length)


@given(
    num_pairs=st.integers(1, 80),
    rope_theta=st.floats(2.0, 1e8),
    original_length=st.integers(2, 2**17),
    ratio=st.floats(1.01, 64.0),
    truncate=st.booleans(),
)
def test_factors_are_never_below_one_nor_above_the_ratio(
    num_pairs: int, rope_theta: float, original_length: int, ratio: float, truncate: bool
) -> None:
    geometry = make_geometry(2 * num_pairs, rope_theta, original_length)
    target = math.ceil(ratio * original_length)
    for regime in (
        methods.identity(geometry, target),
        methods.linear(geometry, target),
        methods.ntk(geometry, target),
        methods.ntk_by_parts(geometry, target, truncate=truncate),
        methods.yarn(geometry, target, truncate=truncate),
        methods.llama3(geometry, target / original_length, 1.0, 4.0),
    ):
        factors = np.array(regime.factors)
        assert len(factors) == num_pairs
        assert factors.min() >= 1
        assert factors.max() <= target / original_length * (1 + 1e-12)


def test_single_pair_keeps_its_frequency_under_ntk() -> None:
    assert methods.ntk(make_geometry(2), 8192).factors == (1.0,)
    assert methods.dynamic_ntk(make_geometry(2), 8192, 8192).factors == (1.0,)


def test_names_and_lengths() -> None:
    geometry = make_geometry(8, original_length=64)
    regimes = [
        methods.identity(geometry, 256),
        methods.linear(geometry, 256),
        methods.ntk(geometry, 256),
        methods.dynamic_ntk(geometry, 256, 128),
        methods.ntk_by_parts(geometry, 256),
        methods.yarn(geometry, 256),
        methods.longrope(geometry, 256, [1.0, 2.0, 3.0, 4.0]),
    ]
    names = ["unscaled", "linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "longrope"]
    assert [(regime.name, regime.max_length) for regime in regimes] == [(name, 256) for name in names]
    assert regimes[0].factors == (1.0,) * 4
    assert methods.longrope(geometry, 256, [1.0] * 4, retained_tokens=12).retained_tokens == 12


@pytest.mark.parametrize(
    ("rotary_dim", "original_length", "critical_pair", "critical_factor", "factor_left_of_it"),
    [
        pytest.param(128, 8192, 33, 21.81, 19.865, id="LongRoPE2's released Llama-3-8B table"),
        pytest.param(96, 4096, 31, 32.03, 28.641, id="LongRoPE2's Phi-4-mini table"),
    ],
)
def test_longrope2_curve_of_released_tables(
    rotary_dim: int, original_length: int, critical_pair: int, critical_factor: float, factor_left_of_it: float
) -> None:
    geometry = make_geometry(rotary_dim, 5e5, original_length)
    right = [critical_factor + step for step in range(geometry.num_pairs - critical_pair)]
    factors = methods.longrope2_curve(geometry, critical_pair, right)
    assert factors[critical_pair - 1] == pytest.approx(factor_left_of_it, abs=5e-4)
    assert factors[critical_pair:] == tuple(right)
    # The left side is one NTK curve: a single theta gives all of it.
    theta = geometry.rope_theta * critical_factor ** (geometry.num_pairs / critical_pair)
    expected = [theta ** (-2 * pair / rotary_dim) for pair in range(critical_pair)]
    np.testing.assert_allclose(inverse_frequencies(geometry, factors)[:critical_pair], expected, rtol=1e-12)


def test_longrope2_curve_from_the_first_pair() -> None:
    assert methods.longrope2_curve(make_geometry(8), 0, [2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("original_length", "target_length", "longrope", "yarn"),
    [
        pytest.param(8192, 131072, 1.1435, 1.2773, id="Llama-3-8B"),
        pytest.param(4096, 131072, 1.1902, 1.3466, id="Phi-4-mini"),
        pytest.param(2048, 131072, 1.2432, 1.4159, id="Phi-3-mini"),
        pytest.param(4096, 32768, 1.1180, 1.2079, id="Llama-2"),
    ],
)
def test_attention_factors_of_known_models(
    original_length: int, target_length: int, longrope: float, yarn: float
) -> None:
    ratio = target_length / original_length
    assert methods.attention_factor_formula("longrope", ratio, original_length) == pytest.approx(longrope, abs=5e-5)
    assert methods.attention_factor_formula("yarn", ratio, original_length) == pytest.approx(yarn, abs=5e-5)
    assert methods.attention_factor_formula("longrope", 1.0, original_length) == 1
    assert methods.attention_factor_formula("yarn", 0.5, original_length) == 1


def test_wrong_arguments_are_named() -> None:
    geometry = make_geometry(8, original_length=64)
    with pytest.raises(InputError, match="expected more than original_length = 64"):
        methods.yarn(geometry, 64)
    with pytest.raises(InputError, match="length: expected 1 to target_length = 256 tokens, got 257"):
        methods.dynamic_ntk(geometry, 256, 257)
    with pytest.raises(InputError, match="beta_fast = 1 and beta_slow = 2"):
        methods.yarn(geometry, 256, beta_fast=1, beta_slow=2)
    with pytest.raises(InputError, match="low_freq_factor = 4 and high_freq_factor = 4"):
        methods.llama3(geometry, 8, 4, 4)
    with pytest.raises(InputError, match=r"at least 1, got 0.5"):
        methods.llama3(geometry, 0.5, 1, 4)
    with pytest.raises(InputError, match="each of the 4 pairs, got 1"):
        methods.longrope(geometry, 256, [2.0])
    with pytest.raises(InputError, match="critical_pair: expected 0 to 3, got 4"):
        methods.longrope2_curve(geometry, 4, [])
    with pytest.raises(InputError, match="expected 2, one for each pair from 2 on, got 3"):
        methods.longrope2_curve(geometry, 2, [2.0, 3.0, 4.0])
    with pytest.raises(InputError, match="finite factors of at least 1"):
        methods.longrope2_curve(geometry, 2, [0.5, 3.0])
    with pytest.raises(InputError, match="expected 'longrope' or 'yarn', got 'su'"):
        methods.attention_factor_formula("su", 2.0, 64)
