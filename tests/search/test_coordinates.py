import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtr
from scipy.stats import chisquare, kstest

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.search.config import SpaceConfig
from ropesearch.search.coordinates import Coordinates
from ropesearch.search.space import Candidate, Space
from ropesearch.search.spaces import make_space
from ropesearch.seeding import stream
from tests.search.analytic import TARGET_LENGTH, make_geometry
from tests.search.test_space import SPACES, candidates

anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(sorted(SPACES)))
def test_any_vector_stands_for_a_candidate(data: st.DataObject, name: str) -> None:
    coordinates = Coordinates(SPACES[name])
    num = coordinates.num_coordinates
    vector = data.draw(st.lists(st.one_of(anything, st.floats(-9, 9)), min_size=num, max_size=num))
    assert SPACES[name].contains(coordinates.candidate(vector))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(sorted(SPACES)))
def test_every_candidate_has_coordinates(data: st.DataObject, name: str) -> None:
    coordinates = Coordinates(SPACES[name])
    candidate = data.draw(candidates(SPACES[name]))
    vector = coordinates.of(candidate)
    assert vector.shape == (coordinates.num_coordinates,) and np.isfinite(vector).all()
    assert coordinates.candidate(vector) == candidate


@pytest.mark.parametrize("num_pairs", [1, 2, 48, 64, 128])
def test_the_methods_have_coordinates_whatever_the_ratio(num_pairs: int) -> None:
    geometry = make_geometry(num_pairs, 4096)
    for target_length in (8192, 4096 * 7 + 1, 4096 * 512):
        for change in ({}, {"num_pairs_at_one": "search", "num_pairs_at_ratio": "search", "max_factor_over_ratio": 1}):
            space = make_space(geometry, target_length, SpaceConfig(**change))
            coordinates = Coordinates(space)
            for method in (methods.identity, methods.linear, methods.ntk, methods.yarn):
                candidate = space.repair(method(geometry, target_length))
                assert coordinates.candidate(coordinates.of(candidate)) == candidate


def drawn(space: Space, num: int, seed: int = 0) -> list[Candidate]:
    coordinates = Coordinates(space)
    rng = stream(seed, "test")
    return [coordinates.candidate(rng.standard_normal(coordinates.num_coordinates)) for _ in range(num)]


def test_normal_vectors_are_uniform_over_non_decreasing_log_factors() -> None:
    """The k-th of m uniform order statistics is Beta(k, m + 1 - k), and spacings have one law."""
    space = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig(factor_step=1e-4))
    found = drawn(space, 4000)
    parts = np.array([np.log(space.regime(candidate).factors) for candidate in found]) / math.log(10)
    for pair in range(8):
        assert kstest(parts[:, pair], "beta", (pair + 1, 8 - pair)).pvalue > 1e-3
    spacings = np.diff(parts, axis=1, prepend=0, append=1)
    for place in range(9):
        assert kstest(spacings[:, place], "beta", (1, 8)).pvalue > 1e-3
    assert kstest([candidate.attention_steps / 500 for candidate in found], "uniform").pvalue > 1e-3


def test_a_coarse_grid_is_hit_as_often_as_its_cells_are_wide() -> None:
    space = make_space(make_geometry(2), 512, SpaceConfig(factor_step=0.5, attention_factor=1.1))  # 1, 1.5, 2, 2.5
    edges = np.log([1, 1.25, 1.75, 2.25, 2.5]) / math.log(2.5)
    width = np.diff(edges)
    found = drawn(space, 6000)
    cells = [(low, high) for low in range(4) for high in range(low, 4)]
    expected = [width[low] * width[high] * (1 if low == high else 2) for low, high in cells]
    counts = [sum(candidate.factor_steps == cell for candidate in found) for cell in cells]
    assert sum(expected) == pytest.approx(1)
    assert chisquare(counts, 6000 * np.array(expected)).pvalue > 1e-3


