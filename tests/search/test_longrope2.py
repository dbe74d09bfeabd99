import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from ropesearch.search.config import SpaceConfig
from ropesearch.search.coordinates import Coordinates
from ropesearch.search.longrope2 import LongRoPE2Space
from ropesearch.search.operators import cross, mutate, nearest_new
from ropesearch.search.parameters import parameters
from ropesearch.search.space import Candidate
from ropesearch.seeding import stream
from tests.search.analytic import TARGET_LENGTH, make_geometry
from tests.search.test_parameters import candidate_of

SEARCHED = {"critical_pair": "search", "max_factor_over_ratio": 2.0}
LLAMA_3_8B = Geometry(model_type="llama", head_dim=128, rotary_dim=128, original_length=8192, rope_theta=500000.0)
PHI_4_MINI = Geometry(model_type="phi3", head_dim=128, rotary_dim=96, original_length=4096, rope_theta=10000.0)
# Geometry, critical pairs that are searched, released critical pair, some figures of the released table by pair.
RELEASED = {
    "Llama-3-8B": (LLAMA_3_8B, (24, 35), 33, {32: "19.87", 33: "21.81", 63: "26.05"}),
    "Phi-4-mini": (PHI_4_MINI, (22, 34), 31, {30: "28.64", 31: "32.03", 47: "33.5"}),
}
TARGET = 131072


def make_space(geometry: Geometry, target_length: int, **change: object) -> LongRoPE2Space:
    return LongRoPE2Space(geometry, target_length, SpaceConfig(**{**SEARCHED, **change}))  # type: ignore[arg-type]


SMALL = make_space(make_geometry(), TARGET_LENGTH)  # 8 pairs, critical pairs 2 to 4, ratio 8
TINY = make_space(make_geometry(4), 512, factor_step=1.0, attention_factor=1.1)  # critical pairs 1 and 2, grid 2, 3, 4


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_tables_lie_in_the_space(name: str) -> None:
    """Their left side follows, to the digits that are known, from their critical pair and its factor."""
    geometry, searched, critical_pair, figures = RELEASED[name]
    space = make_space(geometry, TARGET)
    assert (space.low.least, space.low.most) == searched
    assert (geometry.ten_turn_pair(), geometry.critical_pair()) == searched
    ratio = TARGET // geometry.original_length
    pairs = sorted(pair for pair in figures if pair >= critical_pair)
    # Of the pairs between these only the order is known.
    right = np.interp(range(critical_pair, space.num_pairs), pairs, [float(figures[pair]) for pair in pairs])
    steps = np.rint((right - ratio) / 0.01).astype(int).tolist()
    candidate = Candidate((*[-1] * critical_pair, *steps), 143, 0)
    assert space.contains(candidate)
    factors = space.regime(candidate).factors
    for pair, figure in figures.items():
        digits = len(figure.partition(".")[2])
        assert f"{factors[pair]:.{digits}f}" == figure, pair
    assert all(repr(factor) == repr(round(factor, 2)) for factor in factors[critical_pair:])
    cut = [factors[critical_pair] ** (pair / critical_pair) for pair in range(critical_pair)]
    assert factors[:critical_pair] == pytest.approx(cut, rel=1e-12) and factors[0] == 1
    assert space.repair(space.regime(candidate)) == candidate
    assert space.decode(space.encode(candidate)) == candidate
    assert candidate_of(space, parameters(space, candidate)) == candidate


def test_the_grid_goes_from_the_ratio_to_its_double() -> None:
    space = make_space(LLAMA_3_8B, TARGET)
    assert [space.factor_grid[k] for k in (0, 1, 581, 1005, -1)] == [16, 16.01, 21.81, 26.05, 32]
    odd = make_space(make_geometry(), 2050)
    assert [odd.factor_grid[k] for k in (0, 1, -1)] == [8.0078125, 8.0178125, 16.0078125]
    third = make_space(make_geometry(), 2000)
    assert third.factor_grid[0] == 2000 / 256 == third.regime(third.decode([1.0] * 10)).factors[-1]


