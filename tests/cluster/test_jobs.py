"""The files in jobs/ on a real Slurm: workers share a run, are requeued and go on, and the chain ends verified."""

import json
import signal
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

JOBS = Path(__file__).parents[2] / "jobs"


def submit(cluster: slurm.Slurm, num_workers: int, words: list[str], folder: Path) -> str:
    """Submit an array of workers; returns the job."""
    file = str(JOBS / "search.sbatch")
    return cluster.run("sbatch", "--parsable", f"--array=0-{num_workers - 1}", file, *words[1:], folder=folder)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("*.log")))


def test_two_workers_of_an_array_finish_one_search(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 30)
    job = submit(cluster, 2, words, tmp_path)
    assert cluster.wait(job) == {f"{job}_0": "COMPLETED", f"{job}_1": "COMPLETED"}, logs(tmp_path)
    status = read_status(tmp_path / "run")
    assert not status.unfinished and status.num_complete + status.num_stopped + sum(status.failures.values()) == 34
    assert status.result is not None and all(finding.ok for finding in verify(tmp_path / "run" / "checkpoint"))
    for task in range(2):
        assert "chosen: " in (tmp_path / f"search-{job}_{task}.log").read_text()


USR2 = pytest.param(
    ["scancel", "--signal=USR2"],
    marks=pytest.mark.skipif(signal.SIGUSR2 not in stopping._SIGNALS, reason="SIGUSR2 is not heeded yet"),
)


@pytest.mark.parametrize(
    "command", [["scontrol", "requeue"], ["scancel", "--signal=TERM"], USR2], ids=lambda each: each[-1]
)
def test_a_worker_that_is_stopped_is_requeued_and_goes_on(
    command: list[str],
    cluster: slurm.Slurm,
    toy_folder: Path,
    corpus: Path,
    tmp_path: Path,
    undisturbed: list[tuple[Any, ...]],
) -> None:
    """As if nothing had happened: the trials are those of a search that was never stopped."""
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 60)
    job = submit(cluster, 1, words, tmp_path)
    run = tmp_path / "run"
    wait_until(lambda: (run / "study.journal").exists() and read_status(run).num_complete >= 8, "eight trials scored")
    cluster.run(*command, job)
    wait_until(lambda: cluster.states(job)[f"{job}_0"] == "PENDING", f"requeued: {logs(tmp_path)}")
    assert read_status(run).num_complete < 64
    assert cluster.wait(job) == {f"{job}_0": "COMPLETED"}, logs(tmp_path)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    trials = runs.trials_of(run)
    assert len(trials) == 64 and trials == undisturbed


def test_a_cancelled_worker_stays_cancelled(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    job = submit(cluster, 1, runs.search_words(toy_folder, corpus, tmp_path / "run", 60), tmp_path)
    wait_until((tmp_path / "run" / "study.journal").exists, "the search began")
    cluster.run("scancel", job)
    assert cluster.wait(job) == {f"{job}_0": "CANCELLED"}


def test_the_chain_ends_with_a_verified_checkpoint(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "a run", 6)
    said = cluster.run("env", "NUM_WORKERS=1", str(JOBS / "chain.sh"), *words[1:], folder=tmp_path)
    jobs = dict(part.split() for part in said.partition(";")[0].split(", "))
    assert list(jobs) == ["search", "evaluate", "verify"]
    assert cluster.wait(jobs["verify"], 240) == {jobs["verify"]: "COMPLETED"}, logs(tmp_path)
    assert cluster.wait(jobs["search"]) == {f"{jobs['search']}_0": "COMPLETED"}
    assert cluster.wait(jobs["evaluate"]) == {jobs["evaluate"]: "COMPLETED"}
    assert (tmp_path / f"verify-{jobs['verify']}.log").read_text().endswith("\nverified\n")
    rows = json.loads((tmp_path / "a run-evaluation" / "evaluation.json").read_text())["evaluation"]
    assert {row["split"] for row in rows} == {"held_out"} and {row["length"] for row in rows} == {64, 128}


def test_the_chain_ends_where_a_job_fails(cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 6)
    said = cluster.run("env", "NUM_WORKERS=1", str(JOBS / "chain.sh"), *words[1:], "wrong=1", folder=tmp_path)
    jobs = dict(part.split() for part in said.partition(";")[0].split(", "))
    assert cluster.wait(jobs["search"]) == {f"{jobs['search']}_0": "FAILED"}
    assert "wrong: no such key" in (tmp_path / f"search-{jobs['search']}_0.log").read_text()
    for name in ("evaluate", "verify"):
        assert cluster.wait(jobs[name]) == {jobs[name]: "CANCELLED"}


def test_the_chain_wants_a_run_folder(cluster: slurm.Slurm, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected run=FOLDER"):
        cluster.run(str(JOBS / "chain.sh"), "model", "target_length=128", folder=tmp_path)
    assert cluster.run("squeue", "-h") == ""
