"""Scaled checkpoints of families that are not built as Llama's: tables by layer type, partial rotation, other layouts.

The reference is what transformers makes of the same folder by itself, or of longrope with the same lists.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropesearch import cli
from ropesearch.artifact.load import load_unscaled, own_table, read_bound
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import check_expressible, verify
from ropesearch.errors import InputError
from ropesearch.model.config import DType
from ropesearch.model.install import installed, prove_installable, rotary_table
from ropesearch.model.load import LoadedModel, read_geometry, read_layer_limits
from ropesearch.model.rotary import find_tables, rescaled_tables
from tests import runs, tiny_models, toys, walk
from tests.model.test_own import LONG, ORIGINAL, ORIGINAL_LENGTH, SCALED, SHORT, TARGET_LENGTH
from tests.test_scaled import extended

LENGTHS = (20, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, TARGET_LENGTH)
HALF = {"rope_type": "longrope", "short_factor": SHORT[:4], "long_factor": LONG[:4], "factor": 4.0, **ORIGINAL}
SAME = SCALED["longrope"] | {"short_factor": LONG, "attention_factor": 1.3, "short_mscale": 1.3, "long_mscale": 1.3}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
}
# Name: model type, rope parameters of the layers that see the whole sequence, other keys of the config.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"gemma3-{name}": ("gemma3_text", parameters, {}) for name, parameters in SCALED.items()},
    "olmo3-yarn": ("olmo3", SCALED["yarn"], {}),
    "phi-longrope": ("phi", HALF | {"partial_rotary_factor": 0.5}, {}),
    "glm4-yarn": ("glm4", SCALED["yarn"] | {"partial_rotary_factor": 0.5}, {}),
    "gpt_neox-dynamic": ("gpt_neox", SCALED["dynamic"] | {"partial_rotary_factor": 0.5}, {}),
    "qwen2-windowed-yarn": ("qwen2", SCALED["yarn"], WINDOWED),
    "cohere-llama3": ("cohere", SCALED["llama3"], {}),
    "gpt_oss-yarn": ("gpt_oss", SCALED["yarn"] | {"truncate": False}, {}),
    "llama4-llama3": ("llama4_text", SCALED["llama3"], {}),
    "deepseek_v3-yarn": ("deepseek_v3", SCALED["yarn"], {}),
    "moshi-dynamic": ("moshi", SCALED["dynamic"], {}),  # a module in each layer
    "phimoe-longrope": ("phimoe", SAME, ORIGINAL),
}


def write(folder: Path, model_type: str, scaling: dict[str, Any], other: dict[str, Any]) -> Path:
    """A tiny model of the type; `scaling` is given to its full attention alone where tables are by layer type."""
    # The dynamic type measures growth from max_position_embeddings.
    longest = ORIGINAL_LENGTH if scaling["rope_type"] == "dynamic" else TARGET_LENGTH
    parameters: dict[str, Any] = {"rope_theta": 10000.0} | scaling
    if model_type in ("gemma3_text", "olmo3"):
        windowed = {"rope_type": "default", "rope_theta": 500.0}
        parameters = {"full_attention": parameters, "sliding_attention": windowed}
    return tiny_models.write_tiny_model(
        folder, model_type, max_position_embeddings=longest, rope_parameters=parameters, **other
    )


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("scaled") / request.param, *CASES[request.param])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return walk.load(folder)


def fresh(folder: Path, attention: str) -> Any:
    """The folder as transformers loads it; a dynamic model remembers what it has read, so each length gets its own."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def test_unscaled_is_what_transformers_loads_bit_for_bit(folder: Path, loaded: LoadedModel) -> None:
    assert loaded.own.is_scaled
    for length in LENGTHS:
        with installed(loaded, loaded.own.regime_at(length)):
            inside = walk.logits(loaded.model, length)
        assert torch.equal(inside, walk.logits(fresh(folder, loaded.attention), length))


# PhiMoE's attention factor is that of its config: see test_a_family_whose_forward_pass_multiplies_by_config_is_refused.
exchangeable = pytest.mark.parametrize("folder", [name for name in CASES if name != "phimoe-longrope"], indirect=True)


