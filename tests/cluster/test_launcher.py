"""`launcher=slurm` on a real Slurm: the command ends at once, its workers share a run, and go on when stopped."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ropesearch import stopping
from ropesearch.artifact.verify import verify
from ropesearch.search.status import read_status
from tests import runs
from tests.cluster import slurm
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


def test_an_array_of_workers_finishes_one_search(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    jobs = launch(cluster, runs.search_words(toy_folder, corpus, run, 30), num_workers=2, gres="gpu:1")
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_0", f"{array}_1"]
    assert "TresPerNode=gres:gpu:1" in cluster.run("scontrol", "show", "job", array)
    assert cluster.wait(array) == dict.fromkeys(jobs, "COMPLETED"), log(run)
    status = read_status(run)
    assert not status.unfinished and status.num_complete + status.num_stopped + sum(status.failures.values()) == 34
    assert status.result is not None and all(finding.ok for finding in verify(run / "checkpoint"))
    assert log(run).count("chosen: ") == 2


def preempt(cluster: slurm.Slurm, job: str) -> None:
    cluster.run("sbatch", "-p", "high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 1")


def say_usr2(cluster: slurm.Slurm, job: str) -> None:
    cluster.run("scancel", "--signal=USR2", job)


USR2 = pytest.param(
    say_usr2, marks=pytest.mark.skipif(signal.SIGUSR2 not in stopping._SIGNALS, reason="SIGUSR2 is not heeded yet")
)


@pytest.mark.parametrize("stop", [preempt, USR2])
def test_a_worker_that_is_stopped_is_requeued_and_goes_on(
    stop: Any, cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    run = tmp_path / "run"
    (job,) = launch(cluster, runs.search_words(toy_folder, corpus, run, 60))
    wait_until(lambda: (run / "study.journal").exists() and read_status(run).num_complete >= 8, "eight trials scored")
    stop(cluster, job)
    wait_until(lambda: cluster.states(job)[job] == "PENDING", "requeued")
    assert read_status(run).num_complete < 64
    assert cluster.wait(job) == {job: "COMPLETED"}, log(run)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    assert runs.trials_of(run) == undisturbed


def test_a_cancelled_worker_stays_cancelled(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (job,) = launch(cluster, runs.search_words(toy_folder, corpus, run, 60))
    wait_until((run / "study.journal").exists, "the search began")
    cluster.run("scancel", job)
    wait_until(lambda: "COMPLETING" not in cluster.states(job).values(), "ended")
    assert cluster.wait(job, 60) == {job: "CANCELLED"}, log(run)


def test_a_worker_that_ends_badly_is_a_failed_job(cluster: slurm.Slurm, tmp_path: Path) -> None:
    words = ["search", str(tmp_path / "no model"), "corpus.path=a-dataset", "target_length=64"]
    (job,) = launch(cluster, [*words, f"run={tmp_path / 'run'}"])
    assert cluster.wait(job) == {job: "FAILED"}
    assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", job)
    assert "model.path" in log(tmp_path / "run")
