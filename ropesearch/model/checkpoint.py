"""Where a checkpoint lies on disk, and whether its files are of a kind that may be read."""

import contextlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from ropesearch.errors import InputError
from ropesearch.model.config import ModelConfig

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_checkpoint(config: ModelConfig, *, with_weights: bool = True) -> Path:
    """The local folder of the checkpoint; a hub id is downloaded, or found in the hub's cache when there is no network.

    With `with_weights` false only the small files (configuration and tokenizer) are fetched. Raises InputError when
    nothing is there: no such folder, an unknown hub id, or one that is neither cached nor reachable.
    """
    if not config.path:
        raise InputError("model.path: expected a checkpoint folder or a hub id, got nothing")
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        if config.revision is not None:
            raise InputError(f"model.revision: expected none for the local folder {folder}, got {config.revision!r}")
        return folder
    if folder.suffix.lower() == ".gguf":
        raise InputError(_gguf_message(folder.name))
    if folder.exists():
        raise InputError(f"model.path: expected a checkpoint folder, got the file {folder}; give the folder it lies in")
    if folder.is_absolute() or config.path.startswith((".", "~")):
        raise InputError(f"model.path: no such folder: {folder}")
    patterns = ["*.json", "*.txt", "*.jinja", "*.model"]
    patterns += ["*.safetensors"] if with_weights else []
    patterns += ["*.py"] if config.trust_remote_code else []

    def fetch(*, cached_only: bool) -> Path:
        return Path(
            snapshot_download(
                config.path, revision=config.revision, allow_patterns=patterns, local_files_only=cached_only
            )
        )

    try:
        return fetch(cached_only=False)
    except (OSError, HFValidationError) as error:
        # Without a network some releases of the hub's client do not look into the cache for a commit on their own.
        with contextlib.suppress(OSError, HFValidationError):
            return fetch(cached_only=True)
        revision = f" at revision {config.revision!r}" if config.revision is not None else ""
        raise InputError(
            f"model.path: {config.path!r} is no folder here, and as a hub id{revision} it is neither in the local "
            f"cache nor could it be fetched ({_first_line(error)}); check the spelling, or fetch it online"
        ) from error


def check_weight_files(folder: Path) -> None:
    """InputError unless the folder holds whole safetensors weights: pickled and GGUF files are refused by name."""
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: holds an adapter (adapter_config.json); merge it into its model first")
    if (folder / _WEIGHTS).exists():
        return
    if (folder / _WEIGHTS_INDEX).exists():
        weight_map = read_json(folder / _WEIGHTS_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{folder / _WEIGHTS_INDEX}: expected a weight_map naming the shards, got none")
        missing = sorted({str(name) for name in weight_map.values() if not (folder / str(name)).exists()})
        if missing:
            raise InputError(f"{folder}: {_WEIGHTS_INDEX} names shards that are not there: {', '.join(missing[:3])}")
        return
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.lower().endswith(_PICKLED)]
    if pickled:
        raise InputError(
            f"{folder}: expected {_WEIGHTS}, got {pickled[0]}, a pickled file, which can run code when it is read; "
            "convert it with save_pretrained of transformers, where you trust the file"
        )
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        raise InputError(f"{folder}: {_gguf_message(gguf[0])}")
    raise InputError(f"{folder}: expected {_WEIGHTS} or {_WEIGHTS_INDEX}, got neither")


def check_tokenizer_files(folder: Path) -> None:
    """InputError when the folder holds no tokenizer (transformers may otherwise make up an empty one)."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputError(
            f"{folder}: expected a tokenizer (one of {', '.join(_TOKENIZER_FILES)}), got none; "
            "copy the tokenizer files of the model into the folder"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError when the file is missing or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path.parent}: expected a checkpoint with {path.name}, got none") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected JSON, got something else ({_first_line(error)}); restore it") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _gguf_message(name: str) -> str:
    return f"{name} is a GGUF file, which holds weights for another engine; give the original checkpoint folder"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
