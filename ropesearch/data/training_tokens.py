"""The documents of a fine-tuning as tokens in files, by the bucket of their length."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropesearch.data.packing import IntArray
from ropesearch.data.tokens import TokenIds
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_file, sha256_of_json, write_json

_DESCRIPTION = "training_tokens.json"
_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class BucketCounts:
    """What a bucket holds: documents of more than `above_tokens` and at most `up_to_tokens` tokens (None: of any more),
    BOS and EOS counted.

    num_needed_tokens: its share of the training.
    num_pieces, num_piece_tokens: how many of its documents are pieces of longer ones, and the tokens of these.
    """

    above_tokens: int
    up_to_tokens: int | None
    num_needed_tokens: int
    num_documents: int = 0
    num_tokens: int = 0
    num_pieces: int = 0
    num_piece_tokens: int = 0

    @property
    def lengths(self) -> str:
        """The lengths of its documents, in words."""
        if self.up_to_tokens is None:
            return f"more than {self.above_tokens:,} tokens"
        return f"{self.above_tokens + 1:,} to {self.up_to_tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What became of the documents that were read.

    num_empty: with nothing to predict; num_excluded: evaluation texts and copies of them; num_duplicates: of a kept
    one; num_without_room: when their bucket had what it needs. The rest was kept. stopped: whether no more were read
    because `corpus.max_documents` in a row were of no use.
    """

    num_documents: int = 0
    num_empty: int = 0
    num_excluded: int = 0
    num_duplicates: int = 0
    num_without_room: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The documents of a bucket: number i is `token_ids[offsets[i]:offsets[i + 1]]`, BOS and EOS with it.

    token_ids: int32 (num_tokens,), read-only, mapped from a file; offsets: int64 (num_documents + 1,).
    """

    counts: BucketCounts
    token_ids: TokenIds
    offsets: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTokens:
    """What `preparation.prepare_training_tokens` wrote.

    buckets: by length, first the documents of at most original_length tokens.
    padding_token_id: what sequences are filled up with (EOS, or BOS, or 0); greatest_token_id: of it and all documents.
    identity: what they were prepared from.
    fingerprint: hexadecimal SHA-256 of the buckets' bounds, tokens and offsets, and the padding token.
    """

    buckets: tuple[Bucket, ...]
    read: ReadCounts
    padding_token_id: int
    greatest_token_id: int
    identity: Mapping[str, Any]
    fingerprint: str

    def notes(self) -> tuple[str, ...]:
        """What a user should know about them, a sentence each."""
        notes = []
        for counts in (bucket.counts for bucket in self.buckets):
            if counts.num_pieces:
                notes.append(
                    f"of the {counts.num_tokens:,} training tokens in documents of {counts.lengths}, "
                    f"{counts.num_piece_tokens:,} are {counts.num_pieces:,} pieces of longer documents: the corpus has "
                    "too few short ones"
                )
            if counts.num_tokens < counts.num_needed_tokens:
                notes.append(
                    f"the documents of {counts.lengths} are gone through "
                    f"{counts.num_needed_tokens / counts.num_tokens:.1f} times: {counts.num_tokens:,} tokens for "
                    f"{counts.num_needed_tokens:,}"
                )
        if self.read.stopped:
            notes.append(
                f"reading stopped after {self.read.num_documents:,} documents, as the last "
                f"{self.identity['corpus']['max_documents']:,} (corpus.max_documents) were of no use"
            )
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        """All but the tokens themselves."""
        return {
            "fingerprint": self.fingerprint,
            "read": asdict(self.read),
            "buckets": [asdict(bucket.counts) for bucket in self.buckets],
            "notes": list(self.notes()),
        }


class BucketWriter:
    """Appends documents to the two files of a bucket."""

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = (folder / f"{name}.tokens", folder / f"{name}.offsets")
        self._file = self._paths[0].open("wb")
        self._offsets = array("q", [0])
        self.num_tokens = 0
        self.greatest_token_id = 0

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def append(self, token_ids: TokenIds) -> None:
        """A document: int32, BOS and EOS with it, not empty."""
        self._file.write(token_ids.astype("<i4", copy=False).tobytes())
        self.num_tokens += len(token_ids)
        self._offsets.append(self.num_tokens)
        self.greatest_token_id = max(self.greatest_token_id, int(token_ids.max()))

    def close(self) -> tuple[TokenIds, IntArray]:
        """Write what is not yet written. Returns all tokens, mapped, and the offsets."""
        if not self._file.closed:
            self._file.close()
            np.array(self._offsets, dtype="<i8").tofile(self._paths[1])
        return _mapped(self._paths[0]), np.array(self._offsets, dtype=np.int64)

    def remove(self) -> None:
        """Remove the files, which are closed."""
        for path in self._paths:
            path.unlink()


def bucket_name(index: int) -> str:
    """Of the files of a bucket, without what follows the last dot."""
    return f"bucket{index}"


def describe(
    folder: Path,
    buckets: Sequence[BucketCounts],
    read: ReadCounts,
    padding_token_id: int,
    greatest_token_id: int,
    identity: Mapping[str, Any],
) -> None:
    """Write the description of buckets that are in the folder, complete."""
    files = [f"{bucket_name(index)}.{kind}" for index in range(len(buckets)) for kind in ("tokens", "offsets")]
    values = {
        "schema_version": _SCHEMA_VERSION,
        "buckets": [asdict(counts) for counts in buckets],
        "read": asdict(read),
        "padding_token_id": padding_token_id,
        "greatest_token_id": greatest_token_id,
        "files": {name: sha256_of_file(folder / name) for name in files},
        "identity": dict(identity),
    }
    write_json(folder / _DESCRIPTION, {**values, "sha256": sha256_of_json(values)})


def open_training_tokens(folder: Path) -> TrainingTokens:
    """What was prepared in a folder, after a look at every byte of it.

    Raises:
        InputError: it holds no training tokens, some of another version, or damaged ones.
    """
    try:
        values = json.loads((folder / _DESCRIPTION).read_bytes())
        if values["schema_version"] != _SCHEMA_VERSION:
            raise InputError(
                f"{folder}: expected training tokens of version {_SCHEMA_VERSION}, got {values['schema_version']!r:.20}"
                "; remove the folder, so that they are prepared anew"
            )
        if values.pop("sha256") != sha256_of_json(values):
            raise ValueError(f"{_DESCRIPTION} is not as it was written")
        for name, digest in values["files"].items():
            if sha256_of_file(folder / name) != digest:
                raise ValueError(f"{name} is not as it was written")
        buckets = tuple(
            Bucket(
                BucketCounts(**counts),
                _mapped(folder / f"{bucket_name(index)}.tokens"),
                np.fromfile(folder / f"{bucket_name(index)}.offsets", dtype="<i8").astype(np.int64, copy=False),
            )
            for index, counts in enumerate(values["buckets"])
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        raise InputError(
            f"{folder}: expected whole training tokens, got damaged ones or something else ({reason}); remove the "
            "folder, so that they are prepared anew, or name another"
        ) from error
    bounds = [[bucket.counts.above_tokens, bucket.counts.up_to_tokens] for bucket in buckets]
    return TrainingTokens(
        buckets=buckets,
        read=ReadCounts(**values["read"]),
        padding_token_id=values["padding_token_id"],
        greatest_token_id=values["greatest_token_id"],
        identity=values["identity"],
        fingerprint=sha256_of_json([bounds, values["files"], values["padding_token_id"]]),
    )


def _mapped(path: Path) -> TokenIds:
    """The tokens of a file, read-only."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.int32)
    return np.memmap(path, dtype="<i4", mode="r").view(np.ndarray)
