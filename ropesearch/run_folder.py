"""A run's one folder: its name, and the files that say how it was made."""

import contextlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropesearch.errors import BindingError, InputError
from ropesearch.files import remove_leftovers, sha256_of_json, write_json
from ropesearch.strict_json import read_json_object

_LIBRARIES = (
    "ropesearch",
    "torch",
    "transformers",
    "optuna",
    "cmaes",
    "numpy",
    "scipy",
    "tokenizers",
    "safetensors",
    "datasets",
)

# The job of a run and its resolved configuration.
CONFIG = "config.json"

_NOUNS = {"finetune": "fine-tuning", "evaluate": "evaluation"}

# In a run folder, what a launcher writes that has submitted its workers to a scheduler.
LAUNCHER_FOLDER = "slurm"

# How the note begins that `RunFolder.logged` puts on an error.
LOGGED_IN = "the traceback is in "


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run. What is asked names it, so asking for the same again finds it."""

    path: Path
    job_name: str
    is_new: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, job_name: str, run: str | None, asked: Mapping[str, Any], without: Collection[str]) -> "RunFolder":
        """The folder `run`, or by default runs/JOB-FINGERPRINT of what is asked, without the top-level keys `without`.

        It is made where it is not there; what killed writers left in it is removed.

        Raises InputError when that path is no folder, cannot be written to, or holds a config.json that is not of such
        a run: another job's, or a model's.
        """
        fingerprint = sha256_of_json({key: value for key, value in asked.items() if key not in without})
        path = Path(os.path.expanduser(run)) if run else Path("runs") / f"{job_name}-{fingerprint[:12]}"
        try:
            is_new = not path.exists() or all(entry.name == LAUNCHER_FOLDER for entry in path.iterdir())
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"run: expected a folder that can be written to, got {path} ({reason}); give another with run="
            ) from error
        found = job_of(path)
        if found != job_name and (path / CONFIG).exists():
            raise InputError(
                f"run: expected a new folder or one of the job {job_name}, got {path}, which holds "
                f"{f'one of the job {found}' if found else 'another config.json'}; give another with run="
            )
        remove_leftovers(path)
        return cls(path, job_name, is_new)

    def describe(self, config: Mapping[str, Any]) -> None:
        """Write config.json (the job and its resolved configuration) and versions.json (of libraries, Python and this
        program)."""
        write_json(self.path / CONFIG, {"job": self.job_name, **config})
        write_json(self.path / "versions.json", versions())

    def expect_same(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Raise InputError where what the folder was begun with, by dotted keys (see `by_key`), is not what is asked
        here.
        """
        differing = [key for key in dict.fromkeys((*there, *here)) if there.get(key) != here.get(key)]
        if differing:
            raise InputError(
                f"run: expected the {_NOUNS[self.job_name]} that {self.path} was begun with, got another; give another "
                "run folder, or the same again:\n"
                + "\n".join(f"  {key}: {there.get(key)} there, {here.get(key)} asked" for key in differing)
            )

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Within this block the program's log goes to log.txt of the folder.

        What the user has asked wrongly is no matter for the log: it may be another run's folder. A new folder in which
        nothing was written but that when such an error came to light is removed again.
        """
        refused = False
        handler = _LogFile(self.path / "log.txt", encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("ropesearch")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        except KeyboardInterrupt as stopped:
            logger.info("stopped by %s", str(stopped) or "an interrupt")
            raise
        except Exception as error:
            refused = isinstance(error, InputError | BindingError)
            if not refused:  # here, where the handler is still open; the command line then only names the file
                logger.exception("the job ended with an error")
                error.add_note(f"{LOGGED_IN}{self.path / 'log.txt'}")
            raise
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()
            if refused and self.is_new and [path.name for path in self.path.iterdir()] == ["log.txt"]:
                (self.path / "log.txt").unlink()
                with contextlib.suppress(OSError):  # another worker has just begun here; runs/ holds other runs
                    self.path.rmdir()
                    self.path.parent.rmdir()


def by_key(value: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by their dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= by_key(inner, f"{prefix}.{key}" if prefix else key)
    return found


def job_of(folder: Path) -> str | None:
    """The job that a folder's config.json is of a run of; None for a file that is missing or something else."""
    try:
        found = read_json_object(folder / CONFIG).get("job")
    except InputError:
        return None
    return found if isinstance(found, str) else None


class _LogFile(logging.FileHandler):
    """A log file that never ends the work: where the disk is full, its lines are lost and nothing is printed."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a line that cannot be written."""


def versions() -> dict[str, str]:
    """Versions of what a result depends on, and the commit of this program where it runs from a checkout."""
    found = {name: version(name) for name in _LIBRARIES}
    found["python"] = platform.python_version()
    checkout = Path(__file__).parent.parent
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            found["ropesearch_commit"] = commit
    return found
