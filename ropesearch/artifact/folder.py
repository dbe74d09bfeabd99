"""Writing an extended checkpoint as an ordinary checkpoint folder."""

import errno
import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropesearch import files
from ropesearch.artifact import digest, schema
from ropesearch.artifact.config import WeightsMode
from ropesearch.artifact.config_json import described_regimes, extended_config, extended_tokenizer_config
from ropesearch.artifact.schema import Checkpoint, RopeConfig
from ropesearch.errors import BindingError, InputError
from ropesearch.strict_json import differences, read_json_object

# Weights in other formats and what trainers leave behind: never taken along.
_LEFT_OUT_SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pickle", ".pkl",
    ".pt", ".pth", ".safetensors", ".tflite", ".zip",
)  # fmt: skip
_LEFT_OUT_NAME = "trainer_state.json"
_MAX_SMALL_FILE_BYTES = 128 << 20
_FICLONE = 0x40049409  # linux/fs.h


def write_checkpoint_folder(
    source: Path,
    destination: Path,
    rope_config: RopeConfig,
    weights: WeightsMode = WeightsMode.copy,
    *,
    allow_unportable: bool = False,
) -> tuple[str, ...]:
    """Write `source`, extended by `rope_config`, to the folder `destination`; return the names of files left behind.

    The folder holds rope_config.json, the weights (see WeightsMode), config.json as `extended_config` says,
    tokenizer_config.json with model_max_length raised, and, as they are, the source's other files at its top level and
    its chat templates: tokenizer, generation config, licence, model card. Left behind are subfolders (such as
    original/), hidden files, pickles, weights in other formats, and files above 128 MiB that are not the tokenizer's.

    What other loaders do not serve as it is meant (`RopeConfig.not_portable`) is refused, unless `allow_unportable`.
    Where config.json cannot hold the regimes at all (`described_regimes`), it and tokenizer_config.json then keep what
    the source's say. Other loaders thus see the model as it was, with its old greatest length, rather than a longer one
    that it does not serve; `ropesearch.load` serves the regimes.

    The folder is built beside `destination` and renamed. A destination with the same content is left as it is; one with
    other content is refused. Raises InputError for that, for a source that cannot be read and for too little disk
    space; BindingError when the source is not the checkpoint of `rope_config` (all its bytes are read to know), its
    config.json and generation_config.json included.
    """
    if rope_config.not_portable and not allow_unportable:
        raise InputError(
            f"{destination}: expected a regime that config.json can express, got {', '.join(rope_config.not_portable)}"
            "; use one regime and retained_tokens 0, or allow a folder that only ropesearch.load serves as it is meant"
        )
    binding = digest.checkpoint_binding(source)
    check_binding(rope_config, binding, source)
    for name, expected, found in (
        (digest.CONFIG, rope_config.checkpoint.config, binding.config),
        (digest.GENERATION_CONFIG, rope_config.checkpoint.generation_config, binding.generation_config),
    ):
        difference = next(differences(expected, found), None)
        if difference is not None:
            raise BindingError(
                f"{source}: expected the {name} that the factors were found for, got another: {difference}; restore "
                "it, or search again"
            )
    texts = _written_texts(source, rope_config)
    copied, left_behind = _small_files(source, texts)
    weight_paths = [] if weights is WeightsMode.none else digest.weight_files(source)
    if weight_paths and weight_paths[0].name != digest.SINGLE_FILE:
        copied.append(source / digest.INDEX_FILE)

    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise InputError(f"{destination}: expected a folder or nothing, got a file or a link")
    if destination.is_dir() and any(destination.iterdir()):
        difference = _difference(source, destination, texts, copied, weight_paths, weights, binding)
        if difference is None:
            return left_behind
        raise InputError(
            f"{destination}: expected nothing, or the same content, got other: {difference}; remove {destination} first"
        )

    try:
        with files.folder_beside(destination.absolute()) as stage:
            for name, content in texts.items():
                files.write_bytes(stage / name, content)
            _place(stage, source, copied, weight_paths, weights)
    except OSError as error:
        raise InputError(
            f"{destination}: expected a place to write to, got {error.strerror or error}; make room or give another "
            "place, then give the same command again"
        ) from error
    return left_behind


