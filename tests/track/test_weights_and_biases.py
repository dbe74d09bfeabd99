"""ropesearch/track/weights_and_biases.py and reporter.py: what is handed over is in the run, nothing hangs, nothing
crashes, and of the surroundings nothing is told.
"""

import dataclasses
import fcntl
import getpass
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from ropesearch.rope.geometry import Geometry, LayerRope
from ropesearch.track.weights_and_biases import Claim, Reporter, TrialRow, without_folders
from tests.track import reading
from tests.track.server import serving

GEOMETRY = Geometry(
    model_type="llama",
    head_dim=8,
    rotary_dim=8,
    original_length=64,
    rope_theta=100.0,
    layer_types={"full": LayerRope(rope_theta=100.0, rescaled=True)},
)
BEGIN: dict[str, Any] = {
    "online": False,
    "project": "some-project",
    "group": "study",
    "geometry": dataclasses.asdict(GEOMETRY),
    "target_length": 128,
    "config": {"study": "study", "job": {"seed": 3}},
    "id": "study",
    "name": "a search",
    "job_type": "study",
    "counter": "trial",
}
BLOCKS: dict[str, Any] = {"block_edges": (0, 64, 128), "block_tokens": (63, 64)}
ROWS = [
    TrialRow(
        trial=0,
        method="linear",
        state="complete",
        nats_per_token=2.5,
        perplexity=12.2,
        num_forward_equivalent_tokens=384,
        seconds=0.5,
        factors=(2.0, 2.0, 2.0, 2.0),
        attention_factor=1.0,
        retained_tokens=0,
        block_nats=(126.0, 192.0),
        **BLOCKS,
    ),
    TrialRow(trial=1, method="searched", state="failed", reason="not a number: nan nats", seconds=0.25),
    TrialRow(
        trial=2,
        method="searched",
        state="stopped",
        stopped_after_windows=2,
        num_forward_equivalent_tokens=256,
        seconds=0.25,
        factors=(1.0, 1.0, 2.0, 2.5),
        attention_factor=1.125,
        retained_tokens=4,
    ),
    TrialRow(
        trial=3,
        method="searched",
        state="complete",
        nats_per_token=2.25,
        perplexity=math.inf,
        num_forward_equivalent_tokens=384,
        seconds=math.nan,
        factors=(1.0, 1.25, 2.0, 2.0),
        attention_factor=1.0625,
        retained_tokens=0,
        block_nats=(63.0, 224.0),
        **BLOCKS,
    ),
]


def begun(folder: Path, **changes: Any) -> Reporter:
    (folder / "wandb").mkdir(exist_ok=True)
    claim = Claim(folder / "wandb" / "study.lock")
    assert claim.held()
    return Reporter(folder, {**BEGIN, **changes}, claim)


def send(reporter: Reporter, *rows: TrialRow) -> None:
    for row in rows:
        is_best = row.trial == 3
        reporter.trial(row, is_best_candidate=is_best, so_far={"best/trial": row.trial, "best/perplexity": math.inf})


