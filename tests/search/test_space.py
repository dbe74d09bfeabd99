import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.search.config import SpaceConfig
from ropesearch.search.monotone import MonotoneSpace
from ropesearch.search.space import Candidate, Space
from ropesearch.search.spaces import make_space
from tests.search.analytic import TARGET_LENGTH, make_geometry

GEOMETRY = make_geometry()
RETAINED = [0, 1, 2, 4, 8]
SPACE = make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig())
WIDE = make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig(retained_tokens=RETAINED))
HELD = make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor="longrope"))
PIECEWISE = {"num_pairs_at_one": "search", "num_pairs_at_ratio": "search", "max_factor_over_ratio": 1.0}
LONGROPE2 = {"critical_pair": "search", "max_factor_over_ratio": 2.0}  # 2 to 4 in this geometry
CHANGES: dict[str, dict[str, object]] = {
    "longrope": {},
    "held attention": {"attention_factor": "yarn"},
    "paper": {"retained_tokens": [0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256]},
    "first held": {"num_pairs_at_one": 3},
    "first searched": {"num_pairs_at_one": "search", "retained_tokens": [0, 8]},
    "both held": {"num_pairs_at_one": 3, "num_pairs_at_ratio": 4, "max_factor_over_ratio": 1.0},
    "last held": {"num_pairs_at_ratio": 2, "max_factor_over_ratio": 1.0, "attention_factor": 1.1},
    "piecewise": PIECEWISE,
    "piecewise with tokens": {**PIECEWISE, "retained_tokens": [0, 4, 9], "attention_factor": "longrope"},
    "last searched": {"num_pairs_at_one": 1, "num_pairs_at_ratio": "search", "max_factor_over_ratio": 1.0},
    "coarse": {**PIECEWISE, "factor_step": 3.0, "attention_factor_step": 0.25},
    "longrope2": LONGROPE2,
    "longrope2 with tokens": {**LONGROPE2, "retained_tokens": [0, 4, 9], "attention_factor": "longrope"},
    "critical pair": {**LONGROPE2, "critical_pair": 3},
    "critical pair 0": {**LONGROPE2, "critical_pair": 0, "factor_step": 1.5},
}
SPACES = {
    f"{name}{'' if target == TARGET_LENGTH else target}": make_space(GEOMETRY, target, SpaceConfig(**change))  # type: ignore[arg-type]
    for target in (TARGET_LENGTH, 2050)  # a ratio off the grid: 8.0078125
    for name, change in CHANGES.items()
}
spaces = st.sampled_from([SPACE, WIDE, HELD, *SPACES.values()])
anything = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def candidates(draw: st.DrawFn, space: Space) -> Candidate:
    num_low = space.low.least
    if space.low.step < 0:  # before the critical pair
        num_low = draw(st.integers(space.low.least, space.low.most))
    num_free = space.num_pairs - num_low - space.high.least
    ends = st.sampled_from([0, space.max_factor_steps])  # plateaus at the ends are what retained pairs are
    steps = draw(
        st.lists(st.one_of(st.integers(0, space.max_factor_steps), ends), min_size=num_free, max_size=num_free)
    )
    attention = draw(st.integers(0, space.max_attention_steps))
    held = [space.low.step] * num_low, [space.high.step] * space.high.least
    return Candidate((*held[0], *sorted(steps), *held[1]), attention, draw(st.sampled_from(space.retained_choices)))


