"""Tracked fine-tunings from end to end: the run holds exactly the steps, whatever became of the processes; and with no
server, or one that hangs, the result is the same.
"""

import contextlib
import getpass
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ropesearch import cli
from ropesearch.artifact.schema import RopeConfig
from ropesearch.report import AFTER, BEFORE
from ropesearch.train.loop import FineTuning
from tests.artifact.examples import write_example
from tests.test_finetuning import NUM_STEPS, digest, metrics, words
from tests.track import reading
from tests.track.server import serving
from tests.train.examples import write_texts

pytestmark = pytest.mark.slow

KEY = "k" * 40
# It stays where it is when the line of one step is written and told, and says so.
STAYING = """
import os, sys, time
from ropesearch import cli
from ropesearch.train.loop import FineTuning
record = FineTuning._record
def recorded(self, event):
    record(self, event)
    if event.step == int(os.environ["LAST_STEP"]):
        os.write(1, b"there\\n")
        time.sleep(600)
FineTuning._record = recorded
sys.exit(cli.main())
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def untracked(searched: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same fine-tuning without tracking."""
    folder = tmp_path_factory.mktemp("untracked") / "run"
    assert cli.main(words(searched, texts, folder)) == 0
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no settings"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def asked(searched: Path, texts: Path, folder: Path) -> list[str]:
    return words(searched, texts, folder, track="wandb")


