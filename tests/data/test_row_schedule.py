import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.data.row_schedule import RowSchedule

PARTS = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)


@given(PARTS)
def test_shares_hold_to_less_than_a_row_after_every_row(parts: list[int]) -> None:
    schedule = RowSchedule([part / sum(parts) for part in parts])
    num_having = sum(part > 0 for part in parts)
    bound = 1 - Fraction(1, 2 * num_having - 2) if num_having > 1 else 0
    for num_rows in range(2 * sum(parts) + 1):
        counts = schedule.counts(num_rows)
        assert sum(counts) == num_rows
        for count, part in zip(counts, parts, strict=True):
            assert abs(count - Fraction(part * num_rows, sum(parts))) <= bound
    rows = [schedule.counts(num_rows) for num_rows in range(2 * sum(parts) + 1)]
    for before, after in itertools.pairwise(rows):
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(parts) - 1) + [1]


@given(PARTS, st.integers(0, 100), st.integers(0, 10**12))
def test_any_row_can_be_asked_for_at_once(parts: list[int], num_rows: int, num_periods: int) -> None:
    shares = [part / sum(parts) for part in parts]
    far = RowSchedule(shares).counts(num_periods * sum(parts) + num_rows)
    near = RowSchedule(shares).counts(num_rows)
    assert [num_periods * part + count for part, count in zip(parts, near, strict=True)] == list(far)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        # Tijdeman's rule by hand: of the buckets whose share of the rows so far is half a row (two buckets) ahead of
        # what they had, the one that would first be half a row behind.
        ([0.3, 0.7], [1, 0, 1, 1, 0, 1, 1, 1, 0, 1]),
        ([0.5, 0.5], [0, 1, 0, 1]),
        ([0.0, 1.0], [1, 1, 1]),
    ],
)
def test_order_by_hand(shares: list[float], expected: list[int]) -> None:
    counts = [RowSchedule(shares).counts(num_rows) for num_rows in range(len(expected) + 1)]
    assert [
        next(index for index in range(len(shares)) if after[index] > before[index])
        for before, after in itertools.pairwise(counts)
    ] == expected


def test_rounded_shares_are_taken_for_what_they_are_meant_to_be() -> None:
    assert RowSchedule([0.333333, 0.333333, 0.333334]).counts(10**6) == (333_333, 333_333, 333_334)
    assert RowSchedule([0.1] * 10).counts(10**15) == (10**14,) * 10
