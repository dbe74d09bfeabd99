"""Writing files so that a reader never meets half of one, and hashing what was written."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20


# Names of what is being written: hidden, beside what it will be.
_BESIDE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.part")


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`; it is renamed to `path` when the block ends, and removed when the block raises.

    The data is flushed to disk before the rename, so after a crash `path` holds the old content or the new, in full.
    What a killed writer leaves is found by `remove_leftovers`. Where the system refuses to write, the OSError's
    filename is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        beside, descriptor = _locked_beside(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, stack)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            os.replace(beside, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            if isinstance(error, OSError) and error.filename in (None, str(beside)):
                error.filename = str(path)
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Where the system refuses something in the block without saying where, the OSError's filename is `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def expect_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError, as a full disk would, where so many bytes have no room beside what is in `folder`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        reason = f"{num_bytes:,} bytes are needed, {free_bytes:,} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {reason}", str(folder))


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a folder beside `path`; it is flushed to disk and renamed to `path` when the block ends, and removed when
    the block raises. `path` may be an empty folder. What killed writers left of earlier ones is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    with contextlib.ExitStack() as stack:
        beside, _ = _locked_beside(path, None, stack)
        try:
            yield beside
            for written in (*beside.rglob("*"), beside):
                if not written.is_symlink():
                    sync(written)
            os.rename(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder so that no reader meets half of it, also when this is cut short."""
    with contextlib.ExitStack() as stack:
        beside, _ = _locked_beside(path, None, stack)
        os.rename(path, beside)
        shutil.rmtree(beside)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left in `folder`: of everything, or of the file or folder `name`.

    What a living process is still writing is locked by it, and stays.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _BESIDE.fullmatch(entry.name)
            if match and name in (None, match["name"]):
                with contextlib.suppress(OSError):  # another process may be at it
                    _remove_unlocked(Path(entry.path))


def sync(path: Path) -> None:
    """Flush a file, or what is in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _locked_beside(path: Path, flags: int | None, stack: contextlib.ExitStack) -> tuple[Path, int]:
    """Make a new file (or, without `flags`, a folder) beside `path` and lock it while `stack` lasts."""
    while True:
        beside = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.part"
        if flags is None:
            beside.mkdir()
        descriptor = os.open(beside, (os.O_RDONLY if flags is None else flags) | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, descriptor)  # frees the lock
        with contextlib.suppress(OSError):  # where there are no locks, leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # taken for a leftover before it was locked: another name
            if os.path.samestat(os.fstat(descriptor), beside.stat()):
                return beside, descriptor


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


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
