"""Scores that belong to no trial: each is made once, by one worker, and kept in the study."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ropesearch.errors import NothingScoredError, ScoringError
from ropesearch.score.score import Score
from ropesearch.search.presence import Presence
from ropesearch.search.study import OpenStudy

POLL_SECONDS = 0.2

GuardReference = Callable[[str], Score]

_GUARD_REFERENCE = "guard_reference"


def scored_once(
    opened: OpenStudy, key: str, score: Callable[[], Score], presence: Presence
) -> Mapping[str, Any] | None:
    """What is kept in the study under `key`: {"score": ...} as JSON, or {"failure": why} after a ScoringError; None
    while another worker is at it.

    A worker that was killed before the score was kept leaves nothing: the next one to ask makes it.
    """
    recorded: Mapping[str, Any] | None = opened.study.user_attrs.get(key)
    if recorded is None:
        if not opened.claim(key, presence):
            return None
        recorded = opened.study.user_attrs.get(key)  # it may have been scored just before
        if recorded is None:
            try:
                recorded = {"score": score().to_json()}
            except ScoringError as error:
                recorded = {"failure": str(error)}
            opened.study.set_user_attr(key, recorded)
        opened.disclaim(key)
    return recorded


def guard_score(opened: OpenStudy, split: str, reference: GuardReference, presence: Presence) -> Score:
    """The score that the guard is measured against on the windows of `split`; waited for while another worker is at it.

    Raises NothingScoredError when there is none.
    """
    while True:
        recorded = scored_once(opened, f"{_GUARD_REFERENCE}/{split}", lambda: reference(split), presence)
        if recorded is None:
            time.sleep(POLL_SECONDS)
        elif "failure" in recorded:
            raise no_guard_score(split, recorded["failure"])
        else:
            return Score.from_json(recorded["score"])


def no_guard_score(split: str, reason: object) -> NothingScoredError:
    """The error for a guard that cannot be measured."""
    return NothingScoredError(
        f"the unscaled model could not be scored on the {split} windows, and the guard on short inputs is measured "
        f"against it: {reason}; ask without objective.max_short_perplexity_increase"
    )
