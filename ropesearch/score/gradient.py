"""The objective on one window and its derivatives by the regime, in bounded memory.

Weights are frozen. Layers are computed again in the backward pass (activation checkpointing), and the output head's
part is done piece by piece, so what is held at once is one layer's activations, the hidden states between the layers
and one piece of logits.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ropesearch.errors import ScoringError
from ropesearch.model.adjoint import RegimeGradient, recorded_rows
from ropesearch.score.forward import hidden_states_of, is_out_of_memory, logits_of, num_head_rows

if TYPE_CHECKING:
    from ropesearch.model.load import LoadedModel

# What a gradient costs for each token, in forward-equivalent tokens: the forward pass, a backward pass of twice its
# products, and the recomputation.
GRADIENT_COST = 4


def window_gradient(
    loaded: "LoadedModel", token_ids: NDArray[np.int32], weights: NDArray[np.float64], retained_tokens: int
) -> tuple[float, RegimeGradient]:
    """The weighted sum of a window's nats under whatever table is installed, and its derivatives by the regime.

    `token_ids` (length,); `weights` (length,) of the nats of each token, of which the first is never predicted.
    `retained_tokens` are those of the installed regime. Raises ScoringError when the sum or a derivative is not finite,
    when memory does not suffice, and when the model has an operation without derivative.
    """
    ids = torch.from_numpy(token_ids.astype(np.int64))
    try:
        with torch.enable_grad(), recomputed(loaded.model), recorded_rows(loaded, retained_tokens) as recorded:
            hidden_states = hidden_states_of(loaded.model, ids, None)
            nats, by_hidden_states = _head(loaded.model, hidden_states.detach(), ids, weights)
            hidden_states.backward(by_hidden_states)
            gradient = recorded.gradient()
    except (RuntimeError, MemoryError) as error:  # NotImplementedError, an operation without derivative, is one too
        what = "out of memory with" if is_out_of_memory(error) else "this model does not give"
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ScoringError(f"{what} a gradient over a whole window: {reason}") from None
    derivatives = [*gradient.log_factors.tolist(), gradient.log_attention_factor]
    if not all(math.isfinite(value) for value in (nats, *derivatives)):
        raise ScoringError(f"a gradient is not finite: nats {nats}, derivatives {derivatives}")
    return nats, gradient


def _head(
    model: Any, hidden_states: torch.Tensor, token_ids: torch.Tensor, weights: NDArray[np.float64]
) -> tuple[float, torch.Tensor]:
    """The weighted nats, summed in float64, and their derivatives by the hidden states, (num_tokens, hidden)."""
    by_hidden_states = torch.zeros_like(hidden_states)
    token_weights = torch.from_numpy(weights).to(hidden_states.device)
    total = 0.0
    num_rows, _ = num_head_rows(model, hidden_states.device)
    for start in range(0, len(token_ids) - 1, num_rows):
        stop = min(start + num_rows, len(token_ids) - 1)
        piece_weights = token_weights[start + 1 : stop + 1]
        if not bool(piece_weights.any()):
            continue
        piece = hidden_states[start:stop].requires_grad_()
        logits = logits_of(model, piece).float()
        nats = cross_entropy(logits, token_ids[start + 1 : stop + 1].to(logits.device), reduction="none")
        (by_hidden_states[start:stop],) = torch.autograd.grad(nats, piece, piece_weights.to(nats))
        total += float((nats.detach().double() * piece_weights.to(nats.device)).sum())
    return total, by_hidden_states


@contextlib.contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Within the block the model's layers keep their inputs alone for the backward pass, in evaluation mode too."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                hooked = vars(module).get("forward")  # of a spread model, with what moves the layer's input
                if hooked is None:
                    stack.callback(delattr, module, "forward")
                else:
                    stack.callback(setattr, module, "forward", hooked)
                module.forward = _checkpointed(module.forward)
        yield


def _checkpointed(forward: Any) -> Any:
    def again(*args: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **keywords)

    return again
