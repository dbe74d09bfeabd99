"""Load a checkpoint: model, tokenizer and rotary geometry, checked to belong together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropesearch.errors import InputError, in_one_line
from ropesearch.model.checkpoint import check_tokenizer_files, check_weight_files, find_checkpoint, read_json
from ropesearch.model.config import Attention, ModelConfig
from ropesearch.model.devices import check_placed, device_arguments, devices_of, in_words
from ropesearch.model.own import (
    OwnTable,
    check_original_length,
    check_rope_type,
    original_length_note,
    rescaled_parameters,
)
from ropesearch.model.positions import layer_limits, positions_without_table
from ropesearch.model.rotary import RotaryTable, find_tables, is_windowed, rescaled_tables
from ropesearch.model.skeleton import build_skeleton, rotary_modules
from ropesearch.rope.geometry import Geometry, LayerRope

# What transformers raises for files that do not fit together or do not fit on the device.
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to score: in eval mode, without gradients, with the table its checkpoint describes in force.

    `own` is that table. `folder` is the local checkpoint folder; `dtype`, `attention` and `device` (several, separated
    by commas, where the model is spread) say how it was really loaded.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    own: OwnTable
    folder: Path
    dtype: str
    attention: str
    device: str


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the checkpoint that `config` names; works without a network when it is local or cached.

    Raises InputError for whatever keeps it from being used: files missing, pickled or not matching config.json, no
    tokenizer, weights that are not finite, no rotary embedding, scaling without original_length or that a regime cannot
    express, an architecture whose rotary tables cannot be exchanged, a device or attention implementation that is not
    available.
    """
    folder = find_checkpoint(config)
    geometry = read_geometry(folder, config.original_length, trust_remote_code=config.trust_remote_code)
    own = read_own(folder, geometry, trust_remote_code=config.trust_remote_code)
    check_weight_files(folder)
    tokenizer = _read_tokenizer(folder, config.trust_remote_code)
    device = device_arguments(config.device)
    try:
        answer: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=config.dtype.value,
            **device,
            # Left to itself, transformers takes sdpa, and eager where an architecture has no sdpa.
            attn_implementation=None if config.attention is Attention.sdpa else config.attention.value,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # `_check_weights` refuses them by name
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        if isinstance(error, ImportError) and config.attention is Attention.flash_attention_2:
            raise InputError(
                f"attention: expected the package of {config.attention.value} to be installed, got none that works "
                f"({in_one_line(error)}); install it, or give attention sdpa"
            ) from error
        raise InputError(
            f"{folder}: the {geometry.model_type} model could not be loaded: {in_one_line(error)}"
        ) from error
    model, loading_info = answer
    check_placed(model, config.device)
    _check_weights(model, loading_info, folder)
    own.check(find_tables(model, geometry.model_type))
    model.eval().requires_grad_(False)
    _own_weights(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        own=own,
        folder=folder,
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config._attn_implementation),
        device=in_words(devices_of(model)),
    )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer alone, without fetching or reading weights. Raises InputError when there is none."""
    return _read_tokenizer(find_checkpoint(config, with_weights=False), config.trust_remote_code)


def read_geometry(folder: Path, original_length: int | None = None, *, trust_remote_code: bool = False) -> Geometry:
    """The rotary geometry, before any scaling, of the model that the folder's config.json describes, built without its
    weights.

    `original_length` is in tokens; None means the checkpoint's max_position_embeddings. Raises InputError for a model
    without rotary embeddings, with several tables to rescale, scaled without original_length, quantised, or unknown to
    transformers.
    """
    raw, config = _read_config(folder, trust_remote_code)
    model_type = str(raw["model_type"])
    if config.get_text_config() is not config:
        raise InputError(
            f"model type {model_type!r}: expected a plain decoder, got a model of several parts (the language model is "
            "one of them); give a checkpoint of the language model alone"
        )
    _check_parameters(config, raw, model_type, original_length)
    skeleton = build_skeleton(config, trust_remote_code=trust_remote_code)
    # Falcon builds its rotary module whether or not it is an ALiBi model.
    if not rotary_modules(skeleton) or getattr(config, "alibi", False):
        raise InputError(
            f"model type {model_type!r}: expected a model with rotary position embeddings, got one without: "
            f"{positions_without_table(skeleton, model_type)}"
        )
    parameters, _ = rescaled_parameters(config, model_type)
    tables = find_tables(skeleton, model_type)
    # Counted in the built module: families reckon it in ways of their own.
    rotary_dim = 2 * rescaled_tables(tables, model_type)[0].inv_freq.numel()
    length = getattr(config, "max_position_embeddings", None) if original_length is None else original_length
    if not isinstance(length, int):
        raise InputError(
            f"model type {model_type!r}: config.json gives no max_position_embeddings; "
            "give model.original_length in tokens"
        )
    geometry = Geometry(
        model_type=model_type,
        head_dim=_head_dim_of(config, rotary_dim),
        rotary_dim=rotary_dim,
        original_length=length,
        rope_theta=_theta(parameters, model_type),
        layer_types=_layer_types(config, tables, model_type),
    )
    OwnTable(geometry, config).check(tables)
    return geometry


def read_own(folder: Path, geometry: Geometry, *, trust_remote_code: bool = False) -> OwnTable:
    """The table that the folder's config.json describes; weights are not touched. Raises InputError, see `OwnTable`."""
    return OwnTable(geometry, _read_config(folder, trust_remote_code)[1])