def test_numbers_of_retained_pairs_and_tokens_are_uniform() -> None:
    config = SpaceConfig(
        num_pairs_at_one="search", num_pairs_at_ratio="search", max_factor_over_ratio=1, retained_tokens=[0, 4, 9]
    )
    space = make_space(make_geometry(4), TARGET_LENGTH, config)
    found = drawn(space, 6000)
    at_one = [candidate.factor_steps.count(0) for candidate in found]
    assert chisquare(np.bincount(at_one, minlength=5)).pvalue > 1e-3
    for num in range(4):
        at_ratio = [c.factor_steps.count(700) for c in found if c.factor_steps.count(0) == num]
        assert chisquare(np.bincount(at_ratio, minlength=5 - num)).pvalue > 1e-3
    assert chisquare(np.unique([c.retained_tokens for c in found], return_counts=True)[1]).pvalue > 1e-3


def test_a_small_move_is_a_small_change() -> None:
    coordinates = Coordinates(SPACES["longrope"])
    space = coordinates.space
    start = coordinates.of(space.repair(methods.yarn(space.geometry, TARGET_LENGTH)))
    rng = stream(0, "test")
    for _ in range(50):
        moved = coordinates.candidate(start + 0.01 * rng.standard_normal(len(start)))
        before, after = space.regime(coordinates.candidate(start)), space.regime(moved)
        assert np.abs(np.log(after.factors) - np.log(before.factors)).max() < 0.05
        assert abs(after.attention_factor - before.attention_factor) < 0.02


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"coordinates: expected shape \(10,\), got \(9,\)"):
        Coordinates(SPACES["longrope"]).candidate([0.0] * 9)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(sorted(SPACES)), st.integers(2, 9))
def test_with_knots_any_vector_stands_for_a_candidate_too(data: st.DataObject, name: str, num_knots: int) -> None:
    """And its coordinates for one with the same choices, and the same factors at the knots."""
    coordinates = Coordinates(SPACES[name], num_knots)
    space = coordinates.space
    vector = data.draw(
        st.lists(
            st.one_of(anything, st.floats(-9, 9)),
            min_size=coordinates.num_coordinates,
            max_size=coordinates.num_coordinates,
        )
    )
    found = coordinates.candidate(vector)
    assert space.contains(found)
    again = coordinates.candidate(coordinates.of(found))
    ends = [(c.factor_steps.count(space.low.step), c.factor_steps.count(space.high.step)) for c in (found, again)]
    assert (again.attention_steps, again.retained_tokens) == (found.attention_steps, found.retained_tokens)
    if space.low.searched or space.high.searched:
        assert ends[0] == ends[1]
    first = ends[0][0] if space.low.searched else space.low.least
    last = space.num_pairs - 1 - (ends[0][1] if space.high.searched else space.high.least)
    if first <= last:
        knots = np.rint(np.linspace(first, last, min(num_knots, last - first + 1))).astype(int)
        assert [again.factor_steps[pair] for pair in knots] == [found.factor_steps[pair] for pair in knots]


def test_knots_are_joined_by_monotone_cubics_of_the_log_factors() -> None:
    space = make_space(make_geometry(32), TARGET_LENGTH, SpaceConfig(factor_step=1e-5, attention_factor=1.1))
    coordinates = Coordinates(space, 6)
    assert coordinates.num_coordinates == 7
    assert Coordinates(space, 40).num_coordinates == Coordinates(space).num_coordinates == 33
    rng = stream(0, "test")
    knots = [0, 6, 12, 19, 25, 31]
    for _ in range(20):
        vector = rng.standard_normal(7)
        logs = np.log(space.curve(coordinates.candidate(vector)))
        spacings = -np.log(ndtr(vector))
        assert logs[knots] == pytest.approx(np.log(10) * np.cumsum(spacings)[:-1] / spacings.sum(), abs=2e-5)
        assert logs == pytest.approx(PchipInterpolator(knots, logs[knots])(np.arange(32)), abs=1e-4)