@exchangeable
def test_a_regime_replaces_the_scaling_and_leaves_no_trace(loaded: LoadedModel) -> None:
    """Against transformers' longrope model of the same weights."""
    tables = rescaled_tables(find_tables(loaded.model, "any"), "any")
    before = [(each.inv_freq, each.inv_freq.clone(), each.attention_factor, each.module.rope_type) for each in tables]
    prove_installable(loaded)
    regime = walk.searched(loaded.geometry)
    reference = walk.longrope_model(loaded, regime)
    with installed(loaded, regime):
        for length in (TARGET_LENGTH, *LENGTHS):
            assert relative(walk.logits(loaded.model, length), walk.logits(reference, length)) < 1e-5
        for table in tables:
            assert torch.equal(table.inv_freq, rotary_table(loaded.geometry, regime))
    for table, (tensor, values, attention_factor, rope_type) in zip(tables, before, strict=True):
        assert table.inv_freq is tensor and torch.equal(tensor, values)
        assert table.attention_factor == attention_factor
        assert table.module.rope_type is rope_type and not table.module._forward_hooks


@exchangeable
def test_retained_tokens_see_the_own_table_of_the_greatest_length(folder: Path, loaded: LoadedModel) -> None:
    length = walk.TARGET_LENGTH
    own = walk.logits(fresh(folder, loaded.attention), length)
    with installed(loaded, walk.searched(loaded.geometry, retained_tokens=walk.RETAINED_TOKENS)):
        inside = walk.logits(loaded.model, length)
    moved = (inside - own).abs().amax(dim=(0, 2))
    assert float(moved[: walk.RETAINED_TOKENS].max()) < 1e-4 < float(moved[walk.RETAINED_TOKENS :].max())


