"""The binding to a checkpoint: digests of its tensors and of its tokenizer, read without torch."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropesearch import files
from ropesearch.artifact.schema import Checkpoint, CheckpointFile
from ropesearch.errors import InputError
from ropesearch.strict_json import parse_json_object, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

# What decides which ids a text becomes, and which text a conversation becomes.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
# Vocabularies under other names, and what a checkpoint's own tokenizer or model class is written in.
_TOKENIZER_SUFFIXES = (".model", ".py", ".spm", ".tiktoken")
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_FORMATS = ("pt", "tf", "flax", "mlx", "np")  # who wrote the file; transformers 4 refuses others
_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a safetensors file: stored name and dtype, shape, and where its bytes start and end in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_parameters(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def checkpoint_binding(folder: Path) -> Checkpoint:
    """Read every byte of a checkpoint's weights and tokenizer, and return what identifies them.

    `digest` is the SHA-256 of the sorted per-tensor digests, each the SHA-256 of stored name, dtype, shape and bytes;
    how the tensors are dealt to files does not enter. An output head stored although the checkpoint ties it to the
    input embeddings (config.json does not say `tie_word_embeddings: false`) counts once when both hold the same bytes.
    `tokenizer_digest` covers TOKENIZER_FILES and files of the same kinds, the checkpoint's own Python code, the folder
    of further chat templates, and tokenizer_config.json without `model_max_length`, which states a length and not how
    text is read. config.json and generation_config.json are taken over as they are.

    Raises InputError for a folder without safetensors weights, tokenizer files or config.json, a shard that the index
    names and the folder lacks, a file that is truncated or not in the safetensors format, and what `check_entries`
    refuses.
    """
    check_entries(folder)
    paths = weight_files(folder)
    config = read_json_object(folder / CONFIG)
    if config.get("transformers_weights") is not None:
        raise InputError(
            f"{folder}: expected the weights in {SINGLE_FILE} or {INDEX_FILE}, got a config.json whose "
            "transformers_weights names another file; rename that file, and take the key out"
        )
    has_generation_config = (folder / GENERATION_CONFIG).exists()
    generation_config = read_json_object(folder / GENERATION_CONFIG) if has_generation_config else None
    tokenizer_config = read_json_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else None
    tokenizer_paths = tokenizer_files(folder)
    with ThreadPoolExecutor(max_workers=min(len(paths), os.cpu_count() or 1, 8)) as pool:
        hashed = list(pool.map(_hash_weights, paths))
    entries = _merged(folder, paths, [tensors for _, tensors in hashed])
    _drop_tied_head(config, entries)
    weights = [file for file, _ in hashed]
    tokenizer = [
        CheckpointFile(
            name=path.relative_to(folder).as_posix(), num_bytes=path.stat().st_size, sha256=files.sha256_of_file(path)
        )
        for path in tokenizer_paths
        if path.name != TOKENIZER_CONFIG
    ]
    digests = sorted(_tensor_digest(entry, content) for entry, content in entries.values())
    return Checkpoint(
        digest="sha256:" + hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        num_tensors=len(digests),
        num_parameters=sum(entry.num_parameters for entry, _ in entries.values()),
        tokenizer_digest=_tokenizer_digest(tokenizer_config, tokenizer),
        config=config,
        generation_config=generation_config,
        model_max_length=None if tokenizer_config is None else tokenizer_config.get("model_max_length"),
        files=(*weights, *tokenizer),
    )


def check_entries(folder: Path) -> None:
    """InputError unless the folder can be read and holds nothing but regular files and folders, and no adapter.

    Links count as what they point to. A pipe, a device or a socket would make a reader wait, and a broken link is a
    file that was here; an adapter would be put on top of the weights by whoever loads the folder.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a checkpoint folder, got {'a file' if folder.exists() else 'nothing'}")
    templates = folder / CHAT_TEMPLATE_FOLDER
    try:
        entries = [*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    except OSError as error:
        raise InputError(f"{folder}: expected a folder that can be read, got {error.strerror or error}") from error
    for path in sorted(entries):
        if not (path.is_file() or path.is_dir()):
            found = "a broken link" if path.is_symlink() else "something else"
            raise InputError(f"{path}: expected a regular file or a folder, got {found}; remove or restore it")
        if path.parent == templates and path.is_dir():
            raise InputError(f"{path}: expected a chat template, a file, got a folder; remove or restore it")
        if path.name == "adapter_config.json":
            raise InputError(f"{folder}: holds an adapter (adapter_config.json); merge it into its model first")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint's weights: model.safetensors, else those that its index names.

    Raises InputError when there are none, or when a shard is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise InputError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got neither; put the weights there (pickled "
            "ones are not read, convert them first)"
        )
    names = sorted({shard for shard in _weight_map(index).values()})
    for name in names:
        if not (folder / name).is_file():
            raise InputError(f"{folder}: expected the shard {name} that {INDEX_FILE} names, got no such file")
    return [folder / name for name in names]


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that the tokenizer digest covers, sorted. Raises InputError when there are none."""
    names = (*TOKENIZER_FILES, TOKENIZER_CONFIG)
    found = [folder / name for name in names if (folder / name).is_file()]
    if not any(path.name not in (TOKENIZER_CONFIG, "special_tokens_map.json") for path in found):
        raise InputError(f"{folder}: expected tokenizer files such as tokenizer.json, got none")
    found += [
        path
        for path in folder.iterdir()
        if path.suffix in _TOKENIZER_SUFFIXES and path.name not in names and path.is_file()
    ]
    templates = folder / CHAT_TEMPLATE_FOLDER
    if templates.is_dir():
        found += [path for path in templates.iterdir() if path.suffix == ".jinja"]
    return sorted(found)


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file by ascending offset, from its header alone.

    The format: 8 bytes of little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps to
    the end of the file. Raises InputError, naming the file, for everything else.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
                raise InputError(
                    f"{path}: expected a safetensors header within the file's {num_bytes} bytes, got a header length "
                    f"of {header_bytes}; the file is truncated or not in the safetensors format"
                )
            header = file.read(header_bytes)
    except OSError as error:
        raise InputError(f"{path}: expected a readable safetensors file, got {error.strerror or error}") from error
    value = parse_json_object(header, f"{path}: header")
    metadata = value.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
        raise InputError(f"{path}: expected text under __metadata__ in the header, got {metadata!r:.80}")
    if metadata.get("format", "pt") not in _FORMATS:
        raise InputError(
            f"{path}: expected one of the formats {', '.join(_FORMATS)} in the header, got {metadata['format']!a:.80}"
        )
    start = 8 + header_bytes
    entries = sorted(
        (_entry(path, name, fields, start) for name, fields in value.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    position = start
    for entry in entries:
        if entry.begin != position:
            raise InputError(
                f"{path}: expected tensor {entry.name!a} to start at byte {position - start} of the data, right after "
                f"the one before, got {entry.begin - start}"
            )
        position = entry.end
    if position != num_bytes:
        raise InputError(
            f"{path}: expected {position} bytes for the tensors in its header, got {num_bytes}; the file is truncated "
            "or has something appended: restore it"
        )
    return entries


def _entry(path: Path, name: str, fields: Any, start: int) -> TensorEntry:
    where = f"{path}: tensor {name!a}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where}: expected dtype, shape and data_offsets, got {fields!r:.80}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise InputError(f"{where}: expected one of the dtypes {', '.join(_BITS)}, got {dtype!r:.80}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise InputError(f"{where}: expected counts in shape and data_offsets, got {shape!r:.80}, {offsets!r:.80}")
    entry = TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=start + offsets[0], end=start + offsets[1])
    if (entry.end - entry.begin) * 8 != entry.num_parameters * _BITS[dtype]:
        raise InputError(
            f"{where}: expected {entry.num_parameters * _BITS[dtype] / 8:g} bytes for {dtype} of shape {shape}, got "
            f"{offsets[1] - offsets[0]}"
        )
    return entry


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _hash_weights(path: Path) -> tuple[CheckpointFile, list[tuple[TensorEntry, str]]]:
    """The file's record, and its tensors with the SHA-256 of their bytes, in one pass over the file."""
    entries = read_header(path)
    whole = hashlib.sha256()
    position = 0
    hashed = []
    try:
        with path.open("rb", buffering=0) as file:
            for piece in _pieces(file.fileno(), 0, entries[0].begin if entries else path.stat().st_size, path):
                whole.update(piece)
                position += len(piece)
            for entry in entries:
                content = hashlib.sha256()
                for piece in _pieces(file.fileno(), entry.begin, entry.end, path):
                    whole.update(piece)
                    content.update(piece)
                position = entry.end
                hashed.append((entry, content.hexdigest()))
    except OSError as error:
        raise InputError(f"{path}: expected a readable safetensors file, got {error.strerror or error}") from error
    return CheckpointFile(name=path.name, num_bytes=position, sha256=whole.hexdigest()), hashed


def _pieces(descriptor: int, begin: int, end: int, path: Path) -> Iterator[bytes]:
    # pread rather than a memory map: a file that shrinks meanwhile gives an error here, and a SIGBUS there.
    while begin < end:
        piece = os.pread(descriptor, min(_PIECE_BYTES, end - begin), begin)
        if not piece:
            raise InputError(
                f"{path}: expected {end} bytes, got an end after {begin}; it was changed while it was read"
            )
        begin += len(piece)
        yield piece


def _merged(
    folder: Path, paths: list[Path], hashed: list[list[tuple[TensorEntry, str]]]
) -> dict[str, tuple[TensorEntry, str]]:
    result: dict[str, tuple[TensorEntry, str]] = {}
    shard_of: dict[str, str] = {}
    for path, tensors in zip(paths, hashed, strict=True):
        for entry, content in tensors:
            if entry.name in result:
                raise InputError(
                    f"{folder}: expected tensor {entry.name!a} in one file, got it in {shard_of[entry.name]} and "
                    f"{path.name}"
                )
            result[entry.name] = (entry, content)
            shard_of[entry.name] = path.name
    if not result:
        raise InputError(f"{folder}: expected weights, got safetensors files without tensors")
    if paths[0].name != SINGLE_FILE:
        for name, shard in _weight_map(folder / INDEX_FILE).items():
            if shard_of.get(name) != shard:
                raise InputError(
                    f"{folder}: expected tensor {name!a} in {shard}, as {INDEX_FILE} says, got it in "
                    f"{shard_of.get(name, 'no file')}"
                )
    return result


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values())):
        raise InputError(f"{index}: expected weight_map with a file name for each tensor, got {weight_map!r:.80}")
    for name in weight_map.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index}: expected names of safetensors files in this folder, got {name!a}")
    return weight_map


def _drop_tied_head(config: Mapping[str, Any], entries: dict[str, tuple[TensorEntry, str]]) -> None:
    head = entries.get("lm_head.weight")
    if head is None or config.get("tie_word_embeddings") is False:
        return
    for name, (entry, content) in entries.items():
        if name.endswith("embed_tokens.weight") and (entry.dtype, entry.shape, content) == (
            head[0].dtype, head[0].shape, head[1],
        ):  # fmt: skip
            del entries["lm_head.weight"]
            return


def _tensor_digest(entry: TensorEntry, content: str) -> str:
    description = json.dumps([entry.name, entry.dtype, list(entry.shape), content], separators=(",", ":"))
    return hashlib.sha256(description.encode()).hexdigest()


def _tokenizer_digest(config: Mapping[str, Any] | None, covered: list[CheckpointFile]) -> str:
    if config is not None:
        config = {key: config[key] for key in config if key != "model_max_length"}
    return "sha256:" + files.sha256_of_json({"files": [[file.name, file.sha256] for file in covered], "config": config})
