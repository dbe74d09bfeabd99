"""What can be told about where the workers of a search run; stdlib only."""

import math
from dataclasses import dataclass

from ropesearch.errors import InputError
from ropesearch.settings import setting

_LEAST_MINUTES = 5  # the signal before a time limit comes two minutes early, and on Slurm up to one minute before that


@dataclass(kw_only=True)
class LauncherConfig:
    """Where the workers of a search run."""

    def check(self) -> None:
        """Raise InputError for what no scheduler could take."""


@dataclass(kw_only=True)
class LocalConfig(LauncherConfig):
    """Here: the command is the worker."""


@dataclass(kw_only=True)
class SlurmConfig(LauncherConfig):
    """On a Slurm cluster: the command submits an array of workers and ends."""

    num_workers: int = setting(1, "workers, each a task of one array")
    minutes: int = setting(
        60, "time limit of a worker in minutes; stopped by it, the worker is requeued as often as needed, and goes on"
    )
    partition: str | None = setting(None, "Slurm partition; null for the cluster's default")
    account: str | None = setting(None, "account that is charged; null for the user's default")
    qos: str | None = setting(None, "quality of service; null for the default")
    constraint: str | None = setting(None, "features that the nodes must have")
    gres: str | None = setting(
        None, "generic resources of each worker, such as gpu:1; gpu:4 with model.device=balanced"
    )
    num_cpus: int = setting(1, "CPUs of each worker")
    memory_gigabytes: float | None = setting(None, "memory of each worker; null for the cluster's default")

    def check(self) -> None:
        """Raise InputError for numbers out of range, and texts that are no single word."""
        for name, least in (("num_workers", 1), ("minutes", _LEAST_MINUTES), ("num_cpus", 1)):
            value = getattr(self, name)
            if value < least:
                raise InputError(f"launcher.{name}: expected at least {least}, got {value}")
        memory = self.memory_gigabytes
        if memory is not None and not (math.isfinite(memory) and memory > 0):
            raise InputError(f"launcher.memory_gigabytes: expected a number above 0, or null, got {memory}")
        for name in ("partition", "account", "qos", "constraint", "gres"):
            text = getattr(self, name)
            if text is not None and (text.split() != [text] or not text.isprintable()):
                raise InputError(f"launcher.{name}: expected one word without spaces, or null, got {text!r}")


LAUNCHERS: dict[str, type[LauncherConfig]] = {"local": LocalConfig, "slurm": SlurmConfig}
