"""How a model knows positions where it has no rotary table, and what limits the reach of one that has."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ropesearch.model.rotary import is_windowed

_LEARNED = ("wpe", "position_embeddings", "embed_positions", "positions_embed", "position_embedding", "pos_embed")
_RELATIVE = ("relative_attention_bias", "position_bias", "relative_pos_embeddings", "r_r_bias", "rel_extent")
# Their layers of full attention have no rotary embeddings (their modeling files in transformers).
_ROTATES_WINDOWED_ONLY = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")


def positions_without_table(model: nn.Module, model_type: str) -> str:
    """One sentence on the positions of a built model that holds no inverse frequencies, such as "gpt2 has learned
    absolute positions; there is nothing to rescale".

    Told from the modules, buffers and functions by the names that transformers gives them.
    """
    modules = list(model.named_modules())
    names = {name.rpartition(".")[2] for name, _ in modules}
    names |= {name.rpartition(".")[2] for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    source = vars(sys.modules[type(model).__module__])
    embeddings = [module for name, module in modules if name.rpartition(".")[2] in _LEARNED]
    rotates = any("rotary" in name.lower() or name == "rotate_every_two" for name in source)
    rotates = rotates or hasattr(model.config, "rotary_value")  # RoFormer
    if rotates and (_any_attribute(model, "embed_positions", torch.Tensor) or "embed_positions" in names):
        return (
            f"{model_type} rotates by a stored table of sines, not by inverse frequencies; such a table cannot be "
            "exchanged here: not supported"
        )
    if any("sinusoidal" in type(module).__name__.lower() for _, module in modules) or any(
        hasattr(module, "pos_encoding") for _, module in modules
    ):
        kind = "sinusoidal absolute positions"
    elif any(hasattr(module, "weight") or isinstance(module, nn.Module) for module in embeddings):
        kind = "learned absolute positions"
    elif names & set(_RELATIVE) or any(hasattr(module, word) for _, module in modules for word in _RELATIVE):
        kind = "a relative position bias"
    elif any("alibi" in name.lower() for name in source):
        kind = "ALiBi, a bias that grows with distance"
    else:
        kind = "no position embeddings at all: its layers know order by recurrence or by the causal mask alone"
    return f"{model_type} has {kind}; there is nothing to rescale"


def _any_attribute(model: nn.Module, name: str, kind: type) -> bool:
    return any(isinstance(getattr(module, name, None), kind) for module in model.modules())


def layer_limits(config: Any) -> tuple[str, ...]:
    """What keeps some layers from seeing further whatever the factors: sentences for the user, none where nothing does.

    `config` is the transformers config of a decoder. Layers that attend to a window of tokens only are named with their
    window; layers without rotary embeddings are named, since the factors do not reach them.
    """
    num_layers = getattr(config, "num_hidden_layers", 0)
    limits = []
    windowed, unrotated = _windowed_layers(config, num_layers), _unrotated_layers(config, num_layers)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if windowed:
        tokens = f"the last {window} tokens" if isinstance(window, int) else "a window of tokens"
        limits.append(
            f"{_layers(windowed, num_layers)} attend to {tokens} only: they never see further, whatever the factors"
        )
    if unrotated:
        limits.append(
            f"{_layers(unrotated, num_layers)} have no rotary embeddings: the factors do not reach them, and what they "
            "do beyond the trained length stays as it is"
        )
    if windowed and sorted({*windowed, *unrotated}) == list(range(num_layers)):
        limits.append("no layer both rotates and sees the whole sequence, so factors can change little")
    return tuple(limits)


def _windowed_layers(config: Any, num_layers: int) -> list[int]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return [index for index, kind in enumerate(layer_types) if is_windowed(str(kind))]
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return []
    return list(range(num_layers))


def _unrotated_layers(config: Any, num_layers: int) -> list[int]:
    flags = getattr(config, "no_rope_layers", None)  # Llama 4, SmolLM3: 1 where a layer rotates
    if isinstance(flags, list) and len(flags) == num_layers:
        return [index for index, rotates in enumerate(flags) if not rotates]
    windowed = _windowed_layers(config, num_layers)
    if config.model_type in _ROTATES_WINDOWED_ONLY and windowed:
        return [index for index in range(num_layers) if index not in windowed]
    return []


def _layers(indices: Sequence[int], num_layers: int) -> str:
    if len(indices) == num_layers:
        return "all layers"
    shown = ", ".join(str(index) for index in indices[:8]) + (", ..." if len(indices) > 8 else "")
    return f"{len(indices)} of {num_layers} layers ({shown})"
