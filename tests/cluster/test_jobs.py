"""The files in jobs/ on a real Slurm: workers share a run, are requeued and go on, and the chain ends verified."""

import json
from pathlib import Path
from typing import Any

import pytest

from ropesearch.artifact.verify import verify
from ropesearch.search.status import read_status
from tests import runs
from tests.cluster import conftest, slurm
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"


def submit(cluster: slurm.Slurm, num_workers: int, words: list[str], folder: Path) -> str:
    """Submit an array of workers; returns the job."""
    file = str(JOBS / "search.sbatch")
    return cluster.run("sbatch", "--parsable", f"--array=0-{num_workers - 1}", file, *words[1:], folder=folder)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("*.log")))


def has_begun(run: Path) -> bool:
    return (run / "study.journal").exists() and read_status(run).num_complete >= 8


def test_two_workers_of_an_array_finish_one_search_though_one_is_requeued(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = submit(cluster, 2, runs.search_words(toy_folder, corpus, run, conftest.NUM_TRIALS), tmp_path)
    wait_until(lambda: has_begun(run), "eight trials scored")
    cluster.run("scontrol", "requeue", f"{job}_0")
    assert cluster.wait(job) == {f"{job}_0": "COMPLETED", f"{job}_1": "COMPLETED"}, logs(tmp_path)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", f"{job}_0")
    status = read_status(run)
    assert not status.unfinished and status.num_complete == conftest.NUM_TRIALS + 4
    assert status.result is not None and all(finding.ok for finding in verify(run / "checkpoint"))
    for task in range(2):
        assert "chosen: " in (tmp_path / f"search-{job}_{task}.log").read_text()


def test_a_worker_that_is_preempted_goes_on_as_if_nothing_had_happened(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    run = tmp_path / "run"
    job = submit(cluster, 1, runs.search_words(toy_folder, corpus, run, conftest.NUM_TRIALS), tmp_path)
    wait_until(lambda: has_begun(run), "eight trials scored")
    cluster.run("sbatch", "-p", "high", "--exclusive", "--nodes=2", "--wrap", "sleep 1", folder=tmp_path)
    wait_until(lambda: cluster.states(job)[f"{job}_0"] == "PENDING", f"requeued: {logs(tmp_path)}")
    assert read_status(run).num_complete < conftest.NUM_TRIALS + 4
    assert cluster.wait(job) == {f"{job}_0": "COMPLETED"}, logs(tmp_path)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    assert runs.trials_of(run) == undisturbed


def test_the_chain_ends_with_a_verified_checkpoint(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "a run", 6)
    said = cluster.run("env", "NUM_WORKERS=1", str(JOBS / "chain.sh"), *words[1:], folder=tmp_path)
    jobs = dict(part.split() for part in said.partition(";")[0].split(", "))
    assert list(jobs) == ["search", "evaluate", "verify"]
    assert cluster.wait(jobs["verify"]) == {jobs["verify"]: "COMPLETED"}, logs(tmp_path)
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
