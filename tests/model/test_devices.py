"""ropesearch/model/devices.py, and all that is done with a model whose layers are on several devices.

There are no accelerators here: the models run on two that are pretended (tests/devices.py), with the device map and the
hooks of accelerate.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ropesearch
from ropesearch.artifact import load as load_module
from ropesearch.artifact.verify import verify
from ropesearch.cli import main
from ropesearch.data.windows import Windows
from ropesearch.errors import InputError
from ropesearch.model import devices
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.devices import BALANCED, device_arguments, devices_of, in_words
from ropesearch.model.install import installed, prove_installable
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.model.rotary import find_tables
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import window_gradient
from ropesearch.score.scorer import prove_scorer, score_windows
from tests import runs, toys
from tests.devices import FIRST, SECOND, place_of, pretended, spread
from tests.tiny_models import write_tiny_model

LENGTH = 96
REGIME = Regime(
    name="r", max_length=LENGTH, factors=tuple(np.linspace(1, 3, 8)), attention_factor=1.1, retained_tokens=7
)
OTHERS = [
    "falcon",
    "gemma3n_text",
    "glm4",
    "gpt_neox",
    "granite",
    "helium",
    "nemotron",
    "phi",
    "stablelm",
    "starcoder2",
]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
SCORINGS = [
    ScoringConfig(num_blocks=LENGTH),
    ScoringConfig(num_blocks=LENGTH, chunk_tokens=20),
    ScoringConfig(num_blocks=LENGTH, chunk_tokens=20, offload_cache=True),
]


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def windows_of(num_windows: int = 2) -> Windows:
    token_ids = np.random.default_rng(0).integers(2, toys.VOCABULARY_TOKENS, (num_windows, LENGTH))
    names = tuple(map(str, range(num_windows)))
    return Windows(
        split="search", length_tokens=LENGTH, token_ids=token_ids.astype(np.int32), documents=names, has_bos=True
    )


def loaded_from(folder: Path, dtype: DType = DType.float32, original_length: int | None = None) -> LoadedModel:
    config = ModelConfig(path=str(folder), dtype=dtype, device="cpu", original_length=original_length)
    return load_model(config)


def spread_over_two(config: ModelConfig) -> LoadedModel:
    """In place of `load_model`, within `pretended()`."""
    assert config.device == BALANCED
    loaded = load_model(dataclasses.replace(config, device="cpu"))
    spread(loaded.model)
    return loaded


@pytest.mark.parametrize(("memory", "got"), [({}, "none"), ({0: 10**9}, "1"), ({"mps": 10**9}, "1")])
def test_spreading_needs_two_accelerators(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[Any, int], got: str
) -> None:
    monkeypatch.setattr(devices, "get_max_memory", lambda: {**memory, "cpu": 10**12})
    with pytest.raises(InputError, match=rf"device: expected two or more accelerators .*, got {got}; .*auto"):
        load_model(ModelConfig(path=str(toy_folder), device=BALANCED))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two")
def test_the_command_says_so_too(toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = runs.search_words(toy_folder, runs.write_corpus(tmp_path / "texts"), tmp_path / "run")
    assert main([*words, "model.device=balanced"]) == 2
    assert "expected two or more accelerators" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_weights_without_room_are_refused(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers tells it: what has no place on the accelerators would stay on the disk."""
    monkeypatch.setattr(devices, "get_max_memory", lambda: {0: 1, 1: 1, "cpu": 10**12})
    with pytest.raises(InputError, match=r"device: expected room for all weights .*, got none for all; "):
        load_model(ModelConfig(path=str(toy_folder), device=BALANCED))


