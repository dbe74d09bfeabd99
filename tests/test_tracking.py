"""ropesearch/tracking.py: which trials are told, when and by whom; and that a search never hears of what goes wrong."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from ropesearch import tracking
from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.score.score import Score
from ropesearch.search.worker import SearchEvent
from ropesearch.track.config import NoTracking, TrackMode, WandbTracking
from ropesearch.track.tracker import without_places
from ropesearch.track.weights_and_biases import Claim, TrialRow
from ropesearch.tracking import SearchTracker, row_of

GEOMETRY = Geometry(model_type="llama", head_dim=4, rotary_dim=4, original_length=64, rope_theta=100.0)
SCORE = Score(np.array([[10.0, 20.0], [30.0, 40.0]]), np.array([[9, 10], [9, 10]]), np.array([0, 10, 20]))
FINGERPRINTS = {"weights": "sha256:1", "seed": 0}


def trial(number: int, state: TrialState, value: float | None = None, **attributes: Any) -> FrozenTrial:
    made = optuna.create_trial(state=state, value=value, user_attrs={"method": "searched", **attributes})
    made.number = number
    return made


def complete(number: int, value: float, method: str = "searched") -> FrozenTrial:
    regime = {"factors": [1.0, 2.0], "attention_factor": 1.5, "retained_tokens": 3}
    known = {"method": method, "regime": regime, "seconds": 2.0, "num_forward_equivalent_tokens": 100}
    return trial(number, TrialState.COMPLETE, value, **known, score=SCORE.to_json())


RUNNING = TrialState.RUNNING


def test_a_row_is_what_the_trial_holds() -> None:
    assert row_of(complete(7, 2.0)) == TrialRow(
        trial=7,
        method="searched",
        state="complete",
        nats_per_token=2.0,
        perplexity=pytest.approx(7.38905609893065, rel=1e-15),
        num_forward_equivalent_tokens=100,
        seconds=2.0,
        factors=(1.0, 2.0),
        attention_factor=1.5,
        retained_tokens=3,
        block_edges=(0, 10, 20),
        block_nats=(40.0, 60.0),
        block_tokens=(18, 20),
    )
    stopped = trial(8, TrialState.PRUNED, seconds=1.0, num_forward_equivalent_tokens=64, stopped_after=2)
    assert row_of(stopped) == TrialRow(
        trial=8,
        method="searched",
        state="stopped",
        stopped_after_windows=2,
        seconds=1.0,
        num_forward_equivalent_tokens=64,
    )
    failed = trial(9, TrialState.FAIL, failure="out of memory, see /home/someone/log.txt")
    assert row_of(failed) == TrialRow(trial=9, method="searched", state="failed", reason="out of memory, see log.txt")


def test_a_row_of_two_objectives_and_a_guard() -> None:
    made = optuna.create_trial(
        state=TrialState.COMPLETE,
        values=[2.0, 3.0],
        user_attrs={"method": "ntk", "score": SCORE.to_json()},
        constraints={"short_excess_nats": -0.25},
    )
    row = row_of(made)
    assert (row.nats_per_token, row.short_nats_per_token, row.short_excess_nats) == (2.0, 3.0, -0.25)


def test_places_stay_here() -> None:
    asked = {
        "run": "/home/someone/runs/a/",
        "cache": "~/.cache/ropesearch",
        "tables": ["/x/one.json", "two.csv"],
        "model": {"path": "organisation/model", "revision": None},
        "storage": {"name": "postgresql", "url": "postgresql+psycopg://user@host/db", "host": "node7", "port": 5},
        "seed": 3,
    }
    assert without_places(asked) == {
        "run": "a",
        "cache": "ropesearch",
        "tables": ["one.json", "two.csv"],
        "model": {"path": "model", "revision": None},
        "storage": {"name": "postgresql"},
        "seed": 3,
    }


class FakeReporter:
    """A reporter that keeps what it is told."""

    made: list["FakeReporter"]
    failures: dict[str, str]

    def __init__(self, folder: Path, begin: Mapping[str, Any], claim: Claim) -> None:
        self.begin, self.claim = begin, claim
        self.rows: list[tuple[TrialRow, bool, Mapping[str, Any]]] = []
        self.sent: list[Mapping[str, Any]] = []
        self.ended: tuple[int, float] | None = None
        type(self).made.append(self)

    def trial(self, row: TrialRow, *, is_best_candidate: bool, so_far: Mapping[str, Any]) -> None:
        self.rows.append((row, is_best_candidate, so_far))

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    @property
    def failure(self) -> str | None:
        return self.failures.get("at work")

    def end(self, exit_code: int, seconds: float) -> None:
        self.ended = exit_code, seconds

    def closed(self, deadline: float) -> str | None:
        self.claim.release()
        return self.failures.get("at the end")

    @property
    def trials(self) -> list[int]:
        return [row.trial for row, _, _ in self.rows]


@pytest.fixture(autouse=True)
def reporters(monkeypatch: pytest.MonkeyPatch) -> list[FakeReporter]:
    monkeypatch.setattr(tracking, "Reporter", FakeReporter)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "WANDB_")):
            monkeypatch.delenv(name)
    FakeReporter.made, FakeReporter.failures = [], {}
    return FakeReporter.made


class Search:
    """A study whose trials a test sets, in a run folder, and a tracker of it."""

    def __init__(self, folder: Path, config: Any = None) -> None:
        self.trials: list[FrozenTrial] = []
        self.said: list[str] = []
        folder.mkdir(exist_ok=True)
        self.tracker = SearchTracker(config or WandbTracking(mode=TrackMode.offline), folder, self.said.append)
        study = SimpleNamespace(get_trials=lambda deepcopy: self.trials)
        self.opened: Any = SimpleNamespace(study=study)

    def begin(self) -> "Search":
        self.tracker.begin(self.opened, FINGERPRINTS, GEOMETRY, 128, {"run": "/a/b"})
        return self

    def finished(self, *trials: FrozenTrial) -> None:
        """These are the first trials now, and this worker has finished the last of them."""
        self.trials[: len(trials)] = trials
        self.event(len(trials) - 1)

    def event(self, number: int, split: str = "search") -> None:
        self.tracker.update(
            SearchEvent(
                split=split,
                trial_number=number,
                method="searched",
                nats_per_token=1.0,
                failure=None,
                best_nats_per_token=1.0,
                best_method="searched",
                num_finished=1,
                spent_fraction=0.5,
            )
        )

    def result(self, fingerprint: str = "f") -> None:
        config: Any = SimpleNamespace(
            fingerprint=fingerprint,
            checkpoint=SimpleNamespace(digest="sha256:2"),
            target_length=128,
            evaluation=[
                {"method": "searched", "measure": "perplexity", "length": 64, "nats": 0.0, "tokens": 5},
                {"method": "searched", "measure": "needle", "length": 64},
            ],
        )
        result: Any = SimpleNamespace(
            method="searched",
            trial_number=1,
            num_trials=2,
            num_stopped=0,
            num_failed=0,
            num_forward_equivalent_tokens=200,
            stopped_because="num_trials",
        )
        self.tracker.result(config, result)

    def end(self, error: BaseException | None = None) -> None:
        self.tracker.__exit__(None if error is None else type(error), error, None)


def test_without_tracking_nothing_is_made(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    search = Search(tmp_path / "run", NoTracking()).begin()
    search.finished(complete(0, 2.0))
    search.result()
    search.end()
    assert reporters == [] and list((tmp_path / "run").iterdir()) == [] and search.said == []


def test_trials_are_told_in_order_each_once(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    search = Search(tmp_path / "run").begin()
    running = trial(0, RUNNING)
    search.trials = [running, running, running]
    search.event(0)  # a step of a trial that is not finished
    assert reporters == []
    search.trials = [running, complete(1, 2.0), running]
    search.event(1)
    worker = reporters.pop()
    assert worker.trials == [1] and worker.begin["job_type"] == "worker"
    search.trials = [complete(0, 3.0, "unscaled"), complete(1, 2.0), running]
    search.event(0)
    (study,) = reporters
    assert study.begin["job_type"] == "study" and study.trials == [0, 1] and worker.trials == [1, 0]
    search.event(1, split="selection")
    assert study.trials == [0, 1] and worker.trials == [1, 0]
    search.trials[2] = trial(2, TrialState.FAIL, failure="why")
    search.trials += [complete(3, 2.5)]
    search.event(2)
    assert study.trials == [0, 1, 2, 3] and worker.trials == [1, 0, 2]
    assert study.begin["group"] == worker.begin["group"] == study.begin["id"] == study.begin["config"]["study"]
    assert study.begin["config"]["job"] == {"run": "b"} and study.begin["config"]["weights"] == "sha256:1"
    assert "ropesearch_commit" not in study.begin["config"]["versions"]


def test_the_best_so_far_is_of_all_trials_and_the_pictured_one_of_the_candidates(
    tmp_path: Path, reporters: list[FakeReporter]
) -> None:
    search = Search(tmp_path / "run").begin()
    values = [(3.0, "unscaled"), (2.5, "searched"), (1.0, "yarn"), (2.75, "searched"), (2.0, "searched")]
    search.trials = [complete(number, *value) for number, value in enumerate(values)]
    search.trials.insert(3, trial(3, TrialState.PRUNED, stopped_after=1, num_forward_equivalent_tokens=50))
    for number, made in enumerate(search.trials):
        made.number = number
    search.event(5)
    (study,) = (reporter for reporter in reporters if reporter.begin["job_type"] == "study")
    assert [is_best for _, is_best, _ in study.rows] == [False, True, False, False, False, True]
    assert [so_far["best/trial"] for _, _, so_far in study.rows] == [0, 1, 2, 2, 2, 2]
    assert [so_far["best/method"] for _, _, so_far in study.rows][2:] == ["yarn"] * 4
    spent = [so_far["spent/num_forward_equivalent_tokens"] for _, _, so_far in study.rows]
    assert spent == [100, 200, 300, 350, 450, 550]
    assert [so_far["spent/num_trials"] for _, _, so_far in study.rows] == [1, 2, 3, 4, 5, 6]


def test_one_worker_at_a_time_tells_of_the_study_and_the_next_one_of_all_of_it(
    tmp_path: Path, reporters: list[FakeReporter]
) -> None:
    first, second = Search(tmp_path / "run").begin(), Search(tmp_path / "run").begin()
    first.finished(complete(0, 3.0))
    second.finished(complete(0, 3.0), complete(1, 2.0))
    assert [reporter.trials for reporter in reporters if reporter.begin["job_type"] == "study"] == [[0]]
    first.end(KeyboardInterrupt())
    second.finished(complete(0, 3.0), complete(1, 2.0), complete(2, 1.0))
    told = [reporter for reporter in reporters if reporter.begin["job_type"] == "study"]
    assert [reporter.trials for reporter in told] == [[0], [0, 1, 2]]
    assert told[0].begin["id"] == told[1].begin["id"]
    workers = [reporter for reporter in reporters if reporter.begin["job_type"] == "worker"]
    assert [reporter.trials for reporter in workers] == [[0], [1, 2]]
    assert workers[0].begin["id"] != workers[1].begin["id"]
    second.end()


def test_what_was_told_in_full_begins_no_run_again(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    search = Search(tmp_path / "run").begin()
    search.finished(complete(0, 3.0), complete(1, 2.0))
    search.result()
    (study,) = (reporter for reporter in reporters if reporter.begin["job_type"] == "study")
    (sent,) = study.sent
    assert sent["kind"] == "result" and sent["file"] == "rope_config.json"
    assert sent["metadata"] == {"checkpoint_digest": "sha256:2", "target_length": 128, "method": "searched"}
    assert sent["summary"]["held_out_perplexity/searched/64"] == 1.0 and sent["summary"]["result/trial"] == 1
    search.end()
    reporters.clear()

    again = Search(tmp_path / "run")
    again.trials = [complete(0, 3.0), complete(1, 2.0)]
    again.begin().result()
    again.end()
    assert reporters == []

    more = Search(tmp_path / "run")
    more.trials = [complete(0, 3.0), complete(1, 2.0)]
    more.begin().result("another")
    (study,) = reporters
    assert study.trials == [0, 1] and len(study.sent) == 1
    more.end()


def test_what_did_not_arrive_is_told_again(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    search = Search(tmp_path / "run").begin()
    search.finished(complete(0, 3.0))
    search.result()
    FakeReporter.failures["at the end"] = "no answer"
    search.end()
    assert search.said == ["note: Weights & Biases: no answer; the search does without it"]
    reporters.clear()
    FakeReporter.failures.clear()
    again = Search(tmp_path / "run")
    again.trials = [complete(0, 3.0)]
    again.begin().result()
    (study,) = reporters
    assert study.trials == [0] and len(study.sent) == 1
    again.end()


def test_there_is_one_warning_and_then_no_more_tracking(
    tmp_path: Path, reporters: list[FakeReporter], caplog: pytest.LogCaptureFixture
) -> None:
    search = Search(tmp_path / "run").begin()
    search.finished(complete(0, 3.0))
    FakeReporter.failures |= {"at work": "lost at /home/someone/x", "at the end": "lost"}
    for number in range(1, 4):
        search.finished(*(complete(each, 3.0) for each in range(number + 1)))
    search.result()
    search.end()
    assert search.said == ["note: Weights & Biases: lost at x; the search does without it"]
    assert [record.getMessage() for record in caplog.records] == [search.said[0].removeprefix("note: ")]
    assert all(reporter.trials[-1] <= 1 and not reporter.sent and reporter.ended for reporter in reporters)


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("no folder")
    search = Search(tmp_path / "run").begin()
    search.finished(complete(0, 3.0))
    search.result()
    search.end()
    assert reporters == [] and len(search.said) == 1 and "the search does without it" in search.said[0]
    assert str(tmp_path) not in search.said[0]


class Stopped(KeyboardInterrupt):
    signal_name = "SIGTERM"


@pytest.mark.parametrize(
    ("error", "exit_code", "seconds"),
    [
        (None, 0, 20.0),
        (KeyboardInterrupt(), 130, 8.0),
        (Stopped(), 75, 8.0),
        (InputError("wrong"), 2, 20.0),
        (ValueError("wrong"), 70, 20.0),
    ],
)
def test_runs_end_as_the_command_does(
    error: BaseException | None, exit_code: int, seconds: float, tmp_path: Path, reporters: list[FakeReporter]
) -> None:
    search = Search(tmp_path / "run").begin()
    search.finished(complete(0, 3.0))
    search.end(error)
    assert [reporter.ended for reporter in reporters] == [(exit_code, seconds)] * 2


def worker_ids(folder: Path, reporters: list[FakeReporter], num_workers: int) -> list[str]:
    """The ids of workers' runs that are at work at the same time."""
    searches = [Search(folder).begin() for _ in range(num_workers)]
    reporters.clear()
    for search in searches:
        search.finished(complete(0, 3.0))
    ids = [reporter.begin["id"] for reporter in reporters if reporter.begin["job_type"] == "worker"]
    for search in searches:
        search.end()
    return ids


@pytest.mark.parametrize(
    "place",
    [
        {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "15"},
        {"SLURM_JOB_ID": "15"},
        {"SLURM_JOB_ID": "15", "SLURM_PROCID": "2"},
    ],
)
def test_a_worker_that_is_started_again_at_its_place_goes_on_with_its_run(
    place: dict[str, str], tmp_path: Path, reporters: list[FakeReporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    (first,) = worker_ids(tmp_path / "run", reporters, 1)
    assert worker_ids(tmp_path / "run", reporters, 1) == [first]
    same, other = worker_ids(tmp_path / "run", reporters, 2)  # two at one place
    assert same == first and other != first
    (elsewhere,) = worker_ids(tmp_path / "other", reporters, 1)
    assert elsewhere != first  # another study
    monkeypatch.setenv(next(iter(place)), "99")
    assert worker_ids(tmp_path / "run", reporters, 1) != [first]


def test_a_worker_without_a_place_has_a_new_run(tmp_path: Path, reporters: list[FakeReporter]) -> None:
    ids = [worker_ids(tmp_path / "run", reporters, 1)[0] for _ in range(3)]
    assert len(set(ids)) == 3
