"""What a run of Weights & Biases holds, read back from the file that it is uploaded from, by wandb's own tool."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ReadRun:
    """One .wandb file: its rows by step, the last value of each key, and what ended it (None where nothing did)."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.about["config"]["update"]
        return found

    @property
    def trials(self) -> list[int]:
        return [row["trial"] for row in self.history if "trial" in row]

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.history]

    def media(self, name: str) -> Path:
        """The newest file that was logged under a name."""
        (path,) = [row[f"{name}.path"] for row in self.history if f"{name}.path" in row][-1:]
        return self.path.parent / "files" / str(path)


def read(path: Path) -> ReadRun:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, check=True)
    run = ReadRun(path)
    for record in map(json.loads, done.stdout.splitlines()):
        content = record.get(record["type"])
        if record["type"] == "run":
            run.about = content
        elif record["type"] == "history":
            run.history.append(content["item"])
        elif record["type"] == "summary":
            run.summary |= content.get("update", {})
        elif record["type"] == "artifact":
            run.artifacts.append(content)
        elif record["type"] == "exit":
            run.exit_code = content.get("exit_code", 0)
    return run


def study_id(folder: Path) -> str:
    return str(json.loads((folder / "wandb" / "study.json").read_bytes())["id"])


def study_runs(folder: Path) -> list[ReadRun]:
    """The offline runs of a run folder's study, in the order in which they began."""
    name = study_id(folder)
    return [read(path) for path in sorted((folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))]


def finetune_id(folder: Path) -> str:
    return str(json.loads((folder / "wandb" / "finetune.json").read_bytes())["id"])


def finetune_files(folder: Path) -> list[Path]:
    """The files of a fine-tuning's offline run, in the order in which they were begun."""
    name = finetune_id(folder)
    return sorted((folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))


def finetune_runs(folder: Path) -> list[ReadRun]:
    """What they hold."""
    return [read(path) for path in finetune_files(folder)]


def worker_runs(folder: Path) -> list[ReadRun]:
    """The offline runs of a run folder's workers."""
    paths = sorted((folder / "wandb").glob(f"offline-run-*-{study_id(folder)}-*/run-*.wandb"))
    return [read(path) for path in paths]