def check_binding(rope_config: RopeConfig, found: Checkpoint, folder: Path) -> None:
    """Raises BindingError, showing both digests, when `found` is not the checkpoint that `rope_config` is bound to."""
    bound = rope_config.checkpoint
    for what, expected, got in (
        ("weights", bound.digest, found.digest),
        ("tokenizer", bound.tokenizer_digest, found.tokenizer_digest),
    ):
        if expected != got:
            raise BindingError(
                f"{folder}: expected {what} with the digest {expected}, as rope_config.json says, got {got}; restore "
                "what has changed, or, if this is another checkpoint, search for it"
            )


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where a written folder's JSON is not as it was written.

    `key` is the top-level key of the file `name`; `is_position` tells whether writing the folder set that key; `text`
    says the whole place, what was expected and what was found.
    """

    name: str
    key: str
    is_position: bool
    text: str


def json_differences(folder: Path, rope_config: RopeConfig) -> list[Difference]:
    """Where config.json, generation_config.json and the model_max_length of tokenizer_config.json in `folder` are not
    as they were written for `rope_config`.

    Every key counts, those that no loader of today reads too; the order of keys and white space do not. The other keys
    of tokenizer_config.json are in the tokenizer digest. Raises InputError for a file that cannot be read, and when
    `rope_config` is of a model that no config.json can be written for.
    """
    bound = rope_config.checkpoint
    expected = extended_config(bound.config, rope_config)
    found = read_json_object(folder / digest.CONFIG)
    result = []
    for key in dict.fromkeys((*expected, *found)):
        is_position = list(differences(_only(bound.config, key), _only(expected, key))) != []
        for text in differences(_only(expected, key), _only(found, key)):
            result.append(Difference(digest.CONFIG, key, is_position, text))

    path = folder / digest.GENERATION_CONFIG
    generation_config = read_json_object(path) if path.exists() else None
    result += [
        Difference(digest.GENERATION_CONFIG, "", False, text)
        for text in differences(bound.generation_config, generation_config)
    ]

    path = folder / digest.TOKENIZER_CONFIG
    limit = read_json_object(path).get("model_max_length") if path.exists() else None
    limits = {"model_max_length": bound.model_max_length}
    if described_regimes(bound.config, rope_config) is not None:
        limits = extended_tokenizer_config(limits, rope_config.target_length)
    result += [
        Difference(digest.TOKENIZER_CONFIG, "model_max_length", True, text)
        for text in differences(limits, {"model_max_length": limit})
    ]
    return result


def _only(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: value[key]} if key in value else {}


def _written_texts(source: Path, rope_config: RopeConfig) -> dict[str, bytes]:
    """The files that are not copies, by name."""
    config = extended_config(rope_config.checkpoint.config, rope_config)
    texts = {schema.FILE_NAME: _json_text(rope_config.to_json()), digest.CONFIG: _json_text(config)}
    is_described = described_regimes(rope_config.checkpoint.config, rope_config) is not None
    if is_described and (source / digest.TOKENIZER_CONFIG).is_file():
        tokenizer = read_json_object(source / digest.TOKENIZER_CONFIG)
        texts[digest.TOKENIZER_CONFIG] = _json_text(extended_tokenizer_config(tokenizer, rope_config.target_length))
    return texts


def _json_text(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _small_files(source: Path, written: Mapping[str, bytes]) -> tuple[list[Path], tuple[str, ...]]:
    """The files to copy as they are, and the names of what stays behind."""
    copied, left_behind = [], []
    required, weight_paths = set(digest.tokenizer_files(source)), digest.weight_files(source)
    for path in sorted(source.iterdir()):
        if path.name in (*written, digest.INDEX_FILE, digest.CHAT_TEMPLATE_FOLDER) or path in weight_paths:
            continue
        wanted = path.is_file() and not path.name.startswith(".") and path.suffix.lower() not in _LEFT_OUT_SUFFIXES
        wanted = wanted and path.name != _LEFT_OUT_NAME and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
        if wanted or path in required:
            copied.append(path)
        else:
            left_behind.append(path.name)
    copied += sorted(path for path in required if path.parent.name == digest.CHAT_TEMPLATE_FOLDER)
    return copied, tuple(left_behind)


def _difference(
    source: Path,
    destination: Path,
    texts: Mapping[str, bytes],
    copied: list[Path],
    weight_paths: list[Path],
    weights: WeightsMode,
    binding: Checkpoint,
) -> str | None:
    """What an existing destination has otherwise than it would be written, or None."""
    expected = {*texts, *(path.relative_to(source).as_posix() for path in (*copied, *weight_paths))}
    found = {path.relative_to(destination).as_posix() for path in destination.rglob("*") if not path.is_dir()}
    if expected != found:
        return f"the files that one has and the other has not are {', '.join(sorted(expected ^ found))}"
    for name, content in texts.items():
        if (destination / name).read_bytes() != content:
            return f"{name} differs"
    for path in copied:
        name = path.relative_to(source).as_posix()
        if (destination / name).read_bytes() != path.read_bytes():
            return f"{name} differs"
    sha256 = {file.name: file.sha256 for file in binding.files}
    for path in weight_paths:
        placed = destination / path.name
        if weights is WeightsMode.link:
            if not placed.is_symlink() or placed.resolve() != path.resolve():
                return f"{path.name} is not a link to the source's"
        elif placed.is_symlink() or files.sha256_of_file(placed) != sha256[path.name]:
            return f"{path.name} differs"
    return None


def _place(stage: Path, source: Path, copied: list[Path], weight_paths: list[Path], weights: WeightsMode) -> None:
    for path in copied:
        target = stage / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    if weights is WeightsMode.link:
        for path in weight_paths:
            (stage / path.name).symlink_to(path.resolve())
        return
    to_copy = [path for path in weight_paths if not _reflinked(path, stage / path.name)]
    needed_bytes = sum(path.stat().st_size for path in to_copy)
    free_bytes = shutil.disk_usage(stage).free
    if needed_bytes > free_bytes:
        raise InputError(
            f"{stage.parent}: expected {needed_bytes:,} bytes of free disk space for the weights, got {free_bytes:,}; "
            "free some, or link the weights (weights=link)"
        )
    for path in to_copy:
        shutil.copyfile(path, stage / path.name)


def _reflinked(path: Path, target: Path) -> bool:
    """Make `target` share the bytes of `path` until one of them is changed; False where that is not possible."""
    with path.open("rb") as source, target.open("wb") as destination:
        try:
            fcntl.ioctl(destination.fileno(), _FICLONE, source.fileno())
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM):
                return False
            raise
    return True
