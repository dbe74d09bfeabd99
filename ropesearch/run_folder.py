"""A run's one folder: its name, and the files that say how it was made."""

import contextlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json, write_json

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

# How the note begins that `RunFolder.logged` puts on an error.
LOGGED_IN = "the traceback is in "


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run. What is asked names it, so asking for the same again finds it."""

    path: Path

    @classmethod
    def of(cls, job_name: str, run: str | None, asked: Mapping[str, Any], without: Collection[str]) -> "RunFolder":
        """The folder `run`, or by default runs/JOB-FINGERPRINT of what is asked, without the top-level keys `without`.

        Raises InputError when that path is no folder or cannot be written to.
        """
        fingerprint = sha256_of_json({key: value for key, value in asked.items() if key not in without})
        path = Path(os.path.expanduser(run)) if run else Path("runs") / f"{job_name}-{fingerprint[:12]}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise InputError(
                f"run: expected a folder that can be written to, got {path} ({error.strerror}); give another with run="
            ) from error
        return cls(path)

    def describe(self, config: Mapping[str, Any]) -> None:
        """Write config.json (the resolved configuration) and versions.json (of libraries, Python and this program)."""
        write_json(self.path / "config.json", config)
        write_json(self.path / "versions.json", versions())

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Within this block the program's log goes to log.txt of the folder."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("ropesearch")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        except Exception as error:
            # Written here, where the handler is still open; the command line then only names the file.
            logger.exception("the job ended with an error")
            error.add_note(f"{LOGGED_IN}{self.path / 'log.txt'}")
            raise
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()


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
