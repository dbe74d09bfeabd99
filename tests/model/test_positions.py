"""What is said of models without rotary tables, and of layers that the factors do not reach."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ropesearch.errors import InputError
from ropesearch.model.config import ModelConfig
from ropesearch.model.load import load_model, read_geometry, read_layer_limits
from ropesearch.model.positions import layer_limits
from tests import tiny_models, walk

POSITIONS = {
    "gpt2": "learned absolute positions",
    "opt": "learned absolute positions",
    "biogpt": "learned absolute positions",
    "bloom": "ALiBi, a bias that grows with distance",
    "mpt": "ALiBi, a bias that grows with distance",
    "t5": "a relative position bias",
    "cpmant": "a relative position bias",
    "xlnet": "a relative position bias",
    "xglm": "sinusoidal absolute positions",
    "ctrl": "sinusoidal absolute positions",
    "mamba": "no position embeddings at all",
    "rwkv": "no position embeddings at all",
    "jamba": "no position embeddings at all",
    "nemotron_h": "no position embeddings at all",
}


@pytest.mark.parametrize("model_type", POSITIONS)
def test_models_without_rotation_are_named_for_what_they_are(model_type: str, tmp_path: Path) -> None:
    """From config.json alone: no weights lie there."""
    tiny_models.tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(InputError) as caught:
        read_geometry(tmp_path)
    assert f"{model_type} has {POSITIONS[model_type]}" in str(caught.value)
    assert "there is nothing to rescale" in str(caught.value)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_is_taken_by_its_config(alibi: bool, tmp_path: Path) -> None:
    tiny_models.tiny_config("falcon", alibi=alibi).save_pretrained(tmp_path)
    if alibi:
        with pytest.raises(InputError, match="falcon has ALiBi"):
            read_geometry(tmp_path)
    else:
        assert read_geometry(tmp_path).num_pairs == 8


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "roformer"])
def test_stored_tables_of_sines_are_refused(model_type: str, tmp_path: Path) -> None:
    tiny_models.tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{model_type} rotates by a stored table of sines"):
        read_geometry(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("deepseek_v4", r"expected one rotary table to rescale, got several that differ \(compress, main\)"),
        ("granite_swa", r"several that differ or serve parts of their own \(model.rotary_emb, model.rotary_embs.0\)"),
        ("gemma3", "expected a plain decoder, got a model of several parts"),
        ("llama4", "expected a plain decoder, got a model of several parts"),
        ("emu3", "transformers loads none of this type by AutoModelForCausalLM"),
    ],
)
def test_what_cannot_be_rescaled_is_refused_by_name(model_type: str, expected: str, tmp_path: Path) -> None:
    if model_type in ("gemma3", "llama4"):
        tiny_models.tiny_config(model_type).save_pretrained(tmp_path)
    else:
        tiny_models.tiny_model(tiny_models.tiny_config(model_type)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=expected):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def limits_of(model_type: str, **overrides: Any) -> tuple[str, ...]:
    return layer_limits(tiny_models.tiny_config(model_type, **overrides))


def test_windows_are_said_with_their_layers() -> None:
    assert limits_of("llama") == limits_of("qwen2") == limits_of("mistral", sliding_window=None) == ()
    assert limits_of("mistral", sliding_window=4096) == (
        "all layers attend to the last 4096 tokens only: they never see further, whatever the factors",
        "no layer both rotates and sees the whole sequence, so factors can change little",
    )
    assert limits_of("phi3", sliding_window=2047)[0].startswith("all layers attend to the last 2047 tokens only")
    assert limits_of("gemma2", sliding_window=100) == (
        "2 of 4 layers (0, 2) attend to the last 100 tokens only: they never see further, whatever the factors",
    )
    assert limits_of("gemma3_text", sliding_window=512) == (
        "3 of 4 layers (0, 1, 2) attend to the last 512 tokens only: they never see further, whatever the factors",
    )
    windowed = limits_of("qwen2", use_sliding_window=True, sliding_window=77, max_window_layers=1, layer_types=None)
    assert windowed == (
        "3 of 4 layers (1, 2, 3) attend to the last 77 tokens only: they never see further, whatever the factors",
    )


def test_layers_without_rotation_are_said() -> None:
    (limit,) = limits_of("smollm3")
    assert limit.startswith("1 of 4 layers (3) have no rotary embeddings: the factors do not reach them")
    assert limits_of("llama4_text")[1] == limit
    assert limits_of("cohere2")[1:] == (
        limit,
        "no layer both rotates and sees the whole sequence, so factors can change little",
    )


def test_limits_are_read_from_the_folder(tmp_path: Path) -> None:
    tiny_models.tiny_config("smollm3").save_pretrained(tmp_path)
    assert read_layer_limits(tmp_path) == limits_of("smollm3")


def rotating_layers(model: Any) -> list[int]:
    """The layers whose attention answers otherwise when its cos and sin are others."""
    calls: dict[int, Any] = {}
    layers = model.model.layers
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output, index=index: calls.update({index: (args, kwargs, output[0])}),
            with_kwargs=True,
        )
        for index, layer in enumerate(layers)
    ]
    walk.logits(model, 20)
    for hook in hooks:
        hook.remove()
    rotating = []
    for index, (args, kwargs, output) in calls.items():
        rows = kwargs["position_embeddings"]
        changed = None if rows is None else tuple(each.flip(1) for each in rows)
        with torch.no_grad():
            other = layers[index].self_attn(*args, **kwargs | {"position_embeddings": changed})[0]
        if not torch.equal(other, output):
            rotating.append(index)
    return rotating


@pytest.mark.parametrize(
    "model_type", ["afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "smollm3", "gemma2"]
)
def test_what_is_said_of_rotation_is_what_the_layers_do(model_type: str) -> None:
    if model_type not in tiny_models.causal_model_types():
        pytest.skip(f"this version of transformers has no {model_type}")
    config = tiny_models.tiny_config(model_type)
    model = tiny_models.tiny_model(config)
    said = {
        index
        for limit in layer_limits(config)
        if "no rotary" in limit
        for index in range(4)
        if str(index) in limit.partition(")")[0].partition("(")[2]
    }
    assert rotating_layers(model) == [index for index in range(4) if index not in said]
