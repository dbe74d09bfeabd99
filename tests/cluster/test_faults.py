"""A search on a real Slurm that loses workers in every way a cluster has, and loses nothing.

The virtual nodes share one kernel. So that a worker on another node is judged as there, by its lease and not by its
lock, every worker is told that its node was started on its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from ropesearch.cli import main
from ropesearch.demo.__main__ import write_demo
from ropesearch.search.presence import read_signs
from ropesearch.search.status import SearchStatus, read_status
from ropesearch.search.storage import open_for_reading
from tests.cluster import slurm
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
NUM_CANDIDATES = 100
NUM_TRIALS = 4 + NUM_CANDIDATES
SHIM = """#!{python}
import os, sys
from pathlib import Path
from ropesearch.search import presence
node = Path(__file__).parent / os.environ["SLURMD_NODENAME"]
node.write_text(node.name)
presence._BOOT_ID = node
from ropesearch import cli
sys.exit(cli.main())
"""


@pytest.fixture
def full_cluster() -> Iterator[slurm.Slurm]:
    """Two nodes of two CPUs each: four workers leave no room. A node that was powered off does not come back."""
    with slurm.running(num_nodes=2, num_cpus=2) as found:
        yield found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


def words_of(demo: Path, run: Path, *more: str) -> list[str]:
    """A search whose candidates do not depend on the order in which they are scored."""
    return [
        str(demo / "model"),
        f"corpus.path={demo / 'texts'}",
        f"run={run}",
        "target_length=512",
        "optimizer=random",
        "racing.mark=none",
        "corpus.num_search_windows=8",
        "corpus.num_selection_windows=2",
        "corpus.num_held_out_windows=2",
        f"budget.num_trials={NUM_CANDIDATES}",
        "selection.num_finalists=2",
        "worker.lease_seconds=4",
        "weights=link",
        "cache=null",
        *more,
    ]


def recorded(run: Path) -> list[tuple[Any, ...]]:
    opened = open_for_reading(run)
    assert opened is not None
    storage, name = opened
    trials = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
    return [(trial.number, trial.state, trial.values, trial.user_attrs["regime"]) for trial in trials]


@pytest.fixture(scope="module")
def quiet(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The trials of the same search by one worker that nothing happened to."""
    run = tmp_path_factory.mktemp("quiet") / "run"
    assert main(["search", *words_of(demo, run)]) == 0
    return recorded(run)


