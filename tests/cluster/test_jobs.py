"""The files in jobs/ on a real Slurm: workers share a run, are requeued and go on, and the chain ends verified."""

import json
from pathlib import Path
from typing import Any

import pytest

from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import verify
from ropesearch.search.status import read_status
from tests import runs
from tests.artifact.examples import write_example
from tests.cluster import conftest, slurm
from tests.cluster.processes import wait_until
from tests.train.examples import CORPUS_WORDS, write_texts

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


@pytest.fixture
def tuning_words() -> list[str]:
    """What makes a fine-tuning of a second or two."""
    steps = ["training.num_steps=8", "training.num_step_rows=3", "training.num_warmup_steps=2"]
    return ["training=small", "mixture.needle_share=0", *steps]


def test_the_chain_ends_with_a_verified_checkpoint(
    cluster: slurm.Slurm, toy_folder: Path, tmp_path: Path, tuning_words: list[str]
) -> None:
    """Search, fine-tuning, evaluation, export and verification, by one command."""
    environment = ["env", "NUM_WORKERS=1", "PROCESSES_PER_NODE=1"]
    corpus = runs.write_corpus(tmp_path / "texts", num_documents=20)
    words = runs.search_words(toy_folder, corpus, tmp_path / "a run", 6)
    said = cluster.run(*environment, str(JOBS / "chain.sh"), *words[1:], *tuning_words, folder=tmp_path)
    jobs = dict(part.split() for part in said.partition(";")[0].split(", "))
    assert list(jobs) == ["search", "finetune", "evaluate", "export", "verify"]
    assert cluster.wait(jobs["verify"]) == {jobs["verify"]: "COMPLETED"}, logs(tmp_path)
    assert cluster.wait(jobs["search"]) == {f"{jobs['search']}_0": "COMPLETED"}
    for name in ("finetune", "evaluate", "export"):
        assert cluster.wait(jobs[name]) == {jobs[name]: "COMPLETED"}
    assert (tmp_path / f"verify-{jobs['verify']}.log").read_text().endswith("\nverified\n")
    rows = json.loads((tmp_path / "a run-evaluation" / "evaluation.json").read_text())["evaluation"]
    assert {row["split"] for row in rows} == {"held_out"} and {row["length"] for row in rows} == {64, 128}
    tuned, served = (RopeConfig.read(tmp_path / name) for name in ("a run-tuned", "a run-served"))
    assert tuned.base_checkpoint == RopeConfig.read(tmp_path / "a run").checkpoint
    assert served.checkpoint.digest == tuned.checkpoint.digest and not served.not_portable


def test_the_chain_without_a_word_of_training_has_no_fine_tuning(
    cluster: slurm.Slurm, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 6)
    said = cluster.run("env", "NUM_WORKERS=1", str(JOBS / "chain.sh"), *words[1:], folder=tmp_path)
    jobs = dict(part.split() for part in said.partition(";")[0].split(", "))
    assert list(jobs) == ["search", "evaluate", "verify"]
    assert cluster.wait(jobs["verify"]) == {jobs["verify"]: "COMPLETED"}, logs(tmp_path)


def test_a_fine_tuning_on_two_nodes_is_preempted_and_goes_on(
    cluster: slurm.Slurm, tmp_path: Path, tuning_words: list[str]
) -> None:
    """One process on each node, with sharded weights; a job of a higher partition takes one of the nodes."""
    searched, texts, run = write_example(tmp_path / "model"), write_texts(tmp_path / "texts"), tmp_path / "run"
    words = [str(searched), f"corpus.path={texts}", f"run={run}", *CORPUS_WORDS, *tuning_words]
    words += ["training.num_steps=60", "training.save_every_steps=60", "cache=null"]
    words.remove("training.num_steps=8")
    environment = ["env", "PROCESSES_PER_NODE=1", "SBATCH_GRES=gpu:1"]
    submit = [*environment, "sbatch", "--parsable", "--nodes=2"]
    job = cluster.run(*submit, str(JOBS / "finetune.sbatch"), *words, folder=tmp_path)

    def num_steps() -> int:
        path = run / "metrics.jsonl"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    wait_until(lambda: num_steps() >= 5, f"five steps done: {logs(tmp_path)}")
    cluster.run("sbatch", "-p", "high", "--exclusive", "--nodes=1", "--wrap", "sleep 1", folder=tmp_path)
    wait_until(lambda: cluster.states(job)[job] == "PENDING", f"requeued: {logs(tmp_path)}")
    saved = [int(path.name.removeprefix("step-")) for path in (run / "states").iterdir()]
    assert saved and 5 <= saved[-1] < 60, logs(tmp_path)
    assert cluster.wait(job) == {job: "COMPLETED"}, logs(tmp_path)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == list(range(61))
    assert all(finding.ok for finding in verify(run / "checkpoint"))
    training = RopeConfig.read(run).training
    assert training is not None and training["num_processes"] == 2


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
