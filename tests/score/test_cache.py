"""ropesearch/score/cache.py: a cache in the CPU's memory gives the same numbers, and what cannot fit is told before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ropesearch.cli import main
from ropesearch.errors import InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.score import cache
from ropesearch.score.cache import HostLayer, check_memory, new_cache
from ropesearch.score.config import ScoringConfig
from ropesearch.score.scorer import prove_scorer, score_windows
from tests import runs, toys
from tests.devices import pretended, spread
from tests.score.test_scorer import LENGTH, loaded_from, random_windows
from tests.tiny_models import write_tiny_model

Error = pytest.CaptureFixture[str]
GIB = 2**30


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 32, 40])
def test_offloaded_scores_are_the_same_bit_for_bit(
    toy_loaded: LoadedModel, architecture: str, dtype: torch.dtype, chunk_tokens: int
) -> None:
    loaded = loaded_from(toys.toy_model(architecture, seed=3).to(dtype), toy_loaded)
    plain, offloaded = (
        score_windows(
            loaded,
            random_windows(num_windows=2),
            ScoringConfig(num_blocks=LENGTH, chunk_tokens=chunk_tokens, offload_cache=offload_cache),
        )
        for offload_cache in (False, True)
    )
    np.testing.assert_array_equal(offloaded.nats, plain.nats)


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "qwen3_next", "deepseek_v3"])
def test_layers_of_other_kinds_stay_where_they_are(tmp_path: Path, model_type: str) -> None:
    """Windowed and recurrent layers beside full ones, and latent attention, whose keys and values differ in width."""
    folder = write_tiny_model(tmp_path / "tiny", model_type)
    loaded = load_model(ModelConfig(path=str(folder), dtype=DType.float32, device="cpu"))
    prove_scorer(loaded, offload_cache=True)
    plain, offloaded = (
        score_windows(
            loaded,
            random_windows(num_windows=1),
            ScoringConfig(num_blocks=LENGTH, chunk_tokens=20, offload_cache=offload_cache),
        )
        for offload_cache in (False, True)
    )
    np.testing.assert_array_equal(offloaded.nats, plain.nats)


def test_what_attention_is_given_is_what_a_dynamic_cache_gives(toy_loaded: LoadedModel) -> None:
    offloaded, plain = new_cache(toy_loaded.model, True), DynamicCache(config=toy_loaded.model.config)
    random = np.random.default_rng(0)
    for num_tokens in (5, 1, 7):
        for layer in (0, 1):
            keys, values = (torch.from_numpy(random.normal(size=(1, 1, num_tokens, width))) for width in (16, 12))
            given, expected = offloaded.update(keys, values, layer), plain.update(keys, values, layer)
            keys.zero_()  # a copy was kept
            for one, other in zip(given, expected, strict=True):
                assert torch.equal(one, other)
                assert one.is_contiguous()
        assert offloaded.get_seq_length() == plain.get_seq_length()


def test_a_model_that_keeps_no_whole_sequence_is_refused(toy_loaded: LoadedModel) -> None:
    model = toys.toy_model("mistral", sliding_window=16)
    with pytest.raises(InputError, match=r"objective\.offload_cache: .* got MistralForCausalLM without"):
        prove_scorer(loaded_from(model, toy_loaded), offload_cache=True)


def test_offloading_needs_chunks() -> None:
    with pytest.raises(InputError, match=r"objective\.offload_cache: expected objective\.chunk_tokens with it"):
        ScoringConfig(offload_cache=True).check(LENGTH)
    ScoringConfig(offload_cache=True, chunk_tokens=16).check(LENGTH)


def test_a_gradient_is_refused_beside_it(toy_folder: Path, tmp_path: Path, capsys: Error) -> None:
    words = runs.search_words(toy_folder, runs.write_corpus(tmp_path / "texts"), tmp_path / "run")
    offloading = ["objective.chunk_tokens=32", "objective.offload_cache=true"]
    gradient = [word for word in words if not word.startswith("optimizer")]
    assert main([*gradient, *offloading]) == 2
    assert "optimizer: expected one without gradients" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_search_with_it_is_the_search_without(toy_folder: Path, tmp_path: Path) -> None:
    corpus = runs.write_corpus(tmp_path / "texts")
    for name, more in (("plain", []), ("offloaded", ["objective.offload_cache=true"])):
        words = runs.search_words(toy_folder, corpus, tmp_path / name, num_trials=4)
        assert main([*words, "objective.chunk_tokens=50", "model.device=cpu", *more]) == 0
    assert runs.trials_of(tmp_path / "offloaded") == runs.trials_of(tmp_path / "plain")
    # Workers of one study may differ in it.
    words = runs.search_words(toy_folder, corpus, tmp_path / "plain", num_trials=6)
    assert main([*words, "objective.chunk_tokens=50", "model.device=cpu", "objective.offload_cache=true"]) == 0


# A toy's layer keeps 2 x 1 head x 16 channels x 4 bytes for each token.
LAYER_BYTES = 2 * 1 * 16 * 4
TOKENS = 1 << 21


def weights_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_the_cache_is_reckoned_on_one_device(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weights_of(toy_loaded.model) + 2 * LAYER_BYTES * TOKENS
    monkeypatch.setattr(cache, "_memory_bytes", lambda device: needed)
    check_memory(toy_loaded.model, TOKENS, False)
    monkeypatch.setattr(cache, "_memory_bytes", lambda device: needed - 1)
    with pytest.raises(
        InputError,
        match=r"expected room on cpu .* 0\.5 GiB \(2097152 tokens; all layers take 256 bytes for each\), beside "
        r".* of weights, got 0\.5 GiB in all; give a shorter target_length",
    ):
        check_memory(toy_loaded.model, TOKENS, False)
    monkeypatch.setattr(cache, "_memory_bytes", lambda device: None)  # not known
    check_memory(toy_loaded.model, TOKENS, False)


def test_the_cache_is_reckoned_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        model = spread(toys.toy_model(num_hidden_layers=4))
        first, second = (
            sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.device == device)
            for device in (torch.device("cuda", 0), torch.device("cuda", 1))
        )
        most = max(first, second)

        def check(device_bytes: int, host_bytes: int, offload: bool) -> None:
            monkeypatch.setattr(
                cache, "_memory_bytes", lambda device: host_bytes if device.type == "cpu" else device_bytes
            )
            check_memory(model, TOKENS, offload)

        two, four = 2 * LAYER_BYTES * TOKENS, 4 * LAYER_BYTES * TOKENS
        check(most + two, 0, False)
        with pytest.raises(InputError, match=r"room on cuda:[01] .*give objective\.offload_cache=true, or more GPUs"):
            check(most + two - 1, 0, False)
        check(most + two // 2, four, True)
        with pytest.raises(InputError, match=r"room on cpu .* 1\.0 GiB .*; give a shorter target_length"):
            check(most + two // 2, four - 1, True)
        with pytest.raises(InputError, match=r"room on cuda:[01] .* 0\.2 GiB .*; give a shorter target_length"):
            check(most + two // 2 - 1, four, True)


def test_a_search_that_cannot_fit_is_refused_before_it_begins(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Error
) -> None:
    monkeypatch.setattr(cache, "_memory_bytes", lambda device: 1)
    words = runs.search_words(toy_folder, runs.write_corpus(tmp_path / "texts"), tmp_path / "run", num_trials=1)
    assert main([*words, "model.device=cpu", "objective.chunk_tokens=50"]) == 2
    assert "objective.chunk_tokens: expected room on cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "model.device=cpu"]) == 0  # without chunks there is no cache


def test_pieces_are_kept_as_they_came(toy_loaded: LoadedModel) -> None:
    """No copy of what is there already is made for a chunk."""
    layer = HostLayer()
    first = torch.ones(1, 1, 3, 2)
    layer.update(first, first)
    kept = layer._pieces[0][0]
    layer.update(first, first)
    assert layer._pieces[0][0] is kept
    assert layer.get_seq_length() == 6
