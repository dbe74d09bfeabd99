"""Locks in a run folder, freed by the kernel when their holder dies.

They are flock(2) locks: they hold between processes of one machine, and between machines where the file system has such
locks for all its clients (NFS; Lustre mounted with flock).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropesearch.errors import InputError

_LOCK_NAME = "search.lock"
WORKERS = "workers"  # the folder with what workers leave of themselves


@contextmanager
def exclusive(run_folder: Path) -> Iterator[None]:
    """Hold the run folder's one lock: for asking, adopting, opening and writing the result, never while scoring.

    Raises InputError when the folder is not there any more, or is on a file system without locks.
    """
    path = run_folder / _LOCK_NAME
    with _open(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise InputError(
                f"{path}: expected a file system with locks, got one without ({error.strerror}); give a run folder on "
                "another, such as a local disk"
            ) from error
        yield


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold the lock file `path`, without waiting; yields whether it is held. The file is removed afterwards."""
    with _open(path) as descriptor:
        held = _try_lock(descriptor) and _is_at(descriptor, path)
        try:
            yield held
        finally:
            if held:
                path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether a process of this machine holds the lock file `path`."""
    with suppress(FileNotFoundError), _open(path, create=False) as descriptor:
        return not _try_lock(descriptor)
    return False


@contextmanager
def _open(path: Path, create: bool = True) -> Iterator[int]:
    try:
        if create and path.parent.name == WORKERS:
            path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    except FileNotFoundError as error:
        if not create:
            raise
        raise InputError(
            f"{path.parent} was removed while the search was at work; give the same command again to begin anew"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # frees the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`, and not one that its last holder has removed."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