class Watched:
    """The search as `status` shows it; every look has to be possible after the one before."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._num_done = 0

    def look(self) -> SearchStatus | None:
        if not self._run.exists() or not ((self._run / "config.json").exists()):
            return None
        status = read_status(self._run)
        assert status.num_complete + len(status.unfinished) <= NUM_TRIALS
        assert self._num_done <= status.num_complete and not status.failures and not status.num_stopped
        assert len({trial.number for trial in status.unfinished}) == len(status.unfinished)
        assert len(status.unfinished) <= 4
        self._num_done = status.num_complete
        return status

    def wait_for(self, num_done: int) -> None:
        def reached() -> bool:
            status = self.look()
            return status is not None and status.num_complete >= num_done

        wait_until(reached, f"{num_done} trials scored", 240)


def tasks_at_work(cluster: slurm.Slurm, job: str, run: Path) -> list[str]:
    """Running tasks of the job whose worker owns a trial."""
    at_work = {sign["slurm_job"] for sign in read_signs(run) if sign["state"] == "working" and sign["phase"]}
    return [task for task, state in cluster.states(job).items() if state == "RUNNING" and task in at_work]


def power_off(cluster: slurm.Slurm, node: str) -> None:
    """Kill all that runs on a virtual node, at once, and tell Slurm that it is down."""
    numbers: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if f"SLURM_CONF={cluster.folder}/slurm.conf\0".encode() not in environment:
            continue
        if f"SLURMD_NODENAME={node}\0".encode() in environment:
            numbers.add(int(process.name))
            if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                numbers.add(parent)
        elif command[0] == b"slurmd" and node.encode() in command:
            numbers.add(int(process.name))
    for kind in (signal.SIGSTOP, signal.SIGKILL):  # so that none is left to report the death of another
        for number in numbers:
            os.kill(number, kind)
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")


@pytest.mark.parametrize("storage", ["journal", "postgresql"])
def test_four_workers_that_are_killed_preempted_requeued_and_powered_off_lose_nothing(
    storage: str,
    full_cluster: slurm.Slurm,
    demo: Path,
    quiet: list[tuple[Any, ...]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = request.getfixturevalue("postgres_url") if storage == "postgresql" else None
    cluster, run = full_cluster, tmp_path / "run"
    shim = tmp_path / "bin" / "ropesearch"
    shim.parent.mkdir()
    shim.write_text(SHIM.format(python=sys.executable))
    shim.chmod(0o755)
    words = words_of(demo, run, *([] if url is None else ["storage=postgresql", f"storage.url={url}"]))
    environment = [f"PATH={shim.parent}:{cluster.environment['PATH']}", "OMP_NUM_THREADS=1"]
    environment += [f"PGPASSWORD={os.environ['PGPASSWORD']}"] if url else []
    options = ["--parsable", "--partition=low", "--cpus-per-task=1", "--gres=none", "--array=0-3"]
    job = cluster.run("env", *environment, "sbatch", *options, str(JOBS / "search.sbatch"), *words, folder=tmp_path)
    watched = Watched(run)

    def said() -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(tmp_path.glob("*.log")))

    wait_until(lambda: len(tasks_at_work(cluster, job, run)) == 4, "four workers at work", 240)
    # A job of the higher partition takes the place of one worker, which gets SIGTERM.
    high = cluster.run("sbatch", "--parsable", "--partition=high", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: any(sign["because"] == "SIGTERM" for sign in read_signs(run)), "one worker is preempted", 120)
    cluster.wait(high)
    watched.wait_for(30)
    killed = next(sign for sign in read_signs(run) if sign["slurm_job"] in tasks_at_work(cluster, job, run))
    os.kill(killed["process"], signal.SIGKILL)
    watched.wait_for(45)
    requeued = next(task for task in tasks_at_work(cluster, job, run) if task != killed["slurm_job"])
    cluster.run("scontrol", "requeue", requeued)
    watched.wait_for(60)
    nodes = {task: re.search(r"BatchHost=(\S+)", cluster.run("scontrol", "show", "job", task)) for task in
             tasks_at_work(cluster, job, run)}  # fmt: skip
    node = next(found.group(1) for found in nodes.values() if found)
    power_off(cluster, node)
    watched.wait_for(NUM_TRIALS)
    states = cluster.wait(job, 300)
    assert set(states.values()) <= {"COMPLETED", "FAILED"} and states[killed["slurm_job"]] == "FAILED", said()
    assert sum(state == "COMPLETED" for state in states.values()) == 3, said()

    assert recorded(run) == quiet
    assert {state for _, state, *_ in quiet} == {TrialState.COMPLETE} and len(quiet) == NUM_TRIALS
    log = (run / "log.txt").read_text()
    num_scored = Counter(int(number) for number in re.findall(r"trial (\d+): scored by", log))
    orphans = {int(number) for number in re.findall(r"trial (\d+): taken over from", log)}
    assert {number for number, times in num_scored.items() if times > 1} <= orphans and len(orphans) <= 6
    status = read_status(run)
    assert status.state == "finished" and status.best is not None
    best = min((values[0], number) for number, _, values, _ in quiet)
    assert (status.best.nats_per_token, status.best.number) == best
    reasons = Counter(sign["because"] for sign in read_signs(run))
    # A worker that owned no trial when it was killed is lost to nobody, and its last sign stays.
    assert reasons["SIGTERM"] >= 1 and reasons["lost"] >= 1 and reasons["done"] >= 3, reasons
    assert sum(reasons.values()) - reasons["done"] >= 4, reasons
    shown = subprocess.run(
        [sys.executable, "-m", "ropesearch.cli", "status", str(run), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["trials"]["num_complete"] == NUM_TRIALS
