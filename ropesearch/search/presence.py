"""Who is at work on a run folder: every worker gives a sign of life there, and watches those of the others.

A worker's sign is its file workers/ID.json, written anew every sixth of the lease. A worker is taken for dead when
another one has watched its file for the whole lease and seen no change. No two clocks are compared, and an observer
that was itself suspended has not watched meanwhile. Two things are known sooner: a worker that ended says so in its
file, and on one machine a lock that the kernel frees shows a killed one at once.

A dead worker may come back (a suspended machine, a network that was away). So whoever writes to a trial looks first
whether it is still the owner, under the study's lock.
"""

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ropesearch.files import remove_leftovers, write_json
from ropesearch.search.ownership import WORKERS, claimed, is_held
from ropesearch.stopping import Stopped

_BEATS_IN_A_LEASE = 6
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class _Seen:
    """What was seen of a worker's file: its content, when it was looked at, and for how long it has not changed."""

    content: bytes | None
    looked_seconds: float
    unchanged_seconds: float = 0.0


class Presence:
    """This process as a worker of `run_folder`: its id, its sign of life, and what it sees of the others' signs."""

    def __init__(
        self, run_folder: Path, lease_seconds: float, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.id = uuid.uuid4().hex
        self._run_folder = run_folder
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._mutex = threading.Lock()
        self._sign: dict[str, Any] = {
            "worker": self.id,
            "beats": 0,
            "boot": _boot(),
            "process": os.getpid(),
            "has_lock": False,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "lease_seconds": lease_seconds,
            "state": "working",
            "because": None,
            "phase": None,
            "fraction": 0.0,
            "trial": None,
            "slurm_job": _slurm_job(),
            "device": device,
        }

    @property
    def beat_seconds(self) -> float:
        """How often a sign is given, and the others' are looked at."""
        return self._lease_seconds / _BEATS_IN_A_LEASE

    def show(self, **what: Any) -> None:
        """Say in the next sign what this worker does: `phase`, `fraction` of it, `trial`."""
        with self._mutex:
            self._sign.update(what)

    def beat(self) -> None:
        """Give a sign of life, and look at those of the others. Where the disk refuses, the next one is tried; but the
        first has to be there before this worker owns anything.
        """
        with self._mutex:
            self._sign["beats"] += 1
            sign = dict(self._sign)
        path = _sign_path(self._run_folder, self.id)
        if sign["beats"] == 1:
            write_json(path, sign)
        elif path.parent.exists():  # a run folder that was taken away is not made anew
            with contextlib.suppress(OSError):
                write_json(path, sign)
        with contextlib.suppress(OSError):
            for path in (self._run_folder / WORKERS).glob("*.json"):
                if path.stem != self.id:
                    self._look_at(path.stem)

    def end(self, because: str) -> None:
        """Say that this worker has ended: what it had begun is free from now on."""
        self.show(state="ended", because=because, trial=None)
        self.beat()

    def is_alive(self, worker: str) -> bool:
        """Whether that worker is at work, as far as this one has seen. One without a file was in another folder."""
        if worker == self.id:
            return True
        seen = self._look_at(worker)
        sign = _parsed(seen.content)
        if seen.content is None or sign.get("state") == "ended":
            return False
        if self._was_killed_here(worker, sign):
            return False
        return seen.unchanged_seconds < max(self._lease_seconds, float(sign.get("lease_seconds", 0.0)))

    def _was_killed_here(self, worker: str, sign: Mapping[str, Any]) -> bool:
        lock = _lock_path(self._run_folder, worker)
        here = sign.get("boot") == self._sign["boot"]
        return bool(here and (sign.get("has_lock") or lock.exists()) and not is_held(lock))

    def bury_the_killed(self) -> None:
        """Bury the workers that were killed on this machine and owned nothing that was taken over."""
        for sign in read_signs(self._run_folder):
            if sign["worker"] != self.id and self._was_killed_here(sign["worker"], sign):
                self.bury(sign["worker"])

    def bury(self, worker: str) -> None:
        """Write into a dead worker's file that it was lost, for those who look at the run."""
        path = _sign_path(self._run_folder, worker)
        with contextlib.suppress(OSError):
            sign = _parsed(path.read_bytes())
            if sign.get("state") == "working":
                write_json(path, {**sign, "state": "ended", "because": "lost", "trial": None})
            lock = _lock_path(self._run_folder, worker)
            if not is_held(lock):  # one that is suspended holds it still, and may come back
                lock.unlink(missing_ok=True)

    def _look_at(self, worker: str) -> _Seen:
        content = None
        with contextlib.suppress(OSError):
            content = _sign_path(self._run_folder, worker).read_bytes()
        now = self._clock()
        with self._mutex:
            seen = self._seen.get(worker)
            if seen is None or seen.content != content:
                seen = self._seen[worker] = _Seen(content, now)
            else:
                # A longer gap was no watching: this process may have been suspended.
                seen.unchanged_seconds += min(now - seen.looked_seconds, 1.5 * self.beat_seconds)
                seen.looked_seconds = now
            return seen


@contextlib.contextmanager
def working(run_folder: Path, lease_seconds: float, device: str = "") -> Iterator[Presence]:
    """Be a worker of the run folder within this block."""
    presence = Presence(run_folder, lease_seconds, device)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(presence.beat_seconds):
            presence.beat()

    remove_leftovers(run_folder / WORKERS)
    presence.bury_the_killed()
    presence.beat()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks: the lease alone tells
            presence.show(has_lock=stack.enter_context(claimed(_lock_path(run_folder, presence.id))))
        presence.beat()
        thread = threading.Thread(target=beat, name="sign of life", daemon=True)
        thread.start()
        because = "error"
        try:
            yield presence
            because = "done"
        except Stopped as stopped:
            because = stopped.signal_name
            raise
        except KeyboardInterrupt:
            because = "SIGINT"
            raise
        finally:
            ended.set()
            thread.join()
            presence.end(because)


def read_signs(run_folder: Path) -> list[dict[str, Any]]:
    """The last sign of every worker that the run has had, those that began first coming first; `silent_seconds` in each
    is how long ago it was given, by this machine's clock.
    """
    signs = []
    with contextlib.suppress(OSError):
        for path in (run_folder / WORKERS).glob("[!.]*.json"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                sign = _parsed(file.read())
                written = os.fstat(file.fileno()).st_mtime
                # The file server's clock may be ahead.
                signs.append({**sign, "silent_seconds": max(0.0, time.time() - written)})
    return sorted(
        (sign for sign in signs if "worker" in sign), key=lambda sign: (str(sign.get("began")), str(sign["worker"]))
    )


def _parsed(content: bytes | None) -> dict[str, Any]:
    """A sign; empty where there is none, or something else."""
    with contextlib.suppress(ValueError):
        sign = json.loads(content or b"")
        if isinstance(sign, dict):
            return sign
    return {}


def _sign_path(run_folder: Path, worker: str) -> Path:
    return run_folder / WORKERS / f"{worker}.json"


def _lock_path(run_folder: Path, worker: str) -> Path:
    return run_folder / WORKERS / f"{worker}.lock"


def _boot() -> str:
    """What is the same for all processes of one running machine, and for no others."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return platform.node()


def _slurm_job() -> str | None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