def test_dimensions_name_the_critical_pair() -> None:
    assert [dimension.name for dimension in SMALL.dimensions] == [
        *(f"factor_{pair}" for pair in range(8)),
        "attention_factor",
        "critical_pair",
    ]
    assert SMALL.dimensions[-1].choices == (2, 3, 4)
    candidate = Candidate((-1, -1, -1, 0, 0, 10, 10, 10), 7, 0)
    assert parameters(SMALL, candidate)["critical_pair"] == 3
    assert SMALL.encode(candidate)[-1] == 1
    held = make_space(make_geometry(), TARGET_LENGTH, critical_pair=3)
    assert [dimension.name for dimension in held.dimensions][-1] == "attention_factor"
    assert held.regime(held.decode([9.0] * 9)).factors == (*(9 ** (i / 3) for i in range(3)), *[9.0] * 5)


def test_candidates_are_counted_and_the_walk_finds_all() -> None:
    listed = {
        Candidate(steps, 0, 0)
        for steps in itertools.product(range(-2, 4), repeat=4)
        if TINY.contains(Candidate(steps, 0, 0))
    }
    assert TINY.num_candidates == len(listed) == math.comb(3 + 2, 3) + math.comb(2 + 2, 2) == 16
    known: set[Candidate] = set()
    for _ in range(16):
        found = nearest_new(TINY, Candidate((-1, 0, 1, 2), 0, 0), known)
        assert found is not None and found in listed
        known.add(found)
    assert known == listed
    assert nearest_new(TINY, Candidate((-1, 0, 1, 2), 0, 0), known) is None


def test_candidates_of_equal_factors_stay_apart() -> None:
    """4^(1/2) is 2, so both critical pairs give the factors 1, 2, 4, 4."""
    first, second = Candidate((-1, 0, 2, 2), 0, 0), Candidate((-1, -1, 2, 2), 0, 0)
    assert TINY.regime(first) == TINY.regime(second)
    for candidate in (first, second):
        assert TINY.decode(TINY.encode(candidate)) == candidate_of(TINY, parameters(TINY, candidate)) == candidate


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.5, 5), min_size=4, max_size=4))
def test_a_regime_is_repaired_to_the_nearest_curve(factors: list[float]) -> None:
    """Of the nearest right sides of each critical pair, against all candidates."""
    regime = Regime(name="x", max_length=512, factors=tuple(max(1.0, factor) for factor in factors))
    every = [
        Candidate(steps, 0, 0)
        for steps in itertools.product(range(-1, 3), repeat=4)
        if TINY.contains(Candidate(steps, 0, 0))
    ]

    def off(candidate: Candidate, first: int, logs: bool) -> float:
        found, asked = np.array(TINY.regime(candidate).factors), np.array(regime.factors)
        if logs:
            found, asked = np.log(found), np.log(np.minimum(asked, 4.0))
        return float(((found - asked)[first:] ** 2).sum())

    repaired = TINY.repair(regime)
    nearest = []
    for pair in (1, 2):
        own = [candidate for candidate in every if TINY.critical_pair(candidate) == pair]
        mine = min(own, key=lambda candidate: off(candidate, pair, logs=False))
        if TINY.critical_pair(repaired) == pair:  # rounding to the grid after the projection costs at most half a step
            assert off(repaired, pair, logs=False) <= off(mine, pair, logs=False) + 0.25 * (4 - pair) + 1e-9
        nearest.append(TINY.decode([*regime.factors, pair - 1]))
    assert off(repaired, 0, logs=True) == min(off(candidate, 0, logs=True) for candidate in nearest)


def test_methods_become_seeds() -> None:
    linear, ntk, yarn = (
        SMALL.repair(method(make_geometry(), TARGET_LENGTH)) for method in (methods.linear, methods.ntk, methods.yarn)
    )
    assert linear.factor_steps == (-1, -1, 0, 0, 0, 0, 0, 0)  # the most pairs at the ratio
    assert ntk.factor_steps == yarn.factor_steps == (-1, -1, -1, -1, 0, 0, 0, 0)
    assert (linear.attention_steps, ntk.attention_steps, yarn.attention_steps) == (0, 0, 208)


