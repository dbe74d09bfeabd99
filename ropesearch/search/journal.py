"""The journal file of a study: Optuna's, made safe against a writer that died in the middle of a line.

Optuna replays a journal line by line. An unterminated last line is ignored when read, but the next append is glued to
it and both are lost; so whoever holds the append lock first drops such a tail. Anything else that cannot be read is
refused.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from ropesearch.errors import InputError

# Seconds after which the append lock of a process that was killed while it held the lock is taken from it. An append
# takes milliseconds.
_GRACE_SECONDS = 5

# What Optuna 5 needs to replay each operation (optuna/storages/journal/_storage.py), by op_code.
_KEYS: dict[int, frozenset[str]] = {
    0: frozenset({"study_name", "directions"}),
    1: frozenset({"study_id"}),
    2: frozenset({"study_id", "user_attr"}),
    3: frozenset({"study_id", "system_attr"}),
    4: frozenset({"study_id", "datetime_start"}),
    5: frozenset({"trial_id", "param_name", "param_value_internal", "distribution"}),
    6: frozenset({"trial_id", "state", "values"}),
    7: frozenset({"trial_id", "step", "intermediate_value"}),
    8: frozenset({"trial_id", "user_attr"}),
    9: frozenset({"trial_id", "system_attr"}),
}
_CREATE_TRIAL = 4


class Journal(JournalFileBackend):
    """Optuna's journal backend on the file `path`, checked when opened.

    Raises InputError when the file holds a line that is not part of a journal; the message names the line.
    """

    def __init__(self, path: Path) -> None:
        self._held: list[dict[str, Any]] | None = None
        lock = _RepairingLock(path)
        if path.exists():
            lock.acquire()  # drops a torn tail
            lock.release()
            _check(path)
        super().__init__(str(path), lock_obj=lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations, or hold them back within `together`."""
        if self._held is None:
            super().append_logs(logs)
        else:
            self._held.extend(logs)

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


class _RepairingLock(JournalFileOpenLock):
    """Optuna's append lock; whoever gets it finds a journal that ends with a whole line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), grace_period=_GRACE_SECONDS)
        self._path = path

    def acquire(self) -> bool:
        """Take the lock, waiting for it, then drop what a killed writer left of its last line."""
        super().acquire()
        try:
            drop_torn_tail(self._path)
        except BaseException:
            self.release()
            raise
        return True


def drop_torn_tail(path: Path) -> None:
    """Cut `path` after its last newline. Only for the holder of the append lock."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)


def _check(path: Path) -> None:
    """Read every line as Optuna will."""
    num_trials = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # another worker is appending it
            try:
                operation = json.loads(line)
                code = operation["op_code"]
                whole = isinstance(operation["worker_id"], str) and _KEYS[code] <= operation.keys()
                trial_id = operation.get("trial_id", 0)
                whole = whole and isinstance(trial_id, int) and (trial_id < num_trials or "trial_id" not in operation)
            except (ValueError, KeyError, TypeError, AttributeError):
                whole = False
            if not whole:
                raise InputError(
                    f"{path}: line {number} is not a line of a study's journal, so the file was damaged after it was "
                    "written; restore it from a copy, or start the search in another run folder"
                )
            num_trials += code == _CREATE_TRIAL
