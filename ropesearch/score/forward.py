"""The way through a model, in two parts: to the hidden states, and from these to the logits, piece by piece."""

import inspect
from typing import Any

import torch

from ropesearch.errors import InputError

# Logits that exist at once, as float32. A processor wants at least so many rows in one product, or it reads the head's
# weights too often; the loss of a few at a time then stays in its caches. An accelerator wants long pieces of both.
_LOGITS_BYTES_CPU = 16 << 20
_LEAST_ROWS_CPU = 256
_LOSS_BYTES_CPU = 4 << 20
_LOGITS_BYTES_ACCELERATOR = 256 << 20
_OUT_OF_MEMORY_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


def hidden_states_of(model: Any, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The base model's last hidden states, shape (num_tokens, hidden), of tokens that follow those in `cache`."""
    base = base_of(model)
    input_ids = on_input_device(model, token_ids)
    if cache is None:
        output = base(input_ids=input_ids, use_cache=False)
    else:
        output = base(input_ids=input_ids, use_cache=True, **{_cache_keyword(base): cache})
    hidden_states: torch.Tensor | None = getattr(output, "last_hidden_state", None)
    if hidden_states is None:
        raise InputError(
            f"model: expected hidden states from {type(base).__name__}, the base of {type(model).__name__}, got none; "
            "this architecture is not supported"
        )
    return hidden_states[0]


def logits_of(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    config = model.config.get_text_config()
    logits: torch.Tensor = model.get_output_embeddings()(hidden_states)
    # What families multiply their logits by: modeling_granite.py, modeling_cohere.py, modeling_falcon_h1.py.
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        factor = getattr(config, name, None)
        logits = logits if factor is None else logits * factor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap  # modeling_gemma2.py


def vocabulary_tokens(model: Any) -> int:
    """Rows of the input embedding."""
    return int(model.get_input_embeddings().num_embeddings)


def num_head_rows(model: Any, device: torch.device) -> tuple[int, int]:
    """How many hidden states the output head should be given at once, and of how many of these the loss be taken."""
    row_bytes = 4 * vocabulary_tokens(model)
    if device.type == "cpu":
        return max(_LEAST_ROWS_CPU, _LOGITS_BYTES_CPU // row_bytes), max(1, _LOSS_BYTES_CPU // row_bytes)
    num_rows = max(1, _LOGITS_BYTES_ACCELERATOR // row_bytes)
    return num_rows, num_rows


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory does not suffice: torch has several kinds for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(known in text for known in _OUT_OF_MEMORY_TEXTS)


def base_of(model: Any) -> Any:
    """The decoder without its head; Llama 4's base_model is the whole model."""
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def on_input_device(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Token ids (num_tokens,) as a batch of one sequence, where the input embedding is."""
    return token_ids[None].to(model.get_input_embeddings().weight.device)


def _cache_keyword(base: Any) -> str:
    # Newer releases of transformers renamed it; there the old name still works, but warns.
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
