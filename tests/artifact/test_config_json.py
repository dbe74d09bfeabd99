import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.artifact.config_json import (
    described_regimes,
    extended_config,
    extended_tokenizer_config,
    older_loaders,
)
from ropesearch.errors import InputError
from ropesearch.rope.geometry import LayerRope
from ropesearch.rope.regime import Regime
from tests.artifact import examples

SOURCE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "head_dim": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
    "unknown_key": [1, 2],
}
FACTORS = [1.0, 1.01, 1.37, 2.0, 2.93, 3.6, 4.4, 4.81]


def test_both_schemas_say_the_same_table() -> None:
    config = examples.rope_config()
    table = {
        "rope_type": "longrope",
        "type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "attention_factor": 1.137,
        "short_mscale": 1.137,
        "long_mscale": 1.137,
    }
    assert extended_config(SOURCE, config) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 256,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": table,
        "rope_parameters": table,
        "torch_dtype": "float32",
        "unknown_key": [1, 2],
        "rope_config_fingerprint": config.fingerprint,
    }


@pytest.mark.parametrize("regimes", [(examples.REGIME,), examples.TWO])
def test_writing_it_twice_changes_nothing(regimes: tuple[Regime, ...]) -> None:
    once = extended_config(SOURCE, examples.rope_config(regimes=regimes))
    assert extended_config(once, examples.rope_config(regimes=regimes)) == once


def test_two_regimes_are_two_lists_with_the_threshold_where_every_loader_looks() -> None:
    short = dataclasses.replace(examples.SHORT, max_length=100, factors=(1.0,) * 7 + (1.5,), attention_factor=1.02)
    config = examples.rope_config(regimes=(short, examples.LONG))
    extended = extended_config(SOURCE, config)
    assert extended["rope_parameters"] == extended["rope_scaling"]
    assert extended["rope_scaling"] == {
        "rope_type": "longrope",
        "type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 100,
        "short_factor": [1.0] * 7 + [1.5],
        "long_factor": FACTORS,
        "attention_factor": 1.137,
        "short_mscale": 1.02,
        "long_mscale": 1.137,
    }
    assert extended["original_max_position_embeddings"] == 100
    assert extended["max_position_embeddings"] == 256
    assert extended["rope_config_fingerprint"] == config.fingerprint


def test_regimes_that_no_config_json_can_hold_leave_it_alone() -> None:
    middle = dataclasses.replace(examples.LONG, name="middle", max_length=128)
    retained = dataclasses.replace(examples.LONG, retained_tokens=4)
    for regimes in ((examples.SHORT, middle, examples.LONG), (examples.SHORT, retained)):
        config = examples.rope_config(regimes=regimes)
        assert described_regimes(SOURCE, config) is None
        assert extended_config(SOURCE, config) == {**SOURCE, "rope_config_fingerprint": config.fingerprint}
    phimoe = examples.rope_config(geometry=examples.toy_geometry("phimoe"), regimes=examples.TWO)
    assert described_regimes({"model_type": "phimoe"}, phimoe) is None
    assert described_regimes(SOURCE, examples.rope_config(regimes=examples.TWO)) == examples.TWO


@pytest.mark.parametrize(("bound", "is_described"), [(64, True), (32, False)])
def test_a_scale_of_queries_by_position_keeps_its_own_length(bound: int, is_described: bool) -> None:
    """Ministral 3 reads original_max_position_embeddings for that too."""
    own = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": bound}
    source = {**SOURCE, "rope_parameters": own}
    config = examples.rope_config(regimes=examples.TWO)
    assert (described_regimes(source, config) == examples.TWO) == is_described
    one = extended_config(source, examples.rope_config())
    assert one["rope_parameters"]["original_max_position_embeddings"] == bound


def test_two_regimes_by_layer_type_have_a_threshold_that_counts() -> None:
    geometry = dataclasses.replace(examples.toy_geometry("gemma3_text"), layer_types=LAYER_TYPES)
    config = examples.rope_config(geometry=geometry, regimes=examples.TWO)
    table = extended_config({"model_type": "gemma3_text"}, config)["rope_parameters"]["full_attention"]
    assert (table["short_factor"], table["long_factor"]) == ([1.0] * 8, FACTORS)
    assert table["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("model_type", "source"), [("phi3", {}), ("llama", {"original_max_position_embeddings": 4096})]
)
def test_the_top_level_original_length_is_written_only_where_it_would_win(
    model_type: str, source: dict[str, Any]
) -> None:
    config = examples.rope_config(geometry=examples.toy_geometry(model_type))
    extended = extended_config({"model_type": model_type, **source}, config)
    assert extended["original_max_position_embeddings"] == 64
    assert "original_max_position_embeddings" not in extended_config(SOURCE, examples.rope_config())


