"""ropesearch/score/gradient.py against automatic differentiation of the whole model at once."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer

from ropesearch.errors import ScoringError
from ropesearch.model.adjoint import recorded_rows
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel
from ropesearch.rope.regime import Regime
from ropesearch.score import forward
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import window_gradient
from ropesearch.score.objective import Objective
from ropesearch.score.scorer import score_windows
from tests import tiny_models, toys, walk
from tests.score.test_scorer import LENGTH, loaded_from, other_model, random_windows

WINDOWS = random_windows(num_windows=2)
TOKEN_IDS = WINDOWS.token_ids[0]
PLAIN = Objective().token_weights(WINDOWS, 0, None)
SOME = np.where(np.arange(LENGTH) % 7 == 3, np.random.default_rng(1).uniform(0.1, 1, LENGTH), 0.0)
SOME[:40] = 0
REGIME = Regime(
    name="r", max_length=LENGTH, factors=tuple(np.linspace(1, 3, 8).tolist()), attention_factor=1.2, retained_tokens=5
)


def gradient_of(loaded: LoadedModel, weights: NDArray[np.float64] = PLAIN) -> tuple[float, NDArray[np.float64]]:
    with installed(loaded, REGIME):
        nats, gradient = window_gradient(loaded, TOKEN_IDS, weights, REGIME.retained_tokens)
    return nats, np.append(gradient.log_factors, gradient.log_attention_factor)


def whole(loaded: LoadedModel, weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The model's own logits, all at once, and one backward pass that keeps every activation."""
    ids = torch.from_numpy(TOKEN_IDS.astype(np.int64))
    with installed(loaded, REGIME), torch.enable_grad(), recorded_rows(loaded, REGIME.retained_tokens) as rows:
        logits = loaded.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
        nats = (cross_entropy(logits, ids[1:], reduction="none") * torch.from_numpy(weights)[1:]).sum()
        nats.backward()
    gradient = rows.gradient()
    return float(nats.detach()), np.append(gradient.log_factors, gradient.log_attention_factor)


