"""A model without its weights: what config.json alone says about its rotary tables and its positions."""

from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from ropesearch.errors import InputError

# What transformers raises for a config that contradicts itself or asks for what is not installed.
BUILD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    AssertionError,
    IndexError,
    StrictDataclassError,
)


def build_skeleton(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a transformers config on the meta device, its rotary modules alone real, on the CPU in float32.

    The tables are made as from_pretrained makes them: the module is built empty, and the model's own `_init_weights`
    fills it. A model without rotary tables is returned though it be no causal language model, for its positions to be
    named; one with them is refused then. Raises InputError for that, and when transformers cannot build the model.
    """
    auto_model: Any = transformers.AutoModelForCausalLM
    is_causal = trust_remote_code or type(config) in auto_model._model_mapping
    if not is_causal:
        auto_model = transformers.AutoModel
        if type(config) not in auto_model._model_mapping:
            raise InputError(
                f"model type {config.model_type!r}: expected a causal language model, but transformers loads none of "
                "this type by AutoModelForCausalLM; it is not supported"
            )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_model.from_config(config, trust_remote_code=trust_remote_code)
        for module in rotary_modules(model):
            module.to_empty(device="cpu", recurse=False)
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.fill_(float("nan"))
            model._init_weights(module)
    except BUILD_ERRORS as error:
        text = " ".join(str(error).split())
        raise InputError(
            f"model type {config.model_type!r}: transformers cannot build the model that config.json describes "
            f"({type(error).__name__}: {text[:300]})"
        ) from error
    if not is_causal and rotary_modules(model):
        raise InputError(
            f"model type {config.model_type!r}: expected a causal language model, got a model of another kind, "
            f"{type(model).__name__}; it is not supported"
        )
    return model.eval()


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold inverse frequencies, each once."""
    return [
        module
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]
