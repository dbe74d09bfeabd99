"""Put a regime in force in a loaded model, prove that the forward pass uses it, and take it out without a trace."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropesearch.errors import InputError
from ropesearch.model.load import LoadedModel
from ropesearch.model.rotary import find_rotary
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime, inverse_frequencies

# The attributes of a rotary module that decide its cos and sin; rope_type "default" keeps transformers'
# dynamic_rope_update from writing its own table over the one installed.
_ATTRIBUTES = ("inv_freq", "attention_scaling", "rope_type")
_INSTALLED = "_ropesearch_installed"
_NUM_CANARY_TOKENS = 32


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

    Positions below `retained_tokens` keep the cos and sin of the checkpoint's own table, the one for sequences of
    `max_length` tokens where it has several; positions are absolute, so a cached or chunked forward pass agrees with a
    whole one. A regime that is the checkpoint's own leaves its table in force; where that depends on the length, it is
    held at the one for `max_length`. With `as_shipped` the table is the one that is shipped, made of the factors, in
    that case too: the same up to float32 rounding. Raises InputError when the factors do not fit the model or the
    module does not answer with the cos and sin of the regime; RuntimeError when a regime is installed already.
    """
    rotary = find_rotary(loaded.model, loaded.geometry.model_type)
    if getattr(rotary, _INSTALLED, False):
        raise RuntimeError("a regime is already installed in this model; leave its block first")
    before = {name: getattr(rotary, name) for name in _ATTRIBUTES}
    device = before["inv_freq"].device
    table = rotary_table(loaded.geometry, regime).to(device)
    scaled = {"inv_freq": table, "attention_scaling": regime.attention_factor, "rope_type": "default"}
    own = {**before, "rope_type": "default"}
    if loaded.own.varies:
        own["inv_freq"], own["attention_scaling"] = loaded.own.table_at(regime.max_length, device)
    if loaded.own.is_own(regime) and not as_shipped:
        scaled = own
    hook = None
    try:
        setattr(rotary, _INSTALLED, True)
        _assign(rotary, scaled)
        if regime.retained_tokens:
            hook = rotary.register_forward_hook(_keep_first_rows(own, scaled, regime.retained_tokens), with_kwargs=True)
        _prove_rows(rotary, own, scaled, loaded.geometry, regime)
        yield
    finally:
        if hook is not None:
            hook.remove()
        _assign(rotary, before)
        delattr(rotary, _INSTALLED)


def prove_installable(loaded: LoadedModel) -> None:
    """Prove on the model itself that installing a regime changes what it computes, and that leaving undoes it.

    Three canaries (factors, attention factor, retained tokens) must each change the logits of a short probe, and after
    each block the logits must be those of before, bit for bit. Raises InputError naming the model type otherwise.
    """
    geometry = loaded.geometry
    embeddings: Any = loaded.model.get_input_embeddings()
    # Any tokens do, as long as neighbours differ.
    vocabulary_tokens = embeddings.weight.shape[0]
    probe = torch.arange(0, 7 * _NUM_CANARY_TOKENS, 7, device=loaded.model.device)[None] % vocabulary_tokens

    def logits() -> torch.Tensor:
        with torch.no_grad():
            answer = loaded.model(input_ids=probe, use_cache=False).logits
        if not isinstance(answer, torch.Tensor) or not bool(torch.isfinite(answer).all()):
            raise InputError(
                f"model type {geometry.model_type!r}: expected finite logits, got NaN or infinity "
                f"from {loaded.dtype} weights; give model.dtype=float32 or bfloat16"
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
            raise InputError(
                f"model type {geometry.model_type!r}: {what} of a regime do not reach the model's logits; "
                "this kind of model is not supported"
            )


def _assign(rotary: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(rotary, name, value)


def _keep_first_rows(own: dict[str, Any], scaled: dict[str, Any], retained_tokens: int) -> Any:
    """A forward hook: rows of cos and sin at positions below retained_tokens come from the checkpoint's own table."""

    def hook(
        rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        kept = (position_ids < retained_tokens)[..., None]
        _assign(rotary, own)
        try:
            own_cos, own_sin = rotary.forward(*args, **kwargs)
        finally:
            _assign(rotary, scaled)
        return torch.where(kept, own_cos, output[0]), torch.where(kept, own_sin, output[1])

    return hook


def _prove_rows(
    rotary: nn.Module, own: dict[str, Any], scaled: dict[str, Any], geometry: Geometry, regime: Regime
) -> None:
    """InputError unless the module answers probe positions with cos and sin by LongRoPE's Eq. 3, reckoned in float64.

    The float64 angles come from the float32 tables, which were themselves held against float64 when they were made.
    """
    last, kept = regime.max_length - 1, regime.retained_tokens
    probes = {0, 1, 2, kept - 1, kept, geometry.original_length - 1, geometry.original_length, last // 2, last}
    positions = np.array(sorted(position for position in probes if 0 <= position <= last))
    device = scaled["inv_freq"].device
    with torch.no_grad():
        cos, sin = rotary(
            torch.zeros(1, dtype=torch.float32, device=device), torch.as_tensor(positions, device=device)[None]
        )
    scaled_rows = (positions >= kept)[:, None]
    tables = [values["inv_freq"].double().cpu().numpy() for values in (scaled, own)]
    angles = positions[:, None] * np.where(scaled_rows, *tables)
    attention_factor = np.where(scaled_rows, scaled["attention_scaling"], own["attention_scaling"])
    # The module multiplies, and takes cos and sin, in float32.
    tolerance = attention_factor * (2**-23 * angles + 2e-6)
    for read, expected in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        rows = read.double().cpu().numpy()
        width = geometry.num_pairs
        if rows.shape != (1, len(positions), 2 * width) or not all(
            (np.abs(half - attention_factor * expected) <= tolerance).all()
            for half in (rows[0, :, :width], rows[0, :, width:])
        ):
            raise InputError(
                f"model type {geometry.model_type!r}: the rotary module does not answer with the cos and sin of "
                f"the installed regime {regime.name!r}; this kind of model is not supported"
            )
