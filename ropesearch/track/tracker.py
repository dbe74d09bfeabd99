"""What the trackers of all jobs share: nothing that goes wrong ends the job, and what a run may say of where it is."""

import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ropesearch.files import write_json
from ropesearch.run_folder import versions
from ropesearch.track.config import TrackConfig, WandbTracking
from ropesearch.track.weights_and_biases import without_folders

_log = logging.getLogger(__name__)

# How long a run may take to be finished, at the end of a job and when it was told to stop; and what may come on top.
END_SECONDS = 20.0
_STOPPED_SECONDS = 8.0
GRACE_SECONDS = 2.0
_PLACES = ("host", "port", "url", "user")


class Runs(Protocol):
    """The runs that a process writes."""

    def end(self, exit_code: int, seconds: float) -> str | None:
        """Finish them, within so many seconds and some more; returns what went wrong."""


SomeRuns = TypeVar("SomeRuns", bound=Runs)


class Tracker(Generic[SomeRuns]):
    """Tracks one job for as long as the block lasts; does nothing where nothing was asked for.

    Nothing waits for it before the end of the block, and nothing that goes wrong with it ends the job: there is one
    warning, and then no more tracking.
    """

    def __init__(self, config: TrackConfig, folder: Path, say: Callable[[str], None], *, job: str) -> None:
        """folder: the run folder; job: what the warning calls it."""
        self._config = config
        self._folder = folder.absolute()
        self._say = say
        self._job = job
        self._runs: SomeRuns | None = None
        self._gave_up = False

    def _begin(self, made: Callable[[dict[str, Any]], SomeRuns], asked: Mapping[str, Any], weights: str) -> None:
        """Make the runs, from what they all begin with: `asked` is the job's configuration, `weights` the digest of
        what it is done to.
        """
        if isinstance(self._config, WandbTracking):
            config = {"job": without_places(asked), "weights": weights, "versions": _released(versions())}
            about = {"online": self._config.online, "project": self._config.project, "config": config}
            try:
                self._runs = made(about)
            except OSError as error:
                self._give_up(str(error))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = _STOPPED_SECONDS if isinstance(error, KeyboardInterrupt) else END_SECONDS
        self._do(lambda runs: runs.end(_exit_code(error), seconds), always=True)

    def _do(self, what: Callable[[SomeRuns], str | None], *, always: bool = False) -> None:
        if self._runs is not None and (always or not self._gave_up):
            try:
                failure = what(self._runs)
            except OSError as error:
                failure = str(error)
            if failure is not None:
                self._give_up(failure)

    def _give_up(self, reason: str) -> None:
        """The one warning."""
        if not self._gave_up:
            self._gave_up = True
            message = f"Weights & Biases: {without_folders(reason)}; the {self._job} does without it"
            _log.warning("%s", message)
            self._say(f"note: {message}")


def kept_run_id(path: Path, fingerprint: str) -> str:
    """The id of a run folder's run, made once and kept at `path`: it says what is asked, and no two run folders have
    the same, since a run that was deleted on a server cannot be written again.
    """
    found = entry(path, "id")
    if not (isinstance(found, str) and re.fullmatch("[0-9a-f]{16}", found)):
        found = f"{fingerprint[:8]}{uuid.uuid4().hex[:8]}"
        write_json(path, {"id": found})
    return found


def entry(path: Path, key: str) -> Any:
    """An entry of a JSON file; None where there is none."""
    try:
        return json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def without_places(config: Any) -> Any:
    """A configuration without what tells where files and servers are: of a text with a slash only the last name."""
    if isinstance(config, dict):
        return {key: without_places(value) for key, value in config.items() if key not in _PLACES}
    if isinstance(config, list):
        return [without_places(value) for value in config]
    if isinstance(config, str) and "/" in config:
        return config.rstrip("/").rpartition("/")[2]
    return config


def _released(found: Mapping[str, str]) -> dict[str, str]:
    """Versions without that of a checkout, which is Git's matter."""
    return {name: version for name, version in found.items() if not name.endswith("_commit")}


def _exit_code(error: BaseException | None) -> int:
    """What the command is about to end with."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130 if getattr(error, "signal_name", "SIGINT") == "SIGINT" else 75
    return int(getattr(error, "exit_code", 70))
