"""A wall clock that jumps by hours or years, while a search runs and between its starts, changes nothing."""

import datetime
import os
import random
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from ropesearch.rope.regime import Regime
from ropesearch.score.score import Score
from ropesearch.search.config import BudgetConfig
from ropesearch.search.presence import working
from tests.search.analytic import evaluate, run
from tests.search.test_worker import Killed, contents, dying_after, study_of

HOURS = [-87_600.0, -5.0, 0.0, 1.0, 3.0, 87_600.0]


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every look at the wall clock gives another time; the list holds what was shown, in seconds of the epoch."""
    jumps = random.Random(0)
    real, shown = time.time, []

    def now() -> float:
        shown.append(real() + 3600 * jumps.choice(HOURS))
        return shown[-1]

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(now(), tz)

    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    for module in (optuna.storages.journal._storage, optuna.trial._frozen, optuna.study.study):
        if hasattr(module, "datetime"):
            monkeypatch.setattr(module, "datetime", Datetime)
    return shown


def set_times(folder: Path, hours: float) -> None:
    for path in folder.rglob("*"):
        when = time.clock_gettime(time.CLOCK_REALTIME) + 3600 * hours
        os.utime(path, (when, when))


@pytest.fixture
def whole(tmp_path: Path) -> list[Any]:
    """What a search by a steady clock holds."""
    run(tmp_path / "whole", 12)
    return contents(tmp_path / "whole")


def test_a_clock_that_jumps_changes_no_candidate_value_or_order(
    tmp_path: Path, whole: list[Any], jumping: list[float]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "run", 12, score=dying_after(7))
    assert len(jumping) > 7  # the injection is used: Optuna notes when trials begin and end
    for hours in (-100.0, 100.0):
        set_times(tmp_path / "run", hours)
        with pytest.raises(Killed):
            run(tmp_path / "run", 12, score=dying_after(3))
    run(tmp_path / "run", 12)
    assert contents(tmp_path / "run") == whole


def test_a_budget_of_minutes_is_of_time_that_passed(tmp_path: Path, jumping: list[float]) -> None:
    result = run(tmp_path / "run", budget=BudgetConfig(num_trials=6, minutes=10.0))
    assert result.stopped_because == "num_trials"
    result = run(tmp_path / "short", budget=BudgetConfig(num_trials=500, minutes=1e-9))
    assert result.stopped_because == "minutes"
    trials = contents(tmp_path / "run")[:-1]
    assert len(trials) == 10


def test_seconds_are_those_of_a_clock_that_does_not_jump(tmp_path: Path, jumping: list[float]) -> None:
    def slow(regime: Regime, split: str) -> Score:
        time.sleep(0.01)
        return evaluate(regime, split)

    run(tmp_path, 2, score=slow)
    seconds = [trial.user_attrs["seconds"] for trial in study_of(tmp_path).get_trials()]
    assert all(second == 0 or 0.01 <= second < 60 for second in seconds)


@pytest.mark.parametrize("hours", [-87_600.0, -1.0, 1.0, 87_600.0])
def test_who_is_alive_does_not_depend_on_times_of_files(hours: float, tmp_path: Path, jumping: list[float]) -> None:
    with working(tmp_path, 600) as other:
        with working(tmp_path, 600) as presence:
            set_times(tmp_path, hours)
            assert other.is_alive(presence.id)
        assert not other.is_alive(presence.id)
