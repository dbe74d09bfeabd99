"""The keys and values of the tokens that have gone through the model, for windows that are scored in chunks."""

import os
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ropesearch.errors import InputError
from ropesearch.score.forward import hidden_states_of, vocabulary_tokens

_NUM_PROBE_TOKENS = 8


class HostLayer(DynamicLayer):
    """The cache of one layer in the CPU's memory; on the device is what its attention reads, while it reads.

    Transformers' own offloading (cache_utils.py) copies beside the computation, on a stream of its own, in release 5.16
    without waiting for the computation to have read what it writes over; it needs CUDA, and copies a whole layer back
    for every chunk. Here every copy is waited for and a chunk is kept as it came, so the numbers are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of a chunk, (batch, heads, tokens, channels); give those of all tokens so far."""
        self.is_initialized = True
        self._pieces.append((_on_host(key_states), _on_host(value_states)))
        keys, values = zip(*self._pieces, strict=True)
        return _joined(keys, key_states.device), _joined(values, value_states.device)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens so far."""
        return sum(keys.shape[-2] for keys, _ in self._pieces)


def new_cache(model: Any, offload: bool) -> Any:
    """An empty cache for one window; each layer's is where the layer is, or with `offload` in the CPU's memory.

    Layers that keep a window of tokens, or a state, hold little and stay on the device. InputError where all do.
    """
    cache: Any = DynamicCache(config=model.config)
    if offload:
        cache.layers = [HostLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        if not any(isinstance(layer, HostLayer) for layer in cache.layers):
            raise InputError(
                "objective.offload_cache: expected layers whose cache is the keys and values of all tokens "
                f"and nothing else, got {type(model).__name__} without; leave it out"
            )
    return cache


def check_memory(model: Any, length_tokens: int, offload: bool) -> None:
    """Raise InputError where it is certain that the weights and the cache of `length_tokens` tokens do not fit.

    Certain: more than the machine has, whoever else uses it; what the computation needs comes on top. The layers that
    keep all tokens are asked what they keep of a few; of Llama's, each keeps 2 x num_key_value_heads x head_dim numbers
    for a token.
    """
    probe = new_cache(model, offload=False)
    with torch.inference_mode():
        hidden_states_of(model, torch.arange(_NUM_PROBE_TOKENS) % vocabulary_tokens(model), probe)
    layers = [layer for layer in probe.layers if type(layer) is DynamicLayer and layer.is_initialized]
    layer_bytes = [(layer.keys.nbytes + layer.values.nbytes) // _NUM_PROBE_TOKENS for layer in layers]
    held: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        held[tensor.device] = held.get(tensor.device, 0) + tensor.nbytes
    cached: dict[torch.device, int] = {}
    for layer, token_bytes in zip(layers, layer_bytes, strict=True):
        device, needed = layer.keys.device, token_bytes * length_tokens
        kept_on = torch.device("cpu") if offload else device
        cached[kept_on] = cached.get(kept_on, 0) + needed
        if device != kept_on:  # one layer's at a time
            cached[device] = max(cached.get(device, 0), needed)
    for device, needed in cached.items():
        memory_bytes, weights = _memory_bytes(device), held.get(device, 0)
        if memory_bytes is not None and weights + needed > memory_bytes:
            remedy = "give a shorter target_length"
            if not offload and device.type != "cpu":
                remedy = "give objective.offload_cache=true, or more GPUs with model.device=balanced"
            raise InputError(
                f"objective.chunk_tokens: expected room on {device} for the keys and values of a window, "
                f"{_gigabytes(needed)} ({length_tokens} tokens; all layers take "
                f"{sum(layer_bytes)} bytes for each), beside {_gigabytes(weights)} of "
                f"weights, got {_gigabytes(memory_bytes)} in all; {remedy}"
            )


def _memory_bytes(device: torch.device) -> int | None:
    """All memory that a device has; None where that is not known."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None


def _gigabytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _on_host(states: torch.Tensor) -> torch.Tensor:
    # Pinned memory is copied from several times as fast.
    kept = torch.empty(states.shape, dtype=states.dtype, pin_memory=states.device.type == "cuda")
    return kept.copy_(states)


def _joined(pieces: tuple[torch.Tensor, ...], device: torch.device) -> torch.Tensor:
    """The pieces one after the other, on the device; there is never more of them there than once."""
    first = pieces[0]
    num_tokens = sum(piece.shape[-2] for piece in pieces)
    whole = torch.empty((*first.shape[:-2], num_tokens, first.shape[-1]), dtype=first.dtype, device=device)
    start = 0
    for piece in pieces:
        whole[..., start : start + piece.shape[-2], :] = piece
        start += piece.shape[-2]
    return whole
