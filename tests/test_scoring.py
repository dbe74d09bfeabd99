"""ropesearch/scoring.py: what several workers score together."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropesearch.data.windows import Windows
from ropesearch.errors import ScoringError
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score
from ropesearch.score.store import ScoreStore
from ropesearch.scoring import JobScorer
from ropesearch.search.presence import working
from ropesearch.search.study import open_study
from ropesearch.track.progress import ProgressDisplay
from tests.search.analytic import FINGERPRINTS, TARGET_LENGTH, evaluate, make_sampler

WINDOWS: Any = "windows"  # the scores below do not look at them


def make_regimes(number: int) -> list[Regime]:
    return [
        Regime(name=str(place), max_length=TARGET_LENGTH, factors=(1.0,) * 7 + (2.0 + place,))
        for place in range(number)
    ]


class Scorer(JobScorer):
    """Counts what it scores, and waits before each for its turn."""

    def __init__(self, folder: Path, turn: Callable[[], None], failing: str = "") -> None:
        super().__init__(
            load=lambda: pytest.fail("not here"), identity=lambda of, scoring: {}, store=ScoreStore(folder)
        )
        self._turn, self._failing = turn, failing
        self.scored: list[str] = []

    def score(self, regime: Regime, windows: Windows, scoring: ScoringConfig, *rest: Any, **more: Any) -> Score:
        self._turn()
        self.scored.append(regime.name)
        if regime.name == self._failing:
            raise ScoringError("nats are not a number")
        return evaluate(regime, "held_out")


def test_workers_share_what_is_left_to_score(tmp_path: Path) -> None:
    opened = open_study(tmp_path, FINGERPRINTS, make_sampler())
    barrier = threading.Barrier(2)
    regimes = make_regimes(6)
    tasks = [(regime, WINDOWS, ScoringConfig()) for regime in regimes]
    scorers = [Scorer(tmp_path / "scores", lambda: barrier.wait(60) and None) for _ in range(2)]  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(2) as pool, working(tmp_path, 60) as one, working(tmp_path, 60) as other:
        done = [
            pool.submit(scorer.keep_together, tasks, opened, presence, ProgressDisplay())
            for scorer, presence in zip(scorers, (one, other), strict=True)
        ]
        for each in done:
            each.result(120)
    scored = Counter(scorers[0].scored + scorers[1].scored)
    assert scored == Counter({regime.name: 1 for regime in regimes})
    assert len(scorers[0].scored) == len(scorers[1].scored) == 3
    for scorer in scorers:
        kept = [scorer.kept(*task).window_nats for task in tasks]
        assert np.array_equal(kept, [evaluate(regime, "held_out").window_nats for regime in regimes])
    assert sum(map(len, (scorer.scored for scorer in scorers))) == 6


def test_what_a_dead_worker_had_claimed_is_scored_by_another(tmp_path: Path) -> None:
    opened = open_study(tmp_path, FINGERPRINTS, make_sampler())
    tasks = [(regime, WINDOWS, ScoringConfig()) for regime in make_regimes(2)]

    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    with pytest.raises(Died), working(tmp_path, 60) as presence:
        Scorer(tmp_path / "scores", die).keep_together(tasks, opened, presence, ProgressDisplay())
    second = Scorer(tmp_path / "scores", lambda: None)
    with working(tmp_path, 60) as presence:
        second.keep_together(tasks, opened, presence, ProgressDisplay())
        second.keep_together(tasks, opened, presence, ProgressDisplay())
    assert second.scored == ["0", "1"]


def test_what_cannot_be_scored_is_tried_once_and_said_where_it_is_wanted(tmp_path: Path) -> None:
    opened = open_study(tmp_path, FINGERPRINTS, make_sampler())
    tasks = [(regime, WINDOWS, ScoringConfig()) for regime in make_regimes(3)]
    scorer = Scorer(tmp_path / "scores", lambda: None, failing="1")
    with working(tmp_path, 60) as presence:
        scorer.keep_together(tasks, opened, presence, ProgressDisplay())
    for _ in range(2):
        with pytest.raises(ScoringError, match="nats are not a number"):
            scorer.kept(*tasks[1])
    assert scorer.scored == ["0", "1", "2"]
