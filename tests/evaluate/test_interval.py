"""ropesearch/evaluate/interval.py against a plain loop, an exact enumeration and closed forms."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from ropesearch.errors import InputError
from ropesearch.evaluate import interval
from ropesearch.evaluate.interval import paired_interval
from ropesearch.score.score import Score
from ropesearch.seeding import stream


@dataclass(frozen=True)
class Sums:
    window_nats: tuple[float, ...]
    window_tokens: tuple[int, ...]


A = Sums((210.0, 95.5, 400.25, 31.0, 180.0), (100, 50, 200, 20, 90))
B = Sums((205.0, 99.5, 380.25, 33.0, 190.5), (100, 50, 200, 20, 90))


def test_equals_a_plain_computation() -> None:
    drawn = stream(3, "bootstrap").integers(5, size=(10_000, 5))
    differences: list[float] = []
    for documents in drawn.tolist():
        nats_a = math.fsum(A.window_nats[document] for document in documents)
        nats_b = math.fsum(B.window_nats[document] for document in documents)
        tokens = sum(A.window_tokens[document] for document in documents)
        differences.append(nats_a / tokens - nats_b / tokens)
    differences.sort()

    def quantile(probability: float) -> float:
        place = probability * (len(differences) - 1)
        below = math.floor(place)
        return differences[below] + (place - below) * (differences[below + 1] - differences[below])

    result = paired_interval(A, B, confidence=0.9, seed=3)
    assert result.difference == pytest.approx((916.75 - 908.25) / 460, rel=1e-12)
    assert result.low == pytest.approx(quantile(0.05), abs=1e-12)
    assert result.high == pytest.approx(quantile(0.95), abs=1e-12)
    assert result.confidence == 0.9
    assert result.low < result.difference < result.high


def test_equals_the_exact_bootstrap_distribution() -> None:
    """All 27 draws of three documents, each as likely: the quantiles away from a step are known exactly."""
    a, b = Sums((13.0, 5.0, 21.0), (10, 4, 30)), Sums((10.0, 6.0, 20.0), (10, 4, 30))
    outcomes = sorted(
        sum(a.window_nats[i] - b.window_nats[i] for i in draw) / sum(a.window_tokens[i] for i in draw)
        for draw in itertools.product(range(3), repeat=3)
    )
    for confidence in (0.5, 0.75, 0.95):
        place = (1 - confidence) / 2 * 27
        assert min(place % 1, 1 - place % 1) > 0.1 or outcomes[round(place) - 1] == outcomes[round(place)]
        result = paired_interval(a, b, confidence)
        assert result.low == pytest.approx(outcomes[math.floor(place)], abs=1e-12)
        assert result.high == pytest.approx(outcomes[26 - math.floor(place)], abs=1e-12)


def test_a_constant_difference_has_no_width() -> None:
    a = Sums((30.0, 70.0, 11.0), (10, 20, 3))
    b = Sums((25.0, 60.0, 9.5), (10, 20, 3))
    result = paired_interval(a, b)
    assert (result.low, result.difference, result.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-12)


def test_many_equal_documents_follow_the_normal_law() -> None:
    """Closed form: with equal tokens a draw is a mean of n, normal with standard deviation sd / sqrt(n)."""
    differences = np.random.default_rng(1).normal(0.2, 1.0, 2000)
    tokens = (10,) * 2000
    result = paired_interval(Sums(tuple(30 + 10 * differences), tokens), Sums((30.0,) * 2000, tokens))
    half = 1.959964 * differences.std() / math.sqrt(2000)
    assert result.low == pytest.approx(differences.mean() - half, abs=0.05 * half)
    assert result.high == pytest.approx(differences.mean() + half, abs=0.05 * half)


def test_exchanging_the_scores_mirrors_the_interval() -> None:
    one, other = paired_interval(A, B, seed=5), paired_interval(B, A, seed=5)
    assert (other.difference, other.low, other.high) == pytest.approx((-one.difference, -one.high, -one.low), abs=1e-9)


def test_the_seed_decides_the_draws() -> None:
    assert paired_interval(A, B, seed=5) == paired_interval(A, B, seed=5)
    assert paired_interval(A, B, seed=5) != paired_interval(A, B, seed=6)


def test_memory_bound_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = paired_interval(A, B)
    monkeypatch.setattr(interval, "_NUM_DRAWS_AT_ONCE", 5 * 999)
    assert paired_interval(A, B) == whole


def test_scores_are_taken_as_they_are() -> None:
    edges = np.array([0, 2, 4])
    tokens = np.array([[1, 2], [1, 2]])
    a = Score(nats=np.array([[1.0, 2.0], [3.0, 4.0]]), tokens=tokens, block_edges=edges)
    b = Score(nats=np.array([[1.0, 1.0], [3.0, 3.0]]), tokens=tokens, block_edges=edges)
    assert paired_interval(a, b).difference == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("a", "b", "confidence", "message"),
    [
        (A, Sums(A.window_nats[:4], A.window_tokens[:4]), 0.95, "same windows"),
        (A, Sums(A.window_nats, (100, 50, 200, 20, 91)), 0.95, "same windows"),
        (Sums((1.0,), (1,)), Sums((1.0,), (1,)), 0.95, "at least 2 windows"),
        (A, B, 95, "between 0 and 1"),
        (A, B, 0.0, "between 0 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: Sums, b: Sums, confidence: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        paired_interval(a, b, confidence)
