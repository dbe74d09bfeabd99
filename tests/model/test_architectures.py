"""Families of every build against transformers' own longrope models of the same weights: see tests/walk.py."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ropesearch.artifact.config_json import described_regimes, older_loaders
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.errors import InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, rotary_table
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.model.rotary import find_tables
from ropesearch.rope.geometry import LayerRope
from ropesearch.rope.regime import Regime
from tests import runs, tiny_models, walk
from tests.artifact import examples

# Model type: layout of cos and sin, number of pairs, channels of a head.
NAMED = {
    "llama": ("halves", 8, 16),
    "mistral": ("halves", 8, 16),
    "mixtral": ("halves", 8, 16),  # head_dim is None in its default config
    "qwen2": ("halves", 8, 16),
    "qwen3": ("halves", 8, 16),
    "phi": ("halves", 4, 16),  # half of a head rotates
    "phi3": ("halves", 8, 16),
    "gemma2": ("halves", 8, 16),
    "gemma3_text": ("halves", 8, 16),  # tables by layer type
    "olmo2": ("halves", 8, 16),
    "olmo3": ("halves", 8, 16),  # tables by layer type
    "gpt_neox": ("halves", 4, 16),
    "stablelm": ("halves", 2, 16),
    "cohere": ("neighbours", 8, 16),
    "glm4": ("halves", 4, 16),
    "granite": ("halves", 8, 16),
    "smollm3": ("halves", 8, 16),  # one layer in four does not rotate
    "starcoder2": ("halves", 8, 16),
    "falcon": ("halves", 8, 16),
    "nemotron": ("halves", 4, 16),
    "gpt_oss": ("single", 8, 16),
    "deepseek_v2": ("single", 4, 8),  # complex numbers; only the decoupled channels rotate
    "deepseek_v3": ("halves", 4, 8),
    "qwen3_next": ("halves", 2, 16),
    "llama4_text": ("single", 8, 16),  # complex numbers
    "moshi": ("halves", 8, 16),  # one module in each layer
    "phimoe": ("halves", 8, 16),  # the table is made anew in every forward pass
}


@pytest.mark.parametrize("model_type", NAMED)
def test_works_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """Logits below and across original_length, retained tokens, and the written folder loaded by transformers alone."""
    row = walk.walk(model_type, tmp_path)
    assert (row.state, row.reason) == (walk.WORKS, "")
    assert row.difference <= 1e-5 and row.change > 1e-3
    assert row.reference == "longrope of transformers"
    assert (row.layout, row.num_pairs) == NAMED[model_type][:2]
    assert row.layer_types == (("full_attention",) if model_type in ("gemma3_text", "olmo3") else ())


def tiny(folder: Path, model_type: str, **overrides: Any) -> LoadedModel:
    return walk.load(tiny_models.write_tiny_model(folder / "source", model_type, **overrides))


@pytest.mark.parametrize("model_type", ["mixtral", "stablelm", "glm4", "deepseek_v3", "phi3"])
def test_geometry_is_that_of_the_built_module(model_type: str, tmp_path: Path) -> None:
    geometry = tiny(tmp_path, model_type).geometry
    _, num_pairs, head_dim = NAMED[model_type]
    assert (geometry.num_pairs, geometry.head_dim, geometry.layer_types) == (num_pairs, head_dim, None)


def test_only_full_attention_is_rescaled(tmp_path: Path) -> None:
    loaded = tiny(tmp_path, "gemma3_text")
    assert loaded.geometry.rope_theta == 1e6
    assert loaded.geometry.layer_types == {
        "full_attention": LayerRope(rope_theta=1e6, rescaled=True),
        "sliding_attention": LayerRope(rope_theta=1e4, rescaled=False),
    }
    rotary = loaded.model.model.rotary_emb
    regime = walk.searched(loaded.geometry, retained_tokens=3)
    before = (rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq, rotary.rope_type)
    positions = torch.arange(40)[None]
    plain = {name: rotary(torch.zeros(1), positions, layer_type=name) for name in loaded.geometry.layer_types}
    with installed(loaded, regime):
        assert torch.equal(rotary.full_attention_inv_freq, rotary_table(loaded.geometry, regime))
        assert rotary.full_attention_attention_scaling == 1.17
        assert rotary.sliding_attention_attention_scaling == 1.0
        rows = {name: rotary(torch.zeros(1), positions, layer_type=name) for name in loaded.geometry.layer_types}
    for index in (0, 1):
        assert torch.equal(rows["sliding_attention"][index], plain["sliding_attention"][index])
        changed = (rows["full_attention"][index] != plain["full_attention"][index]).any(dim=-1)[0]
        assert changed.tolist() == [False] * 3 + [True] * 37
    after = (rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq, rotary.rope_type)
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_different_tables_of_full_attention_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "toy", "gemma3_text")
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention", "sliding_attention"]
    config["rope_parameters"]["linear_attention"] = {"rope_type": "default", "rope_theta": 5.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"got several that differ \(full_attention, linear_attention\)"):
        walk.load(folder)


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "cohere", "gpt_oss", "llama4_text", "moshi", "phimoe", "deepseek_v3"]
)
def test_leaving_restores_every_attribute_also_after_exceptions(model_type: str, tmp_path: Path) -> None:
    loaded = tiny(tmp_path, model_type)
    tables = find_tables(loaded.model, model_type)
    before = [(vars(table.module).copy(), table.values(), table.inv_freq.clone()) for table in tables]
    unscaled = walk.logits(loaded.model, 40)
    with contextlib.suppress(KeyboardInterrupt), installed(loaded, walk.searched(loaded.geometry, retained_tokens=2)):
        assert not torch.equal(walk.logits(loaded.model, 40), unscaled)
        raise KeyboardInterrupt
    for table, (attributes, values, copied) in zip(tables, before, strict=True):
        assert vars(table.module).keys() == attributes.keys()
        assert all(table.values()[name] is value for name, value in values.items())
        assert torch.equal(table.inv_freq, copied)
        assert not table.module._forward_hooks
    assert torch.equal(walk.logits(loaded.model, 40), unscaled)


@pytest.mark.parametrize("model_type", ["cohere", "gpt_oss", "gemma2", "olmo3", "falcon"])
def test_half_precision_keeps_float32_tables(model_type: str, tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "source", model_type)
    loaded = load_model(ModelConfig(path=str(folder), dtype=DType.bfloat16, device="cpu"))
    regime = walk.searched(loaded.geometry)
    assert {table.inv_freq.dtype for table in find_tables(loaded.model, model_type)} == {torch.float32}
    with installed(loaded, regime):
        inside = [table.inv_freq for table in find_tables(loaded.model, model_type)]
        assert any(torch.equal(table, rotary_table(loaded.geometry, regime)) for table in inside)


def test_attention_is_eager_where_there_is_no_sdpa(tmp_path: Path) -> None:
    assert tiny(tmp_path / "oss", "gpt_oss").attention == "eager"
    assert tiny(tmp_path / "llama", "llama").attention == "sdpa"


def test_generation_from_the_written_folder_crosses_the_original_length(tmp_path: Path) -> None:
    """Tables by layer type, half-rotated heads and neighbouring pairs, with a cache, token by token."""
    for model_type in ("gemma3_text", "phi", "cohere"):
        loaded = tiny(tmp_path / model_type, model_type)
        source = tmp_path / model_type / "source"
        rope_config = examples.rope_config(
            target_length=walk.TARGET_LENGTH,
            geometry=loaded.geometry,
            regimes=(walk.searched(loaded.geometry),),
            checkpoint=checkpoint_binding(source),
        )
        write_checkpoint_folder(source, tmp_path / model_type / "out", rope_config)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / model_type / "out", dtype=torch.float32).eval()
        prompt = torch.randint(2, 250, (1, 28), generator=torch.Generator().manual_seed(0))
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=12, max_new_tokens=12, do_sample=False,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        with torch.no_grad():
            whole = model(input_ids=answer.sequences, use_cache=False).logits[0, 27:-1]
        torch.testing.assert_close(torch.cat(answer.logits), whole, rtol=1e-4, atol=1e-4)


@contextlib.contextmanager
def not_installed(loaded: LoadedModel, regime: Regime) -> Iterator[None]:
    yield


@contextlib.contextmanager
def installed_backwards(loaded: LoadedModel, regime: Regime) -> Iterator[None]:
    with installed(loaded, dataclasses.replace(regime, factors=tuple(reversed(regime.factors)))):
        yield


@pytest.mark.parametrize("fault", [not_installed, installed_backwards])
def test_the_walk_sees_a_wrong_regime(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "installed", fault)
    row = walk.walk("llama", tmp_path)
    assert row.state == walk.WRONG
    assert "logits differ by" in row.reason


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def test_the_recorded_walk_has_no_wrong_row() -> None:
    states = [row["state"] for row in recorded()["rows"]]
    assert set(states) == {walk.WORKS, walk.REFUSED, walk.NOT_BUILT}
    assert states.count(walk.WORKS) >= 100
    assert {row["model_type"] for row in recorded()["rows"] if row["state"] == walk.WORKS} >= {*NAMED}
    assert all(row["reason"] for row in recorded()["rows"] if row["state"] != walk.WORKS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_causal_model_of_transformers(tmp_path: Path) -> None:
    """Whatever the version: nothing wrong, no crash. On the recorded version: what was recorded."""
    rows = walk.walk_all(tmp_path)
    assert not [row for row in rows if row.state == walk.WRONG]
    assert walk.counts(rows)[walk.WORKS] >= 100
    if transformers.__version__ == recorded()["transformers"]:
        assert [walk.to_json(row) for row in rows] == recorded()["rows"]


OLDER = runs.other_transformers("4.57.6")
IN_OLDER_TRANSFORMERS = """
import sys
import numpy as np, torch, transformers
assert transformers.__version__.startswith("4.57."), transformers.__version__
root, tokens = sys.argv[1:3]
ids = torch.from_numpy(np.load(tokens))
for name in sys.argv[3:]:
    folder = f"{root}/{name}"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            for length in (20, 60):
                logits = model(input_ids=ids[:, :length], use_cache=False).logits
                np.save(f"{folder}/logits-{length}.npy", logits.numpy())
    except Exception as error:
        open(f"{folder}/error.txt", "w").write(f"{type(error).__name__}: {error}")
