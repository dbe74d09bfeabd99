"""The run folder of a fine-tuning: what is in it, and that it is this one's alone and has room for all."""

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ropesearch.artifact.digest import weight_files
from ropesearch.errors import InputError
from ropesearch.run_folder import CONFIG, LAUNCHER_FOLDER, RunFolder, by_key
from ropesearch.search.ownership import claimed
from ropesearch.strict_json import read_json_object
from ropesearch.train.config import TrainingConfig
from ropesearch.train.loop import STATES
from ropesearch.train.loss import RowLoss
from ropesearch.train.processes import Processes

TOKENS = "training-tokens"
NEW_WEIGHTS = "new-weights"
ASKED = "asked.json"
LOCK = "finetune.lock"


@contextlib.contextmanager
def only_one(run: RunFolder, processes: Processes) -> Iterator[None]:
    """Within the block no other fine-tuning works in this run folder. InputError where one does."""
    if not processes.is_first:
        yield
        return
    with claimed(run.path / LOCK) as held:
        if not held:
            raise InputError(
                f"run: expected a run folder that nobody is at work in, got {run.path}, where a fine-tuning is under "
                "way; wait for it, or give another with run="
            )
        yield


def expect_own(run: RunFolder) -> None:
    """InputError where the run folder holds other things than a fine-tuning; nothing is written there then."""
    ours = {"log.txt", LOCK, TOKENS, LAUNCHER_FOLDER}  # of one that was killed before it was described
    others = sorted({entry.name for entry in run.path.iterdir()} - ours)
    if others and not (run.path / ASKED).is_file() and not (run.path / CONFIG).is_file():
        raise InputError(
            f"run: expected a new folder or that of a fine-tuning, got {run.path}, which holds {others[0]}"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}; give another with run="
        )


def expect_same(run: RunFolder, asked: Mapping[str, Any], corpus_path: str) -> None:
    """InputError where the run folder holds a fine-tuning that was asked otherwise."""
    path = run.path / ASKED
    if not path.is_file():
        return
    there, here = by_key(read_json_object(path)), by_key(asked)
    if there.get("corpus.path") != here["corpus.path"]:  # digests
        described = read_json_object(run.path / CONFIG) if (run.path / CONFIG).is_file() else {}
        there["corpus.path"] = by_key(described).get("corpus.path", "another")
        here["corpus.path"] = corpus_path
    run.expect_same(there, here)


def expect_room_for_all(run: RunFolder, loss: RowLoss, source: Path, training: TrainingConfig) -> None:
    """InputError where the disk has no room for what a fine-tuning writes: states, each the weights that are trained
    and their two moments in float32, and at its end the new weights and the checkpoint that is made of them.
    """
    state_bytes = 3 * 4 * sum(parameter.numel() for parameter in loss.parameters() if parameter.requires_grad)
    num_saves = math.ceil(training.num_steps / training.save_every_steps)
    num_states = min(training.num_kept_states, num_saves)
    at_the_end = num_states * state_bytes + 2 * sum(path.stat().st_size for path in weight_files(source))
    needed_bytes = max(min(num_states + 1, num_saves) * state_bytes, at_the_end)
    there = (path for name in (STATES, NEW_WEIGHTS) for path in (run.path / name).rglob("*"))
    needed_bytes -= sum(path.stat().st_size for path in there)
    free_bytes = shutil.disk_usage(run.path).free
    if free_bytes < needed_bytes:
        fewer = ", or keep fewer states (training.num_kept_states=1)" if num_states > 1 else ""
        raise InputError(
            f"run: expected {needed_bytes:,} bytes of free disk space at {run.path}, for the states to go on from, the "
            f"new weights and the checkpoint, got {free_bytes:,}; make room, give another place with run={fewer}"
        )
