"""Loading what was written: a checkpoint with its searched regime in force, or with its plain table for comparison."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropesearch.artifact import schema
from ropesearch.artifact.config_json import regime_config
from ropesearch.artifact.digest import check_entries, checkpoint_binding
from ropesearch.artifact.folder import check_binding, json_differences
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import BindingError, InputError
from ropesearch.model.config import Attention, DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel, load_model, read_own
from ropesearch.model.own import OwnTable
from ropesearch.rope.regime import Regime
from ropesearch.run_folder import job_of


def load(
    folder: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
    length_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a folder that ropesearch wrote: model and tokenizer, the searched regime in force while the model lives.

    What the regime asks for beyond config.json (retained tokens, an attention factor of its own) is in force too. With
    several regimes, the one for sequences of `length_tokens` (prompt and answer together) is taken, and kept at every
    length, so that a cached answer is what a whole pass gives; None means the longest. Sequences must not grow beyond
    the `max_position_embeddings` of the model's config then, the greatest length that the regime serves. `device`,
    `dtype` and `attention` are as in ModelConfig of ropesearch.model.config; inverse frequencies are float32 in any
    case.

    Every byte of the weights is read to compare their digest. Raises BindingError, showing both digests, when weights
    or tokenizer are not those of rope_config.json; InputError for a folder that cannot be read or loaded, and for a
    length that no regime serves.
    """
    folder = find_folder(Path(folder))
    rope_config = read_bound(folder)
    regime = rope_config.regimes[-1] if length_tokens is None else rope_config.regime_for(length_tokens)
    loaded = load_unscaled(
        folder,
        rope_config,
        device=device,
        dtype=_choice(DType, "dtype", dtype),
        attention=_choice(Attention, "attention", attention),
        trust_remote_code=trust_remote_code,
    )
    model: Any = loaded.model
    model._ropesearch_installed = _Installed(loaded, regime)
    # For readers of the config, save_pretrained among them; the table in force does not come from it.
    model.config.max_position_embeddings = regime.max_length
    if not regime.retained_tokens:
        source = rope_config.checkpoint.config
        extended = regime_config(source, rope_config.geometry, regime, regime, rope_config.target_length)
        model.config.rope_parameters = extended["rope_parameters"]
    return model, loaded.tokenizer


def read_bound(folder: Path) -> RopeConfig:
    """The folder's rope_config.json, after comparing it with all that `verify` compares at the level digest, and with
    every key of config.json.

    Raises BindingError, showing both digests, when weights or tokenizer differ, and when config.json, generation_config
    .json or tokenizer_config.json is not the one that was written for this rope_config.json; InputError when something
    cannot be read.
    """
    rope_config = RopeConfig.read(folder)
    check_binding(rope_config, checkpoint_binding(folder), folder)
    for difference in json_differences(folder, rope_config):
        raise BindingError(
            f"{folder}: expected {difference.name} as it was written for this rope_config.json, got another: "
            f"{difference.text}; one of the two was changed, `ropesearch verify` says where they differ"
        )
    return rope_config


def find_folder(path: Path) -> Path:
    """The written checkpoint folder that `path` is, or that the run folder `path` holds; InputError for others."""
    folders = [path / "checkpoint", path] if job_of(path) is None else [path / "checkpoint"]
    for folder in folders:
        if (folder / schema.FILE_NAME).is_file():
            if not (folder / "config.json").is_file():
                raise InputError(f"{folder}: expected config.json beside {schema.FILE_NAME}, got none; restore it")
            return folder
    expected = f"a checkpoint folder with {schema.FILE_NAME}, or the run folder of a finished search or fine-tuning"
    job = job_of(path)
    if job in ("search", "finetune"):
        kind = "search" if job == "search" else "fine-tuning"
        if (path / schema.FILE_NAME).is_file() and (path / "checkpoint").is_dir():
            raise InputError(
                f"{path / 'checkpoint'}: expected {schema.FILE_NAME}, got none; copy {path / schema.FILE_NAME} there"
            )
        raise InputError(
            f"{path}: expected {expected}, got that of a {kind} that is not finished; the same `ropesearch {job}` "
            "command as before goes on with it"
        )
    what = "a folder without" if path.is_dir() else "a file" if path.exists() else "nothing at this path"
    raise InputError(f"{path}: expected {expected}, got {what}; `ropesearch search` writes such a folder")


def load_unscaled(
    folder: Path,
    rope_config: RopeConfig,
    *,
    device: str = "auto",
    dtype: DType = DType.auto,
    attention: Attention = Attention.sdpa,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The weights of a written folder with the checkpoint's own table, plain or scaled, for `installed` to work on.

    This is the model as the search saw it: its config.json is made of the one in rope_config.json. Weights are not
    compared with the digest, see `read_bound`. Raises InputError, see `load_model` and `check_entries`.
    """
    check_entries(folder)
    with source_folder(folder, rope_config) as source:
        model_config = ModelConfig(
            path=str(source),
            dtype=dtype,
            device=device,
            attention=attention,
            trust_remote_code=trust_remote_code,
            original_length=rope_config.geometry.original_length,
        )
        loaded = load_model(model_config)
    return dataclasses.replace(loaded, folder=folder)


@contextlib.contextmanager
def source_folder(folder: Path, rope_config: RopeConfig) -> Iterator[Path]:
    """A view of a written folder as the checkpoint that it was written from: its files, but the config.json of
    rope_config.json in place of the written one. It is there within the block; errors of the user speak of `folder`.
    """
    with tempfile.TemporaryDirectory(prefix="ropesearch-") as name:
        view = Path(name)
        for path in folder.iterdir():
            if path.name not in ("config.json", schema.FILE_NAME):
                (view / path.name).symlink_to(path.resolve())
        (view / "config.json").write_text(json.dumps(rope_config.checkpoint.config))
        try:
            yield view
        except (InputError, BindingError) as error:
            raise type(error)(str(error).replace(name, str(folder))) from error


def own_table(folder: Path, rope_config: RopeConfig, *, trust_remote_code: bool = False) -> OwnTable:
    """The checkpoint's own table, as the search saw it; only config.json is read. Raises InputError, see `read_own`."""
    with tempfile.TemporaryDirectory(prefix="ropesearch-") as name:
        (Path(name) / "config.json").write_text(json.dumps(rope_config.checkpoint.config))
        for path in folder.glob("*.py") if trust_remote_code else ():
            (Path(name) / path.name).symlink_to(path.resolve())
        try:
            return read_own(Path(name), rope_config.geometry, trust_remote_code=trust_remote_code)
        except InputError as error:
            raise InputError(str(error).replace(name, str(folder))) from error


class _Installed:
    """Keeps a regime installed: its context ends, and takes the regime out, only when the model itself goes."""

    def __init__(self, loaded: LoadedModel, regime: Regime) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(installed(loaded, regime, as_shipped=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Installed":
        return self


def _choice(choices: Any, name: str, value: str) -> Any:
    try:
        return choices[value]
    except KeyError as error:
        raise InputError(
            f"{name}: expected one of {', '.join(choice.name for choice in choices)}, got {value!r}"
        ) from error