def test_the_grid_is_the_papers() -> None:
    assert (SPACE.max_factor_steps, SPACE.max_attention_steps) == (900, 500)  # [1, 1.25 * 8] by 0.01, [1, 1.5] by 0.001
    assert [SPACE.factor_grid[k] for k in (0, 7, 207, 900)] == [1.0, 1.07, 3.07, 10.0]
    assert [repr(float(value)) for value in SPACE.factor_grid] == [
        str(1 + k // 100) + "." + (f"{k % 100:02d}".rstrip("0") or "0") for k in range(901)
    ]
    assert [SPACE.attention_grid[k] for k in (0, 203, 500)] == [1.0, 1.203, 1.5]


def test_a_bound_between_grid_points_is_not_crossed() -> None:
    space = make_space(make_geometry(), 300, SpaceConfig())  # 1.25 * 300 / 256 = 1.46484375
    assert space.factor_grid[-1] == 1.46
    assert (
        make_space(make_geometry(), 2816, SpaceConfig(max_factor_over_ratio=1.1)).factor_grid[-1] == 12.1
    )  # 12.100000000000001


def test_dimensions_and_number_of_candidates() -> None:
    assert (SPACE.num_dimensions, WIDE.num_dimensions, HELD.num_dimensions) == (9, 10, 8)
    two = make_space(make_geometry(2), 512, SpaceConfig(factor_step=0.5, attention_factor=1.1, retained_tokens=[0, 3]))
    listed = {
        Candidate((a, b), 0, kept)
        for a in range(-1, 5)
        for b in range(-1, 5)
        for kept in range(5)
        if two.contains(Candidate((a, b), 0, kept))
    }
    assert two.max_factor_steps == 3
    assert two.num_candidates == len(listed) == 20


@settings(deadline=None)
@given(st.data(), spaces)
def test_decode_inverts_encode(data: st.DataObject, space: Space) -> None:
    candidate = data.draw(candidates(space))
    assert space.contains(candidate)
    assert space.encode(candidate).shape == (space.num_dimensions,)
    assert space.decode(space.encode(candidate)) == candidate
    assert space.repair(space.regime(candidate)) == candidate


@settings(deadline=None)
@given(st.data(), spaces)
def test_any_vector_decodes_into_the_space(data: st.DataObject, space: Space) -> None:
    vector = data.draw(st.lists(anything, min_size=space.num_dimensions, max_size=space.num_dimensions))
    candidate = space.decode(vector)
    assert space.contains(candidate)
    space.regime(candidate)


def test_values_that_are_no_numbers() -> None:
    vector = [math.nan, -math.inf, 1e308, 1e308, math.inf, math.inf, math.inf, math.inf, math.nan]
    assert SPACE.decode(vector) == Candidate((0, 0, *[900] * 6), 0, 0)
    assert SPACE.decode([math.inf, math.nan, *[math.inf] * 7]).attention_steps == 500


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected shape \(9,\), got \(8,\)"):
        SPACE.decode([1.0] * 8)


@pytest.mark.parametrize("name", [name for name, space in SPACES.items() if isinstance(space, MonotoneSpace)])
def test_held_pairs_have_their_exact_factors(name: str) -> None:
    space = SPACES[name]
    ratio = space.target_length / 256
    for vector in (np.full(space.num_dimensions, 5.0), np.arange(space.num_dimensions)[::-1].astype(float)):
        factors = space.regime(space.decode(vector)).factors
        assert factors[: space.low.least] == (1.0,) * space.low.least
        assert factors[8 - space.high.least :] == (ratio,) * space.high.least
    if space.high.searched:
        assert space.factor_grid[-1] == ratio
        linear = space.repair(methods.linear(GEOMETRY, space.target_length))
        assert space.regime(linear).factors[space.low.least :] == (ratio,) * (8 - space.low.least)


def test_candidates_of_retained_pairs_are_counted_and_listed() -> None:
    geometry = make_geometry(4)
    for change, num in (
        ({"num_pairs_at_one": 1}, math.comb(3 + 3, 3)),
        ({"num_pairs_at_one": 1, "num_pairs_at_ratio": 1, "max_factor_over_ratio": 1.0}, math.comb(2 + 2, 2)),
        (PIECEWISE, math.comb(4 + 2, 4)),  # as without retained pairs: they are counts of the pairs at either end
    ):
        space = make_space(geometry, 512, SpaceConfig(factor_step=0.5, attention_factor=1.1, **change))  # type: ignore[arg-type]
        steps = itertools.product(range(-1, space.max_factor_steps + 2), repeat=4)
        listed = {each for each in steps if space.contains(Candidate(each, 0, 0))}
        assert space.num_candidates == len(listed) == num


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-2, 12), min_size=4, max_size=4))
def test_the_projection_with_held_pairs_is_the_nearest_candidate(factors: list[int]) -> None:
    """Against all candidates of a small space, in least squares."""
    change = {"num_pairs_at_one": 1, "num_pairs_at_ratio": 1, "max_factor_over_ratio": 1.0}
    space = make_space(make_geometry(4), 1024, SpaceConfig(factor_step=0.5, attention_factor=1.1, **change))  # type: ignore[arg-type]
    found = np.array(space.regime(space.decode(factors)).factors)
    pairs = [(low, high) for low in space.factor_grid for high in space.factor_grid if low <= high]
    least = min((low - factors[1]) ** 2 + (high - factors[2]) ** 2 for low, high in pairs)
    assert (found[1] - factors[1]) ** 2 + (
        found[2] - factors[2]
    ) ** 2 <= least + 0.25 + 1e-9  # rounding: 2 * (step/2)^2


