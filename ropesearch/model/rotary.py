"""The one rotary module that a model's forward pass reads its cos and sin from."""

import numpy as np
import torch
from torch import nn

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry

# float32 powers of theta are this close to the float64 ones (relative), for any theta and rotary_dim in use.
_TABLE_TOLERANCE = 1e-5


def find_rotary(model: nn.Module, model_type: str) -> nn.Module:
    """The module `rotary_emb` of the decoder. InputError, naming the model type, where it is not built as Llama's.

    That is: exactly one module holds inverse frequencies, it sits at `<decoder>.rotary_emb`, has one buffer `inv_freq`
    and one `attention_scaling`. Replacing a rotary module elsewhere (per layer, say) would silently change nothing.
    """
    holders = {name: module for name, module in model.named_modules() if _holds_inverse_frequencies(module)}
    rotary = getattr(getattr(model, "base_model", model), "rotary_emb", None)
    if not isinstance(rotary, nn.Module) or list(holders.values()) != [rotary]:
        raise InputError(
            f"model type {model_type!r}: expected one rotary module at <decoder>.rotary_emb, as in Llama, "
            f"got {', '.join(sorted(holders)) or 'none'}; this kind of model is not supported"
        )
    if not isinstance(getattr(rotary, "inv_freq", None), torch.Tensor) or not hasattr(rotary, "attention_scaling"):
        raise InputError(
            f"model type {model_type!r}: expected a rotary module with inv_freq and attention_scaling, as in Llama; "
            "models with a table per layer kind are not supported"
        )
    return rotary


def check_geometry(rotary: nn.Module, geometry: Geometry) -> None:
    """InputError unless the built module's float32 table is that of `geometry`, which config.json describes."""
    table = rotary.inv_freq
    if not isinstance(table, torch.Tensor) or table.dtype != torch.float32:
        raise InputError(
            f"model type {geometry.model_type!r}: expected a float32 table of inverse frequencies in the built model, "
            f"got {getattr(table, 'dtype', type(table).__name__)}"
        )
    if table.numel() != geometry.num_pairs:
        raise InputError(
            f"model type {geometry.model_type!r}: config.json describes {geometry.num_pairs} rotary pairs, "
            f"the built model has {table.numel()}; check head_dim and partial_rotary_factor in config.json"
        )
    built = table.double().cpu().numpy()
    if not np.allclose(built, geometry.inverse_frequencies(), rtol=_TABLE_TOLERANCE, atol=0):
        raise InputError(
            f"model type {geometry.model_type!r}: the built model's inverse frequencies are not those of "
            f"rope_theta = {geometry.rope_theta:g} in config.json; this kind of model is not supported"
        )


def _holds_inverse_frequencies(module: nn.Module) -> bool:
    names = [*dict(module.named_buffers(recurse=False)), *dict(module.named_parameters(recurse=False))]
    return any(name.endswith("inv_freq") for name in names)
