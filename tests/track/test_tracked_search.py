"""Tracked searches from end to end: the run of the study holds exactly its trials, whoever wrote it and whatever became
of them; and with no server, or one that refuses, the result is the same.
"""

import contextlib
import getpass
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ropesearch import cli
from tests import runs
from tests.track import reading
from tests.track.server import Server, serving

pytestmark = pytest.mark.slow

KEY = "k" * 40
NUM_TRIALS = 10  # at least; a population is asked for as a whole
SLOWLY = """
import os, sys, time
from ropesearch import cli, scoring
score = scoring.score_windows
def slow(*arguments, **keywords):
    os.write(1, b"scoring\\n")
    time.sleep(float(os.environ["SECONDS_A_SCORE"]))
    return score(*arguments, **keywords)
scoring.score_windows = slow
sys.exit(cli.main())
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def untracked(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same search without tracking."""
    folder = tmp_path_factory.mktemp("untracked") / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, folder, NUM_TRIALS)) == 0
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account and no scheduler of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no settings"))


@pytest.fixture
def words(toy_folder: Path, corpus: Path, tmp_path: Path) -> list[str]:
    return [*runs.search_words(toy_folder, corpus, tmp_path / "run", NUM_TRIALS), "track=wandb"]


def to(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)


def begun(words: list[str], seconds: float = 0.4) -> "subprocess.Popen[bytes]":
    """A search of which each score takes so long."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "SECONDS_A_SCORE": str(seconds)},
    )


def started(words: list[str], num_scorings: int, seconds: float = 0.4) -> "subprocess.Popen[bytes]":
    """The same, when it begins to score for the `num_scorings`th time."""
    process = begun(words, seconds)
    assert process.stdout is not None
    for _ in range(num_scorings):
        assert process.stdout.readline() == b"scoring\n"
    return process


def has_trials(found: list[Any]) -> bool:
    return any(run.trials for run in found)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reporters_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """What a search has started, and what that has started."""
    return psutil.Process(process.pid).children(recursive=True)


def open_files_below(process: "subprocess.Popen[bytes]") -> set[str]:
    """What the processes that write for a search have open."""
    return {file.path for each in reporters_of(process) for file in each.open_files()}


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left


def same_result(folder: Path, untracked: Path) -> bool:
    return (folder / "rope_config.json").read_bytes() == (untracked / "rope_config.json").read_bytes()


def check_holds_the_study(history: list[dict[str, Any]], folder: Path) -> None:
    """The rows of a run, of which each trial of the study has one, in order, with its values."""
    rows = [row for row in history if "trial" in row]
    trials = runs.study_of(folder).get_trials()
    assert [row["trial"] for row in rows] == [trial.number for trial in trials]
    best = float("inf")
    for row, trial in zip(rows, trials, strict=True):
        known = trial.user_attrs
        assert row["state"] == "complete" and row["nats_per_token"] == trial.value
        assert row["method"] == known["method"] and row["factors"] == known["regime"]["factors"]
        assert row["attention_factor"] == known["regime"]["attention_factor"]
        assert row["seconds"] == known["seconds"]
        assert row["num_forward_equivalent_tokens"] == known["num_forward_equivalent_tokens"]
        best = min(best, trial.value)
        assert row["best/nats_per_token"] == best


def check_table(path: Path, folder: Path) -> None:
    table = json.loads(path.read_bytes())
    numbers = [row[table["columns"].index("trial")] for row in table["data"]]
    assert numbers == [trial.number for trial in runs.study_of(folder).get_trials()]


def private(folder: Path, toy_folder: Path, corpus: Path) -> list[bytes]:
    """What must not be told: where things are, and who asks."""
    texts = [
        *(str(path.parent) for path in (folder, toy_folder, corpus)),
        os.getcwd(),
        sys.prefix,
        sys.executable,
        KEY,
        f'"{socket.gethostname()}"',
        f'"{getpass.getuser()}"',
    ]
    return [text.encode() for text in texts]


def test_an_offline_run_holds_the_study(
    words: list[str], untracked: Path, tmp_path: Path, toy_folder: Path, corpus: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    assert cli.main(words) == 0
    said = capfd.readouterr()
    assert same_result(folder, untracked) and "wandb" not in said.err.lower() and "Weights" not in said.err
    (study,) = reading.study_runs(folder)
    check_holds_the_study(study.history, folder)
    check_table(study.media("trials"), folder)
    assert study.media("factors_plot").is_file() and study.media("loss_by_position_plot").is_file()
    assert study.exit_code == 0
    rope_config = json.loads((folder / "rope_config.json").read_bytes())
    assert study.summary["result/method"] == rope_config["search"]["method"]
    (artifact,) = [artifact for artifact in study.artifacts if artifact["type"] == "rope_config"]
    assert json.loads(artifact["metadata"])["checkpoint_digest"] == rope_config["checkpoint"]["digest"]
    (entry,) = artifact["manifest"]["contents"]
    staged = folder / Path(entry["local_path"]).relative_to("/proc/self/cwd")
    assert staged.read_bytes() == (folder / "rope_config.json").read_bytes()

    (worker,) = reading.worker_runs(folder)
    assert worker.trials == study.trials and worker.about["run_group"] == study.about["run_group"]
    assert (worker.about["job_type"], study.about["job_type"]) == ("worker", "study")
    asked = study.config["job"]
    assert asked["model"]["path"] == toy_folder.name and asked["corpus"]["path"] == corpus.name
    assert asked["budget"]["num_trials"] == NUM_TRIALS and asked["run"] == "run" and asked["track"]["name"] == "wandb"

    for run in (study, worker):
        for path in (run.path, *run.path.parent.glob("files/**/*.*")):
            assert [text for text in private(folder, toy_folder, corpus) if text in path.read_bytes()] == [], path
    before = sorted((folder / "wandb").iterdir())
    assert cli.main(words) == 0  # it is finished, and told in full
    assert sorted((folder / "wandb").iterdir()) == before


def test_without_tracking_nothing_of_it_is_imported(
    words: list[str], toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    code = "import sys; from ropesearch import cli; code = cli.main(); print('wandb' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", code, *words[:-1], "budget.num_trials=1"]
    command.remove(f"budget.num_trials={NUM_TRIALS}")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and not (folder / "wandb").exists()


def test_a_search_that_was_not_tracked_can_be_tracked_later(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracking is no part of what is asked: by default it is the same run folder."""
    monkeypatch.chdir(tmp_path)
    asked = [word for word in words if not word.startswith(("run=", "track="))]
    assert cli.main(asked) == 0 and cli.main([*asked, "track=wandb"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    (study,) = reading.study_runs(folder)
    check_holds_the_study(study.history, folder)
    assert study.summary["result/num_trials"] == len(study.trials) and reading.worker_runs(folder) == []


def num_bytes(folder: Path, index: int) -> int:
    """How much the study's offline run number `index` of a run folder holds; 0 where there is none yet."""
    name = reading.study_id(folder) if (folder / "wandb" / "study.json").exists() else "none"
    paths = sorted((folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    return paths[index].stat().st_size if len(paths) > index else 0


def test_a_killed_search_goes_on_and_no_trial_is_missing_or_there_twice(
    words: list[str], untracked: Path, tmp_path: Path
) -> None:
    """First the search alone is killed, then it and all that writes for it, when it had time to write."""
    folder = tmp_path / "run"
    process = started(words, 6)
    reporters = reporters_of(process)
    process.kill()
    process.communicate()
    wait_for_the_end_of(reporters)
    (first,) = reading.study_runs(folder)
    assert first.exit_code == 1 and first.trials == list(range(len(first.trials))) and len(first.trials) >= 4

    process = started(words, 3, seconds=2.0)
    reporters = reporters_of(process)
    wait_until(lambda: num_bytes(folder, 1) > 4000)  # rows, beside what the run begins with
    for each in [*reporters, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    second = reading.study_runs(folder)[1]
    assert second.exit_code is None and second.trials

    assert cli.main(words) == 0
    assert same_result(folder, untracked)
    found = reading.study_runs(folder)
    assert len(found) == 3
    check_holds_the_study([row for run in found for row in run.history], folder)
    check_table(found[-1].media("trials"), folder)


def test_a_signal_to_all_processes_of_a_job_finishes_the_runs(
    words: list[str], untracked: Path, tmp_path: Path
) -> None:
    """As schedulers do: to the search, to what writes for it, and to the core of wandb."""
    folder = tmp_path / "run"
    process = started(words, 2, 1.5)
    # The core of wandb does not heed signals while it starts.
    wait_until(lambda: all(has_trials(runs_of(folder)) for runs_of in (reading.study_runs, reading.worker_runs)))
    for each in [*reporters_of(process), psutil.Process(process.pid)]:
        each.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    (study,), (worker,) = reading.study_runs(folder), reading.worker_runs(folder)
    # The core of wandb ends at its own signal, maybe before the trial that is nearly done, and the run's end, are told.
    assert {study.exit_code, worker.exit_code} <= {None, 75, 130}
    assert study.trials != [] != worker.trials
    assert cli.main(words) == 0
    assert same_result(folder, untracked)
    check_holds_the_study([row for run in reading.study_runs(folder) for row in run.history], folder)


def test_when_the_worker_that_writes_dies_another_one_goes_on(
    words: list[str], untracked: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    processes = [begun(words, seconds=1.0) for _ in range(2)]
    wait_until(lambda: num_bytes(folder, 0) > 4000)
    lock = str(folder / "wandb" / f"{reading.study_id(folder)}.lock")
    first, second = sorted(processes, key=lambda process: lock not in open_files_below(process))
    reporters = reporters_of(first)
    first.kill()
    first.communicate()
    wait_for_the_end_of(reporters)
    second.communicate(timeout=600)
    assert second.returncode == 0 and same_result(folder, untracked)
    found = reading.study_runs(folder)
    assert len(found) == 2 and found[1].exit_code == 0
    check_holds_the_study([row for run in found for row in run.history], folder)
    own = [run.trials for run in reading.worker_runs(folder)]
    assert len(own) == 2
    assert sorted(itertools.chain(*own)) == list(itertools.chain(*(run.trials for run in found)))


def test_runs_that_were_offline_are_uploaded_without_doubles(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert cli.main([*words[:-1], "track=wandb"]) == 0
    more = [word.replace(f"num_trials={NUM_TRIALS}", f"num_trials={NUM_TRIALS + 6}") for word in words]
    assert cli.main(more) == 0
    with serving() as server:
        to(server, monkeypatch)
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        files = sorted(str(path.relative_to(folder)) for path in (folder / "wandb").glob("offline-run-*"))
        command = [sys.executable, "-P", "-m", "wandb", "sync", "--yes", *files]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
        check_holds_the_study(server.runs[reading.study_id(folder)].history, folder)
        assert len(server.runs) == 3 and all(kept["is_committed"] for kept in server.artifacts)
        assert str(tmp_path).encode() not in b"".join(server.heard)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as server:
        to(server, monkeypatch)
        yield server


def test_an_online_run_holds_the_study_also_when_it_goes_on(
    words: list[str], untracked: Path, tmp_path: Path, server: Server, toy_folder: Path, corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    process = started(words, 6)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    study = server.runs[reading.study_id(folder)]
    assert study.exit_codes[0] in (75, 130) and len(study.trials) >= 4

    assert cli.main(words) == 0
    assert same_result(folder, untracked)
    check_holds_the_study(study.history, folder)
    assert study.exit_codes[1:] == [0] and study.summary["result/num_trials"] == len(study.trials)
    (worker,) = (run for run in server.runs.values() if run is not study)  # of both processes, as their place is one
    assert worker.trials == study.trials and len(worker.exit_codes) == 2
    assert study.about["groupName"] == worker.about["groupName"] and study.config["job"]["seed"] == 0
    (kept,) = [kept for kept in server.artifacts if kept["artifactTypeName"] == "rope_config"]
    assert kept["is_committed"] and json.loads(kept["metadata"])["method"] == study.summary["result/method"]
    assert server.files[f"/{kept['id']}/rope_config.json"] == (folder / "rope_config.json").read_bytes()
    pictures = [path for path in server.files if path.endswith(".png")]
    assert {"factors_plot", "loss_by_position_plot"} <= {Path(path).name.rsplit("_", 2)[0] for path in pictures}

    heard = b"\n".join(server.heard)
    assert [text for text in private(folder, toy_folder, corpus) if text in heard] == []
    kept_key = [path for path in (folder / "wandb").rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert kept_key == []


@pytest.mark.parametrize("what", ["refused", "wrong key", "no answer", "no such host"])
def test_a_server_that_cannot_be_reached_changes_nothing_but_one_warning(
    what: str, words: list[str], untracked: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    if what == "refused":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
    elif what == "no such host":
        monkeypatch.setenv("WANDB_BASE_URL", "http://nowhere.invalid")
    elif what == "wrong key":
        server.status = 401
    else:
        server.answers.clear()
    assert cli.main(words) == 0
    assert same_result(folder, untracked)
    said = [line for line in capfd.readouterr().err.splitlines() if "Weights & Biases" in line]
    logged = [line for line in (folder / "log.txt").read_text().splitlines() if "Weights & Biases" in line]
    assert len(said) == len(logged) == 1 and said[0].endswith("the search does without it")
    assert str(tmp_path) not in said[0] and KEY not in said[0]


def test_a_server_that_falls_silent_does_not_hold_the_search(
    words: list[str], untracked: Path, tmp_path: Path, server: Server
) -> None:
    folder = tmp_path / "run"
    process = started(words, 7)
    wait_until(lambda: len(server.runs) == 2)  # the study's and the worker's have begun
    server.answers.clear()
    reporters = reporters_of(process)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and same_result(folder, untracked)
    assert errors.count(b"note: Weights & Biases: ") == 1
    wait_for_the_end_of(reporters)
    found = sorted((folder / "wandb").glob(f"run-*-{reading.study_id(folder)}/*.wandb"))
    check_holds_the_study([row for path in found for row in reading.read(path).history], folder)
