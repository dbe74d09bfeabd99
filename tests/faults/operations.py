"""Counting what a program asks of the disk, and letting one request fail, or the program die at it."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# What needs room; a full disk refuses these, and lets names be changed and removed.
GROWING = ("write", "fsync", "mkdir", "open", "sendfile", "symlink")
CHANGING = (*GROWING, "replace", "rename", "unlink", "rmdir", "ftruncate")

Fault = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


class Counter:
    """How many operations have been asked for."""

    def __init__(self) -> None:
        self.number = 0


@contextmanager
def counted(names: tuple[str, ...], fault: Fault, at: Callable[[int], bool]) -> Iterator[Counter]:
    """Within the block, operations of the os module whose number satisfies `at` go to `fault` instead."""
    counter = Counter()

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
                return original(*arguments, **keywords)
            if name == "write" and arguments[0] < 3:
                return original(*arguments, **keywords)
            counter.number += 1
            if at(counter.number - 1):
                return fault(name, original, arguments)
            return original(*arguments, **keywords)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield counter


def refuse(name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The disk is full: half of what was to be written still fits."""
    if name == "write" and len(arguments[1]) > 1:
        original(arguments[0], arguments[1][: len(arguments[1]) // 2])
    path = arguments[0] if arguments and isinstance(arguments[0], str | Path) else None
    raise OSError(errno.ENOSPC, "No space left on device", None if path is None else str(path))


def die(name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The process is killed with half of the write done."""
    if name == "write":
        original(arguments[0], arguments[1][: len(arguments[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk_from(number: int) -> Any:
    """A disk that is full from that operation on."""
    return counted(GROWING, refuse, lambda at: at >= number)


def died_at(number: int, work: Callable[[], Any]) -> bool:
    """Run `work` in a forked process that dies at that operation; False when `work` came to its end before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with counted(CHANGING, die, lambda at: at == number):
                work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def leftovers(folder: Path) -> list[Path]:
    """Files and folders that are named as what is being written."""
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".lock")) and path.name != "search.lock"]
