"""Weights & Biases, as a job sees it: messages to a process of its own for each run, and bounded waiting."""

import contextlib
import fcntl
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropesearch.track.config import server

# What may pass from the environment to wandb: where the server is, who asks, and how to get there.
_PASSED = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_INSECURE_DISABLE_SSL")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The program of a reporter: this very package, wherever it lies, and nothing of the working folder.
_PACKAGE = str(Path(__file__).parents[2])
_COMMAND = (
    f"import sys; {_PACKAGE!r} in sys.path or sys.path.insert(0, {_PACKAGE!r}); "
    "from ropesearch.track.reporter import main; main()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A finished trial as plain values.

    `state` is "complete", "stopped" (by a race, after so many windows) or "failed" (for a `reason`). Nats per token are
    by the study's objectives; `short_excess_nats` above the guard. Blocks are summed over the search windows:
    `block_nats[b]` of `block_tokens[b]` tokens at the positions block_edges[b] .. block_edges[b + 1] - 1. What a trial
    does not have is None or empty.
    """

    trial: int
    method: str
    state: str
    reason: str | None = None
    stopped_after_windows: int | None = None
    nats_per_token: float | None = None
    perplexity: float | None = None
    short_nats_per_token: float | None = None
    short_excess_nats: float | None = None
    num_forward_equivalent_tokens: int | None = None
    seconds: float | None = None
    factors: tuple[float, ...] = ()
    attention_factor: float | None = None
    retained_tokens: int | None = None
    block_edges: tuple[int, ...] = ()
    block_nats: tuple[float, ...] = ()
    block_tokens: tuple[int, ...] = ()


class Claim:
    """A lock file that one process of all holds, and with it those to which it gives the descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor: int | None = None

    def held(self) -> bool:
        """Try to hold it, without waiting; OSError where there are no locks."""
        if self.descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self.descriptor = descriptor
        return True

    def release(self) -> None:
        """Let go; a process that was given the descriptor holds it until it ends."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Reporter:
    """One run, written by a process of its own, which holds `claim` until it ends.

    Nothing here waits but `closed`. Signals do not end the process, as schedulers send them to every process of a job,
    and terminals to all in the foreground; it ends when it is told to, and by itself when the job is killed.
    """

    def __init__(self, folder: Path, begin: Mapping[str, Any], claim: Claim) -> None:
        self._claim = claim
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said: str | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited, by the core of wandb too
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_environment(folder),
                pass_fds=[] if claim.descriptor is None else [claim.descriptor],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        threading.Thread(target=self._write, daemon=True).start()
        self.send(begin)

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand over a message, in JSON values, for later."""
        self._messages.put(json.dumps(message).encode() + b"\n")

    def trial(self, row: TrialRow, *, is_best_candidate: bool, so_far: Mapping[str, Any]) -> None:
        """Hand over a finished trial; `so_far` are further values of its row."""
        self.send(
            {"kind": "trial", "trial": asdict(row), "is_best_candidate": is_best_candidate, "so_far": dict(so_far)}
        )

    @property
    def failure(self) -> str | None:
        """Why the process has ended before it was told to; None while it is at work."""
        return None if self._process.poll() is None else self._reason()

    def end(self, exit_code: int, seconds: float) -> None:
        """Tell the process to finish the run, within so many seconds."""
        self.send({"kind": "end", "exit_code": exit_code, "seconds": seconds})
        self._messages.put(None)

    def closed(self, deadline: float) -> str | None:
        """Wait for the end until `deadline` of the monotonic clock, then kill; returns None or what went wrong."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._said = "it did not end in time; the same command again logs what is missing"
        self._claim.release()
        reason = self._reason()
        return None if self._process.returncode == 0 else reason

    def _reason(self) -> str:
        """What an ended process has left to say."""
        if self._process.stdout is not None and not self._process.stdout.closed:
            with self._process.stdout as pipe:
                said = pipe.read().decode(errors="replace").strip()
            self._said = self._said or said
        return self._said or f"its process ended with {self._process.returncode}"

    def _write(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError), self._process.stdin as pipe:  # OSError: it has ended, see `failure`
                while (message := self._messages.get()) is not None:
                    pipe.write(message)
                    pipe.flush()


def _environment(folder: Path) -> dict[str, str]:
    """What the process gets of the environment: of wandb's own variables those that say which server and who, so that
    no other run, sweep or service of the surroundings is meant; and where its files belong.

    Artifacts carry the absolute names of their staged files, and wandb uploads these names. So the staging folder is
    named as seen from the working folder, which is the run folder here and has to be where `wandb sync` is called.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") or name in _PASSED}
    found = server()
    files = folder / "wandb"
    here = Path("/proc/self/cwd")
    return {
        **kept,
        **({} if found is None else {"WANDB_BASE_URL": found}),
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str((here if here.exists() else folder) / "wandb" / "data"),
        "WANDB_CACHE_DIR": str(files / "cache"),
        "WANDB_CONFIG_DIR": str(files / "config"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_HTTP_TIMEOUT": "10",
    }


def without_folders(text: str) -> str:
    """`text` with each absolute path in it cut to its last name."""
    return re.sub(r"(?<![\w/:.~])~?/(?:[^\s/'\":,;()]+/)+", "", text)
