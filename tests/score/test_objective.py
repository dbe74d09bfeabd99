"""ropesearch/score/objective.py: sums by hand, and what the scorer keeps for them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.errors import InputError
from ropesearch.model.load import LoadedModel
from ropesearch.score.config import ScoringConfig
from ropesearch.score.objective import Objective, Part, objective_of, span_nats_per_token
from ropesearch.score.score import Score
from ropesearch.score.scorer import score_windows
from tests.score.test_scorer import LENGTH, random_windows, reference_nats

SCORE = Score(
    nats=np.array([[3.0, 8.0, 30.0], [6.0, 12.0, 10.0]]),
    tokens=np.array([[3, 4, 8], [3, 4, 8]]),
    block_edges=np.array([0, 4, 8, 16]),
)  # position 0 is not scored


def test_a_plain_objective_is_nats_per_token() -> None:
    objective = objective_of(ScoringConfig(), 16, 4)
    assert objective == Objective() and objective.spans is None
    assert objective.value(SCORE) == SCORE.nats_per_token == 69 / 30
    assert objective.excess_nats(SCORE, None) is None
    assert objective_of(ScoringConfig(last_tokens=3), 16, 4) == Objective()  # one span, which the scorer knows


def test_lengths_are_weighted_means_by_token() -> None:
    config = ScoringConfig(lengths=[4, 16], length_weights=[3.0, 1.0])
    objective = objective_of(config, 16, 8)
    assert objective.spans == [(0, 4), (0, 16)]
    assert objective.value(SCORE) == pytest.approx((3 * (9 / 6) + 1 * (69 / 30)) / 4, rel=1e-15)
    even = objective_of(ScoringConfig(lengths=[16, 8, 4]), 16, 8)
    assert even.value(SCORE) == pytest.approx((69 / 30 + 29 / 14 + 9 / 6) / 3, rel=1e-15)


@pytest.mark.parametrize(
    "config",
    [
        ScoringConfig(),
        ScoringConfig(lengths=[4, 16], length_weights=[3.0, 1.0]),
        ScoringConfig(lengths=[16, 8, 4], max_short_perplexity_increase=0.1),
    ],
)
def test_the_value_is_the_mean_of_the_windows_values(config: ScoringConfig) -> None:
    objective = objective_of(config, 16, 8)
    values = objective.window_values(SCORE)
    assert values.mean() == pytest.approx(objective.value(SCORE), rel=1e-15)
    for row in range(2):
        alone = Score(nats=SCORE.nats[[row]], tokens=SCORE.tokens[[row]], block_edges=SCORE.block_edges)
        assert values[row] == objective.value(alone)
    assert values[0] != values[1]


def test_windows_are_alike_without_needles_and_without_a_second_objective() -> None:
    assert Objective().has_like_windows and objective_of(ScoringConfig(lengths=[4, 16]), 16, 8).has_like_windows
    assert not Objective(needle_weight=0.5).has_like_windows
    assert not Objective(short_tokens=4).has_like_windows
    with pytest.raises(InputError, match="windows with answers, which have a weight, got none"):
        Objective(needle_weight=0.5).window_values(SCORE)


def test_the_last_tokens_of_each_length() -> None:
    objective = objective_of(ScoringConfig(lengths=[8, 16], last_tokens=4), 16, 8)
    assert objective.spans == [(4, 8), (12, 16)]
    score = Score(nats=np.array([[0, 8.0, 0, 3.0]]), tokens=np.array([[0, 4, 0, 4]]), block_edges=[0, 4, 8, 12, 16])
    assert objective.value(score) == pytest.approx((8 / 4 + 3 / 4) / 2)


def test_the_guard_is_a_part_of_the_unscaled_perplexity() -> None:
    objective = objective_of(ScoringConfig(max_short_perplexity_increase=0.05), 16, 4)
    assert objective.spans == [(0, 16), (0, 4)]
    assert objective.value(SCORE) == pytest.approx(69 / 30)
    unscaled = Score(nats=np.array([[5.0, 0.0, 99.0]]), tokens=np.array([[3, 0, 8]]), block_edges=[0, 4, 8, 16])
    excess = objective.excess_nats(SCORE, unscaled)
    assert excess == pytest.approx(9 / 6 - 5 / 3 - math.log(1.05))
    for nats, keeps in ((3 * math.log(1.0499), True), (3 * math.log(1.0501), False)):
        other = Score(nats=np.array([[5.0 + nats, 0, 0]]), tokens=np.array([[3, 0, 8]]), block_edges=[0, 4, 8, 16])
        found = objective.excess_nats(other, unscaled)
        assert found is not None and (found <= 0) is keeps
    assert objective.excess_nats(unscaled, unscaled) == pytest.approx(-math.log(1.05))
    with pytest.raises(InputError, match="unscaled model's score"):
        objective.excess_nats(SCORE, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScoringConfig(lengths=[8]), "lengths: expected different lengths from 2 to target_length = 16"),
        (ScoringConfig(lengths=[8, 32]), "lengths"),
        (ScoringConfig(lengths=[1, 16]), "lengths"),
        (ScoringConfig(lengths=[16, 16]), "lengths"),
        (ScoringConfig(lengths=[8, 16], length_weights=[1.0]), "one for each of the 2"),
        (ScoringConfig(length_weights=[1.0]), "one for each of the 0"),
        (ScoringConfig(lengths=[8, 16], length_weights=[1.0, 0.0]), "above 0"),
        (ScoringConfig(lengths=[8, 16], length_weights=[1.0, math.inf]), "above 0"),
        (ScoringConfig(lengths=[8, 16], last_tokens=8), "last_tokens: expected fewer than the 8"),
        (ScoringConfig(max_short_perplexity_increase=-0.1), "max_short_perplexity_increase"),
        (ScoringConfig(max_short_perplexity_increase=math.nan), "max_short_perplexity_increase"),
    ],
)
def test_impossible_objectives_are_refused(config: ScoringConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        objective_of(config, 16, 4)


# Two windows of text as in SCORE, and two answers: 3 tokens of 6 nats and 1 token of 4.
NEEDLES = Score(
    nats=np.array([[3.0, 8.0, 30.0], [0.0, 0.0, 6.0], [6.0, 12.0, 10.0], [0.0, 0.0, 4.0]]),
    tokens=np.array([[3, 4, 8], [0, 0, 3], [3, 4, 8], [0, 0, 1]]),
    block_edges=np.array([0, 4, 8, 16]),
    answered=(None, True, None, False),
)


def test_needles_have_their_weight_by_token() -> None:
    alone = objective_of(ScoringConfig(needle_weight=1.0), 16, 4)
    assert alone.spans is None and not alone.needs_text
    assert alone.value(NEEDLES) == 10 / 4  # not the mean of 2 and 4
    answers = NEEDLES.of_windows(with_answer=True)
    assert answers is not None and alone.value(answers) == 10 / 4
    some = objective_of(ScoringConfig(needle_weight=0.25), 16, 4)
    assert some.spans is None and some.needs_text
    assert some.value(NEEDLES) == pytest.approx(0.25 * 10 / 4 + 0.75 * 69 / 30, rel=1e-15)
    lengths = objective_of(ScoringConfig(needle_weight=0.25, lengths=[4, 16], length_weights=[3.0, 1.0]), 16, 8)
    text = (3 * (9 / 6) + 1 * (69 / 30)) / 4
    assert lengths.value(NEEDLES) == pytest.approx(0.25 * 10 / 4 + 0.75 * text, rel=1e-15)
    assert [each.to_json()["needle_weight"] for each in (alone, some, Objective())] == [1.0, 0.25, 0.0]
    assert alone.to_text() == "nats per token of the needles' answers"
    assert some.to_text().startswith("0.25 of nats per token of the needles' answers, the rest nats per token of all")
    for objective, score in ((some, SCORE), (alone, SCORE), (some, answers)):
        with pytest.raises(InputError, match="objective: expected a score of"):
            objective.value(score)


def test_a_guard_beside_needles_needs_the_first_tokens_of_plain_text_only() -> None:
    objective = objective_of(ScoringConfig(needle_weight=1.0, max_short_perplexity_increase=0.05), 16, 4)
    assert objective.spans == [(0, 4)] and objective.needs_text and objective.parts == ()
    assert objective.value(NEEDLES) == 10 / 4
    assert objective.excess_nats(NEEDLES, NEEDLES) == pytest.approx(-math.log(1.05))
    answers = NEEDLES.of_windows(with_answer=True)
    with pytest.raises(InputError, match="plain text too"):
        objective.excess_nats(answers, NEEDLES)  # type: ignore[arg-type]


def test_the_second_objective_comes_from_the_same_score() -> None:
    objective = objective_of(ScoringConfig(two_objectives=True), 16, 4)
    assert objective.spans == [(0, 16), (0, 4)] and objective.num_values == 2
    assert objective.values(SCORE) == [69 / 30, 9 / 6]
    assert objective.to_json()["short_tokens"] == 4 and Objective().to_json()["short_tokens"] is None
    assert objective.to_text().endswith("at 16 tokens; second objective: nats per token of the first 4 tokens")
    one = objective_of(ScoringConfig(), 16, 4)
    assert one.num_values == 1 and one.values(SCORE) == [69 / 30]
    config = ScoringConfig(two_objectives=True, needle_weight=1.0, max_short_perplexity_increase=0.05)
    needles = objective_of(config, 16, 4)
    assert needles.spans == [(0, 4)] and needles.needs_text and needles.guarded_tokens == 4
    assert needles.values(NEEDLES) == [10 / 4, 9 / 6]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScoringConfig(needle_weight=-0.1), "needle_weight: expected a number from 0 to 1"),
        (ScoringConfig(needle_weight=math.nan), "needle_weight: expected a number from 0 to 1"),
        (ScoringConfig(num_needle_windows=0), "num_needle_windows: expected at least 1"),
        (ScoringConfig(needle_depths=[]), "needle_depths: expected numbers from 0 to 1"),
        (ScoringConfig(needle_depths=[0.5, 1.5]), "needle_depths: expected numbers from 0 to 1"),
        (ScoringConfig(needle_weight=1.0, lengths=[8, 16]), "which objective.needle_weight=1 leaves out"),
    ],
)
def test_impossible_needles_are_refused(config: ScoringConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.check(16)


def test_a_span_between_edges_is_refused() -> None:
    with pytest.raises(InputError, match="block edges at 0 and 5"):
        span_nats_per_token(SCORE, 0, 5)
    empty = Score(nats=np.array([[0.0, 1.0]]), tokens=np.array([[0, 1]]), block_edges=[0, 4, 8])
    with pytest.raises(InputError, match="scored tokens from 0 to 3"):
        span_nats_per_token(empty, 0, 4)


CASES = [
    ScoringConfig(lengths=[20, 64, LENGTH], length_weights=[0.5, 0.25, 1.0]),
    ScoringConfig(max_short_perplexity_increase=0.05, last_tokens=7),
    ScoringConfig(lengths=[50, LENGTH], last_tokens=10, max_short_perplexity_increase=0.0),
]


@pytest.mark.parametrize("config", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("chunk_tokens", [None, 17, 33])
def test_sums_of_one_forward_pass_are_those_of_windows_cut_short(
    toy_loaded: LoadedModel, config: ScoringConfig, chunk_tokens: int | None
) -> None:
    """The float64 reference runs the model on each cut window by itself; chunked and whole passes agree with it."""
    objective = objective_of(config, LENGTH, 32)
    windows = random_windows()
    scoring = ScoringConfig(chunk_tokens=chunk_tokens, num_blocks=5)
    score = score_windows(toy_loaded, windows, scoring, spans=objective.spans)
    alone = {
        length: reference_nats(toy_loaded.model, windows.cut(length))
        for length in (32, *(part.length for part in objective.parts))
    }
    expected = [(part.weight, alone[part.length][:, max(1, part.start) :].mean()) for part in objective.parts]
    weighted = sum(weight * mean for weight, mean in expected) / sum(weight for weight, _ in expected)
    assert objective.value(score) == pytest.approx(weighted, abs=2e-5)
    if objective.guarded_tokens:
        assert span_nats_per_token(score, 0, 32) == pytest.approx(alone[32][:, 1:].mean(), abs=2e-5)
    scored = {place for start, stop in objective.spans or [] for place in range(max(1, start), stop)}
    assert score.total_tokens == windows.num_windows * len(scored)
    assert set(score.block_edges.tolist()) >= {0, 19, 38, 57, 76, LENGTH}
    part = objective.parts[0]
    assert isinstance(part, Part) and part.length in score.block_edges


WEIGHED = {
    "plain": ScoringConfig(),
    "last tokens": ScoringConfig(last_tokens=5),
    "lengths": ScoringConfig(lengths=[7, 12, 24], length_weights=[0.5, 3.0, 1.0]),
    "last tokens of each length": ScoringConfig(lengths=[9, 24], length_weights=[2.0, 1.0], last_tokens=4),
    "guard": ScoringConfig(max_short_perplexity_increase=0.1),
    "guard and last tokens": ScoringConfig(max_short_perplexity_increase=0.1, last_tokens=6),
    "needles alone": ScoringConfig(needle_weight=1.0),
    "needles with text": ScoringConfig(needle_weight=0.25),
    "needles with lengths": ScoringConfig(needle_weight=0.6, lengths=[8, 24], length_weights=[1.0, 4.0]),
    "needles alone with a guard": ScoringConfig(needle_weight=1.0, max_short_perplexity_increase=0.1),
}


@settings(max_examples=60)
@given(st.data(), st.sampled_from(list(WEIGHED)))
def test_weighted_tokens_have_the_objective_for_their_mean(data: st.DataObject, name: str) -> None:
    """Over windows of any nats: what the scorer sums of them, by hand, against the weights of each window."""
    config, length = WEIGHED[name], 24
    objective = objective_of(config, length, 6)
    num_text = data.draw(st.integers(1, 4)) if objective.needs_text else 0
    answers = data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=4)) if config.needle_weight else []
    starts = data.draw(st.permutations([*[0] * num_text, *answers]))
    windows = dataclasses.replace(
        random_windows(length, len(starts)), answer_starts=tuple(starts) if config.needle_weight else ()
    )
    seed = data.draw(st.integers(0, 2**32 - 1))
    nats = np.random.default_rng(seed).uniform(0.1, 9, (len(starts), length))
    text_spans = objective.spans or [(length - (config.last_tokens or length), length)]
    scored = np.zeros(nats.shape, dtype=bool)
    for window, answer_start in enumerate(starts):
        for start, stop in [(answer_start, length)] if answer_start else text_spans:
            scored[window, max(start, 1) : stop] = True
    score = Score(
        nats=np.where(scored, nats, 0.0),
        tokens=scored.astype(np.int64),
        block_edges=np.arange(length + 1),
        answered=tuple(True if start else None for start in starts) if config.needle_weight else (),
    )
    guard_weight = data.draw(st.sampled_from([0.0, 0.5, 4.0]))
    weights = [
        objective.token_weights(windows, index, config.last_tokens, guard_weight) for index in range(len(starts))
    ]
    assert all(each.dtype == np.float64 and each.shape == (length,) and each[0] == 0 for each in weights)
    weighted = np.mean([each @ row for each, row in zip(weights, nats, strict=True)])
    expected = objective.value(score)
    if objective.guarded_tokens is not None:
        text = score.of_windows(with_answer=False)
        assert text is not None
        expected += guard_weight * span_nats_per_token(text, 0, objective.guarded_tokens)
    assert weighted == pytest.approx(expected, rel=1e-12)
    each = [each @ row for each, row in zip(weights, nats, strict=True)]
    assert objective.window_values(score, guard_weight) == pytest.approx(each, rel=1e-12)
