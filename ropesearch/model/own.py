"""The table that a checkpoint has by itself: the plain one, or what the scaling in its config.json makes of it."""

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropesearch.errors import InputError
from ropesearch.model.rotary import (
    RotaryTable,
    check_plain,
    expected_rows,
    is_windowed,
    matching_layout,
    rescaled_tables,
)
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
        self._parameters, self._layer_type = rescaled_parameters(config, geometry.model_type)
        self.rope_type = check_rope_type(self._parameters, geometry.model_type)
        self._name = f"model type {geometry.model_type!r}, rope_type {self.rope_type!r} in config.json"
        if self.is_scaled and (self._layer_type is None) != (geometry.layer_types is None):
            raise InputError(
                f"{self._name}: expected rope parameters by layer type where the built model has a table for each, and "
                "nowhere else; this kind of model is not supported"
            )
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

    def check(self, tables: Sequence[RotaryTable]) -> None:
        """InputError unless a built model, of which `tables` are all, holds this table in float32, entry by entry,
        switches tables as it says, and holds the plain one of each windowed layer type.

        Where the table is scaled, the module has to answer with its cos and sin too: some (PhiMoE) compute another one
        in their forward pass than they hold.
        """
        geometry = self.geometry
        for table in tables:
            if is_windowed(table.layer_type):
                layer = (geometry.layer_types or {}).get(str(table.layer_type))
                check_plain(table, geometry.rope_theta if layer is None else layer.rope_theta, geometry.model_type)
        for table in rescaled_tables(tables, geometry.model_type):
            num_pairs = table.inv_freq.numel()
            if num_pairs != geometry.num_pairs:
                raise InputError(
                    f"model type {geometry.model_type!r}: expected {geometry.num_pairs} rotary pairs, the built model "
                    f"has {num_pairs} at {table.name}"
                )
            if self.is_scaled:
                self._check_scaled(table)
            else:
                check_plain(table, geometry.rope_theta, geometry.model_type)

    def _check_scaled(self, table: RotaryTable) -> None:
        lengths = [1, self.geometry.original_length]
        if self.varies:
            parameters, longest = self._parameters, self._config.max_position_embeddings
            switch = int(parameters["original_max_position_embeddings"] if self.rope_type == "longrope" else longest)
            lengths += [switch, switch + 1, 2 * switch]
        for length in lengths:
            # A dynamic module remembers the longest sequence that it has seen.
            hook = getattr(table.module, "_hf_hook", None)  # accelerate's, which holds weights of the whole model
            built = dataclasses.replace(table, module=copy.deepcopy(table.module, {id(hook): hook}))
            positions = np.array(sorted({0, length // 2, length - 1}))
            try:
                answer = built.answer(positions)
            except _TABLE_ERRORS as error:
                raise InputError(
                    f"{self._name}: the rotary module at {table.name} cannot be asked for cos and sin "
                    f"({type(error).__name__}: {error}); this kind of model is not supported"
                ) from error
            inv_freq, attention_factor = self.table_at(length, built.inv_freq.device)
            rows = expected_rows(positions, inv_freq.double().cpu().numpy(), attention_factor)
            found = built.inv_freq
            if (
                found.dtype != torch.float32
                or found.shape != inv_freq.shape
                or not np.allclose(found.cpu().numpy(), inv_freq.cpu().numpy(), rtol=1e-6, atol=0)
                or not math.isclose(built.attention_factor, attention_factor, rel_tol=1e-6)
                or matching_layout(answer, *rows) is None
            ):
                raise InputError(
                    f"{self._name}: the built model's table for {length} tokens is not what transformers computes "
                    "from config.json; this kind of model is not supported"
                )


def rescaled_parameters(config: Any, model_type: str) -> tuple[dict[str, Any], str | None]:
    """The config's rope parameters of the layers that see the whole sequence, and one of their types where parameters
    differ by layer type. InputError where there are none, or several that differ, or windowed layers are scaled.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        raise InputError(
            f"model type {model_type!r}: expected a model with rotary position embeddings, got one without "
            "(config.json gives no rope parameters)"
        )
    by_layer_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if not by_layer_type:
        return parameters, None
    for name, value in by_layer_type.items():
        if is_windowed(name) and value.get("rope_type", _PLAIN) != _PLAIN:
            raise InputError(
                f"model type {model_type!r}: expected the plain table for windowed layers, got rope_type "
                f"{value['rope_type']!r} for {name} in config.json; such checkpoints are not supported"
            )
    chosen = {name: value for name, value in by_layer_type.items() if not is_windowed(name)}
    if not chosen:
        raise InputError(
            f"model type {model_type!r}: expected layers that see the whole sequence, got only windowed layer types "
            f"({', '.join(sorted(by_layer_type))}); there is nothing to rescale"
        )
    (layer_type, first), *others = chosen.items()
    if any(other != first for _, other in others):
        raise InputError(
            f"model type {model_type!r}: expected one rotary table to rescale, got several that differ "
            f"({', '.join(sorted(chosen))}); which factors each should get is not known: not supported"
        )
    return first, layer_type


def check_rope_type(parameters: Mapping[str, Any], model_type: str) -> str:
    """The rope type that the parameters name; InputError for one that is not known here."""
    rope_type = str(parameters.get("rope_type", _PLAIN))
    if rope_type not in (_PLAIN, *_SCALED):
        raise InputError(
            f"model type {model_type!r}, rope_type {rope_type!r} in config.json: expected one of "
            f"{', '.join((_PLAIN, *_SCALED))}"
        )
    return rope_type


def check_original_length(original_length: int | None, raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """InputError for a scaled checkpoint without original_length; `raw` is its config.json, for the hint, `parameters`
    are its rope parameters.
    """
    rope_type = parameters.get("rope_type", _PLAIN)
    if rope_type == _PLAIN or original_length is not None:
        return
    hint = _stated_original(raw)
    if hint is not None:
        where = f"original_max_position_embeddings = {hint}"
    else:
        where = f"max_position_embeddings = {raw.get('max_position_embeddings')}"
    raise InputError(
        "model.original_length: expected the length in tokens that the model was trained to, as config.json scales "
        f"positions (rope_type {rope_type!r}), got none; config.json gives {where}, which may be it"
    )


def original_length_note(
    original_length: int | None, raw: Mapping[str, Any], parameters: Mapping[str, Any], longest: Any
) -> str | None:
    """A sentence for an original_length that is given and is not what config.json says, else None. `longest` is the
    checkpoint's max_position_embeddings, which says it where nothing is scaled; for `raw` and `parameters` see
    `check_original_length`.
    """
    key, stated = "original_max_position_embeddings", _stated_original(raw)
    if stated is None and parameters.get("rope_type", _PLAIN) == _PLAIN:
        key, stated = "max_position_embeddings", longest
    if original_length is None or not isinstance(stated, int) or stated == original_length:
        return None
    return (
        f"model.original_length = {original_length} is used, where config.json says {key} = {stated}; the ratio, the "
        "baselines and the price on short inputs follow from it"
    )


def _stated_original(raw: Mapping[str, Any]) -> int | None:
    """original_max_position_embeddings, wherever a config.json holds it."""
    places = [raw, raw.get("rope_scaling"), raw.get("rope_parameters")]
    places += [place for outer in places[1:] if isinstance(outer, Mapping) for place in outer.values()]
    stated = [place.get("original_max_position_embeddings") for place in places if isinstance(place, Mapping)]
    return next((length for length in stated if isinstance(length, int)), None)


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