def read_layer_limits(folder: Path, *, trust_remote_code: bool = False) -> tuple[str, ...]:
    """What keeps some layers of the folder's model from seeing further whatever the factors, see `layer_limits`."""
    return layer_limits(_read_config(folder, trust_remote_code)[1])


def read_length_note(folder: Path, original_length: int | None, *, trust_remote_code: bool = False) -> tuple[str, ...]:
    """What to say of an original_length, in tokens, that is not what config.json says, see `original_length_note`."""
    raw, config = _read_config(folder, trust_remote_code)
    parameters, _ = rescaled_parameters(config, str(raw["model_type"]))
    longest = getattr(config, "max_position_embeddings", None)
    note = original_length_note(original_length, raw, parameters, longest)
    return () if note is None else (note,)


def _read_config(folder: Path, trust_remote_code: bool) -> tuple[dict[str, Any], Any]:
    """config.json as JSON and as transformers understands it."""
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{folder / 'config.json'}: expected a model_type, got none")
    if raw.get("quantization_config"):
        raise InputError(f"{folder}: expected plain weights, got a quantised checkpoint; give the original one")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except LOAD_ERRORS as error:
        raise InputError(
            f"{folder}: config.json (model type {model_type!r}) is not usable: {in_one_line(error)}"
        ) from error
    return raw, config


def _check_parameters(config: Any, raw: dict[str, Any], model_type: str, original_length: int | None) -> None:
    """InputError, before anything is built, for rope parameters that no model could be built with."""
    if not getattr(config, "rope_parameters", None):
        return  # what positions it has is told from the built model
    parameters, _ = rescaled_parameters(config, model_type)
    check_rope_type(parameters, model_type)
    check_original_length(original_length, raw, parameters)
    head_dim, partial = getattr(config, "head_dim", None), parameters.get("partial_rotary_factor")
    for key, value in (("head_dim", head_dim), ("partial_rotary_factor", partial)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6):
            raise InputError(
                f"model type {model_type!r}: expected a number above 0 for {key} in config.json, got {value!r}"
            )


def _layer_types(config: Any, tables: Sequence[RotaryTable], model_type: str) -> dict[str, LayerRope] | None:
    """Theta of each layer type that has a table of its own; None where all layers share one."""
    names = [table.layer_type for table in tables if table.layer_type is not None]
    if not names:
        return None
    thetas = {name: _theta(config.rope_parameters.get(name) or {}, model_type) for name in names}
    return {name: LayerRope(rope_theta=theta, rescaled=not is_windowed(name)) for name, theta in sorted(thetas.items())}


def _theta(parameters: dict[str, Any], model_type: str) -> float:
    theta = parameters.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not math.isfinite(theta):
        raise InputError(f"model type {model_type!r}: expected a number for rope_theta in config.json, got {theta!r}")
    return float(theta)


def _head_dim_of(config: Any, rotary_dim: int) -> int:
    """Channels of a head; where the config says fewer than are rotated, the head that is rotated is another one."""
    head_dim = getattr(config, "head_dim", None)
    if not isinstance(head_dim, int):
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        head_dim = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0
    return max(head_dim, rotary_dim)


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    check_tokenizer_files(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        tokenizer.encode("a text", add_special_tokens=False)  # some values are only met when it is used
    except Exception as error:  # the tokenizers library raises plain Exception for a file that it cannot use
        raise InputError(f"{folder}: the tokenizer could not be loaded: {in_one_line(error)}") from error
    return tokenizer


def _check_weights(model: PreTrainedModel, loading_info: dict[str, Any], folder: Path) -> None:
    """InputError when files and config.json do not name the same tensors and shapes, or a weight is not finite."""
    for problem, keys in (
        ("lack", loading_info.get("missing_keys")),
        ("hold tensors that config.json has no place for:", loading_info.get("unexpected_keys")),
        ("hold tensors of other shapes than config.json asks for:", loading_info.get("mismatched_keys")),
    ):
        if keys:
            names = sorted(str(key[0] if isinstance(key, tuple | list) else key) for key in keys)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(f"{folder}: the weight files {problem} {', '.join(names[:3])}{more}")
    for name, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{folder}: expected finite weights, got NaN or infinity in {name}")


def _own_weights(model: PreTrainedModel) -> None:
    """Copy weights on the CPU, which may be views of the mapped files: a file that is overwritten would change them
    under way, and one that is cut would end the process (SIGBUS)."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def quiet_transformers() -> None:
    """Progress bars and warnings of transformers would tear this program's own progress display."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
