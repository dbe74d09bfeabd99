"""Writing files so that a reader never meets half of one, and hashing what was written."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`; it is renamed to `path` when the block ends, and removed when the block raises.

    The data is flushed to disk before the rename, so after a crash `path` holds the old content or the new, in full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step (beside, then renamed)."""
    with written_beside(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as strict, indented JSON in one step; NaN and infinity raise ValueError."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of `value` (sorted keys, no spaces): the project's fingerprint."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
