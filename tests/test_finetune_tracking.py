"""ropesearch/finetune_tracking.py: which steps are told, and when; and that a fine-tuning never hears of what goes
wrong.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from ropesearch import finetune_tracking
from ropesearch.finetune_tracking import FinetuneTracker, row_of
from ropesearch.track.config import NoTracking, TrackMode, WandbTracking
from ropesearch.track.weights_and_biases import Claim
from ropesearch.train.loop import METRICS, Measurement, StepEvent


class FakeReporter:
    """Keeps what it is handed."""

    made: ClassVar["list[FakeReporter]"] = []
    failures: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path, begin: Mapping[str, Any], claim: Claim) -> None:
        self.begin, self.claim = begin, claim
        self.sent: list[Mapping[str, Any]] = []
        self.ended: tuple[int, float] | None = None
        self.made.append(self)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(json.loads(json.dumps(message, allow_nan=False)))

    @property
    def failure(self) -> str | None:
        return self.failures.get("at work")

    def end(self, exit_code: int, seconds: float) -> None:
        self.ended = exit_code, seconds

    def closed(self, deadline: float) -> str | None:
        self.claim.release()
        return self.failures.get("at the end")

    @property
    def steps(self) -> list[int]:
        return [message["values"]["step"] for message in self.sent if message["kind"] == "step"]

    @property
    def results(self) -> list[Mapping[str, Any]]:
        return [message for message in self.sent if message["kind"] == "result"]


@pytest.fixture(autouse=True)
def reporters(monkeypatch: pytest.MonkeyPatch) -> list[FakeReporter]:
    monkeypatch.setattr(finetune_tracking, "Reporter", FakeReporter)
    monkeypatch.setattr(finetune_tracking, "END_SECONDS", 0.2)
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    FakeReporter.made, FakeReporter.failures = [], {}
    return FakeReporter.made


def step(number: int, **changes: Any) -> StepEvent:
    values: dict[str, Any] = {
        "step": number,
        "learning_rate": 0.5,
        "gradient_norm": 0.25,
        "regime_of": {0: "short", 1: "long", 2: "long"},
        "nats": {0: 30.0, 1: 40.0, 2: 20.0},
        "tokens": {0: 10, 1: 10, 2: 20},
        "divergence_nats": 0.0,
        "tokens_per_second": 1234.56,
    }
    return StepEvent(**{**values, **changes})


MEASURED = [
    Measurement("short", np.array([1.0, 2.0]), 3),
    Measurement("long", np.array([8.0, 4.0]), 6),
]


class Training:
    """A fine-tuning whose steps a test sets, in a run folder, and a tracker of it."""

    def __init__(self, folder: Path, config: Any = None) -> None:
        self.folder = folder
        self.said: list[str] = []
        folder.mkdir(exist_ok=True)
        self.tracker = FinetuneTracker(config or WandbTracking(mode=TrackMode.offline), folder, self.said.append)
        self.tracker.begin({"seed": 1}, "sha256:1", {"run": "/a/b", "seed": 1})

    def done(self, *numbers: int) -> None:
        for number in numbers:
            with (self.folder / METRICS).open("a") as file:
                file.write(json.dumps(step(number).to_json()) + "\n")
            self.tracker.update(step(number))

    def result(self, fingerprint: str = "f") -> None:
        config: Any = SimpleNamespace(
            fingerprint=fingerprint,
            checkpoint=SimpleNamespace(digest="sha256:2"),
            base_checkpoint=SimpleNamespace(digest="sha256:1"),
            target_length=128,
            training={"num_training_tokens": 640, "num_processes": 2},
            evaluation=[{"method": "fine-tuned", "measure": "perplexity", "length": 64, "nats": 0.0, "tokens": 5}],
        )
        self.tracker.result(config)

    def end(self, error: BaseException | None = None) -> None:
        self.tracker.__exit__(None if error is None else type(error), error, None)


def test_a_row_is_nats_per_token_by_regime_and_bucket() -> None:
    common = {"learning_rate": 0.5, "gradient_norm": 0.25, "tokens_per_second": 1234.6}
    losses = {
        "nats_per_token/short": 3.0,
        "nats_per_token/long": 2.0,
        "nats_per_token/bucket_0": 3.0,
        "nats_per_token/bucket_1": 4.0,
        "nats_per_token/bucket_2": 1.0,
    }
    assert row_of(step(5)) == {"step": 5, **common, **losses}
    only_long = step(6, regime_of={1: "long"}, nats={1: 5.0}, tokens={1: 10}, measured=MEASURED)
    assert row_of(only_long) == {
        "step": 6,
        **common,
        "nats_per_token/long": 0.5,
        "nats_per_token/bucket_1": 0.5,
        "held_out_perplexity/short": pytest.approx(math.exp(0.5), rel=1e-15),
        "held_out_perplexity/long": pytest.approx(math.e, rel=1e-15),
    }


def test_before_the_first_step_there_are_only_measurements() -> None:
    nothing: dict[str, Any] = {"regime_of": {}, "nats": {}, "tokens": {}}
    row = row_of(step(0, learning_rate=0.0, gradient_norm=0.0, measured=MEASURED[:1], **nothing))
    assert row == {"step": 0, "held_out_perplexity/short": pytest.approx(math.exp(0.5), rel=1e-15)}


@pytest.mark.parametrize(
    "event", [step(3), step(4, measured=MEASURED, regime_of={2: "long"}, nats={2: 1.0 / 3}, tokens={2: 7})]
)
def test_a_line_of_metrics_gives_the_same_row_as_the_step(event: StepEvent) -> None:
    line = json.loads(json.dumps(event.to_json()))
    assert row_of(StepEvent.from_json(line)) == row_of(event)
    assert StepEvent.from_json(line).to_json() == event.to_json()


def test_without_tracking_nothing_is_made(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    training = Training(tmp_path / "run", NoTracking())
    training.done(0, 1)
    training.result()
    training.end()
    assert reporters == [] and [path.name for path in (tmp_path / "run").iterdir()] == [METRICS]
    assert training.said == []


def test_each_process_tells_all_steps_from_the_first_in_the_same_run(
    tmp_path: Path, reporters: list[FakeReporter]
) -> None:
    first = Training(tmp_path / "run")
    first.done(0, 1, 2)
    first.end(KeyboardInterrupt())
    second = Training(tmp_path / "run")
    assert len(reporters) == 1  # nothing before the first step, where lines of later steps may be in the file
    second.done(3, 4)
    second.result()
    second.end()
    assert [reporter.steps for reporter in reporters] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [reporter.ended and reporter.ended[0] for reporter in reporters] == [130, 0]
    for begin in (reporter.begin for reporter in reporters):
        assert begin["id"] == begin["group"] == begin["config"]["fine_tuning"] == reporters[0].begin["id"]
        assert (begin["job_type"], begin["counter"], begin["name"]) == ("finetune", "step", "run")
        assert begin["config"]["job"] == {"run": "b", "seed": 1} and begin["config"]["weights"] == "sha256:1"
        assert "ropesearch_commit" not in begin["config"]["versions"]
    (sent,) = reporters[1].results
    assert sent["file"] == "rope_config.json" and sent["artifact"] == f"rope_config-{reporters[0].begin['id']}"
    assert sent["metadata"] == {
        "checkpoint_digest": "sha256:2",
        "base_checkpoint_digest": "sha256:1",
        "target_length": 128,
    }
    assert sent["summary"] == {
        "result/num_training_tokens": 640,
        "result/num_processes": 2,
        "held_out_perplexity/fine-tuned/64": 1.0,
    }
    other = Training(tmp_path / "other")
    other.done(0)
    assert reporters[-1].begin["id"] != reporters[0].begin["id"]
    other.end()


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    training = Training(tmp_path / "run")
    (tmp_path / "run" / METRICS).write_text(json.dumps(step(0).to_json()) + '\n{"step": 1, "lear')
    training.result()
    assert reporters[0].steps == [0] and len(reporters[0].results) == 1
    training.end()


def test_what_was_told_in_full_begins_no_run_again(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    training = Training(tmp_path / "run")
    training.done(0, 1)
    training.result()
    training.end()
    reporters.clear()
    again = Training(tmp_path / "run")
    again.result()
    again.end()
    assert reporters == []
    other = Training(tmp_path / "run")
    other.result("another")
    assert [(reporter.steps, len(reporter.results)) for reporter in reporters] == [([0, 1], 1)]
    other.end()


def test_what_did_not_arrive_is_told_again(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    training = Training(tmp_path / "run")
    training.done(0)
    training.result()
    FakeReporter.failures["at the end"] = "no answer"
    training.end()
    assert training.said == ["note: Weights & Biases: no answer; the fine-tuning does without it"]
    FakeReporter.failures.clear()
    again = Training(tmp_path / "run")
    again.result()
    assert [(reporter.steps, len(reporter.results)) for reporter in reporters] == [([0], 1)] * 2
    again.end()


def test_there_is_one_warning_and_then_no_more_tracking(
    tmp_path: Path, reporters: list[FakeReporter], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path / "run")
    training.done(0)
    FakeReporter.failures |= {"at work": "lost at /home/someone/x", "at the end": "lost"}
    training.done(1, 2, 3)
    training.result()
    training.end()
    assert training.said == ["note: Weights & Biases: lost at x; the fine-tuning does without it"]
    assert [record.getMessage() for record in caplog.records] == [training.said[0].removeprefix("note: ")]
    (reporter,) = reporters
    assert reporter.steps == [0, 1] and not reporter.results and reporter.ended


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("no folder")
    training = Training(tmp_path / "run")
    training.done(0, 1)
    training.result()
    training.end()
    assert reporters == [] and len(training.said) == 1 and "the fine-tuning does without it" in training.said[0]
    assert str(tmp_path) not in training.said[0]


def test_while_the_reporter_of_a_killed_process_is_at_work_it_waits_for_its_turn(
    tmp_path: Path, reporters: list[FakeReporter]
) -> None:
    killed = Training(tmp_path / "run")
    killed.done(0, 1)
    training = Training(tmp_path / "run")
    training.done(2)
    assert len(reporters) == 1
    killed.end()
    training.done(3)
    assert [reporter.steps for reporter in reporters] == [[0, 1], [0, 1, 2, 3]]
    third = Training(tmp_path / "run")
    third.result()  # for a while
    assert len(reporters) == 2 and len(third.said) == 1 and "another process still writes its run" in third.said[0]
    third.end()
    training.end()
