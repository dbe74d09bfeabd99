"""Documents, read one at a time from text files, folders, records and datasets."""

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropesearch.data.config import CORPUS_KINDS, RECORD_SUFFIXES, TEXT_SUFFIXES, CorpusConfig
from ropesearch.errors import InputError

_PARQUET_BATCH_ROWS = 16  # documents may be large
_PARQUET_TEXT_TYPES = ("string", "large_string", "string_view", "null")
_BINARY_REMEDY = "convert it to UTF-8 text, or take it out of the corpus"


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `name` says where in the corpus it is: a relative path, with `:<line or row>` in files of records."""

    name: str
    text: str


def read_documents(
    config: CorpusConfig, split: str | None = None, order: np.random.Generator | None = None
) -> Iterator[Document]:
    """The documents of a corpus, read while they are asked for. Texts are never empty and hold no lone surrogates.

    A text file is one document: UTF-8, line ends as "\\n". In a folder, files of records (.jsonl, .parquet) at any
    depth are the corpus, or the text files (.txt, .md) if there are none; links to folders are followed, each folder
    once; hidden files and folders are passed over. A folder with neither is given to `datasets`, like a name on the
    hub. Records with an empty or missing (null) text are passed over. A byte order mark before a text is dropped. A
    zero byte makes a file binary and is refused there; in a record it is a character like others.

    One document is in memory at a time: its bytes, and its text in 1, 2 or 4 bytes a character (Python's), the text of
    a record twice while it is parsed.

    Args:
        split: of a corpus already split (`CorpusConfig.is_split`), the subfolder to read; names then start with it.
        order: draws the order in which the files of a folder are read; None is sorted by name. Inside a file of records
            and in a dataset the order is the stored one.

    Raises:
        InputError: nothing at this path; a file that is empty, unreadable or not UTF-8; a record that is no JSON
            object, or has no such text field; a dataset that cannot be loaded.
    """
    path = config.local_path()
    if path is None:
        yield from _read_dataset(config, config.path)
        return
    if not path.is_dir():
        yield from _read_file(path, path.name, config.text_field)
        return
    folder = path / split if split else path
    names = _file_names(folder)
    if not names:
        if not any(folder.iterdir()):
            raise InputError(f"{folder}: expected documents, got an empty folder; give {CORPUS_KINDS}")
        for file in _files(folder):
            if not file.is_file():  # a reader would wait for the other end of a pipe
                raise InputError(f"{file}: expected a regular file, got something else or a broken link; remove it")
        yield from _read_dataset(config, str(folder))
        return
    for index in range(len(names)) if order is None else order.permutation(len(names)):
        name = names[index]
        yield from _read_file(folder / name, f"{split}/{name}" if split else name, config.text_field)


def _file_names(folder: Path) -> list[str]:
    """Sorted paths, relative to the folder, of the files in it that hold documents."""
    names = [file.relative_to(folder).as_posix() for file in _files(folder)]
    for suffixes in (RECORD_SUFFIXES, TEXT_SUFFIXES):
        if found := sorted(name for name in names if Path(name).suffix.lower() in suffixes):
            return found
    return []


def _files(folder: Path) -> Iterator[Path]:
    """All that is no folder in a folder, at any depth, hidden names passed over; links to folders are followed."""

    def fail(error: OSError) -> None:
        raise InputError(f"{error.filename}: expected a folder that can be read ({error.strerror})") from error

    visited: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()  # a link back to where the walk has been
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in names if not name.startswith("."))


def _read_file(path: Path, name: str, text_field: str) -> Iterator[Document]:
    if not path.is_file():
        raise InputError(f"{path}: expected a regular file, got something else or a broken link; remove it")
    suffix = path.suffix.lower()
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: expected text, got an empty file; take it out of the corpus")
        if suffix == ".jsonl":
            yield from _read_jsonl(path, name, text_field)
        elif suffix == ".parquet":
            yield from _read_parquet(path, name, text_field)
        else:
            yield Document(name, _read_text(path))
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be read ({error.strerror or error})") from error


def _read_text(path: Path) -> str:
    text = _decode(path.read_bytes(), str(path)).replace("\r\n", "\n")
    if "\0" in text:
        raise InputError(f"{path}: expected text, got binary content (a zero byte); {_BINARY_REMEDY}")
    if text.isspace() or not text:
        raise InputError(f"{path}: expected text, got nothing but white space; take it out of the corpus")
    return text


def _decode(content: bytes, place: str) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        found = "UTF-16" if utf16 else f"the byte 0x{error.object[error.start]:02x} at byte {error.start}"
        raise InputError(f"{place}: expected UTF-8 text, got {found}; {_BINARY_REMEDY}") from error


def _read_jsonl(path: Path, name: str, text_field: str) -> Iterator[Document]:
    num_records = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            content = _decode(line, place)
            if not content.strip():
                continue
            num_records += 1
            try:
                record = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place}: expected one JSON object, got what is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise InputError(f"{place}: expected a JSON object, got {type(record).__name__}")
            if text := _text_of(record, text_field, place):
                yield Document(f"{name}:{number}", text)
    if not num_records:
        raise InputError(f"{path}: expected JSON records, got nothing but white space; take it out of the corpus")


def _read_parquet(path: Path, name: str, text_field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fields = file.schema_arrow.names
            if text_field not in fields:
                raise _no_field(text_field, fields, str(path))
            if fields.count(text_field) > 1:
                raise InputError(f"{path}: expected one field {text_field!r}, got {fields.count(text_field)}")
            kind = file.schema_arrow.field(text_field).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if str(values) not in _PARQUET_TEXT_TYPES:
                raise InputError(
                    f"{path}: expected text in the field {text_field!r}, got {kind!s:.80}; name another field"
                )
            if not file.metadata.num_rows:
                raise InputError(f"{path}: expected documents, got no rows; take it out of the corpus")
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_field]):
                for record in batch.to_pylist():
                    number += 1
                    if text := _text_of(record, text_field, f"{path}, row {number}"):
                        yield Document(f"{name}:{number}", text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, after row {number}: expected UTF-8 text, got other bytes ({error})") from error
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: expected a parquet file, got what cannot be read as one ({error})") from error


def _read_dataset(config: CorpusConfig, name: str) -> Iterator[Document]:
    import datasets

    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            records = datasets.load_from_disk(name)
            if isinstance(records, datasets.DatasetDict):
                if config.dataset_split not in records:
                    raise InputError(
                        f"{name}: expected one of the splits {', '.join(map(str, records))}, got {config.dataset_split}"
                    )
                records = records[config.dataset_split]
        else:
            records = datasets.load_dataset(
                name, config.dataset_config, split=config.dataset_split, streaming=config.streaming
            )
            if Path(name).exists() and records.info.builder_name == "text":
                raise InputError(
                    f"{name}: expected documents, got files of text that `datasets` reads line by line, each line as a "
                    "document; unpack them into .txt files"
                )
        fields = records.column_names
        if fields is not None and config.text_field in fields:
            records = records.select_columns([config.text_field])
        for number, record in enumerate(records, start=1):
            if text := _text_of(record, config.text_field, f"dataset {name}, record {number}"):
                yield Document(f"{config.dataset_split}:{number}", text)
    except InputError:
        raise
    except Exception as error:  # each format's reader has errors of its own: zip, tar, gzip, missing libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        where = "" if Path(name).exists() else "no such file or folder, so "
        raise InputError(
            f"{name}: {where}expected a dataset that can be loaded (configuration {config.dataset_config}, split "
            f"{config.dataset_split}), got: {reason}; without a network, give local files or a cached dataset"
        ) from error


def _text_of(record: Mapping[str, Any], text_field: str, place: str) -> str | None:
    """The text of a record, or None when it is to be passed over."""
    if text_field not in record:
        raise _no_field(text_field, list(record), place)
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        found = type(text).__name__
        raise InputError(f"{place}: expected text in the field {text_field!r}, got {found}; name another field")
    if text is None or not text.strip("\ufeff").strip():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: expected Unicode text, got a lone surrogate at character {error.start}") from error
    return text.removeprefix("\ufeff")


def _no_field(text_field: str, fields: list[str], place: str) -> InputError:
    found = ", ".join(repr(field) for field in sorted(map(str, fields))) or "none"
    return InputError(
        f"{place}: expected the text in a field {text_field!r}, got the fields {found}; name the right one"
    )
