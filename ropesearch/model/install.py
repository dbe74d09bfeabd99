"""Put a regime in force in a loaded model, prove that the forward pass uses it, and take it out without a trace."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropesearch.errors import InputError
from ropesearch.model.load import LoadedModel
from ropesearch.model.rotary import (
    RotaryTable,
    expected_rows,
    find_tables,
    held,
    layout_of,
    matching_layout,
    rescaled_tables,
)
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime, inverse_frequencies

_INSTALLED = "_ropesearch_installed"
_NUM_CANARY_TOKENS = 32
_MOST_LOGIT = 1000.0  # those of a model that has learnt something stay near 100 and below


def rotary_table(geometry: Geometry, regime: Regime) -> torch.Tensor:
    """Inverse frequencies under the regime, float32 on the CPU, shape (num_pairs,): the table installed and shipped.

    Bit for bit what transformers computes from the same list (`longrope` in modeling_rope_utils.py, short and long
    alike); `inverse_frequencies` in ropesearch.rope is the same in float64. Raises InputError when there is not one
    factor per pair.
    """
    table64 = inverse_frequencies(geometry, regime.factors)
    factors = list(regime.factors)
    # The table depends on theta and the rotated channels alone: one head of exactly these channels gives it.
    config = LlamaConfig(
        hidden_size=geometry.rotary_dim,
        num_attention_heads=1,
        head_dim=geometry.rotary_dim,
        max_position_embeddings=max(regime.max_length, geometry.original_length),
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": geometry.rope_theta,
            "factor": max(regime.max_length / geometry.original_length, 1.0),
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": geometry.original_length,
            "attention_factor": regime.attention_factor,
        },
    )
    table, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device=torch.device("cpu"))
    if table.dtype != torch.float32 or not np.allclose(table.double().numpy(), table64, rtol=1e-5, atol=0):
        raise InputError(
            "transformers' longrope table is not the plain inverse frequencies divided by the factors; "
            "use a supported version of transformers"
        )
    return table


@contextlib.contextmanager
def installed(loaded: LoadedModel, regime: Regime, *, as_shipped: bool = False) -> Iterator[None]:
    """Within the block the model's forward pass uses the regime; after it, exception or not, what was there before.

    The regime is put in force in every table that `rescaled_tables` names; tables of windowed layers stay as they are.
    Positions below `retained_tokens` keep the cos and sin of the checkpoint's own table, the one for sequences of
    `max_length` tokens where it has several; positions are absolute, so a cached or chunked forward pass agrees with a
    whole one. A regime that is the checkpoint's own leaves its table in force; where that depends on the length, it is
    held at the one for `max_length`. With `as_shipped` the table is the one that is shipped, made of the factors, in
    that case too: the same up to float32 rounding. Raises InputError when the factors do not fit the model or a module
    does not answer with the cos and sin of the regime; RuntimeError when a regime is installed already.
    """
    model_type = loaded.geometry.model_type
    tables = rescaled_tables(find_tables(loaded.model, model_type), model_type)
    modules = list({id(table.module): table.module for table in tables}.values())
    if any(getattr(module, _INSTALLED, False) for module in modules):
        raise RuntimeError("a regime is already installed in this model; leave its block first")
    scaled_table = rotary_table(loaded.geometry, regime)
    keeps_own = loaded.own.is_own(regime) and not as_shipped
    with contextlib.ExitStack() as stack:
        for module in modules:
            setattr(module, _INSTALLED, True)
            stack.callback(delattr, module, _INSTALLED)
        stack.enter_context(held(tables))
        installations = []
        for table in tables:
            stack.callback(_assign, table.module, table.values())
            device = table.inv_freq.device
            own: tuple[torch.Tensor, float] = (table.inv_freq, table.attention_factor)  # the very same tensor
            if loaded.own.varies:
                own = loaded.own.table_at(regime.max_length, device)
            scaled = own if keeps_own else (scaled_table.to(device), regime.attention_factor)
            _assign(table.module, table.values_of(*own))
            installations.append(_Installation(table, own, scaled, layout_of(table, model_type)))
            _assign(table.module, table.values_of(*scaled))
        if regime.retained_tokens:
            for module in modules:
                inside = [each for each in installations if each.table.module is module]
                hook = module.register_forward_hook(_keep_first_rows(inside, regime.retained_tokens), with_kwargs=True)
                stack.callback(hook.remove)
        for installation in installations:
            _prove_rows(installation, loaded.geometry, regime)
        yield


def prove_installable(loaded: LoadedModel) -> None:
    """Prove on the model itself that installing a regime changes what it computes, and that leaving undoes it.

    Three canaries (factors, attention factor, retained tokens) must each change the logits of a short probe, and after
    each block the logits must be those of before, bit for bit. Raises InputError otherwise, naming the model type, or
    the weights where these are ruined: then nothing shows in the logits, whatever the kind of model.
    """
    geometry = loaded.geometry
    embeddings: Any = loaded.model.get_input_embeddings()
    # Any tokens do, as long as neighbours differ.
    vocabulary_tokens = embeddings.weight.shape[0]
    probe = torch.arange(0, 7 * _NUM_CANARY_TOKENS, 7, device=embeddings.weight.device)[None] % vocabulary_tokens

    def logits() -> torch.Tensor:
        try:
            with torch.no_grad():
                answer = loaded.model(input_ids=probe, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            # Such as a scaled Qwen2 with a partial_rotary_factor: that shortens its table, not what is rotated.
            raise InputError(
                f"model type {geometry.model_type!r}: transformers cannot run the model that config.json describes "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error
        if not isinstance(answer, torch.Tensor) or not bool(torch.isfinite(answer).all()):
            remedy = "give other weights: these are ruined, as by a training with too high a learning rate"
            if loaded.dtype == "float16":
                remedy = "give model.dtype=float32 or bfloat16"
            raise InputError(
                f"model type {geometry.model_type!r}: expected finite logits, got NaN or infinity from {loaded.dtype} "
                f"weights; {remedy}"
            )
        return answer

    longest = 4 * max(geometry.original_length, _NUM_CANARY_TOKENS)
    own = loaded.own.regime_at(longest)

    def canary(stretch: float, attention_factor: float, retained_tokens: int) -> Regime:
        return Regime(
            name="canary",
            max_length=longest,
            factors=tuple(stretch * factor for factor in own.factors),
            attention_factor=attention_factor * own.attention_factor,
            retained_tokens=retained_tokens,
        )

    def logits_under(regime: Regime) -> torch.Tensor:
        with installed(loaded, regime):
            inside = logits()
        if not torch.equal(logits(), before):
            raise InputError(
                f"model type {geometry.model_type!r}: taking a regime out does not restore the logits bit for bit; "
                "this kind of model is not supported on this device"
            )
        return inside

    before = logits()
    stretched = logits_under(canary(4.0, 1.0, 0))
    for what, inside, other in (
        ("factors", stretched, before),
        ("attention_factor", logits_under(canary(1.0, 2.0, 0)), before),
        ("retained_tokens", logits_under(canary(4.0, 1.0, _NUM_CANARY_TOKENS // 2)), stretched),
    ):
        if torch.equal(inside, other):
            least, greatest = float(before.min()), float(before.max())
            if least == greatest or max(-least, greatest) > _MOST_LOGIT:
                raise InputError(
                    f"{loaded.folder}: expected weights of a model that has learnt something, got logits from "
                    f"{least:.3g} to {greatest:.3g}, whatever a regime's {what}; give other weights: these are "
                    "ruined, as by a training with too high a learning rate"
                )
            raise InputError(
                f"model type {geometry.model_type!r}: changing a regime's {what} does not change the model's logits; "
                "this kind of model is not supported"
            )


@dataclass(frozen=True, slots=True)
class _Installation:
    """One table of a model, what it is by itself and under the regime (inverse frequencies and attention factor), and
    how its module lays out cos and sin.
    """

    table: RotaryTable
    own: tuple[torch.Tensor, float]
    scaled: tuple[torch.Tensor, float]
    layout: str


def _assign(rotary: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(rotary, name, value)


def _keep_first_rows(installations: Sequence[_Installation], retained_tokens: int) -> Any:
    """A forward hook: rows of cos and sin at positions below retained_tokens come from the checkpoint's own table."""

    def hook(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        # The module is the one that answers: of a copied model, the copy's.
        for installation in installations:
            _assign(rotary, installation.table.values_of(*installation.own))
        try:
            own = rotary.forward(*args, **kwargs)
        finally:
            for installation in installations:
                _assign(rotary, installation.table.values_of(*installation.scaled))
        if isinstance(output, torch.Tensor):  # complex: cos and sin in one
            return torch.where(_kept(position_ids, retained_tokens, output), own, output)
        return tuple(
            torch.where(_kept(position_ids, retained_tokens, rows), own_rows, rows)
            for own_rows, rows in zip(own, output, strict=True)
        )

    return hook


def _kept(position_ids: torch.Tensor, retained_tokens: int, rows: torch.Tensor) -> torch.Tensor:
    """Which rows are retained, broadcastable to `rows` and where these are: of a spread model, another device. Text in
    models with positions of several axes has the same position on every axis.
    """
    kept = (position_ids < retained_tokens).to(rows.device)[..., None]
    while kept.ndim > rows.ndim:
        kept = kept[0]
    return kept


def _prove_rows(installation: _Installation, geometry: Geometry, regime: Regime) -> None:
    """InputError unless the module answers probe positions with cos and sin by LongRoPE's Eq. 3, reckoned in float64,
    in the layout that it had before.

    The float64 angles come from the float32 tables, which were themselves held against float64 when they were made.
    """
    last, kept = regime.max_length - 1, regime.retained_tokens
    probes = {0, 1, 2, kept - 1, kept, geometry.original_length - 1, geometry.original_length, last // 2, last}
    positions = np.array(sorted(position for position in probes if 0 <= position <= last))
    scaled_rows = (positions >= kept)[:, None]
    (scaled, scaled_factor), (own, own_factor) = installation.scaled, installation.own
    inverse_frequencies64 = np.where(scaled_rows, scaled.double().cpu().numpy(), own.double().cpu().numpy())
    rows = expected_rows(positions, inverse_frequencies64, np.where(scaled_rows, scaled_factor, own_factor))
    layout = matching_layout(installation.table.answer(positions), *rows)
    if layout != installation.layout:
        raise InputError(
            f"model type {geometry.model_type!r}: the rotary module at {installation.table.name} does not answer with "
            f"the cos and sin of the installed regime {regime.name!r}; this kind of model is not supported"
        )