def end(reporter: Reporter, exit_code: int = 0, seconds: float = 60.0) -> str | None:
    reporter.end(exit_code, seconds)
    return reporter.closed(time.monotonic() + seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a study's run in it, and with what another process added that went on with the run; between
    them two that were killed before they had written anything of use.
    """
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "rope_config.json").write_text('{"some": "table"}')
    reporter = begun(folder)
    send(reporter, *ROWS[:2])
    assert end(reporter, 75) is None
    for name, content in (("19990101_000000", b""), ("19990101_000001", b"\x00" * 100)):
        (folder / "wandb" / f"offline-run-{name}-study").mkdir()
        (folder / "wandb" / f"offline-run-{name}-study" / "run-study.wandb").write_bytes(content)
    reporter = begun(folder)
    send(reporter, *ROWS)
    result = {"summary": {"result/method": "searched", "result/worst": math.nan}, "file": "rope_config.json"}
    reporter.send({"kind": "result", **result, "artifact": "rope_config-study", "metadata": {"digest": "sha256:1"}})
    assert end(reporter) is None
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[reading.ReadRun]:
    return [reading.read(path) for path in sorted((folder / "wandb").glob("offline-run-2*-study/run-study.wandb"))]


def test_each_trial_is_in_one_of_the_files_of_a_run(runs: list[reading.ReadRun]) -> None:
    assert [run.trials for run in runs] == [[0, 1], [2, 3]]
    assert [run.exit_code for run in runs] == [75, 0]


def test_a_row_holds_what_was_given_and_nothing_that_is_not_finite(runs: list[reading.ReadRun]) -> None:
    rows = {row["trial"]: row for run in runs for row in run.history if "trial" in row}
    for row in ROWS:
        given = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(row).items()
            if not key.startswith("block_") and value not in (None, math.inf) and value == value
        }
        if not row.factors:
            given["factors"] = []
        found = {key: value for key, value in rows[row.trial].items() if not key.startswith("_")}
        assert found == {**given, "best/trial": row.trial}


def test_the_run_says_what_it_is_of(runs: list[reading.ReadRun]) -> None:
    for run in runs:
        about = {
            key: run.about[key] for key in ("run_id", "run_group", "job_type", "display_name", "project", "resume")
        }
        assert about == {
            "run_id": "study",
            "run_group": "study",
            "job_type": "study",
            "display_name": "a search",
            "project": "some-project",
            "resume": True,
        }
        assert {key: value for key, value in run.config.items() if key != "_wandb"} == BEGIN["config"]
    assert runs[1].summary["result/method"] == "searched" and "result/worst" not in runs[1].summary


def test_tables_hold_all_trials_also_those_of_earlier_processes(runs: list[reading.ReadRun]) -> None:
    for run, num_trials in zip(runs, (2, 4), strict=True):
        table = json.loads(run.media("trials").read_bytes())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert [row["trial"] for row in rows] == list(range(num_trials))
        for row, given in zip(rows, ROWS, strict=False):
            assert (row["state"], row["method"], row["reason"]) == (given.state, given.method, given.reason)
            assert row["nats_per_token"] == given.nats_per_token and row["factors"] == list(given.factors)
            assert row["stopped_after_windows"] == given.stopped_after_windows
            assert row["retained_tokens"] == given.retained_tokens
    assert (rows[0]["perplexity"], rows[3]["perplexity"], rows[3]["seconds"]) == (12.2, None, None)


def test_loss_by_position_is_that_of_the_baselines_and_of_the_best_candidate(runs: list[reading.ReadRun]) -> None:
    table = json.loads(runs[1].media("loss_by_position").read_bytes())
    assert table["columns"] == ["method", "trial", "first_position", "end_position", "nats_per_token"]
    assert table["data"] == [
        ["linear", 0, 0, 64, 2.0],
        ["linear", 0, 64, 128, 3.0],
        ["searched", 3, 0, 64, 1.0],
        ["searched", 3, 64, 128, 3.5],
    ]


def test_pictures_follow_the_best_candidate(runs: list[reading.ReadRun]) -> None:
    for name in ("factors_plot", "loss_by_position_plot"):
        pictures = [imread(run.media(name)) for run in runs]
        assert [picture.shape[:2] for picture in pictures] == [(540, 1140)] * 2
        assert not np.array_equal(pictures[0], pictures[1])


def test_the_result_is_an_artifact(runs: list[reading.ReadRun], folder: Path) -> None:
    (artifact,) = [artifact for artifact in runs[1].artifacts if artifact["type"] == "rope_config"]
    assert artifact["name"] == "rope_config-study" and json.loads(artifact["metadata"]) == {"digest": "sha256:1"}
    (entry,) = artifact["manifest"]["contents"]
    assert entry["path"] == "rope_config.json"
    staged = Path(entry["local_path"]).relative_to("/proc/self/cwd")
    assert (folder / staged).read_text() == '{"some": "table"}'


def test_nothing_is_told_of_the_surroundings(folder: Path, runs: list[reading.ReadRun]) -> None:
    """Neither in the files that are uploaded from, nor in what is uploaded beside them."""
    secrets = [str(folder), os.getcwd(), sys.executable, sys.prefix, "ropesearch.track", f"host={socket.gethostname()}"]
    uploaded = [run.path for run in runs] + [path for run in runs for path in run.path.parent.glob("files/**/*.*")]
    assert len(uploaded) >= 10
    for path in uploaded:
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, (path, secret)
    for run in runs:
        records = subprocess.run(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--json", run.path], capture_output=True, check=True
        ).stdout.splitlines()
        kinds = {json.loads(record)["type"] for record in records}
        expected = {"header", "run", "telemetry", "metric", "summary", "history", "artifact", "files", "exit"}
        assert kinds == expected  # no environment, no stats, no output
        assert not {"host", "git", "settings"} & set(run.about)
        texts = {value for value in run.about.values() if isinstance(value, str)}
        assert getpass.getuser() not in texts and socket.gethostname() not in texts


def test_nothing_is_left_outside_the_run_folder(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"rope_config.json", "wandb"}


def fake_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Another wandb, before the installed one."""
    (folder / "fake" / "wandb").mkdir(parents=True)
    (folder / "fake" / "wandb" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))


