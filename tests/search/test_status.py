"""ropesearch/search/status.py: what is counted is what the study holds, whoever is at work, and nothing is touched."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna import Study
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from ropesearch.errors import InputError
from ropesearch.search.journal import Journal
from ropesearch.search.status import UnfinishedTrial, read_status
from tests.search import analytic

SCORE = {"nats": [[1.0], [2.0], [3.0]]}  # three windows


def new_study(run: Path) -> Study:
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps({"job": "search", "storage": {"name": "journal"}}))
    storage = JournalStorage(Journal(run / "study.journal"))
    return optuna.create_study(study_name="ropesearch", storage=storage)


def add(study: Study, state: TrialState = TrialState.COMPLETE, value: float | None = None, **attributes: Any) -> int:
    trial = study.ask()
    for key, attribute in ({"method": "searched"} | attributes).items():
        trial.set_user_attr(key, attribute)
    if state is not TrialState.RUNNING:
        study.tell(trial, value, state=state)
    return int(trial.number)


def add_complete(study: Study, value: float, method: str = "searched", **attributes: Any) -> int:
    known = {"num_forward_equivalent_tokens": 100, "seconds": 2.0, "score": SCORE}
    return add(study, value=value, method=method, **(known | attributes))


def write_sign(run: Path, worker: str, seconds_ago: float = 0.0, **changes: Any) -> None:
    sign = {
        "worker": worker, "beats": 3, "boot": "b", "process": 1, "began": "2026-01-01T00:00:00+00:00",
        "state": "working", "because": None, "phase": "search windows", "fraction": 0.25, "trial": 1,
        "slurm_job": "12_3", "device": "cuda:0",
    }  # fmt: skip
    path = run / "workers" / f"{worker}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sign | changes))
    written = time.time() - seconds_ago
    os.utime(path, (written, written))


def test_every_trial_is_counted_once_by_its_state(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.5, "unscaled")
    add_complete(study, 1.25, "yarn")
    add_complete(study, 1.125)
    add(study, TrialState.PRUNED, stopped_after=2, num_forward_equivalent_tokens=40, seconds=1.0)
    for reason in ("out of memory", "nats are not a number", "out of memory"):
        add(study, TrialState.FAIL, failure=reason)
    add(study, TrialState.FAIL)
    add(study, TrialState.RUNNING, owner="a", window_000={}, window_001={}, num_forward_equivalent_tokens=20)
    add(study, TrialState.RUNNING, owner="a", plan={"num_steps": 8}, step_000={}, step_001={}, step_002={})
    write_sign(tmp_path, "a")
    status = read_status(tmp_path)
    assert (status.num_complete, status.num_stopped) == (3, 1)
    assert status.failures == {"out of memory": 2, "nats are not a number": 1, "no reason was kept": 1}
    assert status.unfinished == [
        UnfinishedTrial(
            number=8, method="searched", worker="a", waits=False, num_windows=2, num_steps=0, num_planned_steps=0
        ),
        UnfinishedTrial(
            number=9, method="searched", worker="a", waits=False, num_windows=0, num_steps=3, num_planned_steps=8
        ),
    ]
    assert status.best is not None and (status.best.number, status.best.nats_per_token) == (2, 1.125)
    assert status.best_baseline is not None and status.best_baseline.method == "yarn"
    assert status.num_search_windows == 3
    assert status.num_tokens == 3 * 100 + 40 + 20 and status.scoring_seconds == 7.0
    assert status.state == "running"


def test_trials_wait_when_their_worker_does_not_live(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    write_sign(tmp_path, "alive", 50)
    write_sign(tmp_path, "silent", 70)
    write_sign(tmp_path, "ended", state="ended", because="SIGTERM")
    owners = ["alive", "silent", "ended", "never seen", None]
    for owner in owners:
        add(study, TrialState.RUNNING, owner=owner)
    status = read_status(tmp_path)
    assert [trial.worker for trial in status.unfinished] == owners
    assert [trial.waits for trial in status.unfinished] == [False, True, True, True, True]
    assert [(sign.worker, sign.state) for sign in status.workers] == [
        ("alive", "working"), ("silent", "silent"), ("ended", "ended")
    ]  # fmt: skip
    assert 70 <= status.workers[1].silent_seconds < 100


@pytest.mark.parametrize("where", ["run", "worker"])
def test_the_lease_is_the_runs_or_the_workers_own(where: str, tmp_path: Path) -> None:
    new_study(tmp_path)
    lease = {"lease_seconds": 1000.0}
    if where == "run":
        (tmp_path / "config.json").write_text(json.dumps({"job": "search", "worker": lease}))
    write_sign(tmp_path, "a", 900, **(lease if where == "worker" else {}))
    write_sign(tmp_path, "b", 1100, **(lease if where == "worker" else {}))
    assert [sign.state for sign in read_status(tmp_path).workers] == ["working", "silent"]


def test_a_worker_whose_file_is_from_the_future_is_alive(tmp_path: Path) -> None:
    """The file server's clock may be ahead of this machine's."""
    new_study(tmp_path)
    write_sign(tmp_path, "a", -500)
    assert [(sign.state, sign.silent_seconds) for sign in read_status(tmp_path).workers] == [("working", 0.0)]


def test_what_is_no_sign_is_passed_over(tmp_path: Path) -> None:
    new_study(tmp_path)
    write_sign(tmp_path, "a")
    for name, content in (("b.json", "{"), ("c.json", "[]"), ("d.json", '{"worker": "d"}'), (".e.json.part", "")):
        (tmp_path / "workers" / name).write_text(content)
    (tmp_path / "workers" / "a.lock").touch()
    assert [sign.worker for sign in read_status(tmp_path).workers] == ["a"]


def test_pace_is_that_of_the_last_trials_times_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    study = new_study(tmp_path)
    for _ in range(5):  # long ago, at another pace
        add_complete(study, 1.0, num_forward_equivalent_tokens=1, seconds=50.0)
    for _ in range(31):
        add_complete(study, 1.0)  # 50 tokens a second
    add(study, TrialState.PRUNED, num_forward_equivalent_tokens=25, seconds=0.5)
    add_complete(study, 1.0, num_forward_equivalent_tokens=0, seconds=0.0, reused_from=7)
    write_sign(tmp_path, "a", fraction=0.2)
    write_sign(tmp_path, "b", fraction=0.25)
    write_sign(tmp_path, "c", state="ended", fraction=1.0)
    status = read_status(tmp_path)
    assert status.tokens_per_second == pytest.approx(2 * 50.0)
    spent = 5 + 31 * 100 + 25
    assert status.seconds_left == pytest.approx(3 * spent / (2 * 50.0), abs=1e-3)
    write_sign(tmp_path, "b", 10, fraction=0.25)  # said when 1,000 tokens were not spent yet
    left = read_status(tmp_path).seconds_left
    assert left == pytest.approx(3 * (spent - 1000) / (2 * 50.0) - 10, abs=1e-3)


def test_no_pace_and_no_time_left_where_nobody_works(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.0)
    assert (read_status(tmp_path).tokens_per_second, read_status(tmp_path).seconds_left) == (None, None)
    assert read_status(tmp_path).state == "stopped"
    write_sign(tmp_path, "a", phase="held-out windows", fraction=0.5)
    status = read_status(tmp_path)
    assert status.tokens_per_second == 50.0 and status.seconds_left is None


def test_what_breaks_the_guard_is_not_best(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.5, "unscaled")
    trial = study.ask()
    for key, value in {"method": "searched", "score": SCORE}.items():
        trial.set_user_attr(key, value)
    trial.set_constraint("short_excess_nats", 0.25)
    study.tell(trial, 1.0)
    status = read_status(tmp_path)
    assert status.best is not None and (status.best.number, status.best.excess_nats) == (0, 0.0)


def test_a_finished_search(tmp_path: Path) -> None:
    """Its counts are those that the search itself reports."""
    result = analytic.run(tmp_path, 20)
    (tmp_path / "config.json").write_text('{"job": "search"}')
    status = read_status(tmp_path)
    assert status.result is None and status.state == "stopped"  # killed before the result was written
    (tmp_path / "rope_config.json").touch()
    status = read_status(tmp_path)
    assert (status.state, status.result) == ("finished", tmp_path / "rope_config.json")
    assert status.num_complete + sum(status.failures.values()) + status.num_stopped == result.num_trials == 24
    assert sum(status.failures.values()) == result.num_failed > 0
    assert status.num_tokens == result.num_forward_equivalent_tokens
    assert status.best is not None and status.best.nats_per_token == min(nats for _, nats in result.course)


@pytest.mark.parametrize("entry", ["log.txt", "slurm", "study.journal"])
def test_a_search_that_has_just_begun(entry: str, tmp_path: Path) -> None:
    (tmp_path / entry).mkdir() if entry == "slurm" else (tmp_path / entry).touch()
    status = read_status(tmp_path)
    assert not status.has_study and status.state == "new"
    assert (status.num_complete, status.unfinished, status.best, status.num_tokens) == (0, [], None, 0)
    write_sign(tmp_path, "a", phase=None)
    assert read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: None, "which is not there"),
        (lambda run: run.touch(), "which is a file"),
        (lambda run: run.mkdir(), "which holds neither config.json nor study.journal"),
        (lambda run: write_config(run, '{"model_type": "llama"}'), "whose config.json is not that of a run"),
        (lambda run: write_config(run, "[1]"), "whose config.json is not that of a run"),
        (lambda run: write_config(run, '{"job": "evaluate"}'), "which holds a run of the job evaluate"),
    ],
)
def test_what_is_no_search_is_refused(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(InputError, match=f"expected the run folder of a search, got .*run, {message}"):
        read_status(tmp_path / "run")


def write_config(run: Path, content: str) -> None:
    run.mkdir()
    (run / "config.json").write_text(content)


def test_a_damaged_study_is_refused_as_the_search_does(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.5)
    path = tmp_path / "study.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"1", b"2", 1), *lines[3:]]))
    content = path.read_bytes()
    with pytest.raises(InputError, match="line 3 is not what a search has written there: the file was damaged"):
        read_status(tmp_path)
    assert path.read_bytes() == content


def test_a_line_that_a_killed_worker_left_unfinished_stays(tmp_path: Path) -> None:
    add_complete(new_study(tmp_path), 1.5)
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 5, "tri')
    content = (tmp_path / "study.journal").read_bytes()
    assert read_status(tmp_path).num_complete == 1
    assert (tmp_path / "study.journal").read_bytes() == content


def test_nothing_is_opened_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.5)
    write_sign(tmp_path, "a")
    opened, before = os.open, sorted(path.name for path in tmp_path.rglob("*"))

    def read_only(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC), path
        return opened(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    assert read_status(tmp_path).num_complete == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_it_is_right_at_any_time_while_a_worker_writes(tmp_path: Path) -> None:
    """Finished trials only grow, by the numbers that the study ends with."""
    (tmp_path / "log.txt").touch()
    command = [sys.executable, "-m", "tests.search.analytic", str(tmp_path), "30", "0.01"]
    worker = subprocess.Popen(command)
    seen: list[int] = []
    end = datetime.now() + timedelta(seconds=60)
    while worker.poll() is None and datetime.now() < end:
        status = read_status(tmp_path)
        seen.append(status.num_complete + sum(status.failures.values()))
        assert len(status.unfinished) <= 1
    assert worker.wait(60) == 0
    status = read_status(tmp_path)
    assert status.num_complete + sum(status.failures.values()) == 34 and not status.unfinished
    assert seen == sorted(seen) and len(set(seen)) > 5
