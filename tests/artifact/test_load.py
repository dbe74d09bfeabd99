"""What is served, by transformers alone or by ropesearch.load, is what the search scored."""

import copy
import dataclasses
import gc
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ropesearch
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.load import load, load_unscaled, read_bound
from ropesearch.artifact.schema import RopeConfig, content_digest
from ropesearch.errors import BindingError, InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, rotary_table
from ropesearch.model.load import load_model
from tests import runs, toys
from tests.artifact import examples

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]
LENGTHS = [1, 63, 64, 65, 256]
TOKENS = torch.from_numpy(np.random.default_rng(3).integers(2, toys.VOCABULARY_TOKENS, size=256))


def logits_of(model: Any, length: int) -> torch.Tensor:
    """float32, shape (length, vocabulary)."""
    with torch.no_grad():
        return model(input_ids=TOKENS[None, :length], use_cache=False).logits[0].float()


def generated(model: Any, prompt: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What generate answers token by token with its cache: the whole sequence, and the logits of each new token."""
    answer = model.generate(
        TOKENS[None, :prompt],
        attention_mask=torch.ones(1, prompt, dtype=torch.long),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return answer.sequences, torch.cat(answer.logits)


def searched_logits(source: Path, retained_tokens: int = 0) -> dict[int, torch.Tensor]:
    """Logits under the regime as the search installs it in the source checkpoint."""
    loaded = load_model(ModelConfig(path=str(source), dtype=DType.float32, device="cpu"))
    regime = dataclasses.replace(examples.REGIME, retained_tokens=retained_tokens)
    with installed(loaded, regime):
        return {length: logits_of(loaded.model, length) for length in LENGTHS}


def greatest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_transformers_serves_what_the_search_scored(tmp_path: Path, architecture: str) -> None:
    folder = examples.write_example(tmp_path, architecture)
    expected = searched_logits(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    unscaled = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    for length in LENGTHS:
        found = logits_of(model, length)
        assert greatest_difference(found, expected[length]) <= 1e-5
        if length > 1:
            assert greatest_difference(found, logits_of(unscaled, length)) > 0.1
    assert model.config.max_position_embeddings == 256
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("retained_tokens", [0, 5])
def test_a_cached_answer_across_the_original_length_is_the_uncached_one(
    tmp_path: Path, architecture: str, retained_tokens: int
) -> None:
    folder = examples.write_example(tmp_path, architecture, retained_tokens=retained_tokens)
    if retained_tokens:
        model = load(folder, device="cpu", dtype="float32")[0]
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequence, cached = generated(model, prompt=60, num_tokens=12)
    with torch.no_grad():
        whole = model(input_ids=sequence, use_cache=False).logits[0, 59:-1]
    assert sequence.shape == (1, 72)
    assert greatest_difference(cached, whole) <= 1e-4


@pytest.mark.parametrize("retained_tokens", [0, 5])
def test_load_puts_the_whole_regime_in_force_for_good(tmp_path: Path, retained_tokens: int) -> None:
    folder = examples.write_example(tmp_path, retained_tokens=retained_tokens)
    expected = searched_logits(tmp_path / "source", retained_tokens)
    model, tokenizer = ropesearch.load(str(folder), device="cpu", dtype="float32")
    gc.collect()
    for length in LENGTHS:
        assert greatest_difference(logits_of(model, length), expected[length]) <= 1e-5
        assert greatest_difference(logits_of(copy.deepcopy(model), length), expected[length]) <= 1e-5
    if retained_tokens:
        other = searched_logits(tmp_path / "source")
        assert greatest_difference(expected[65], other[65]) > 1e-3
    assert model.config.max_position_embeddings == 256
    assert tokenizer("a")["input_ids"][0] == 0


def test_load_keeps_float32_tables_under_bfloat16(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path)
    for model in (
        load(folder, device="cpu", dtype="bfloat16", attention="eager")[0],
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    ):
        assert model.dtype == torch.bfloat16
        assert torch.equal(model.model.rotary_emb.inv_freq, rotary_table(examples.toy_geometry(), examples.REGIME))


def test_a_loaded_model_can_be_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path)
    model = load(folder, device="cpu")[0]
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert greatest_difference(logits_of(again, 256), logits_of(model, 256)) <= 1e-5


def test_load_unscaled_gives_back_the_model_that_was_searched(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path)
    loaded = load_unscaled(folder, read_bound(folder), device="cpu")
    source = load_model(ModelConfig(path=str(tmp_path / "source"), device="cpu"))
    assert loaded.geometry == source.geometry == examples.toy_geometry()
    assert loaded.folder == folder
    assert torch.equal(logits_of(loaded.model, 256), logits_of(source.model, 256))


def test_other_weights_or_another_tokenizer_are_refused_showing_both_digests(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path)
    bound = RopeConfig.read(folder).checkpoint
    other = toys.write_checkpoint(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", folder)
    with pytest.raises(BindingError) as caught:
        load(folder, device="cpu")
    assert bound.digest in str(caught.value) and checkpoint_binding(other).digest in str(caught.value)

    shutil.copy(tmp_path / "source" / "model.safetensors", folder)
    load(folder, device="cpu")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"</s>"', '"</t>"'))
    with pytest.raises(BindingError, match="expected tokenizer with the digest") as caught:
        load(folder, device="cpu")
    assert bound.tokenizer_digest in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_the_regime_is_chosen_by_the_final_length_of_a_sequence(tmp_path: Path, architecture: str) -> None:
    folder = examples.write_example(tmp_path, architecture, regimes=examples.TWO)
    source = load_model(ModelConfig(path=str(tmp_path / "source"), dtype=DType.float32, device="cpu"))
    for length, regime in ((None, examples.LONG), (1, examples.SHORT), (64, examples.SHORT), (65, examples.LONG)):
        model = load(folder, device="cpu", dtype="float32", length_tokens=length)[0]
        with installed(source, regime, as_shipped=True):
            for num_tokens in (40, 64, 65, 200):  # the table is that of the regime, not of the pass
                assert torch.equal(logits_of(model, num_tokens), logits_of(source.model, num_tokens))
        assert model.config.max_position_embeddings == regime.max_length
    for length, message in ((257, "expected at most target_length = 256 tokens, got 257"), (0, "at least 1 token")):
        with pytest.raises(InputError, match=message):
            load(folder, device="cpu", length_tokens=length)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "phi3"])
def test_an_answer_across_the_crossing_under_one_regime_is_that_of_a_whole_pass(
    tmp_path: Path, architecture: str
) -> None:
    folder = examples.write_example(tmp_path, architecture, regimes=examples.TWO)
    model = load(folder, device="cpu", dtype="float32", length_tokens=60 + 12)[0]
    sequence, cached = generated(model, prompt=60, num_tokens=12)
    with torch.no_grad():
        whole = model(input_ids=sequence, use_cache=False).logits[0, 59:-1]
    assert greatest_difference(cached, whole) <= 1e-4


def test_what_is_loaded_for_one_length_can_be_saved_as_that(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path, regimes=examples.TWO)
    for number, length in enumerate((64, 256)):
        model = load(folder, device="cpu", length_tokens=length)[0]
        model.save_pretrained(tmp_path / str(number))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).eval()
        for num_tokens in (64, 65):
            assert greatest_difference(logits_of(again, num_tokens), logits_of(model, num_tokens)) <= 1e-5


@pytest.mark.parametrize("name", ["config.json", "rope_config.json"])
def test_files_that_disagree_are_refused(tmp_path: Path, name: str) -> None:
    """A changed attention factor in either file: plain loaders and this one would run different tables."""
    folder = examples.write_example(tmp_path)
    text = (folder / name).read_text()
    assert "1.137" in text
    value = json.loads(text.replace("1.137", "1.138"))
    if name == "rope_config.json":
        value["content_digest"] = content_digest(value)
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(BindingError, match=r"config\.json as it was written for this rope_config\.json"):
        load(folder, device="cpu")


def test_a_run_folder_stands_for_its_checkpoint(tmp_path: Path) -> None:
    written = examples.write_example(tmp_path)
    written.rename(tmp_path / "checkpoint")
    model, _ = load(tmp_path, device="cpu")
    assert model.model.rotary_emb.attention_scaling == examples.REGIME.attention_factor
    with pytest.raises(InputError, match="got nothing at this path"):
        load(tmp_path / "nowhere")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path)
    with pytest.raises(InputError, match=r"dtype: expected one of .*float32.*, got 'fp32'"):
        load(folder, dtype="fp32")
    with pytest.raises(InputError, match=r"attention: expected one of .*sdpa.*, got 'fast'"):
        load(folder, attention="fast")
    with pytest.raises(
        InputError,
        match=r"expected a checkpoint folder with rope_config\.json, or the run folder .* got a folder without",
    ):
        load(tmp_path / "source")


OLDER = runs.other_transformers("4.57.6")
IN_OLDER_TRANSFORMERS = """
import sys
import numpy as np, torch, transformers
assert transformers.__version__.startswith("4.57."), transformers.__version__
folder, tokens, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.from_numpy(np.load(tokens))[None]
with torch.no_grad():
    whole = model(input_ids=ids, use_cache=False).logits[0].numpy()
    answer = model(input_ids=ids[:, :60], use_cache=True)
    parts = [answer.logits[0]]
    for position in range(60, 72):
        answer = model(input_ids=ids[:, position : position + 1], past_key_values=answer.past_key_values)
        parts.append(answer.logits[0])
np.savez(out, whole=whole, cached=torch.cat(parts).numpy())
"""


@pytest.mark.slow
@pytest.mark.skipif(OLDER is None, reason=f"{runs.OTHER_TRANSFORMERS} names no folder with transformers 4.57.6")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_4_57_serves_the_same(tmp_path: Path, architecture: str) -> None:
    folder = examples.write_example(tmp_path, architecture)
    np.save(tmp_path / "tokens.npy", TOKENS.numpy())
    subprocess.run(
        [sys.executable, "-c", IN_OLDER_TRANSFORMERS, folder, tmp_path / "tokens.npy", tmp_path / "logits.npz"],
        env=os.environ | {"PYTHONPATH": str(OLDER)},
        check=True,
        cwd=tmp_path,
    )
    with np.load(tmp_path / "logits.npz") as older:
        expected = searched_logits(tmp_path / "source")[256]
        assert np.abs(older["whole"] - expected.numpy()).max() <= 1e-4
        assert np.abs(older["cached"] - expected[:72].numpy()).max() <= 1e-4


def test_the_written_attention_factor_is_a_plain_number(tmp_path: Path) -> None:
    config = json.loads((examples.write_example(tmp_path) / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        assert config[key]["attention_factor"] == config[key]["short_mscale"] == config[key]["long_mscale"] == 1.137
    # Not what loaders would reckon by themselves, so the tests above would notice if it were ignored.
    assert not math.isclose(math.sqrt(1 + math.log(4) / math.log(64)), 1.137, rel_tol=1e-2)