def test_what_transformers_is_told(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_pretrained, told = transformers.AutoModelForCausalLM.from_pretrained, {}

    def elsewhere(folder: Path, **keywords: Any) -> Any:
        told.update(keywords)
        return from_pretrained(folder, **{**keywords, "device_map": {"": "cpu"}, "max_memory": None})

    monkeypatch.setattr(devices, "get_max_memory", lambda: {0: 10**9, 1: 2 * 10**9, "cpu": 10**12})
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", elsewhere)
    load_model(ModelConfig(path=str(toy_folder), device=BALANCED))
    assert (told["device_map"], told["max_memory"]) == ("balanced", {0: 10**9, 1: 2 * 10**9})
    assert device_arguments("cpu") == {"device_map": {"": torch.device("cpu")}}


def test_other_jobs_than_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`evaluate` and `ropesearch.load` spread a model as a search does; `verify` compares logits on one device."""
    folder = toys.write_checkpoint(tmp_path / "toy", num_hidden_layers=4)
    words = runs.search_words(folder, runs.write_corpus(tmp_path / "texts"), tmp_path / "run", num_trials=1)
    assert main([*words, "model.device=cpu"]) == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    same = [word for word in words if word.startswith(("corpus.", "cache"))]
    evaluation = ["evaluate", str(checkpoint), *same, "objective.chunk_tokens=50"]
    assert main([*evaluation, "device=cpu", f"run={tmp_path / 'one'}"]) == 0
    if torch.cuda.device_count() < 2:
        capsys.readouterr()
        assert main([*evaluation, "device=balanced", f"run={tmp_path / 'none'}"]) == 2
        assert "expected two or more accelerators" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"device: logits are compared on one device, got 'balanced'"):
        list(verify(checkpoint, device=BALANCED))

    tokens = torch.from_numpy(windows_of(1).token_ids.astype(np.int64))
    expected = ropesearch.load(checkpoint, device="cpu")[0](input_ids=tokens).logits
    monkeypatch.setattr(load_module, "load_model", spread_over_two)
    with pretended():
        assert main([*evaluation, "device=balanced", f"run={tmp_path / 'two'}"]) == 0
        model, _ = ropesearch.load(checkpoint, device=BALANCED)
        assert devices_of(model) == [FIRST, SECOND]
        found = model(input_ids=tokens.to(FIRST)).logits.cpu()
    assert torch.equal(found, expected)
    one, two = (json.loads((tmp_path / name / "evaluation.json").read_text())["evaluation"] for name in ("one", "two"))
    assert len(one) >= 5
    assert two == one


@pytest.mark.parametrize(
    ("architecture", "dtype", "overrides"),
    [
        ("llama", DType.float32, {}),
        ("llama", DType.bfloat16, {}),
        ("qwen3", DType.float32, {"tie_word_embeddings": True}),
        ("llama", DType.float32, {"rope_parameters": DYNAMIC}),
    ],
    ids=["float32", "bfloat16", "tied", "dynamic"],
)
def test_scores_are_those_of_one_device_bit_for_bit(
    tmp_path: Path, architecture: str, dtype: DType, overrides: dict[str, Any]
) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", architecture, num_hidden_layers=4, **overrides)
    one = loaded_from(folder, dtype, toys.ORIGINAL_LENGTH)
    with installed(one, REGIME):
        expected = [score_windows(one, windows_of(), scoring).nats for scoring in SCORINGS]
    with pretended():
        two = loaded_from(folder, dtype, toys.ORIGINAL_LENGTH)
        spread(two.model)
        assert devices_of(two.model) == [FIRST, SECOND]
        assert in_words(devices_of(two.model)) == "cuda:0, cuda:1"
        for offload_cache in (False, True):
            with installed(two, two.own.regime_at(toys.ORIGINAL_LENGTH)):
                prove_scorer(two, offload_cache)
        with installed(two, REGIME):
            found = [score_windows(two, windows_of(), scoring).nats for scoring in SCORINGS]
    for there, here in zip(found, expected, strict=True):
        np.testing.assert_array_equal(there, here)
    np.testing.assert_array_equal(expected[2], expected[1])
    assert np.abs(expected[1] - expected[0]).max() < (1e-4 if dtype is DType.float32 else 1.0)


@pytest.mark.parametrize("model_type", ["cohere", "gemma3_text", "moshi", "olmo3", *(slow(name) for name in OTHERS)])
def test_other_families_too(tmp_path: Path, model_type: str) -> None:
    """Neighbouring channels and scaled logits, two tables in one module, a module with a table for each layer."""
    folder = write_tiny_model(tmp_path / "tiny", model_type)
    one = loaded_from(folder)
    factors = tuple(np.linspace(1, 3, one.geometry.num_pairs))
    regime = Regime(name="r", max_length=LENGTH, factors=factors, attention_factor=1.1, retained_tokens=7)
    with installed(one, regime):
        expected = [score_windows(one, windows_of(1), scoring).nats for scoring in SCORINGS[:2]]
    with pretended():
        two = loaded_from(folder)
        spread(two.model)
        prove_installable(two)
        with installed(two, regime):
            found = [score_windows(two, windows_of(1), scoring).nats for scoring in SCORINGS[:2]]
    for there, here in zip(found, expected, strict=True):
        np.testing.assert_array_equal(there, here)


def test_installing_is_proved_and_undone(tmp_path: Path) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", num_hidden_layers=4)
    with pretended():
        loaded = loaded_from(folder)
        spread(loaded.model)
        (table,) = find_tables(loaded.model, "llama")
        assert table.inv_freq.device == SECOND  # and the tokens are on the first
        before, kept = table.inv_freq, table.inv_freq.clone()
        prove_installable(loaded)
        with installed(loaded, REGIME):
            assert table.inv_freq.device == SECOND
            assert table.inv_freq is not before
        assert table.inv_freq is before
        assert torch.equal(table.inv_freq, kept)


def test_each_layer_keeps_its_part_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ropesearch.score import scorer

    caches = []

    def kept(new_cache: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: caches.append(new_cache(*arguments)) or caches[-1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(scorer, "new_cache", kept(scorer.new_cache))
    with pretended():
        loaded = loaded_from(toys.write_checkpoint(tmp_path / "toy", num_hidden_layers=4))
        spread(loaded.model)
        for scoring in SCORINGS[1:]:
            score_windows(loaded, windows_of(1), scoring)
        on_devices, on_host = caches
        assert [layer.keys.device for layer in on_devices.layers] == [FIRST, FIRST, SECOND, SECOND]
        assert [place_of(layer.values) for layer in on_devices.layers] == [FIRST, FIRST, SECOND, SECOND]
        for layer in on_host.layers:
            assert layer.keys is None
            assert layer.get_seq_length() == LENGTH
            assert {place_of(states) for piece in layer._pieces for states in piece} == {torch.device("cpu")}


def test_gradients_are_those_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", num_hidden_layers=4)
    token_ids = windows_of(1).token_ids[0]
    weights = np.where(np.arange(LENGTH) > 0, 1 / (LENGTH - 1), 0.0)
    one = loaded_from(folder)
    with installed(one, REGIME):
        nats, gradient = window_gradient(one, token_ids, weights, REGIME.retained_tokens)
    calls = []
    with pretended():
        two = loaded_from(folder)
        spread(two.model)
        forwards = [layer.forward for layer in two.model.model.layers]
        for layer in two.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        with installed(two, REGIME):
            there, found = window_gradient(two, token_ids, weights, REGIME.retained_tokens)
        assert [layer.forward for layer in two.model.model.layers] == forwards
    assert there == nats
    np.testing.assert_array_equal(found.log_factors, gradient.log_factors)
    assert found.log_attention_factor == gradient.log_attention_factor
    assert np.abs(found.log_factors).max() > 1e-4
    assert len(calls) == 2 * 4  # each layer was computed again in the backward pass, and held nothing meanwhile


@pytest.mark.parametrize("optimizer", ["gradient", pytest.param("evolution", marks=pytest.mark.slow)])
def test_a_search_finds_what_it_finds_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The whole job, with values and states of every trial as they stand in the journal."""
    from ropesearch import pipeline

    folder = toys.write_checkpoint(tmp_path / "toy", num_hidden_layers=4)
    corpus = runs.write_corpus(tmp_path / "texts")
    words = [
        *(word for word in runs.search_words(folder, corpus, tmp_path / "one", 5) if not word.startswith("optimizer")),
        f"optimizer={optimizer}",
        "objective.chunk_tokens=50",
    ]
    assert main([*words, "model.device=cpu"]) == 0

    monkeypatch.setattr(pipeline, "load_model", spread_over_two)
    with pretended():
        others = [f"run={tmp_path / 'two'}" if word.startswith("run=") else word for word in words]
        assert main([*others, "model.device=balanced"]) == 0
    found, expected = runs.trials_of(tmp_path / "two"), runs.trials_of(tmp_path / "one")
    assert len(found) > 5
    assert found == expected
