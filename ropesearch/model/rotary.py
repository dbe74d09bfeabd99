"""The rotary tables that a model's forward pass reads its cos and sin from: where they are, and how they answer."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ropesearch.errors import InputError

# float32 powers of theta are this close to the float64 ones (relative), for any theta and rotary_dim in use.
_TABLE_TOLERANCE = 1e-5
_INV_FREQ = "inv_freq"
# Layer types that look at a window of tokens only; what they never see, no table can bring nearer.
_WINDOWED = ("sliding", "chunked", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """One table of inverse frequencies in a built model.

    `name` says where it is; `layer_type` is set in modules that hold one table for each type of layer and take the type
    as the argument `layer_type` of their forward pass (gemma3, olmo3), and None in all others.
    """

    name: str
    module: nn.Module
    layer_type: str | None = None

    @property
    def prefix(self) -> str:
        """How the module's attributes for this table begin."""
        return "" if self.layer_type is None else f"{self.layer_type}_"

    @property
    def inv_freq(self) -> torch.Tensor:
        """The inverse frequencies in force, shape (num_pairs,)."""
        value: torch.Tensor = getattr(self.module, f"{self.prefix}{_INV_FREQ}")
        return value

    @property
    def attention_factor(self) -> float:
        """The attention factor in force."""
        return float(getattr(self.module, f"{self.prefix}attention_scaling"))

    def values(self) -> dict[str, Any]:
        """The module's attributes that are this table, by name."""
        names = [f"{self.prefix}{_INV_FREQ}", f"{self.prefix}attention_scaling"]
        # PhiMoE computes its table in every forward pass, with this function.
        names += ["rope_init_fn"] if "rope_init_fn" in vars(self.module) else []
        return {name: getattr(self.module, name) for name in names}

    def values_of(self, inv_freq: torch.Tensor, attention_factor: float) -> dict[str, Any]:
        """The same attributes for another table; `inv_freq` is float32 on the module's device, shape (num_pairs,)."""
        values = {f"{self.prefix}{_INV_FREQ}": inv_freq, f"{self.prefix}attention_scaling": attention_factor}
        if "rope_init_fn" in vars(self.module):
            values["rope_init_fn"] = lambda *arguments, **keywords: (inv_freq, attention_factor)
        return values

    def answer(self, positions: Sequence[int] | NDArray[np.int64]) -> Any:
        """What the module's forward pass gives for one float32 sequence at these positions."""
        device = self.inv_freq.device
        keywords = {} if self.layer_type is None else {"layer_type": self.layer_type}
        with torch.no_grad():
            return self.module(
                torch.zeros(1, dtype=torch.float32, device=device),
                torch.as_tensor(positions, device=device)[None],
                **keywords,
            )


@contextlib.contextmanager
def held(tables: Sequence[RotaryTable]) -> Iterator[None]:
    """Within the block the modules of `tables` keep what is put in force there, whatever lengths they are asked for.

    Its rope_type is "default" there, which keeps transformers' dynamic_rope_update from writing a table of its own over
    it.
    """
    with contextlib.ExitStack() as stack:
        for table in tables:
            rope_type: Any = table.module.rope_type
            stack.callback(setattr, table.module, "rope_type", rope_type)
            unchanging: Any = {**rope_type, table.layer_type: "default"} if isinstance(rope_type, dict) else "default"
            table.module.rope_type = unchanging
        yield


def _halves(rows: torch.Tensor) -> Iterable[torch.Tensor]:
    first, second = rows.chunk(2, dim=-1)
    return first, second


def _neighbours(rows: torch.Tensor) -> Iterable[torch.Tensor]:
    return rows[..., 0::2], rows[..., 1::2]


def _single(rows: torch.Tensor) -> Iterable[torch.Tensor]:
    return (rows,)


# How cos and sin of num_pairs pairs lie in a row: one after the other, twice (Llama); each twice (Cohere, GLM);
# once (gpt-oss), as complex numbers also (Llama 4).
_LAYOUTS: dict[str, tuple[int, Callable[[torch.Tensor], Iterable[torch.Tensor]]]] = {
    "halves": (2, _halves),
    "neighbours": (2, _neighbours),
    "single": (1, _single),
}


def parts_of(layout: str, rows: torch.Tensor) -> Iterable[torch.Tensor]:
    """The copies of cos or sin, each (..., num_pairs), that `rows` of a known layout hold."""
    return _LAYOUTS[layout][1](rows)


def matching_layout(
    answer: Any, cos: NDArray[np.float64], sin: NDArray[np.float64], tolerance: NDArray[np.float64]
) -> str | None:
    """The layout in which `answer` holds the rows `cos` and `sin`, float64 of shape (positions, num_pairs), or None.

    `answer` is what a rotary module gave for one sequence: a pair of tensors, or one complex tensor.
    """
    if isinstance(answer, torch.Tensor) and answer.is_complex():
        answer = (answer.real, answer.imag)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return None
    if not all(isinstance(rows, torch.Tensor) and rows.is_floating_point() for rows in answer):
        return None
    num_positions, num_pairs = cos.shape
    for name, (width, parts_of) in _LAYOUTS.items():
        if all(rows.shape == (1, num_positions, width * num_pairs) for rows in answer) and all(
            bool((np.abs(part[0].double().cpu().numpy() - expected) <= tolerance).all())
            for rows, expected in zip(answer, (cos, sin), strict=True)
            for part in parts_of(rows)
        ):
            return name
    return None


