"""The journal file of a study: Optuna's format, each line bound to all the lines before it.

Optuna replays a journal line by line, one JSON object each, and passes over keys that it does not know. Every line here
ends with such a key, `check`: the beginning of the SHA-256 of the check before it and of the line itself. A line that
was changed, dropped, moved or inserted is thus found wherever it stands, and what plain Optuna reads is what was
written. What a killed writer left of its last line, which has no end, is dropped by the next writer.
"""

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from ropesearch.errors import InputError
from ropesearch.files import sync

_CHECK_DIGITS = 16


@dataclass(frozen=True, slots=True)
class _Place:
    """The end of a line: how many lines and bytes are before it, and that line's check."""

    num_lines: int = 0
    num_bytes: int = 0
    check: str = ""


class Journal(BaseJournalBackend):
    """The journal in the file `path`, made when it is not there.

    Any number of processes of one machine may write to it. Raises InputError, also from its methods, when the file is
    not what was written: the message names the line, and how to keep the lines before it.

    With `read_only` nothing is made or written, and FileNotFoundError raised where there is no file.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._access = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        self._held: list[dict[str, Any]] | None = None
        self._read = _Place()
        try:
            descriptor = os.open(path, self._access if read_only else self._access | os.O_CREAT, 0o666)
        except IsADirectoryError as error:
            raise InputError(
                f"{path}: expected the journal of a search, got a folder; use another run folder"
            ) from error
        try:
            self._identity = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if read_only:
            return
        if self._identity.st_size == 0:
            sync(path.parent)
        if self._identity.st_nlink > 1:
            raise InputError(
                f"{path}: expected a file of its own, got one with {self._identity.st_nlink} names (hard links): what "
                f"this search writes would appear under the others; make it one of its own: {_remade(path, 'cat')}"
            )

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """All operations from that number on, each line checked."""
        if log_number_from != self._read.num_lines:
            self._read = _Place()
        with self._locked(fcntl.LOCK_SH) as descriptor:
            lines, self._read = self._whole_lines(descriptor, self._read)
        operations = [json.loads(line) for line in lines]
        return operations[log_number_from - (self._read.num_lines - len(lines)) :]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations and flush them to disk, or hold them back within `together`."""
        if self._held is not None:
            self._held.extend(logs)
            return
        with self._locked(fcntl.LOCK_EX) as descriptor:
            _, end = self._whole_lines(descriptor, self._read)
            check, content = end.check, b""
            for log in logs:
                line = json.dumps(log, separators=(",", ":")).encode()
                check = _check_of(check, line)
                content += b'%s,"check":"%s"}\n' % (line[:-1], check.encode())
            try:
                os.ftruncate(descriptor, end.num_bytes)
                os.lseek(descriptor, end.num_bytes, os.SEEK_SET)
                while content:
                    content = content[os.write(descriptor, content) :]
                os.fsync(descriptor)
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(descriptor, end.num_bytes)  # all of these operations or none
                error.filename = error.filename or str(self._path)
                raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the operations of this block at its end, with one append (and one flush to disk) for all.

        They are not seen by readers before, this process included. Nothing is written when the block raises.
        """
        self._held = []
        try:
            yield
            held = self._held
        finally:
            self._held = None
        if held:
            self.append_logs(held)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[int]:
        """The file, locked; the kernel frees the lock when the process dies.

        It must be the file that was opened first: nothing is written to another one at its path.
        """
        try:
            descriptor = os.open(self._path, self._access)
        except FileNotFoundError as error:
            raise InputError(f"{self._path} was removed while the search was at work; {_AGAIN}") from error
        try:
            if not os.path.samestat(os.fstat(descriptor), self._identity):
                raise InputError(f"{self._path} was replaced by another file while the search was at work; {_AGAIN}")
            fcntl.flock(descriptor, kind)
            yield descriptor
        finally:
            os.close(descriptor)

    def _whole_lines(self, descriptor: int, start: _Place) -> tuple[list[bytes], _Place]:
        """The lines after `start` as Optuna writes them, and the end of the last; an unfinished one is left out."""
        content = _read_all(descriptor, start.num_bytes)
        if os.fstat(descriptor).st_size < start.num_bytes:
            raise InputError(f"{self._path} was cut while the search was at work; {_AGAIN}")
        lines = []
        place = start
        for written in content.split(b"\n")[:-1]:
            line, check = _without_check(written)
            if check != _check_of(place.check, line):
                raise InputError(self._damage(place.num_lines))
            lines.append(line)
            place = _Place(place.num_lines + 1, place.num_bytes + len(written) + 1, check)
        return lines, place

    def _damage(self, num_whole_lines: int) -> str:
        if num_whole_lines == 0:
            return (
                f"{self._path}: line 1 is not what a search writes there: the file was damaged, or another program "
                "wrote it; restore it from a copy, or use another run folder"
            )
        return (
            f"{self._path}: line {num_whole_lines + 1} is not what a search has written there: the file was damaged; "
            f"restore it from a copy, or keep the {num_whole_lines} lines before it and score again what followed: "
            f"{_remade(self._path, f'head -n {num_whole_lines}')}"
        )


_AGAIN = "give the same command again: it goes on with what is there"


def _check_of(before: str, line: bytes) -> str:
    return hashlib.sha256(before.encode() + line).hexdigest()[:_CHECK_DIGITS]


def _without_check(written: bytes) -> tuple[bytes, str]:
    """A line of the file as Optuna made it, and its check; an empty check where it carries none."""
    head, _, tail = written.rpartition(b',"check":"')
    whole = len(tail) == _CHECK_DIGITS + 2 and tail.endswith(b'"}') and tail.isascii()
    return head + b"}", tail[:_CHECK_DIGITS].decode() if whole else ""


def _read_all(descriptor: int, offset: int) -> bytes:
    pieces = []
    while piece := os.pread(descriptor, 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _remade(path: Path, command: str) -> str:
    """The shell words that put what `command` prints of a file in its place."""
    quoted, beside = shlex.quote(str(path)), shlex.quote(f"{path}.whole")
    return f"{command} {quoted} > {beside} && mv {beside} {quoted}"