@pytest.mark.parametrize("retained_tokens", [0, walk.RETAINED_TOKENS])
def test_a_written_folder_gives_the_own_table_back_and_verifies(
    folder: Path, loaded: LoadedModel, retained_tokens: int, tmp_path: Path
) -> None:
    regime = walk.searched(loaded.geometry, retained_tokens)
    if loaded.geometry.model_type == "phimoe":
        regime = dataclasses.replace(regime, attention_factor=1.3)
    check_expressible(folder, loaded.geometry, TARGET_LENGTH)
    written = extended(folder, tmp_path / "extended", regime)
    rope_config = read_bound(written)
    assert own_table(written, rope_config).to_json() == loaded.own.to_json()
    again = load_unscaled(written, rope_config, device="cpu", dtype=DType.float32)
    with installed(again, again.own.regime_at(TARGET_LENGTH)):
        found = walk.logits(again.model, TARGET_LENGTH)
    assert torch.equal(found, walk.logits(fresh(folder, loaded.attention), TARGET_LENGTH))
    assert [finding.message for finding in verify(written, device="cpu") if not finding.ok] == []


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3"])
def test_the_older_words_of_a_config_mean_the_same(model_type: str, tmp_path: Path) -> None:
    """As Gemma 3 of 4B and more is published: rope_scaling beside rope_theta, for full attention alone."""
    scaling = SCALED["linear" if model_type == "gemma3_text" else "yarn"]
    source = write(tmp_path / "new", model_type, scaling, {})
    config = json.loads((source / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config |= {"rope_scaling": scaling, "rope_theta": 10000.0}
    if model_type == "gemma3_text":
        config["rope_local_base_freq"] = 500.0
    else:  # OLMo 3's config class gives windowed layers its default
        parameters["sliding_attention"]["rope_theta"] = 500000.0
        toys.edit_config(source, {"rope_parameters": parameters})
    (source / "older").mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json":
            (source / "older" / path.name).symlink_to(path)
    (source / "older" / "config.json").write_text(json.dumps(config))
    new, older = walk.load(source), walk.load(source / "older")
    assert new.geometry == older.geometry
    assert older.own.regime_at(TARGET_LENGTH) == new.own.regime_at(TARGET_LENGTH)
    assert older.own.rope_type == scaling["rope_type"]
    regime = walk.searched(older.geometry, walk.RETAINED_TOKENS)
    written = extended(source / "older", tmp_path / "extended", regime)
    assert [finding.message for finding in verify(written, device="cpu") if not finding.ok] == []
    portable = extended(source / "older", tmp_path / "portable", dataclasses.replace(regime, retained_tokens=0))
    assert [finding.message for finding in verify(portable, device="cpu") if not finding.ok] == []


def test_a_search_of_a_scaled_gemma_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own table is a baseline and a seed; what is written verifies and says what full attention came with."""
    model, run = write(tmp_path / "toy", "gemma3_text", SCALED["linear"], {}), tmp_path / "run"
    corpus = runs.write_corpus(tmp_path / "texts")
    words = [*runs.search_words(model, corpus, run, num_trials=8), f"model.original_length={ORIGINAL_LENGTH}"]
    assert cli.main(words) == 0
    assert "layers (0, 1, 2" in capsys.readouterr().err  # which attend to a window only
    trials = runs.trials_of(run)
    assert [trial[4] for trial in trials[:4]] == ["unscaled", "linear", "ntk", "yarn"]
    assert trials[0][5]["factors"] == [3.0] * 8
    own = own_table(run / "checkpoint", RopeConfig.read(run)).to_json()["rope_parameters"]
    assert own["full_attention"] == SCALED["linear"] | {"rope_theta": 10000.0}
    assert own["sliding_attention"]["rope_theta"] == 500.0
    assert cli.main(["verify", str(run)]) == 0
    capsys.readouterr()
    splits = [f"corpus.num_{split}_windows=3" for split in ("search", "selection", "held_out")]
    assert cli.main(["evaluate", str(run), f"corpus.path={corpus}", "cache=null", *splits, "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["evaluation"]}
    assert rows.keys() >= {"unscaled", "linear", "ntk", "yarn"}


def refused(folder: Path, original_length: int | None = ORIGINAL_LENGTH) -> str:
    with pytest.raises(InputError) as caught:
        read_geometry(folder, original_length)
    return str(caught.value)


def test_scaling_of_one_layer_type_needs_original_length(tmp_path: Path) -> None:
    folder = write(tmp_path / "toy", "gemma3_text", SCALED["llama3"], {})
    message = refused(folder, None)
    assert "model.original_length" in message and "rope_type 'llama3'" in message
    assert f"original_max_position_embeddings = {ORIGINAL_LENGTH}, which may be it" in message


def test_what_scales_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    """Each of these would be served wrongly, or cannot be put into one table."""
    gemma = write(tmp_path / "gemma", "gemma3_text", SCALED["linear"], {})
    config = json.loads((gemma / "config.json").read_text())
    config["rope_parameters"]["sliding_attention"] |= SCALED["linear"]
    (gemma / "config.json").write_text(json.dumps(config))
    expected = "expected the plain table for windowed layers, got rope_type 'linear' for sliding_attention"
    assert expected in refused(gemma)
    deepseek = write(tmp_path / "deepseek", "deepseek_v3", SCALED["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0}, {})
    assert "'deepseek_v3', rope_type 'yarn'" in (message := refused(deepseek)) and "mscale_all_dim" in message
    # It answers with the first list at every length, whatever table it holds.
    phimoe = write(tmp_path / "phimoe", "phimoe", SAME | {"short_factor": SHORT}, ORIGINAL)
    assert "table for 33 tokens is not what transformers computes" in refused(phimoe)
    # HunYuan makes another theta of alpha.
    hunyuan = write(tmp_path / "hunyuan", "hunyuan_v1_dense", SCALED["dynamic"] | {"alpha": 50.0}, {})
    assert "is not what transformers computes from config.json" in refused(hunyuan)


def test_a_family_whose_forward_pass_multiplies_by_config_is_refused(tmp_path: Path) -> None:
    """PhiMoE multiplies by short_mscale and long_mscale of its config, so another attention factor has no effect."""
    loaded = walk.load(write(tmp_path / "toy", *CASES["phimoe-longrope"]))
    with pytest.raises(InputError, match=r"'phimoe'.* does not answer with the cos and sin of the installed regime"):
        prove_installable(loaded)


def test_a_scaled_model_that_transformers_cannot_run_is_refused(tmp_path: Path) -> None:
    """Qwen2 rotates whole heads, and its scaled tables are shortened by partial_rotary_factor all the same."""
    scaling = SCALED["yarn"] | {"partial_rotary_factor": 0.5}
    loaded = walk.load(write(tmp_path / "toy", "qwen2", scaling, {}))
    with pytest.raises(InputError, match=r"'qwen2': transformers cannot run the model that config.json describes"):
        prove_installable(loaded)


def test_layers_that_see_a_window_are_named_where_the_table_is_scaled(tmp_path: Path) -> None:
    folder = write(tmp_path / "toy", *CASES["qwen2-windowed-yarn"])
    assert any("2 of 4 layers (2, 3) attend to" in limit for limit in read_layer_limits(folder))
