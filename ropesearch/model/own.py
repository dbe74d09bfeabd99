"""The table that a checkpoint has by itself: the plain one, or what the scaling in its config.json makes of it."""

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime

UNSCALED = "unscaled"
# A table that depends on the length of the sequence, held at the one for target_length.
UNSCALED_LONG = "unscaled_long"

_PLAIN = "default"
_SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")
# Relative; a quotient of two float32 tables is this close to what was meant.
_ROUNDING = 3e-7
# What transformers' table functions raise for parameters that they cannot use.
_TABLE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class OwnTable:
    """A checkpoint's own table, as a function of the final length of a sequence.

    Computed by transformers' functions (modeling_rope_utils.py) from the config alone, without weights. Only the types
    `dynamic` and `longrope` depend on the length. Where layer types differ, it is the table of those that the geometry
    says are rescaled. Raises InputError for scaling that a regime cannot express.
    """

    def __init__(self, geometry: Geometry, config: Any) -> None:
        self.geometry = geometry
        self._config = config
        layer_types = geometry.layer_types or {}
        self._layer_type = next((name for name, layer in layer_types.items() if layer.rescaled), None)
        self.rope_type = str(self._parameters.get("rope_type", _PLAIN))
        self._name = f"model type {geometry.model_type!r}, rope_type {self.rope_type!r} in config.json"
        if self.rope_type not in (_PLAIN, *_SCALED):
            raise InputError(f"{self._name}: expected one of {', '.join((_PLAIN, *_SCALED))}")
        if self._parameters.get("mscale_all_dim"):
            raise InputError(
                f"{self._name}: its mscale_all_dim changes the attention outside the table, which a regime cannot "
                "express; such checkpoints are not supported"
            )
        longest = getattr(config, "max_position_embeddings", None)
        if self.is_scaled and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
            raise InputError(f"{self._name}: expected max_position_embeddings in tokens beside it, got {longest!r}")
        try:
            json.dumps(self.to_json(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"{self._name}: expected rope parameters that JSON can hold, got {error}") from error
        for length in (1, geometry.original_length):
            self.regime_at(length)

    @property
    def is_scaled(self) -> bool:
        """Whether config.json scales positions at all."""
        return self.rope_type != _PLAIN

    @property
    def varies(self) -> bool:
        """Whether the table depends on the length of the sequence."""
        parameters = self._parameters
        if self.rope_type == "longrope":
            return bool(parameters["short_factor"] != parameters["long_factor"])
        return self.rope_type == "dynamic"

    @property
    def _parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self._config.rope_parameters
        return parameters if self._layer_type is None else parameters[self._layer_type]

    def to_json(self) -> dict[str, Any]:
        """What the table follows from, as JSON values: transformers' rope_parameters and max_position_embeddings."""
        return {
            "rope_parameters": copy.deepcopy(self._config.rope_parameters),
            "max_position_embeddings": getattr(self._config, "max_position_embeddings", None),
        }

    def table_at(self, length: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, float]:
        """Inverse frequencies, float32, shape (num_pairs,), and attention factor of a sequence of `length` tokens.

        Bit for bit what a freshly loaded model computes on that device when it reads the sequence in one pass.
        """
        device = torch.device(device)
        if not self.is_scaled:
            return _plain_table(self.geometry, device), 1.0
        seq_len: Any = None  # for the other types, and for dynamic up to max_position_embeddings, the table built first
        try:
            if self.rope_type == "longrope":
                seq_len = length
            elif self.rope_type == "dynamic" and length > self._config.max_position_embeddings:
                seq_len = torch.tensor(length, device=device)  # a tensor in the forward pass too, so rounded to float32
            table, attention_factor = ROPE_INIT_FUNCTIONS[self.rope_type](
                self._config, device, seq_len=seq_len, layer_type=self._layer_type
            )
            attention_factor = float(attention_factor)
        except _TABLE_ERRORS as error:
            raise InputError(
                f"{self._name}: transformers cannot make a table of it: {type(error).__name__}: {error}"
            ) from error
        if table.dtype != torch.float32 or table.shape != (self.geometry.num_pairs,):
            raise InputError(
                f"{self._name}: expected a float32 table of {self.geometry.num_pairs} pairs, "
                f"got {table.dtype} of shape {tuple(table.shape)}"
            )
        return table, attention_factor

    def regime_at(self, length: int) -> Regime:
        """The regime "unscaled" of a sequence of `length` tokens: factors relative to the plain rope_theta.

        A factor is the plain inverse frequency over the own one, freed of float32 rounding where a number of up to five
        digits was meant. Raises InputError for a factor below 1 and for a table that is not finite.
        """
        table, attention_factor = self.table_at(length)
        quotients = _plain_table(self.geometry, torch.device("cpu")).double() / table.double()
        try:
            return Regime(
                name=UNSCALED,
                max_length=length,
                factors=tuple(_as_meant(quotient) for quotient in quotients.tolist()),
                attention_factor=attention_factor,
            )
        except InputError as error:
            raise InputError(f"{self._name}: {error}; such checkpoints are not supported") from error

    def is_own(self, regime: Regime) -> bool:
        """Whether `regime` is this table at its max_length, up to float32 rounding."""
        own = self.regime_at(regime.max_length)
        return len(own.factors) == len(regime.factors) and bool(
            np.allclose(regime.factors, own.factors, rtol=_ROUNDING, atol=0)
            and math.isclose(regime.attention_factor, own.attention_factor, rel_tol=_ROUNDING)
        )

    def check(self, rotary: nn.Module) -> None:
        """InputError unless the built module holds this table, entry by entry, and switches tables as it says."""
        lengths = [1]
        if self.varies:
            parameters, longest = self._parameters, self._config.max_position_embeddings
            switch = int(parameters["original_max_position_embeddings"] if self.rope_type == "longrope" else longest)
            lengths += [switch, switch + 1, 2 * switch]
        prefix = "" if self._layer_type is None else f"{self._layer_type}_"
        keywords = {} if self._layer_type is None else {"layer_type": self._layer_type}
        for length in lengths:
            module: Any = copy.deepcopy(rotary)  # a dynamic module remembers the longest sequence that it has seen
            device = getattr(module, f"{prefix}inv_freq").device
            with torch.no_grad():
                module(torch.zeros(1, device=device), torch.tensor([[length - 1]], device=device), **keywords)
            table, attention_factor = self.table_at(length, device)
            found, found_factor = (getattr(module, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
            if (
                found.dtype != torch.float32
                or found.shape != table.shape
                or not np.allclose(found.cpu().numpy(), table.cpu().numpy(), rtol=1e-6, atol=0)
                or not math.isclose(float(found_factor), attention_factor, rel_tol=1e-6)
            ):
                raise InputError(
                    f"{self._name}: the built model's table for {length} tokens is not what transformers computes "
                    "from config.json; this kind of model is not supported"
                )


def check_original_length(original_length: int | None, raw: Mapping[str, Any], rope_type: str) -> None:
    """InputError for a scaled checkpoint without original_length; `raw` is its config.json, for the hint."""
    if rope_type == _PLAIN or original_length is not None:
        return
    places = [raw, raw.get("rope_scaling"), raw.get("rope_parameters")]
    places += [place for outer in places[1:] if isinstance(outer, Mapping) for place in outer.values()]
    hints = [place.get("original_max_position_embeddings") for place in places if isinstance(place, Mapping)]
    hint = next((hint for hint in hints if isinstance(hint, int)), None)
    if hint is not None:
        where = f"original_max_position_embeddings = {hint}"
    else:
        where = f"max_position_embeddings = {raw.get('max_position_embeddings')}"
    raise InputError(
        "model.original_length: expected the length in tokens that the model was trained to, as config.json scales "
        f"positions (rope_type {rope_type!r}), got none; config.json gives {where}, which may be it"
    )


def _plain_table(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """theta^(-2 i / rotary_dim) in float32, rounded as in transformers' default and scaled tables."""
    exponents = torch.arange(0, geometry.rotary_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float)
    table: torch.Tensor = 1.0 / (geometry.rope_theta ** (exponents / geometry.rotary_dim))
    return table


def _as_meant(quotient: float) -> float:
    for num_digits in range(1, 6):
        number = float(f"{quotient:.{num_digits}g}")
        if math.isclose(number, quotient, rel_tol=_ROUNDING):
            return number
    return quotient