def test_partial_rotation_is_said_in_both_schemas() -> None:
    geometry = dataclasses.replace(examples.toy_geometry(), head_dim=64)
    extended = extended_config(SOURCE, examples.rope_config(geometry=geometry))
    assert extended["head_dim"] == 64
    for place in (extended, extended["rope_parameters"], extended["rope_scaling"]):
        assert place["partial_rotary_factor"] == 0.25


def test_what_cannot_be_expressed_leaves_the_model_unscaled() -> None:
    regime = dataclasses.replace(examples.REGIME, retained_tokens=4)
    config = examples.rope_config(regimes=(regime,))
    assert extended_config(SOURCE, config) == {**SOURCE, "rope_config_fingerprint": config.fingerprint}


def test_other_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected model_type 'llama', as in rope_config.json, got 'qwen2'"):
        extended_config({**SOURCE, "model_type": "qwen2"}, examples.rope_config())


LAYER_TYPES = {
    "full_attention": LayerRope(rope_theta=10000.0, rescaled=True),
    "sliding_attention": LayerRope(rope_theta=500.0, rescaled=False),
}


@pytest.mark.parametrize(
    ("model_type", "has_scaling", "has_local_theta"),
    [("gemma3_text", True, True), ("olmo3", True, False), ("laguna", False, False)],
)
def test_only_the_rescaled_layer_types_get_the_regime(
    model_type: str, has_scaling: bool, has_local_theta: bool
) -> None:
    geometry = dataclasses.replace(examples.toy_geometry(model_type), layer_types=LAYER_TYPES)
    own = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    parameters = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}, "sliding_attention": own}
    extended = extended_config(
        {"model_type": model_type, "rope_parameters": parameters}, examples.rope_config(geometry=geometry)
    )
    table = extended["rope_parameters"]["full_attention"]
    assert (table["rope_type"], table["long_factor"], table["rope_theta"]) == ("longrope", FACTORS, 10000.0)
    assert table["original_max_position_embeddings"] == 256  # the target: see extended_config
    assert extended["rope_parameters"] == {"full_attention": table, "sliding_attention": own}
    assert extended.get("rope_scaling") == (table if has_scaling else None)
    assert extended["rope_theta"] == 10000.0
    assert extended.get("rope_local_base_freq") == (500.0 if has_local_theta else None)
    assert (older_loaders(geometry) is None) == has_scaling


def test_names_of_their_own_for_partial_rotation_and_theta() -> None:
    geometry = dataclasses.replace(examples.toy_geometry("gpt_neox"), head_dim=64, rope_theta=2e4)
    extended = extended_config({"model_type": "gpt_neox"}, examples.rope_config(geometry=geometry))
    assert (extended["rotary_pct"], extended["rotary_emb_base"], extended["rope_theta"]) == (0.25, 2e4, 2e4)
    assert extended["rope_scaling"]["partial_rotary_factor"] == 0.25
    falcon = extended_config({"model_type": "falcon"}, examples.rope_config(geometry=examples.toy_geometry("falcon")))
    assert "head_dim" not in falcon


def test_a_partial_factor_that_the_unscaled_table_ignores_is_overruled() -> None:
    """Llama's default table has head_dim / 2 pairs whatever partial_rotary_factor is; its longrope table has not."""
    source = {**SOURCE, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    extended = extended_config(source, examples.rope_config())
    for place in (extended, extended["rope_parameters"], extended["rope_scaling"]):
        assert place["partial_rotary_factor"] == 1.0


@given(st.integers(1, 512).flatmap(lambda pairs: st.tuples(st.just(pairs), st.integers(2 * pairs, 1024))))
def test_the_partial_factor_gives_back_the_rotated_channels(sizes: tuple[int, int]) -> None:
    num_pairs, head_dim = sizes
    geometry = dataclasses.replace(examples.toy_geometry(), head_dim=head_dim, rotary_dim=2 * num_pairs)
    regime = dataclasses.replace(examples.REGIME, factors=(1.0,) * num_pairs)
    config = examples.rope_config(geometry=geometry, regimes=(regime,))
    factor = extended_config({**SOURCE, "partial_rotary_factor": 1.0}, config)["partial_rotary_factor"]
    assert int(head_dim * factor) == 2 * num_pairs


@pytest.mark.parametrize(
    ("limit", "expected"), [(64, 256), (256, 256), (300, 300), (1e30, 1e30), (None, None), ("64", "64")]
)
def test_the_tokenizer_limit_is_only_raised(limit: Any, expected: Any) -> None:
    source = {"clean": False, "model_max_length": limit}
    assert extended_tokenizer_config(source, 256) == {"clean": False, "model_max_length": expected}
    assert extended_tokenizer_config({}, 256) == {}