"""
# As `older_loaders` says: config classes that refuse the written rope_scaling, and a model that has none.
REFUSED_BY_OLDER = ("phi3", "olmo2")
UNSCALED_BY_OLDER = ("nemotron",)
# Not among the model types of transformers 4.57, or, like Moshi, without scaling there.
UNKNOWN_TO_OLDER = ("llama4_text", "moshi")


@pytest.mark.slow
@pytest.mark.skipif(OLDER is None, reason=f"{runs.OTHER_TRANSFORMERS} names no folder with transformers 4.57.6")
def test_transformers_4_57_serves_the_same_where_it_can(tmp_path: Path) -> None:
    """One regime at all lengths, and two, of which the short one has the long one's attention factor there."""
    expected = {}
    tokens = np.random.default_rng(1).integers(2, 240, size=(1, 60))
    np.save(tmp_path / "tokens.npy", tokens)
    model_types = [name for name in NAMED if name not in UNKNOWN_TO_OLDER]
    for model_type in model_types:
        loaded = tiny(tmp_path / model_type, model_type)
        geometry, source, long = loaded.geometry, tmp_path / model_type / "source", walk.searched(loaded.geometry)
        short = Regime(name="short", max_length=geometry.original_length, factors=(1.0,) * geometry.num_pairs)
        for name, regimes in (("one", (long,)), ("two", (short, long))):
            rope_config = examples.rope_config(
                target_length=walk.TARGET_LENGTH,
                geometry=geometry,
                regimes=regimes,
                checkpoint=checkpoint_binding(source),
            )
            place = tmp_path / model_type / name
            write_checkpoint_folder(source, place, rope_config, allow_unportable=len(regimes) > 1)
            for length in (20, 60):
                regime = rope_config.regime_for(length)
                if described_regimes(rope_config.checkpoint.config, rope_config) is None:
                    regime = loaded.own.regime_at(length)
                else:
                    regime = dataclasses.replace(regime, attention_factor=long.attention_factor)
                with installed(loaded, regime), torch.no_grad():
                    ids = torch.from_numpy(tokens[:, :length])
                    logits = loaded.model(input_ids=ids, use_cache=False).logits.numpy()
                expected[f"{model_type}/{name}", length] = logits
        assert (older_loaders(geometry) is None) == (model_type not in REFUSED_BY_OLDER + UNSCALED_BY_OLDER)
    names = list(dict.fromkeys(name for name, _ in expected))
    subprocess.run(
        [sys.executable, "-c", IN_OLDER_TRANSFORMERS, tmp_path, tmp_path / "tokens.npy", *names],
        env=os.environ | {"PYTHONPATH": str(OLDER)},
        check=True,
        cwd=tmp_path,
    )
    wrong = []
    for name, length in expected:
        model_type = name.partition("/")[0]
        error = tmp_path / name / "error.txt"
        if model_type in REFUSED_BY_OLDER:
            assert "rope_scaling" in error.read_text()
        elif error.exists():
            wrong.append(f"{name}: {error.read_text()[:200]}")
        else:
            difference = np.abs(np.load(tmp_path / name / f"logits-{length}.npy") - expected[name, length]).max()
            same = difference <= 1e-4 * max(1.0, np.abs(expected[name, length]).max())
            if same == (model_type in UNSCALED_BY_OLDER):
                wrong.append(f"{name} at {length} tokens: logits differ by {difference}")
    assert not wrong