def expected_rows(
    positions: NDArray[np.int64], inv_freq: NDArray[np.float64], attention_factor: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """cos, sin and how near a module has to come to them, float64 of shape (positions, num_pairs); LongRoPE's Eq. 3.

    `inv_freq` and `attention_factor` are those of the table, or of each position. The module multiplies, and takes cos
    and sin, in float32.
    """
    angles = positions[:, None] * inv_freq
    tolerance = attention_factor * (2**-23 * angles + 2e-6)
    return attention_factor * np.cos(angles), attention_factor * np.sin(angles), tolerance


def find_tables(model: nn.Module, model_type: str) -> tuple[RotaryTable, ...]:
    """Every rotary table of the decoder, in the order of its modules. InputError, naming the model type, where one is
    of a kind that cannot be exchanged, or where there is none.

    A table is a buffer `inv_freq`, or `{layer_type}_inv_freq`, with an `attention_scaling` of the same prefix and a
    `rope_type` in one module.
    """
    tables = []
    for name, module in model.named_modules():
        for buffer in _inverse_frequencies(module):
            layer_type = buffer.removesuffix(_INV_FREQ).rstrip("_") or None
            where = f"{name} ({layer_type})" if layer_type else name
            scaling = buffer.removesuffix(_INV_FREQ) + "attention_scaling"
            if not hasattr(module, scaling) or not hasattr(module, "rope_type"):
                raise InputError(
                    f"model type {model_type!r}: expected rotary modules with attention_scaling and rope_type beside "
                    f"their inverse frequencies, got {where} ({type(module).__name__}) without; this kind of model is "
                    "not supported"
                )
            tables.append(RotaryTable(name=where, module=module, layer_type=layer_type))
    if not tables:
        raise InputError(
            f"model type {model_type!r}: expected a model with rotary position embeddings, got one without a table of "
            "inverse frequencies; there is nothing to rescale"
        )
    return tuple(tables)


def rescaled_tables(tables: Sequence[RotaryTable], model_type: str) -> tuple[RotaryTable, ...]:
    """The tables that factors apply to: those of layers that see the whole sequence.

    Tables by layer type: the types that are not windowed. One table in several modules, such as one for each layer: all
    of them. InputError, naming the tables, where they are not one and the same.
    """
    chosen = [table for table in tables if not is_windowed(table.layer_type)]
    if not chosen:
        raise InputError(
            f"model type {model_type!r}: expected layers that see the whole sequence, got only tables of windowed "
            f"layers ({', '.join(table.name for table in tables)}); there is nothing to rescale"
        )
    first = chosen[0]
    for table in chosen[1:]:
        if (
            type(table.module) is not type(first.module)
            or getattr(table.module, "config", None) is not getattr(first.module, "config", None)
            or not torch.equal(table.inv_freq.to(first.inv_freq.device), first.inv_freq)
        ):
            raise InputError(
                f"model type {model_type!r}: expected one rotary table to rescale, got several that differ or serve "
                f"parts of their own ({first.name}, {table.name}); which factors each should get is not known: not "
                "supported"
            )
    return tuple(chosen)


def is_windowed(layer_type: str | None) -> bool:
    """Whether layers of this type, as transformers names it, look at a window of tokens only."""
    return layer_type is not None and any(word in layer_type for word in _WINDOWED)


def check_plain(table: RotaryTable, rope_theta: float, model_type: str) -> None:
    """InputError unless the built module's table is float32 and the plain one of `rope_theta`."""
    inv_freq = table.inv_freq
    if inv_freq.dtype != torch.float32:
        raise InputError(
            f"model type {model_type!r}: expected a float32 table of inverse frequencies in the built model, got "
            f"{inv_freq.dtype} at {table.name}"
        )
    built, num_pairs = inv_freq.double().cpu().numpy(), inv_freq.numel()
    plain = rope_theta ** -(np.arange(num_pairs) / num_pairs)
    if not np.allclose(built, plain, rtol=_TABLE_TOLERANCE, atol=0):
        raise InputError(
            f"model type {model_type!r}: the built model's inverse frequencies at {table.name} are not those of "
            f"rope_theta = {rope_theta:g} in config.json; this kind of model is not supported"
        )


def layout_of(table: RotaryTable, model_type: str, first_position: int = 0) -> str:
    """How the module lays out cos and sin, learnt from its answer under the table it holds, at four positions from
    `first_position` on; InputError if it is none that is known.
    """
    positions = first_position + np.arange(4)
    try:
        answer = table.answer(positions)
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"model type {model_type!r}: the rotary module at {table.name} cannot be asked for cos and sin at given "
            f"positions ({type(error).__name__}: {error}); this kind of model is not supported"
        ) from error
    inv_freq = table.inv_freq.double().cpu().numpy()
    layout = matching_layout(answer, *expected_rows(positions, inv_freq, table.attention_factor))
    if layout is None:
        raise InputError(
            f"model type {model_type!r}: the rotary module at {table.name} does not answer with the cos and sin of the "
            "inverse frequencies it holds, in any layout that is known; this kind of model is not supported"
        )
    return layout


def _inverse_frequencies(module: nn.Module) -> list[str]:
    names = [*dict(module.named_buffers(recurse=False)), *dict(module.named_parameters(recurse=False))]
    return [name for name in names if name.endswith(_INV_FREQ) and not name.endswith(f"original_{_INV_FREQ}")]