FINE = make_space(make_geometry(4), TARGET_LENGTH, SpaceConfig(attention_factor=1.0, factor_step=1e-4))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 14), min_size=4, max_size=4))
def test_projection_is_the_exact_one(factors: list[float]) -> None:
    found = np.array(FINE.regime(FINE.decode(factors)).factors)
    order = [{"type": "ineq", "fun": lambda x, i=i: x[i + 1] - x[i]} for i in range(3)]
    reference = minimize(
        lambda x: ((x - factors) ** 2).sum(),
        np.linspace(2, 3, 4),
        jac=lambda x: 2 * (x - factors),
        bounds=[(1, 10)] * 4,
        constraints=order,
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 200},
    )
    assert np.abs(found - reference.x).max() < 2e-4


def test_order_is_repaired_before_the_bounds() -> None:
    # The projection of (100, 0) is (50, 50), then clipped; clipping first would give the mean of 10 and 1.
    assert SPACE.decode([100.0, 0.0, *[50.0] * 6, 1.2]).factor_steps == (900,) * 8


def test_yarn_is_repaired_to_the_grid_entry_by_entry() -> None:
    yarn = methods.yarn(GEOMETRY, TARGET_LENGTH)
    repaired = SPACE.regime(SPACE.repair(yarn))
    assert repaired.factors == tuple(round(factor, 2) for factor in yarn.factors)
    assert repaired.attention_factor == round(yarn.attention_factor, 3) == 1.208
    assert repaired.name == "searched"


def test_retained_tokens_go_to_the_nearest_choice() -> None:
    assert [WIDE.repair(Regime(name="x", max_length=9, factors=(1.0,) * 8, retained_tokens=n)).retained_tokens
            for n in (0, 3, 5, 9)] == [0, 2, 4, 8]  # fmt: skip
    assert WIDE.decode([1.0] * 9 + [2.4]).retained_tokens == 2
    assert WIDE.decode([1.0] * 9 + [99]).retained_tokens == 8


def test_held_attention_factors() -> None:
    candidate = HELD.decode([1.0] * 8)
    assert HELD.regime(candidate).attention_factor == math.sqrt(1 + math.log(8) / math.log(256))
    yarn = make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor="yarn"))
    assert yarn.regime(candidate).attention_factor == 0.1 * math.log(8) + 1
    held = make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor=1.05))
    assert held.regime(candidate).attention_factor == 1.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor_step": 0.0}, "factor_step: expected a finite number above 0"),
        ({"factor_step": math.nan}, "factor_step"),
        ({"factor_step": 20.0}, "leaves 2 to a million values"),
        ({"factor_step": 1e-9}, "leaves 2 to a million values"),
        ({"max_factor_over_ratio": 0.5}, "expected at least 1"),
        ({"max_factor_over_ratio": math.inf}, "expected at least 1"),
        ({"attention_factor": "none"}, "got 'none'"),
        ({"attention_factor": -1.0}, "got -1"),
        ({"attention_factor": 0.999}, "a number of at least 1, .* got 0.999; give 1"),
        ({"attention_factor": "0.5"}, "got '0.5'"),
        ({"attention_factor": math.nan}, "got nan"),
        ({"attention_factor_max": 0.5}, "attention_factor_max: expected a finite number above 1"),
        ({"attention_factor_max": 1.0}, "attention_factor_max: .* space.attention_factor=1 holds it there"),
        ({"attention_factor_max": math.inf}, "attention_factor_max"),
        ({"attention_factor_step": 1.0}, "leaves 2 to a million values from 1 to 1.5, got 1.0; ask for a smaller"),
        ({"attention_factor_step": 1e-9}, "attention_factor_step: .* ask for a larger step"),
        ({"max_factor_over_ratio": 1e308}, "factor_step"),
        ({"attention_factor_step": 0.0}, "attention_factor_step"),
        ({"num_pairs_at_one": -1}, "num_pairs_at_one: expected 'search' or a number of pairs from 0 on, got -1"),
        ({"num_pairs_at_one": 8}, "num_pairs_at_one: expected 'search' or from 0 to 7 of the 8 pairs, got 8"),
        ({"num_pairs_at_one": 1.0}, "got 1.0"),
        ({"num_pairs_at_one": "many"}, "got 'many'"),
        ({"num_pairs_at_ratio": 1}, "max_factor_over_ratio: expected 1 with pairs at the ratio"),
        ({"num_pairs_at_ratio": "search"}, "max_factor_over_ratio: expected 1 with pairs at the ratio"),
        ({"num_pairs_at_one": 4, "num_pairs_at_ratio": 4, "max_factor_over_ratio": 1}, "fewer than the 8 pairs"),
        ({**PIECEWISE, "factor_step": 7.0}, "expected a factor between 1 and the ratio"),
        ({"retained_tokens": []}, "retained_tokens"),
        ({"retained_tokens": [-1, 0]}, "retained_tokens"),
        ({"retained_tokens": [4, 0, 4]}, "retained_tokens: expected one or more different numbers"),
        ({"retained_tokens": [TARGET_LENGTH + 1]}, "retained_tokens"),
    ],
)
def test_impossible_spaces_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_space(GEOMETRY, TARGET_LENGTH, SpaceConfig(**change))  # type: ignore[arg-type]


