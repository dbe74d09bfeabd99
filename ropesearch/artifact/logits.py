"""Logits of random texts: of a model under a regime, and of a folder as transformers loads it by itself."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ropesearch import seeding
from ropesearch.errors import InputError
from ropesearch.model.install import installed
from ropesearch.model.load import LOAD_ERRORS, LoadedModel
from ropesearch.rope.regime import Regime

_NUM_POSITIONS = 64
_AUTO_MODEL: Any = transformers.AutoModelForCausalLM


def logits_under(
    loaded: LoadedModel, regime_at: Callable[[int], Regime], lengths: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Logits of each length with the regime for it installed; see `random_logits`."""
    result: dict[int, torch.Tensor] = {}
    for regime, group in itertools.groupby(lengths, regime_at):
        with installed(loaded, regime, as_shipped=True):
            result |= random_logits(loaded.model, list(group))
    return result


def greatest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The greatest absolute difference of two tensors of one shape."""
    return float((first - second).abs().max())


def plain_load(folder: Path, device: str, attention: str) -> Any:
    """The folder's model as transformers alone loads it, in the checkpoint's dtype. InputError where it cannot."""
    try:
        model = _AUTO_MODEL.from_pretrained(
            folder,
            dtype="auto",
            device_map={"": device},
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
        )
    except LOAD_ERRORS as error:
        raise InputError(f"{folder}: transformers cannot load the folder: {error}") from error
    model.eval()
    return model


def random_logits(model: Any, lengths: Sequence[int]) -> dict[int, torch.Tensor]:
    """Logits of a random text of each length, by length: float32 on the CPU, shape (positions, vocabulary).

    A model that transformers cannot run at a length raises InputError.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    result = {}
    for length in lengths:
        tokens = torch.from_numpy(seeding.stream(0, "verify").integers(vocabulary, size=length))
        positions = torch.linspace(0, length - 1, min(length, _NUM_POSITIONS), dtype=torch.float64).round().long()
        try:
            with torch.no_grad():
                answer = model(
                    input_ids=tokens[None].to(model.device),
                    use_cache=False,
                    logits_to_keep=positions.to(model.device),
                )
        except UnboundLocalError as error:  # transformers 5.16 with two tables by layer type, see loader_limits
            raise InputError(f"transformers cannot run the model on {length} tokens: {error}") from error
        result[length] = answer.logits[0].float().cpu()
    return result
