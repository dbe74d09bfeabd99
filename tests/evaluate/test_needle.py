"""ropesearch/evaluate/needle.py: a row is the sums of its score, and a score without answers is none."""

import json
import math

import numpy as np
import pytest

from ropesearch.data.windows import Windows
from ropesearch.errors import InputError
from ropesearch.evaluate.needle import needle_row
from ropesearch.score.score import Score

WINDOWS = Windows("held_out", 8, np.arange(24, dtype=np.int32).reshape(3, 8), ("a", "b", "c"), False, (5, 6, 7))
NATS, TOKENS = np.array([[0.0, 1.5], [0.0, 0.5], [0.0, 4.0]]), np.array([[0, 3], [0, 2], [0, 1]])


def test_a_row_holds_sums_and_counts() -> None:
    row = needle_row(Score(NATS, TOKENS, np.array([0, 4, 8]), (True, True, False)), WINDOWS, "yarn")
    assert row.perplexity == math.exp(6.0 / 6)
    assert json.loads(json.dumps(row.to_json())) == {
        "method": "yarn",
        "measure": "needle",
        "split": "held_out",
        "length": 8,
        "nats": 6.0,
        "tokens": 6,
        "num_right": 2,
        "window_nats": [1.5, 0.5, 4.0],
        "window_tokens": [3, 2, 1],
        "window_right": [True, True, False],
    }


@pytest.mark.parametrize("answered", [(), (True, None, True)])
def test_windows_without_answers_are_refused(answered: tuple[bool | None, ...]) -> None:
    with pytest.raises(InputError, match="expected an answer in each of 3 windows"):
        needle_row(Score(NATS, TOKENS, np.array([0, 4, 8]), answered), WINDOWS, "yarn")