def test_a_regime_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="expected 8 factors, got 3"):
        SPACE.repair(Regime(name="x", max_length=9, factors=(1.0, 1.0, 1.0)))


logs_of_pairs = st.lists(st.floats(-2, 5), min_size=8, max_size=8).map(np.array)


@st.composite
def curves(draw: st.DrawFn, space: Space, like: Candidate) -> np.ndarray:
    """Logs of factors of the space but for its grid, with the pairs that are held in `like`."""
    moving = space.moving_pairs(like)
    lowest, highest = np.log(space.factor_grid[[0, -1]])
    count = len(range(space.num_pairs)[moving])
    parts = np.sort(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
    logs = np.zeros(space.num_pairs)
    logs[moving] = lowest + (highest - lowest) * parts
    if space.low.step < 0:
        logs[: moving.start] = logs[moving.start] * np.arange(moving.start) / max(moving.start, 1)
    logs[moving.stop :] = highest
    return logs


@settings(max_examples=150)
@given(st.data(), spaces, logs_of_pairs)
def test_logs_are_projected_exactly(data: st.DataObject, space: Space, logs: np.ndarray) -> None:
    """By the inequality that defines the projection onto a convex set: no curve of the space lies on this side."""
    like = data.draw(candidates(space))
    moving = space.moving_pairs(like)
    found = space.project_logs(logs, like)
    lowest, highest = np.log(space.factor_grid[[0, -1]])
    assert found[moving].min() >= lowest and found[moving].max() <= highest
    assert np.diff(found).min() >= -1e-12 and found.min() >= 0
    other = data.draw(curves(space, like))
    assert (logs - found)[moving] @ (other - found)[moving] <= 1e-9
    np.testing.assert_allclose(space.project_logs(found, like), found, rtol=0, atol=1e-12)
    np.testing.assert_allclose(space.project_logs(other, like), other, rtol=0, atol=1e-12)
    held = np.log(space.curve(like))
    if space.low.step == 0:
        outside = [*range(moving.start), *range(moving.stop, space.num_pairs)]
        assert np.array_equal(found[outside], held[outside])
    else:  # the curve before the critical pair follows
        num_left = moving.start
        left = found[num_left] * np.arange(num_left) / max(num_left, 1)
        np.testing.assert_allclose(found[:num_left], left, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(st.data(), spaces, st.integers(0, 2**32 - 1))
def test_derivatives_are_pulled_back_to_the_pairs_that_move(data: st.DataObject, space: Space, seed: int) -> None:
    """Against central differences of a function of the whole curve, on points of the space."""
    like = data.draw(candidates(space))
    moving = space.moving_pairs(like)
    rng = np.random.default_rng(seed)
    linear, quadratic = rng.normal(size=8), rng.normal(size=(8, 8))

    def curve_of(moved: np.ndarray) -> np.ndarray:
        logs = np.log(space.curve(like))
        logs[moving] = moved
        if space.low.step < 0:
            logs[: moving.start] = logs[moving.start] * np.arange(moving.start) / max(moving.start, 1)
        return logs

    def value(moved: np.ndarray) -> float:
        logs = curve_of(moved)
        return float(linear @ logs + logs @ quadratic @ logs)

    here = np.log(space.curve(like))
    found = space.pull_back(linear + (quadratic + quadratic.T) @ here, like)
    steps = 1e-4 * np.eye(len(here[moving]))
    expected = np.zeros(8)
    expected[moving] = [(value(here[moving] + step) - value(here[moving] - step)) / 2e-4 for step in steps]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
