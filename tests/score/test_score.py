"""ropesearch/score/score.py: totals, exact round trips, what is refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.errors import InputError
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score, perplexity

SCORE = Score(
    nats=np.array([[0.0, 2.5], [0.0, 40.0]]),
    tokens=np.array([[0, 1], [0, 4]]),
    block_edges=np.array([0, 4, 8]),
)


def test_totals_are_token_weighted() -> None:
    assert SCORE.total_nats == 42.5
    assert SCORE.total_tokens == 5
    assert SCORE.nats_per_token == 8.5  # the mean of the windows' means would be 6.25
    assert SCORE.perplexity == pytest.approx(math.exp(8.5), rel=1e-15)
    assert SCORE.window_nats.tolist() == [2.5, 40.0]
    assert SCORE.window_tokens.tolist() == [1, 4]


def test_perplexity_beyond_float64_is_infinite() -> None:
    assert perplexity(7100.0, 10) == math.inf
    assert perplexity(7000.0, 10) == math.exp(700)


@given(st.data())
def test_json_round_trip_is_exact(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 4))
    num_windows = data.draw(st.integers(1, 3))
    edges = np.cumsum([0, *data.draw(st.lists(st.integers(1, 9), min_size=num_blocks, max_size=num_blocks))])
    nats = data.draw(
        st.lists(
            st.lists(st.floats(0, 1e300), min_size=num_blocks, max_size=num_blocks),
            min_size=num_windows,
            max_size=num_windows,
        )
    )
    score = Score(nats=np.array(nats), tokens=np.tile(np.diff(edges), (num_windows, 1)), block_edges=edges)
    again = Score.from_json(json.loads(json.dumps(score.to_json(), allow_nan=False)))
    for name in ("nats", "tokens", "block_edges"):
        ours, read = getattr(score, name), getattr(again, name)
        assert ours.tobytes() == read.tobytes() and ours.dtype == read.dtype and ours.shape == read.shape


def test_arrays_are_copied_and_read_only() -> None:
    nats = np.ones((1, 1))
    score = Score(nats=nats, tokens=np.array([[1]]), block_edges=np.array([0, 1]))
    nats[0, 0] = 5
    assert score.nats[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        score.nats[0, 0] = 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nats": [[0.0, math.nan], [0.0, 1.0]]}, "finite nats"),
        ({"nats": [[0.0, math.inf], [0.0, 1.0]]}, "finite nats"),
        ({"nats": [[0.0, -1e-9], [0.0, 1.0]]}, "finite nats"),
        ({"nats": [[1.0, 1.0], [0.0, 1.0]]}, "without a scored token"),
        ({"nats": [[0.0, 1.0]]}, "expected tokens of the nats' shape"),
        ({"nats": [0.0, 1.0]}, "expected nats of shape"),
        ({"nats": [[0.0], [0.0, 1.0]]}, "array of numbers"),
        ({"nats": [["a", "b"], ["c", "d"]]}, "array of numbers"),
        ({"nats": None}, "array of numbers"),
        ({"tokens": [[0, 0], [0, 4]], "nats": [[0.0, 0.0], [0.0, 1.0]]}, "in every window"),
        ({"tokens": [[0, 5], [0, 4]]}, "length of its block"),
        ({"tokens": [[-1, 1], [0, 4]]}, "length of its block"),
        ({"tokens": [[0.0, 1.0], [0.0, 4.0]]}, "whole numbers"),
        ({"block_edges": [0, 8, 8]}, "rise from 0"),
        ({"block_edges": [1, 4, 8]}, "rise from 0"),
        ({"block_edges": [0, 4, 6, 8]}, "expected nats of shape"),
    ],
)
def test_what_is_no_score_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Score.from_json(SCORE.to_json() | changes)


def test_other_json_is_refused() -> None:
    with pytest.raises(InputError, match="JSON object, got list"):
        Score.from_json([])
    with pytest.raises(InputError, match="expected the keys"):
        Score.from_json({"nats": [[1.0]]})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScoringConfig(num_blocks=0), "num_blocks: expected at least 1"),
        (ScoringConfig(num_blocks=17), "windows of at least 17 tokens"),
        (ScoringConfig(chunk_tokens=0), "chunk_tokens: expected at least 1"),
        (ScoringConfig(last_tokens=0), "last_tokens: expected from 1 to 15"),
        (ScoringConfig(last_tokens=16), "last_tokens: expected from 1 to 15"),
    ],
)
def test_scoring_config_is_checked(config: ScoringConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.check(length_tokens=16)


def test_scoring_config_allows_its_bounds() -> None:
    ScoringConfig(num_blocks=16, last_tokens=15, chunk_tokens=1).check(length_tokens=16)
    ScoringConfig(num_blocks=1).check(length_tokens=2)


MIXED = Score(SCORE.nats, SCORE.tokens, SCORE.block_edges, (None, True))


def test_answers_divide_a_score() -> None:
    for score, text, answers in ((MIXED, [2.5], [40.0]), (SCORE, [2.5, 40.0], None)):
        of_text, of_answers = score.of_windows(with_answer=False), score.of_windows(with_answer=True)
        assert of_text is not None and of_text.window_nats.tolist() == text and of_text.answered == ()
        assert (of_answers and of_answers.window_nats.tolist()) == answers
    only = MIXED.of_windows(with_answer=True)
    assert only is not None and only.answered == (True,) and only.of_windows(with_answer=False) is None
    assert only.block_edges.tolist() == SCORE.block_edges.tolist() and only.tokens.tolist() == [[0, 4]]


def test_answers_survive_json_and_only_where_there_are_some() -> None:
    assert set(SCORE.to_json()) == {"block_edges", "nats", "tokens"} and Score.from_json(SCORE.to_json()).answered == ()
    assert MIXED.to_json()["answered"] == [None, True]
    assert Score.from_json(json.loads(json.dumps(MIXED.to_json()))).answered == (None, True)
    for answered in ([True], [0, 1], ["yes", None], "no", {"a": 1}):
        with pytest.raises(InputError, match="score: expected"):
            Score.from_json({**SCORE.to_json(), "answered": answered})


def test_scores_of_windows_are_joined_in_order() -> None:
    edges = [0, 2, 4]
    first = Score(nats=[[1.0, 2.0]], tokens=[[1, 2]], block_edges=edges)
    others = Score(nats=[[3.0, 4.0], [5.0, 6.0]], tokens=[[1, 2], [2, 2]], block_edges=edges)
    whole = Score(nats=[[1, 2], [3, 4], [5, 6]], tokens=[[1, 2], [1, 2], [2, 2]], block_edges=edges)
    assert Score.joined([first, others]).to_json() == whole.to_json()
    assert Score.joined([first]).to_json() == first.to_json()
    answered = Score(nats=[[0.0, 4.0]], tokens=[[0, 2]], block_edges=edges, answered=[True])
    assert Score.joined([answered, answered]).answered == (True, True)
    with pytest.raises(InputError, match="answered"):
        Score.joined([answered, first])
    with pytest.raises(InputError, match="position blocks"):
        Score.joined([first, Score(nats=[[1.0]], tokens=[[1]], block_edges=[0, 4])])