def waited_for(reporter: Reporter) -> str:
    deadline = time.monotonic() + 60
    while reporter.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return reporter.failure


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise ValueError('broken in /home/someone/secret/place.py\\n by itself')",
            "ValueError: broken in place.py by ",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "its process ended with -9"),
        (
            "def __getattr__(name):\n    raise OSError(28, 'No space left', '/a/b/c')",
            "OSError: [Errno 28] No space left",
        ),
    ],
    ids=["import", "killed", "later"],
)
def test_whatever_happens_to_wandb_is_a_reason(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wandb(tmp_path, monkeypatch, code)
    reporter = begun(tmp_path)
    assert waited_for(reporter).startswith(reason)
    for _ in range(2000):  # more than a pipe holds: nobody reads it
        send(reporter, *ROWS)
    assert (end(reporter) or "").startswith(reason)
    assert "secret" not in waited_for(reporter)


def test_what_hangs_is_killed_in_time_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\nopen('at work', 'w').close()\ntime.sleep(1000)"
    )
    fake_wandb(tmp_path, monkeypatch, code)
    reporter = begun(tmp_path)
    while not (tmp_path / "at work").exists():
        time.sleep(0.02)
    for _ in range(2000):
        send(reporter, *ROWS)  # nobody reads, and nobody waits
    assert reporter.failure is None
    reason = end(reporter, seconds=0.2)
    assert reason == "it did not end in time; the same command again logs what is missing"
    group = reporter._process.pid
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-g", str(group), "sleep"], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_signals_to_all_processes_of_a_job_do_not_end_it_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what it has started; and the search heeds them as before."""
    code = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\nopen('at work', 'w').close()\ntime.sleep(1000)"
    )
    fake_wandb(tmp_path, monkeypatch, code)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    reporter = begun(tmp_path)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    while not (tmp_path / "at work").exists():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.killpg(reporter._process.pid, number)
        time.sleep(0.02)
    os.killpg(reporter._process.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert reporter.failure is None
    assert subprocess.run(["pgrep", "-g", str(reporter._process.pid), "sleep"], capture_output=True).returncode == 0
    assert end(reporter, seconds=0.1) is not None


def test_a_claim_is_held_by_one_and_by_the_process_that_was_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wandb(tmp_path, monkeypatch, "import time\nopen('at work', 'w').close()\ntime.sleep(1000)")
    (tmp_path / "wandb").mkdir()
    path = tmp_path / "wandb" / "a.lock"
    first, second = Claim(path), Claim(path)
    assert first.held() and first.held() and not second.held()
    reporter = Reporter(tmp_path, BEGIN, first)
    first.release()  # as when this process were killed
    assert not second.held()
    while not (tmp_path / "at work").exists():
        time.sleep(0.02)
    assert not second.held()
    assert end(reporter, seconds=0.1) is not None
    assert second.held() and not Claim(path).held()
    second.release()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_where_there_are_no_locks_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Claim(tmp_path / "no such folder" / "a.lock").held()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/a/b/c.txt", "c.txt"),
        ("in '/home/x/y z/c'", "in 'y z/c'"),
        ("~/runs/a and /b", "a and /b"),
        ("see /a/b/, (/c/d/e): no", "see , (e): no"),
        ("https://api.example/graphql refused", "https://api.example/graphql refused"),
        ("2/3 of a/b, 5 / 7", "2/3 of a/b, 5 / 7"),
    ],
)
def test_folders_are_left_out(text: str, told: str) -> None:
    assert without_folders(text) == told


@pytest.mark.slow
def test_what_a_killed_process_had_uploaded_is_not_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with all that it started, while the server has some rows and others are on their way; twice."""
    rows = [dataclasses.replace(ROWS[0], trial=number) for number in range(400)]
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        num_sent = num_there = 0
        for _ in range(2):
            reporter = begun(tmp_path, online=True)
            send(reporter, *rows[:num_sent])
            while "study" not in server.runs or len(server.runs["study"].trials) == num_there:
                send(reporter, rows[num_sent])  # wandb uploads every 15 seconds
                num_sent += 1
                time.sleep(0.2)
            send(reporter, *rows[num_sent : num_sent + 3])  # just after an upload: on their way for seconds
            num_sent += 3
            os.killpg(reporter._process.pid, signal.SIGKILL)
            assert waited_for(reporter) == "its process ended with -9"
            end(reporter)
            found = server.runs["study"].trials
            assert num_there < len(found) < num_sent and found == list(range(len(found)))
            num_there = len(found)
        reporter = begun(tmp_path, online=True)
        send(reporter, *rows[:num_sent])
        assert end(reporter) is None
        assert server.runs["study"].trials == list(range(num_sent))
