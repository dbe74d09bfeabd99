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

from ropesearch.errors import InputError
from ropesearch.model.checkpoint import check_tokenizer_files, check_weight_files, find_checkpoint, read_json
from ropesearch.model.config import Attention, ModelConfig
from ropesearch.model.positions import layer_limits, positions_without_table
from ropesearch.model.rotary import RotaryTable, check_geometry, find_tables, is_windowed, rescaled_tables
from ropesearch.model.skeleton import build_skeleton, rotary_modules
from ropesearch.rope.geometry import Geometry, LayerRope

# What transformers raises for files that do not fit together or do not fit on the device.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
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

    `folder` is the local checkpoint folder; `dtype`, `attention` and `device` say how it was really loaded.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    folder: Path
    dtype: str
    attention: str
    device: str


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the checkpoint that `config` names; works without a network when it is local or cached.

    Raises InputError for whatever keeps it from being used: files missing, pickled or not matching config.json, no
    tokenizer, weights that are not finite, no rotary embedding or one that is already scaled, an architecture
    whose rotary tables cannot be exchanged, a device or attention implementation that is not available.
    """
    folder = find_checkpoint(config)
    geometry = read_geometry(folder, config.original_length, trust_remote_code=config.trust_remote_code)
    check_weight_files(folder)
    tokenizer = _read_tokenizer(folder, config.trust_remote_code)
    device = _device(config.device)
    try:
        answer: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=config.dtype.value,
            device_map={"": device},
            # Left to itself, transformers takes sdpa, and eager where an architecture has no sdpa.
            attn_implementation=None if config.attention is Attention.sdpa else config.attention.value,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise InputError(f"{folder}: the {geometry.model_type} model could not be loaded: {_reason(error)}") from error
    model, loading_info = answer
    _check_weights(model, loading_info, folder)
    check_geometry(find_tables(model, geometry.model_type), geometry)
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        geometry=geometry,
        folder=folder,
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config._attn_implementation),
        device=str(device),
    )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer alone, without fetching or reading weights. Raises InputError when there is none."""
    return _read_tokenizer(find_checkpoint(config, with_weights=False), config.trust_remote_code)


def read_geometry(folder: Path, original_length: int | None = None, *, trust_remote_code: bool = False) -> Geometry:
    """The rotary geometry of the model that the folder's config.json describes, built without its weights.

    `original_length` is in tokens; None means the checkpoint's max_position_embeddings. Raises InputError for a model
    without rotary embeddings, with several tables to rescale, already scaled, quantised, or unknown to transformers.
    """
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
    except _LOAD_ERRORS as error:
        raise InputError(
            f"{folder}: config.json (model type {model_type!r}) is not usable: {_reason(error)}"
        ) from error
    if config.get_text_config() is not config:
        raise InputError(
            f"model type {model_type!r}: expected a plain decoder, got a model of several parts (the language model is "
            "one of them); give a checkpoint of the language model alone"
        )
    skeleton = build_skeleton(config, trust_remote_code=trust_remote_code)
    # Falcon builds its rotary module whether or not it is an ALiBi model.
    if not rotary_modules(skeleton) or getattr(config, "alibi", False):
        raise InputError(
            f"model type {model_type!r}: expected a model with rotary position embeddings, got one without: "
            f"{positions_without_table(skeleton, model_type)}"
        )
    parameters = _rope_parameters(config, model_type)
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
        rope_theta=float(parameters["rope_theta"]),
        layer_types=_layer_types(config, tables, model_type),
    )
    check_geometry(tables, geometry)
    return geometry


def read_layer_limits(folder: Path, *, trust_remote_code: bool = False) -> tuple[str, ...]:
    """What keeps some layers of the folder's model from seeing further whatever the factors, see `layer_limits`."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    return layer_limits(config)


def _layer_types(config: Any, tables: Sequence[RotaryTable], model_type: str) -> dict[str, LayerRope] | None:
    """Theta of each layer type that has a table of its own; None where all layers share one."""
    names = [table.layer_type for table in tables if table.layer_type is not None]
    if not names:
        return None
    thetas = {name: _theta(config.rope_parameters.get(name) or {}, model_type) for name in names}
    return {name: LayerRope(rope_theta=theta, rescaled=not is_windowed(name)) for name, theta in sorted(thetas.items())}


def _rope_parameters(config: Any, model_type: str) -> dict[str, Any]:
    """The config's one set of rope parameters, of the unscaled type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        raise InputError(
            f"model type {model_type!r}: expected a model with rotary position embeddings, got one without "
            "(config.json gives no rope parameters)"
        )
    by_layer_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if by_layer_type:
        parameters = _rescaled_parameters(by_layer_type, model_type)
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default":
        raise InputError(
            f"model type {model_type!r}: expected a checkpoint without position scaling, got rope_type {rope_type!r}; "
            "checkpoints that are already scaled are not supported: give the model it was made from"
        )
    _theta(parameters, model_type)
    return parameters


def _rescaled_parameters(by_layer_type: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Of rope parameters by layer type, those of the layers that see the whole sequence."""
    chosen = {name: value for name, value in by_layer_type.items() if not is_windowed(name)}
    if not chosen:
        raise InputError(
            f"model type {model_type!r}: expected layers that see the whole sequence, got only windowed layer types "
            f"({', '.join(sorted(by_layer_type))}); there is nothing to rescale"
        )
    first, *others = chosen.values()
    if any(other != first for other in others):
        raise InputError(
            f"model type {model_type!r}: expected one rotary table to rescale, got several that differ "
            f"({', '.join(sorted(chosen))}); which factors each should get is not known: not supported"
        )
    parameters: dict[str, Any] = first
    return parameters


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
    except Exception as error:  # the tokenizers library raises plain Exception for a file that it cannot use
        raise InputError(f"{folder}: the tokenizer could not be loaded: {_reason(error)}") from error
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # torch built without CUDA says so with an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"model.device: {name!r} is not available here ({_reason(error)}); give another device, or auto"
        ) from error
    if device.type == "meta":
        raise InputError("model.device: expected a device that holds data, got 'meta'")
    return device


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


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
