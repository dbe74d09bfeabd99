"""The derivatives of a loss by a regime, from those by the rows of cos and sin that the model was given.

A model reads a regime only through cos = a cos(n f_i) and sin = a sin(n f_i) at position n, with a the attention factor
and f_i the inverse frequency of pair i divided by its factor. Automatic differentiation is needed for the derivatives
by these rows alone, summed over the layers that share them; the rest is the chain rule, here in float64.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ropesearch.model.load import LoadedModel
from ropesearch.model.rotary import RotaryTable, find_tables, layout_of, parts_of, rescaled_tables


@dataclass(frozen=True, slots=True, eq=False)
class RegimeGradient:
    """Derivatives by the natural logs of a regime's factors, float64 (num_pairs,), and of its attention factor."""

    log_factors: NDArray[np.float64]
    log_attention_factor: float


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Positions (num_tokens,) of one call of a rotary module, and what it gave: leaves of the graph."""

    positions: torch.Tensor
    leaves: Sequence[torch.Tensor]
    inv_freq: torch.Tensor
    layout: str


class RecordedRows:
    """The rows of cos and sin that a model was given while they were recorded (see `recorded_rows`)."""

    def __init__(self, num_pairs: int, retained_tokens: int) -> None:
        self._num_pairs = num_pairs
        self._retained_tokens = retained_tokens
        self._calls: list[_Call] = []

    def gradient(self) -> RegimeGradient:
        """The derivatives, after a backward pass: of an angle n f_i by the log of the factor they are -n f_i, so
        d cos = n f_i sin and d sin = -n f_i cos. Rows of retained tokens depend on neither factors nor attention
        factor.
        """
        log_factors = np.zeros(self._num_pairs)
        log_attention_factor = 0.0
        for call in self._calls:
            if any(leaf.grad is None for leaf in call.leaves):
                continue  # of a recomputation, whose derivatives are with the first call, or without influence
            cos, sin = _by_pair([leaf.detach() for leaf in call.leaves], call.layout)
            by_cos, by_sin = _by_pair([leaf.grad for leaf in call.leaves], call.layout)
            moves = (call.positions >= self._retained_tokens)[:, None, None]
            angles = call.positions.double()[:, None, None] * call.inv_freq.double()[None, :, None]
            log_factors += (angles * (by_cos * sin - by_sin * cos) * moves).sum(dim=(0, 2)).cpu().numpy()
            log_attention_factor += float(((by_cos * cos + by_sin * sin) * moves).sum())
        return RegimeGradient(log_factors, log_attention_factor)

    def _hook(self, table: RotaryTable, layout: str) -> Any:
        """A forward hook: the rows that it gives instead are the same numbers, as leaves of the graph."""

        def hook(rotary: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not torch.is_grad_enabled() or table.layer_type != _layer_type(table, args, kwargs):
                return output
            position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            single = isinstance(output, torch.Tensor)
            leaves = [rows.detach().clone().requires_grad_() for rows in ([output] if single else output)]
            # Of models with positions of several axes, text has the same on each.
            positions = position_ids.reshape(-1)[-leaves[0].shape[-2] :].to(leaves[0].device)
            self._calls.append(_Call(positions, leaves, table.inv_freq, layout))
            return leaves[0] if single else tuple(leaves)

        return hook


@contextlib.contextmanager
def recorded_rows(loaded: LoadedModel, retained_tokens: int) -> Iterator[RecordedRows]:
    """Within the block forward passes of one sequence, in which a regime with these retained tokens is installed,
    record the rows of cos and sin that factors apply to, as leaves of the graph; the logits stay bit for bit the same.
    """
    model_type = loaded.geometry.model_type
    recorded = RecordedRows(loaded.geometry.num_pairs, retained_tokens)
    with contextlib.ExitStack() as stack:
        for table in rescaled_tables(find_tables(loaded.model, model_type), model_type):
            # Retained tokens answer with the checkpoint's own table.
            hook = recorded._hook(table, layout_of(table, model_type, first_position=retained_tokens))
            stack.callback(table.module.register_forward_hook(hook, with_kwargs=True).remove)
        yield recorded


def _layer_type(table: RotaryTable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer type that a module with one table for each was asked for; None in all others."""
    if table.layer_type is None:
        return None
    return kwargs["layer_type"] if "layer_type" in kwargs else args[2]


def _by_pair(rows: Sequence[Any], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin, float64 of shape (num_tokens, num_pairs, copies), of rows for one sequence in a known layout."""
    both = [rows[0].real, rows[0].imag] if len(rows) == 1 else rows
    cos, sin = (torch.stack([*parts_of(layout, each)], dim=-1)[0].double() for each in both)
    return cos, sin