@pytest.mark.parametrize("weights", [PLAIN, SOME], ids=["plain", "some tokens"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_equals_the_whole_model_at_once(
    toy_loaded: LoadedModel, name: str, weights: NDArray[np.float64], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 20 rows, with layers computed again; gemma2 caps its logits besides."""
    loaded = toy_loaded
    if name == "gemma2":
        loaded = loaded_from(other_model("Gemma2", final_logit_softcapping=2.0, layer_types=None), toy_loaded)
    monkeypatch.setattr(forward, "_LOGITS_BYTES_CPU", 4 * toys.VOCABULARY_TOKENS * 20)
    monkeypatch.setattr(forward, "_LEAST_ROWS_CPU", 1, raising=False)
    pieces: list[int] = []
    head = loaded.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: pieces.append(len(output)))
    found = gradient_of(loaded, weights)
    handle.remove()
    # Those in which a token has a weight: the first 40 of some tokens have none.
    assert pieces == ([20] * 4 + [15] if weights is PLAIN else [20] * 2 + [15])
    expected = whole(loaded, weights)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-4 * np.abs(expected[1]).max())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_nats_are_those_of_the_score(toy_loaded: LoadedModel) -> None:
    """After scoring, whose tensors autograd must not meet; and scoring gives the same bits after a gradient."""
    with installed(toy_loaded, REGIME):
        before = score_windows(toy_loaded, WINDOWS, ScoringConfig())
    nats, _ = gradient_of(toy_loaded)
    with installed(toy_loaded, REGIME):
        after = score_windows(toy_loaded, WINDOWS, ScoringConfig())
    assert np.array_equal(before.nats, after.nats)
    assert nats == pytest.approx(before.window_nats[0] / before.window_tokens[0], rel=1e-6)


def test_tokens_without_weight_change_nothing(toy_loaded: LoadedModel) -> None:
    """What follows the last token with a weight may be any text."""
    weights = np.where(np.arange(LENGTH) < 50, PLAIN, 0.0)
    other = TOKEN_IDS.copy()
    other[50:] = 2 + (other[50:] + 31) % 200
    with installed(toy_loaded, REGIME):
        (nats, one), (other_nats, two) = (
            window_gradient(toy_loaded, ids, weights, REGIME.retained_tokens) for ids in (TOKEN_IDS, other)
        )
    assert nats == pytest.approx(other_nats, rel=1e-6)
    np.testing.assert_allclose(one.log_factors, two.log_factors, rtol=1e-3, atol=1e-6)


class Saved:
    """Bytes that autograd keeps for backward passes, parameters aside, and how often each layer is computed."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = {parameter.data_ptr() for parameter in model.parameters()}
        self.num_bytes = self.most_bytes = 0
        self.calls: list[int] = []
        for index, layer in enumerate(layer for layer in model.modules() if isinstance(layer, Layer)):
            layer.self_attn.register_forward_hook(lambda module, args, output, index=index: self.calls.append(index))

    def __enter__(self) -> "Saved":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: torch.Tensor) -> Any:
        num_bytes = 0 if tensor.data_ptr() in self.kept else tensor.numel() * tensor.element_size()
        return Packed(self, tensor, num_bytes)


class Packed:
    def __init__(self, saved: Saved, tensor: torch.Tensor, num_bytes: int) -> None:
        self.saved, self.tensor, self.num_bytes = saved, tensor, num_bytes
        saved.num_bytes += num_bytes
        saved.most_bytes = max(saved.most_bytes, saved.num_bytes)

    def __del__(self) -> None:
        self.saved.num_bytes -= self.num_bytes


Layer = GradientCheckpointingLayer


def most_bytes(base: LoadedModel, num_layers: int, monkeypatch: pytest.MonkeyPatch, recomputed: bool) -> int:
    loaded = loaded_from(toys.toy_model(num_hidden_layers=num_layers), base)
    saved = Saved(loaded.model, monkeypatch)
    with saved:
        gradient_of(loaded) if recomputed else whole(loaded, PLAIN)
    twice = [*range(num_layers), *reversed(range(num_layers))]  # each layer once more, the last one first
    # installed() proves rows without the layers, so these calls are the gradient's alone.
    assert saved.calls == (twice if recomputed else list(range(num_layers)))
    return saved.most_bytes


def test_layers_are_computed_again_instead_of_kept(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a further layer costs is about its input; without recomputation it is many times that."""
    inputs = LENGTH * 32 * 4  # bytes of the hidden states
    few, many = (most_bytes(toy_loaded, number, monkeypatch, recomputed=True) for number in (2, 8))
    plain_few, plain_many = (most_bytes(toy_loaded, number, monkeypatch, recomputed=False) for number in (2, 8))
    assert (plain_many - plain_few) / 6 > 8 * inputs
    assert (many - few) / 6 <= 2 * inputs
    assert many < plain_many / 3


@pytest.mark.parametrize("model_type", ["deepseek_v2", "moshi", "phimoe", "gpt_oss", "falcon", "qwen3_next"])
def test_families_equal_the_whole_model_at_once(model_type: str, tmp_path: Path) -> None:
    """Mixtures of experts, one rotary module in each layer, complex rows: computed again after a score."""
    loaded = walk.load(tiny_models.write_tiny_model(tmp_path / "source", model_type))
    regime = walk.searched(loaded.geometry, retained_tokens=3)
    layers = [layer for layer in loaded.model.modules() if isinstance(layer, Layer)]
    assert len(layers) >= tiny_models.NUM_LAYERS
    ids = random_windows(48, 1)
    weights = Objective().token_weights(ids, 0, None)
    with installed(loaded, regime):
        score = score_windows(loaded, ids, ScoringConfig())
        nats, gradient = window_gradient(loaded, ids.token_ids[0], weights, 3)
        assert nats == pytest.approx(score.nats_per_token, rel=1e-5)
        tokens = torch.from_numpy(ids.token_ids.astype(np.int64))
        with torch.enable_grad(), recorded_rows(loaded, 3) as rows:
            logits = loaded.model(input_ids=tokens, use_cache=False).logits[0, :-1].double()
            cross_entropy(logits, tokens[0, 1:]).backward()
    expected = rows.gradient()
    unit = np.abs(expected.log_factors).max()
    np.testing.assert_allclose(gradient.log_factors, expected.log_factors, rtol=1e-3, atol=1e-4 * unit)
    assert gradient.log_attention_factor == pytest.approx(expected.log_attention_factor, rel=1e-3, abs=1e-4 * unit)


def test_nothing_is_left_in_the_model(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: set(vars(module)) for name, module in toy_loaded.model.named_modules()}
    gradient_of(toy_loaded)
    head = toy_loaded.model.get_output_embeddings()

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    handle = head.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradient_of(toy_loaded)
    handle.remove()
    assert {name: set(vars(module)) for name, module in toy_loaded.model.named_modules()} == before


def test_dropout_in_the_config_is_not_applied(toy_loaded: LoadedModel) -> None:
    model = toys.toy_model(attention_dropout=0.5)
    loaded = loaded_from(model, toy_loaded)
    state = torch.get_rng_state()
    first, second = gradient_of(loaded), gradient_of(loaded)
    assert torch.equal(torch.get_rng_state(), state)
    plain = gradient_of(loaded_from(toys.toy_model(), toy_loaded))
    for nats, derivatives in (second, plain):
        assert nats == first[0] and np.array_equal(derivatives, first[1])
    assert not any(module.training for module in loaded.model.modules())


def test_what_is_not_finite_is_a_scoring_error(toy_loaded: LoadedModel) -> None:
    model = copy.deepcopy(toy_loaded.model)
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 0] = math.nan
    with pytest.raises(ScoringError, match="a gradient is not finite: nats nan"):
        gradient_of(dataclasses.replace(toy_loaded, model=model))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), MemoryError()])
def test_too_little_memory_is_a_scoring_error(toy_loaded: LoadedModel, error: Exception) -> None:
    def hungry(*arguments: Any) -> Any:
        raise error

    handle = toy_loaded.model.model.layers[1].mlp.register_forward_hook(hungry)
    with pytest.raises(ScoringError, match="out of memory with a gradient over a whole window"):
        gradient_of(toy_loaded)
    handle.remove()
    gradient_of(toy_loaded)  # and nothing is installed any more


def test_a_model_without_derivatives_is_said_to_be_that(toy_loaded: LoadedModel) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    handle = toy_loaded.model.model.layers[0].register_forward_hook(broken)
    with pytest.raises(ScoringError, match=r"^this model does not give a gradient over a whole window: mat1 and mat2"):
        gradient_of(toy_loaded)
    handle.remove()
