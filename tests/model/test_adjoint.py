"""ropesearch/model/adjoint.py against automatic differentiation and finite differences of float64 tables."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ropesearch.model.adjoint import recorded_rows
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel
from ropesearch.model.rotary import find_tables, layout_of, rescaled_tables
from ropesearch.rope.regime import Regime
from tests import tiny_models, walk

LENGTH = 48  # of which 32 are trained
# Every layout, tables by layer type, partial rotation, MLA, one module in each layer, a table made in every pass.
FAMILIES = [
    *("llama", "phi", "gemma3_text", "olmo3", "gpt_neox", "cohere", "gpt_oss", "smollm3", "falcon"),
    *("deepseek_v2", "deepseek_v3", "qwen3_next", "llama4_text", "moshi", "phimoe"),
]


def loaded_of(model_type: str, folder: Path) -> LoadedModel:
    return walk.load(tiny_models.write_tiny_model(folder / "source", model_type))


def token_ids_of(length: int = LENGTH) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(2, 200, (1, length)))


def regime_of(loaded: LoadedModel, retained_tokens: int) -> Regime:
    factors = np.linspace(1.1, 3.0, loaded.geometry.num_pairs)
    return Regime(
        name="r",
        max_length=LENGTH,
        factors=tuple(factors.tolist()),
        attention_factor=1.17,
        retained_tokens=retained_tokens,
    )


def laid_out(layout: str, rows: torch.Tensor) -> torch.Tensor:
    if layout == "single":
        return rows
    return torch.cat([rows, rows], dim=-1) if layout == "halves" else rows.repeat_interleave(2, dim=-1)


class Reference:
    """Logs of factors and attention factor as a float64 leaf, which cos and sin of all rescaled tables come from."""

    def __init__(self, loaded: LoadedModel, regime: Regime, dtype: torch.dtype = torch.float32) -> None:
        model_type = loaded.geometry.model_type
        tables = rescaled_tables(find_tables(loaded.model, model_type), model_type)
        self.layouts = [(table, layout_of(table, model_type)) for table in tables]
        self.dtype, self.retained_tokens = dtype, regime.retained_tokens
        logs = np.log([*regime.factors, regime.attention_factor])
        self.logs = torch.from_numpy(logs).requires_grad_()
        self.plain = torch.from_numpy(loaded.geometry.inverse_frequencies())

    def rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(num_tokens, dtype=torch.float64)[:, None]
        scaled, own = positions * self.plain * torch.exp(-self.logs[:-1]), positions * self.plain
        factor, kept = torch.exp(self.logs[-1]), positions < self.retained_tokens
        cos = torch.where(kept, torch.cos(own), factor * torch.cos(scaled))
        sin = torch.where(kept, torch.sin(own), factor * torch.sin(scaled))
        return cos.to(self.dtype), sin.to(self.dtype)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        def hook_of(table: Any, layout: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                given = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
                if table.layer_type is not None and given != table.layer_type:
                    return output
                single = isinstance(output, torch.Tensor)
                num_tokens = output.shape[1] if single else output[0].shape[1]
                cos, sin = (laid_out(layout, rows)[None] for rows in self.rows(num_tokens))
                return torch.complex(cos, sin) if single else (cos, sin)

            return hook

        with contextlib.ExitStack() as stack:
            for table, layout in self.layouts:
                hook = hook_of(table, layout)
                stack.callback(table.module.register_forward_hook(hook, with_kwargs=True).remove)
            yield


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return cross_entropy(logits[:-1].double(), ids[0, 1:])


def recorded(loaded: LoadedModel, regime: Regime, ids: torch.Tensor) -> NDArray[np.float64]:
    with installed(loaded, regime), torch.enable_grad(), recorded_rows(loaded, regime.retained_tokens) as rows:
        loss_of(loaded.model, ids).backward()  # type: ignore[no-untyped-call]
    gradient = rows.gradient()
    assert gradient.log_factors.dtype == np.float64
    return np.append(gradient.log_factors, gradient.log_attention_factor)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_derivatives_are_those_of_the_tables(model_type: str, tmp_path: Path) -> None:
    """Entry by entry, slow and fast pairs, against autograd through cos and sin that are reckoned in float64."""
    loaded = loaded_of(model_type, tmp_path)
    ids = token_ids_of()
    for retained_tokens in (0, 7):
        regime = regime_of(loaded, retained_tokens)
        reference = Reference(loaded, regime)
        found = recorded(loaded, regime, ids)
        with installed(loaded, regime), reference.in_force(), torch.enable_grad():
            loss_of(loaded.model, ids).backward()  # type: ignore[no-untyped-call]
        assert reference.logs.grad is not None
        expected = reference.logs.grad.numpy()
        assert np.abs(expected).min() > 0  # each pair counts
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def normed(module: Any, states: torch.Tensor) -> torch.Tensor:
    return module.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def test_derivatives_are_finite_differences(toy_loaded: LoadedModel) -> None:
    """Of the loss with float64 weights and rows, entry by entry, as central differences."""
    model = copy.deepcopy(toy_loaded.model).double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):  # which reckons in float32 whatever it is given
            module.forward = functools.partial(normed, module)
    ids = token_ids_of(96)
    for retained_tokens in (0, 5):
        regime = regime_of(toy_loaded, retained_tokens)
        found = recorded(toy_loaded, regime, ids)
        reference = Reference(dataclasses.replace(toy_loaded, model=model), regime, torch.float64)
        start = reference.logs.detach().clone()
        expected = np.zeros(len(start))
        with reference.in_force(), torch.no_grad():
            for entry in range(len(start)):
                values = []
                for step in (1e-5, -1e-5):
                    reference.logs.copy_(start)
                    reference.logs[entry] += step
                    values.append(float(loss_of(model, ids)))
                expected[entry] = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "llama4_text"])
def test_logits_are_the_same_while_recording_and_nothing_is_left(model_type: str, tmp_path: Path) -> None:
    loaded = loaded_of(model_type, tmp_path)
    ids = token_ids_of()
    modules = [table.module for table in find_tables(loaded.model, model_type)]
    with installed(loaded, regime_of(loaded, 3)):
        hooks = [list(module._forward_hooks) for module in modules]
        with torch.enable_grad():
            plain = loaded.model(input_ids=ids, use_cache=False).logits
            assert not plain.requires_grad
            with recorded_rows(loaded, 3):
                inside = loaded.model(input_ids=ids, use_cache=False).logits
            assert inside.requires_grad
            assert torch.equal(inside.detach(), plain)
            with contextlib.suppress(KeyboardInterrupt), recorded_rows(loaded, 3):
                assert [list(module._forward_hooks) for module in modules] != hooks
                raise KeyboardInterrupt
            after = loaded.model(input_ids=ids, use_cache=False).logits
            assert not after.requires_grad and torch.equal(after, plain)
        assert [list(module._forward_hooks) for module in modules] == hooks
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
