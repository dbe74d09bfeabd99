"""`launcher=slurm` on a real Slurm: the command ends at once, its workers share a run, and go on when stopped."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ropesearch.artifact.verify import verify
from ropesearch.search.status import read_status
from tests import runs
from tests.cluster import conftest, slurm
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.slow


def launch(cluster: slurm.Slurm, words: list[str], **launcher: Any) -> list[str]:
    """Give the command; returns the Slurm jobs that it names."""
    asked = ["launcher=slurm", *(f"launcher.{key}={value}" for key, value in launcher.items())]
    command = [sys.executable, "-m", "ropesearch.cli", *words, *asked]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0].partition(": ")[2].split(", ")


def log(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "slurm").rglob("*.out")))


def has_begun(run: Path) -> bool:
    return (run / "study.journal").exists() and read_status(run).num_complete >= 8


def test_an_array_of_workers_finishes_one_search_and_who_is_cancelled_stays_so(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    stays, goes = launch(
        cluster, runs.search_words(toy_folder, corpus, run, conftest.NUM_TRIALS), num_workers=2, gres="gpu:1"
    )
    array = stays.partition("_")[0]
    assert (stays, goes) == (f"{array}_0", f"{array}_1")
    assert "TresPerNode=gres:gpu:1" in cluster.run("scontrol", "show", "job", array)
    wait_until(lambda: has_begun(run), "eight trials scored")
    cluster.run("scancel", goes)
    assert cluster.wait(array) == {stays: "COMPLETED", goes: "CANCELLED"}, log(run)
    status = read_status(run)
    assert not status.unfinished and status.num_complete == conftest.NUM_TRIALS + 4
    assert status.result is not None and all(finding.ok for finding in verify(run / "checkpoint"))
    assert log(run).count("chosen: ") == 1


def test_a_worker_at_its_time_limit_is_requeued_and_goes_on_as_if_nothing_had_happened(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    """The signal alone: the limit itself is at least five minutes away."""
    run = tmp_path / "run"
    (job,) = launch(cluster, runs.search_words(toy_folder, corpus, run, conftest.NUM_TRIALS))
    wait_until(lambda: has_begun(run), "eight trials scored")
    cluster.run("scancel", "--signal=USR2", job)
    wait_until(lambda: cluster.states(job)[job] == "PENDING", "requeued")
    assert read_status(run).num_complete < conftest.NUM_TRIALS + 4
    assert cluster.wait(job) == {job: "COMPLETED"}, log(run)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    assert runs.trials_of(run) == undisturbed
