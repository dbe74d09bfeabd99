"""What `loader_limits` says of plain transformers is what plain transformers does, this version and others."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import verify
from ropesearch.errors import InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, rotary_table
from ropesearch.model.load import load_model
from ropesearch.rope.regime import Regime
from tests import runs, tiny_models, toys, walk
from tests.artifact import crossing, examples

TOKENS = np.random.default_rng(5).integers(2, toys.VOCABULARY_TOKENS, size=256)
# Of a pass that ends with the token of this place among the new ones, the table is the long one.
FIRST_LONG = toys.ORIGINAL_LENGTH + 1 - crossing.PROMPT_TOKENS
# What plain transformers has in force for short sequences: the short table, and the one attention factor.
SERVED_SHORT = dataclasses.replace(examples.SHORT, attention_factor=1.137)
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "phi3"]
VERSIONS = {"4.57.6": ARCHITECTURES[:-1], "5.16.1": ARCHITECTURES}  # 4.57 cannot load this config.json of phi3


def logits_under(source: Path, regime: Regime, length: int) -> Any:
    loaded = load_model(ModelConfig(path=str(source), dtype=DType.float32, device="cpu"))
    with torch.no_grad(), installed(loaded, regime, as_shipped=True):
        return loaded.model(input_ids=torch.from_numpy(TOKENS)[None, :length], use_cache=False).logits[0].numpy()


def greatest(first: Any, second: Any) -> float:
    return float(np.abs(first - second).max())


def check(found: dict[str, Any], source: Path, architecture: str, version: str, tolerance: float) -> None:
    """That `found`, from `crossing.measured`, is what is said of two regimes in plain transformers of this version."""
    geometry = examples.toy_geometry(architecture)
    for length, regime in ((1, SERVED_SHORT), (64, SERVED_SHORT), (65, examples.LONG), (256, examples.LONG)):
        assert np.array_equal(found[f"table_{length}"], rotary_table(geometry, regime).numpy())
        assert found[f"attention_factor_{length}"] == 1.137  # one for all lengths, the long one's
        assert greatest(found[f"logits_{length}"], logits_under(source, regime, length)) <= tolerance
    assert greatest(found["logits_64"], logits_under(source, examples.SHORT, 64)) > 0.05

    for way in ("looped", "generated"):
        difference = np.abs(found[way] - found["whole"]).max(axis=-1)
        assert difference[:FIRST_LONG].max() <= tolerance
        if way == "generated" and architecture == "phi3" and version != "5.16.1":
            assert difference.max() <= tolerance
        else:
            assert difference[FIRST_LONG:].min() > 0.05
    assert greatest(found["batched"], logits_under(source, examples.LONG, 20)) <= tolerance
    assert greatest(found["batched"], logits_under(source, SERVED_SHORT, 20)) > 0.05


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_regimes_in_plain_transformers(tmp_path: Path, architecture: str) -> None:
    folder = examples.write_example(tmp_path, architecture, regimes=examples.TWO)
    check(crossing.measured(str(folder), TOKENS), tmp_path / "source", architecture, transformers.__version__, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_two_regimes_in_other_versions_of_transformers(tmp_path: Path, version: str) -> None:
    library = runs.other_transformers(version)
    if library is None:
        pytest.skip(f"{runs.OTHER_TRANSFORMERS} names no folder with transformers {version}")
    np.save(tmp_path / "tokens.npy", TOKENS)
    folders = [examples.write_example(tmp_path / each, each, regimes=examples.TWO) for each in VERSIONS[version]]
    subprocess.run(
        [sys.executable, crossing.__file__, version, tmp_path / "tokens.npy", *folders],
        env=os.environ | {"PYTHONPATH": str(library)},
        check=True,
        cwd=tmp_path,
    )
    for architecture, folder in zip(VERSIONS[version], folders, strict=True):
        with np.load(f"{folder}.npz") as found:
            check(dict(found), tmp_path / architecture / "source", architecture, version, 2e-4)


def test_one_regime_has_no_limits() -> None:
    assert loader_limits(examples.rope_config()) == ()
    older = loader_limits(examples.rope_config(geometry=examples.toy_geometry("phi3")))
    assert len(older) == 1 and older[0].startswith("transformers 4.57 cannot load")


def limits(model_type: str = "llama", **changes: Any) -> tuple[str, ...]:
    geometry = examples.toy_geometry(model_type)
    return loader_limits(examples.rope_config(**{"geometry": geometry, "regimes": examples.TWO} | changes))


def test_two_regimes_are_said_with_their_lengths_and_factors() -> None:
    cache, attention_factor, engines, remedy = limits()
    assert "takes the short table up to 64 tokens and the long one beyond" in cache
    assert "what it answers from there on is wrong" in cache
    assert attention_factor.endswith("up to 64 tokens it multiplies by the long table's 1.137, not by 1")
    assert "where --max-model-len is above 64" in engines
    assert "length_tokens" in remedy and "single_table=true" in remedy
    equal = dataclasses.replace(examples.SHORT, attention_factor=1.137)
    assert limits(regimes=(equal, examples.LONG)) == (cache, engines, remedy)
    assert "generate() of this family computes them anew there in transformers 5.24" in limits("phi3")[0]


def test_what_no_config_json_holds_is_said_instead() -> None:
    retained = dataclasses.replace(examples.LONG, retained_tokens=2)
    for regimes, reasons in (
        ((retained,), "retained_tokens"),
        ((examples.SHORT, retained), "regimes, retained_tokens"),
    ):
        (only,) = limits(regimes=regimes)
        assert only.startswith(f"config.json cannot express {reasons}: other loaders see the unscaled model")
    (only,) = limits("phimoe")
    assert only.startswith("config.json cannot express regimes: ")


def test_tables_by_layer_type_fail_in_the_oldest_transformers_alone(tmp_path: Path) -> None:
    loaded = walk.load(tiny_models.write_tiny_model(tmp_path / "source", "gemma3_text"))
    plain = Regime(name="short", max_length=tiny_models.ORIGINAL_LENGTH, factors=(1.0,) * loaded.geometry.num_pairs)
    rope_config = examples.rope_config(
        target_length=walk.TARGET_LENGTH,
        geometry=loaded.geometry,
        regimes=(plain, walk.searched(loaded.geometry)),
        checkpoint=checkpoint_binding(tmp_path / "source"),
    )
    write_checkpoint_folder(tmp_path / "source", tmp_path / "out", rope_config, allow_unportable=True)
    assert sum(each.startswith("transformers 5.16 fails in the second") for each in loader_limits(rope_config)) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    first = walk.logits(model, 60)
    if transformers.__version__ == "5.16.1":
        with pytest.raises(UnboundLocalError):
            walk.logits(model, 60)
        assert any("transformers cannot run the model" in each for each in logits_findings(tmp_path / "out"))
    else:
        assert torch.equal(walk.logits(model, 60), first)
        assert logits_findings(tmp_path / "out") == []


def logits_findings(folder: Path) -> list[str]:
    """What `verify` has to say against a plain load's logits."""
    try:
        return [each.message for each in verify(folder, [VerifyLevel.logits], device="cpu") if not each.ok]
    except InputError as error:
        return [str(error)]


def test_a_written_folder_says_the_same(tmp_path: Path) -> None:
    assert loader_limits(RopeConfig.read(examples.write_example(tmp_path, regimes=examples.TWO))) == limits()
