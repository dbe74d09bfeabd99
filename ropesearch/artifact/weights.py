"""Writing changed weights as a checkpoint folder like the one that they came from."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ropesearch import files
from ropesearch.artifact import digest
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


def check_stored_names(source: Path, names: Iterable[str]) -> None:
    """Raise InputError unless every tensor that the checkpoint `source` stores is one of `names`, the model's own, in a
    dtype of floating point: then changed weights can be written in its place, tensor by tensor."""
    known = set(names)
    for path in digest.weight_files(source):
        for entry in digest.read_header(path):
            if entry.name not in known:
                raise InputError(
                    f"{path}: expected stored tensors with the names that transformers' model gives them, got "
                    f"{entry.name!a}, which it stores otherwise; such a checkpoint cannot be fine-tuned here: save it "
                    "anew with transformers' save_pretrained, if that keeps the model's names, or use another"
                )
            if entry.dtype not in _DTYPES:
                raise InputError(
                    f"{path}: expected weights in floating point ({', '.join(_DTYPES)}), got {entry.dtype} in "
                    f"{entry.name!a}"
                )


def stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    """The dtype that each tensor of the checkpoint is stored in, by name; those not in floating point left out."""
    entries = (entry for path in digest.weight_files(source) for entry in digest.read_header(path))
    return {entry.name: _DTYPES[entry.dtype] for entry in entries if entry.dtype in _DTYPES}


def write_weights(
    source: Path,
    destination: Path | None,
    rope_config: RopeConfig,
    tensor_of: Callable[[str], torch.Tensor],
) -> None:
    """Write the checkpoint of `rope_config`, whose folder is `source`, with other weights to the folder `destination`,
    which is made: `tensor_of(name)` on the CPU, in the files, names and dtypes of the source.

    Everything else is as it was before rope_config.json was written: config.json and the greatest length of the
    tokenizer too. With no destination the tensors are only asked for, as processes that share them have to. OSError
    where the disk refuses. One file's tensors are in memory at a time.
    """
    paths = digest.weight_files(source)
    if destination is not None:
        _write_small_files(source, destination, rope_config, {path.name for path in paths})
    for path in paths:
        tensors = {}
        for entry in digest.read_header(path):
            tensor = tensor_of(entry.name).to(_DTYPES[entry.dtype]).contiguous()
            if destination is not None:
                tensors[entry.name] = tensor
        if destination is not None:
            save_tensors(tensors, destination / path.name)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file. Where the system refuses, OSError with its number and the path, as open() would."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _write_small_files(source: Path, destination: Path, rope_config: RopeConfig, weight_names: set[str]) -> None:
    bound = rope_config.checkpoint
    destination.mkdir(parents=True)
    names = {path.relative_to(source).as_posix() for path in digest.tokenizer_files(source)}
    names |= {digest.GENERATION_CONFIG, digest.TOKENIZER_CONFIG}
    if len(weight_names) > 1 or digest.SINGLE_FILE not in weight_names:
        names.add(digest.INDEX_FILE)
    for name in sorted(names):
        if (source / name).is_file():
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, destination / name)
    files.write_json(destination / digest.CONFIG, bound.config)
    tokenizer_config = destination / digest.TOKENIZER_CONFIG
    if tokenizer_config.is_file():
        content = json.loads(tokenizer_config.read_bytes())
        if content.get("model_max_length") != bound.model_max_length:
            files.write_json(tokenizer_config, {**content, "model_max_length": bound.model_max_length})
