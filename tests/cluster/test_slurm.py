"""The fixtures themselves: they start what they say, and leave nothing behind."""

from pathlib import Path

import pytest

from tests.cluster import slurm

pytestmark = pytest.mark.slow


def test_jobs_run_on_both_nodes(cluster: slurm.Slurm, tmp_path: Path) -> None:
    script = 'echo "$SLURMD_NODENAME $SLURM_ARRAY_TASK_ID" > $SLURM_ARRAY_TASK_ID.txt; sleep 2'
    words = ["sbatch", "--parsable", "--array=0-1", "--exclusive", "--gres=gpu:1", "--wrap", script]
    job = cluster.run(*words, folder=tmp_path)
    assert cluster.wait(job) == {f"{job}_0": "COMPLETED", f"{job}_1": "COMPLETED"}
    places = sorted((tmp_path / f"{task}.txt").read_text().split() for task in range(2))
    assert {node for node, _ in places} == {"n0", "n1"}


def test_jobs_can_depend_on_others(cluster: slurm.Slurm, tmp_path: Path) -> None:
    failing = cluster.run("sbatch", "--parsable", "--wrap", "exit 3", folder=tmp_path)
    words = ["--parsable", f"--dependency=afterok:{failing}", "--kill-on-invalid-dep=yes"]
    after = cluster.run("sbatch", *words, "--wrap", "true", folder=tmp_path)
    assert cluster.wait(failing) == {failing: "FAILED"}
    assert cluster.wait(after) == {after: "CANCELLED"}