def killed_after(asked: list[str], step: int) -> "subprocess.Popen[bytes]":
    """A fine-tuning that has done so many steps and is about to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAYING, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LAST_STEP": str(step)},
    )
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    return process


def below(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """What a fine-tuning has started, and what that has started."""
    return psutil.Process(process.pid).children(recursive=True)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_holds_the_steps(history: list[dict[str, Any]], folder: Path) -> None:
    """The rows of a run: one for each line of metrics.jsonl, in order, with its values and no others."""
    lines = metrics(folder)
    assert [row["step"] for row in history] == [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for row, line in zip(history, lines, strict=True):
        expected = {"step": line["step"]}
        if line["step"]:
            expected |= {key: line[key] for key in ("learning_rate", "gradient_norm")}
            # Two buckets: short documents under "short", all others under "long".
            for bucket, regime in (("0", "short"), ("1", "long")):
                if bucket in line["nats"]:
                    loss = line["nats"][bucket] / line["tokens"][bucket]
                    expected |= {f"nats_per_token/{regime}": loss, f"nats_per_token/bucket_{bucket}": loss}
            assert row["tokens_per_second"] > 0
        for name, found in line.get("held_out", {}).items():
            num_tokens = found["num_window_tokens"] * len(found["window_nats"])
            expected[f"held_out_perplexity/{name}"] = math.exp(sum(found["window_nats"]) / num_tokens)
        found = {key: value for key, value in row.items() if key[0] != "_" and key != "tokens_per_second"}
        assert found == pytest.approx(expected, rel=1e-12)
    assert [row["step"] for row in history if "held_out_perplexity/short" in row] == [0, 3, 6]
    assert {key for row in history for key in row if key.startswith("nats")} == {
        f"nats_per_token/{name}" for name in ("short", "long", "bucket_0", "bucket_1")
    }


def check_result(summary: dict[str, Any], metadata: str, folder: Path) -> None:
    rope_config = RopeConfig.read(folder)
    assert rope_config.base_checkpoint is not None
    assert json.loads(metadata) == {
        "checkpoint_digest": rope_config.checkpoint.digest,
        "base_checkpoint_digest": rope_config.base_checkpoint.digest,
        "target_length": 256,
    }
    assert rope_config.checkpoint.digest != rope_config.base_checkpoint.digest
    rows = {key: value for key, value in summary.items() if key.partition("/")[2].partition("/")[0] in (BEFORE, AFTER)}
    assert rows == pytest.approx(
        {
            f"held_out_perplexity/{row['method']}/{row['length']}": math.exp(row["nats"] / row["tokens"])
            for row in rope_config.evaluation
        }
    )
    assert len(rows) == 4 and summary["result/num_training_tokens"] == NUM_STEPS * 5 * 256


def private(folder: Path, searched: Path, texts: Path) -> list[bytes]:
    """What must not be told: where things are, and who asks."""
    places = [str(path.parent) for path in (folder, searched, texts)]
    who = [KEY, f'"{socket.gethostname()}"', f'"{getpass.getuser()}"']
    return [text.encode() for text in [*places, os.getcwd(), sys.prefix, sys.executable, *who]]


def test_an_offline_run_holds_each_step_and_the_result(
    asked: list[str],
    folder: Path,
    untracked: Path,
    searched: Path,
    texts: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(asked) == 0
    said = capfd.readouterr().err
    assert digest(folder) == digest(untracked) and "wandb" not in said and "Weights" not in said
    (run,) = reading.finetune_runs(folder)
    check_holds_the_steps(run.history, folder)
    (artifact,) = [each for each in run.artifacts if each["type"] == "rope_config"]
    check_result(run.summary, artifact["metadata"], folder)
    (entry,) = artifact["manifest"]["contents"]
    staged = folder / Path(entry["local_path"]).relative_to("/proc/self/cwd")
    assert staged.read_bytes() == (folder / "rope_config.json").read_bytes()
    name = reading.finetune_id(folder)
    about = [run.about[key] for key in ("run_id", "run_group", "job_type", "display_name")]
    assert about == [name, name, "finetune", "run"] and run.exit_code == 0
    job = run.config["job"]
    assert (job["path"], job["corpus"]["path"], job["run"]) == (searched.name, texts.name, "run")
    assert job["training"]["peak_learning_rate"] == 2e-3 and job["mixture"]["shares"] == [0.3, 0.7]
    assert run.config["weights"] == RopeConfig.read(searched).checkpoint.digest
    for path in (run.path, staged, *run.path.parent.glob("files/**/*.*")):
        assert [text for text in private(folder, searched, texts) if text in path.read_bytes()] == [], path
    before = sorted((folder / "wandb").iterdir())
    assert cli.main(asked) == 0  # it is finished, and told in full
    assert sorted((folder / "wandb").iterdir()) == before


def test_one_that_is_finished_can_be_tracked_later(untracked: Path, searched: Path, texts: Path) -> None:
    """Tracking is no part of what is asked."""
    assert cli.main(words(searched, texts, untracked, track="wandb")) == 0
    (run,) = reading.finetune_runs(untracked)
    check_holds_the_steps(run.history, untracked)
    (artifact,) = run.artifacts
    check_result(run.summary, artifact["metadata"], untracked)


def test_killed_and_gone_on_with_no_step_is_missing_or_there_twice(
    asked: list[str], folder: Path, untracked: Path
) -> None:
    """First the training alone is killed after three steps, with the state after the second; then, after five, it and
    all that writes for it, when that had time to write.
    """
    process = killed_after(asked, 3)
    reporters = below(process)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(reporters, timeout=60)[1]

    process = killed_after(asked, 5)
    wait_until(lambda: [b"gradient_norm" in path.read_bytes() for path in reading.finetune_files(folder)[1:]] == [True])
    for each in [*below(process), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()

    assert cli.main(asked) == 0
    assert digest(folder) == digest(untracked)
    first, second, third = found = reading.finetune_runs(folder)
    assert [run.exit_code for run in found] == [1, None, 0] and len({run.about["run_id"] for run in found}) == 1
    assert first.steps and second.steps and third.steps
    check_holds_the_steps([row for run in found for row in run.history], folder)
    check_result(third.summary, third.artifacts[-1]["metadata"], folder)


def test_an_online_run_goes_on_after_a_signal(
    asked: list[str], folder: Path, untracked: Path, searched: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = FineTuning._backward

    def signalled(self: Any, micro: Any, counts: bool, num_scored: int, place: tuple[int, int]) -> Any:
        if place == (3, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(self, micro, counts, num_scored, place)

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with monkeypatch.context() as patched:
            patched.setattr(FineTuning, "_backward", signalled)
            assert cli.main(asked) == 75
        ((name, run),) = server.runs.items()
        assert [row["step"] for row in run.history] == [0, 1, 2, 3] and run.exit_codes == [75]
        assert cli.main(asked) == 0
        assert digest(folder) == digest(untracked)
        assert list(server.runs) == [name] == [reading.finetune_id(folder)] and run.exit_codes == [75, 0]
        check_holds_the_steps(run.history, folder)
        (kept,) = [each for each in server.artifacts if each["artifactTypeName"] == "rope_config"]
        assert kept["is_committed"]
        check_result(run.summary, kept["metadata"], folder)
        assert server.files[f"/{kept['id']}/rope_config.json"] == (folder / "rope_config.json").read_bytes()
        heard = b"\n".join(server.heard)
        assert [text for text in private(folder, searched, texts) if text in heard] == []


@pytest.mark.parametrize("what", ["refused", "no answer"])
def test_a_server_that_cannot_be_reached_costs_one_warning(
    what: str,
    asked: list[str],
    folder: Path,
    untracked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server, socket.socket() as unused:
        server.answers.clear()
        unused.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", refused if what == "refused" else server.url)
        assert cli.main(asked) == 0
    assert digest(folder) == digest(untracked)
    said = [line for line in capfd.readouterr().err.splitlines() if "Weights & Biases" in line]
    logged = [line for line in (folder / "log.txt").read_text().splitlines() if "Weights & Biases" in line]
    assert len(said) == len(logged) == 1 and said[0].endswith("the fine-tuning does without it")
    assert str(tmp_path) not in said[0] and KEY not in said[0]