def test_mutants_move_the_critical_pair_and_the_right_side_only() -> None:
    space = make_space(LLAMA_3_8B, TARGET)
    parent = Candidate((*[-1] * 30, *range(300, 300 + 34 * 8, 8)), 100, 0)
    rng = stream(0, "test")
    mutants = [mutate(space, parent, 0.3, 1, rng) for _ in range(2000)]
    assert all(space.contains(mutant) for mutant in mutants)
    moved = [space.critical_pair(mutant) for mutant in mutants if space.critical_pair(mutant) != 30]
    assert len(moved) == pytest.approx(0.3 * 2000, rel=0.15)
    assert {27, 28, 29, 31, 32, 33} <= set(moved) <= set(range(24, 36))
    kept = np.array([mutant.factor_steps[30:] for mutant in mutants if space.critical_pair(mutant) == 30])
    assert np.not_equal(kept, parent.factor_steps[30:]).mean() == pytest.approx(0.3, rel=0.07)
    first = [mutant.factor_steps[29] for mutant in mutants if space.critical_pair(mutant) == 29]
    assert all(step >= 0 for step in first)


def test_a_child_has_a_critical_pair_near_its_parents() -> None:
    space = make_space(LLAMA_3_8B, TARGET)
    first, second = (Candidate((*[-1] * pair, *[steps] * (64 - pair)), 0, 0) for pair, steps in ((26, 200), (34, 900)))
    rng = stream(0, "test")
    children = [cross(space, first, second, 0.3, rng) for _ in range(300)]
    assert all(space.contains(child) for child in children)
    pairs = Counter(space.critical_pair(child) for child in children)
    assert set(pairs) <= set(range(24, 36)) and len(pairs) > 3
    assert {child.factor_steps[-1] for child in children} > {200, 900}


def test_random_candidates_have_each_critical_pair_as_often() -> None:
    coordinates = Coordinates(SMALL)
    assert coordinates.num_coordinates == 1 + (8 - 2 + 1) + 1 and coordinates.discrete == [0]
    rng = stream(0, "test")
    drawn = [coordinates.candidate(rng.standard_normal(9)) for _ in range(3000)]
    pairs = Counter(SMALL.critical_pair(candidate) for candidate in drawn)
    assert set(pairs) == {2, 3, 4} and min(pairs.values()) > 900
    for pair in (2, 3, 4):  # the first of m order statistics of log factors is in the mean at 1 / (m + 1)
        own = [SMALL.regime(c).factors[pair] / 8 for c in drawn if SMALL.critical_pair(c) == pair]
        assert np.log2(own).mean() == pytest.approx(1 / (8 - pair + 1), rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"critical_pair": -1}, "critical_pair: expected null, 'search' or a pair from 0 on, got -1"),
        ({"critical_pair": 8}, "got 8"),
        ({"critical_pair": "all"}, "got 'all'"),
        ({"num_pairs_at_one": 1}, "num_pairs_at_one: expected 0 with a critical pair"),
        ({"num_pairs_at_ratio": "search"}, "num_pairs_at_ratio: expected 0 with a critical pair"),
        ({"max_factor_over_ratio": 1.0}, "max_factor_over_ratio: expected more than 1 with a critical pair"),
        ({"max_factor_over_ratio": math.nan}, "max_factor_over_ratio"),
        ({"factor_step": 9.0}, "factor_step: expected a step that leaves 2 to a million values from 8 to 16"),
    ],
)
def test_impossible_spaces_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_space(make_geometry(), TARGET_LENGTH, **change)


def test_without_turns_the_last_pair_is_the_critical_one() -> None:
    """A base so small that all pairs turn often in training: one factor is searched, that of the last pair."""
    geometry = Geometry(model_type="llama", head_dim=16, rotary_dim=16, original_length=4096, rope_theta=10.0)
    space = make_space(geometry, 8192)
    assert (space.low.least, space.low.most) == (7, 7)
    assert space.regime(space.decode([3.0] * 9)).factors == pytest.approx([3 ** (i / 7) for i in range(8)])
