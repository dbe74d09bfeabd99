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
from ropesearch.search.space import Candidate, Space
from tests.search.analytic import TARGET_LENGTH, make_geometry

GEOMETRY = make_geometry()
RETAINED = [0, 1, 2, 4, 8]
SPACE = Space(GEOMETRY, TARGET_LENGTH, SpaceConfig())
WIDE = Space(GEOMETRY, TARGET_LENGTH, SpaceConfig(retained_tokens=RETAINED))
HELD = Space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor="longrope"))
spaces = st.sampled_from([SPACE, WIDE, HELD])
anything = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def candidates(draw: st.DrawFn, space: Space) -> Candidate:
    steps = draw(st.lists(st.integers(0, space.max_factor_steps), min_size=8, max_size=8))
    attention = draw(st.integers(0, space.max_attention_steps))
    return Candidate(tuple(sorted(steps)), attention, draw(st.sampled_from(space.retained_choices)))


def test_the_grid_is_the_papers() -> None:
    assert (SPACE.max_factor_steps, SPACE.max_attention_steps) == (900, 500)  # [1, 1.25 * 8] by 0.01, [1, 1.5] by 0.001
    assert [SPACE.factor_grid[k] for k in (0, 7, 207, 900)] == [1.0, 1.07, 3.07, 10.0]
    assert [repr(float(value)) for value in SPACE.factor_grid] == [
        str(1 + k // 100) + "." + (f"{k % 100:02d}".rstrip("0") or "0") for k in range(901)
    ]
    assert [SPACE.attention_grid[k] for k in (0, 203, 500)] == [1.0, 1.203, 1.5]


def test_a_bound_between_grid_points_is_not_crossed() -> None:
    space = Space(make_geometry(), 300, SpaceConfig())  # 1.25 * 300 / 256 = 1.46484375
    assert space.factor_grid[-1] == 1.46
    assert (
        Space(make_geometry(), 2816, SpaceConfig(max_factor_over_ratio=1.1)).factor_grid[-1] == 12.1
    )  # 12.100000000000001


def test_dimensions_and_number_of_candidates() -> None:
    assert (SPACE.num_dimensions, WIDE.num_dimensions, HELD.num_dimensions) == (9, 10, 8)
    two = Space(make_geometry(2), 512, SpaceConfig(factor_step=0.5, attention_factor=1.1, retained_tokens=[0, 3]))
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


FINE = Space(make_geometry(4), TARGET_LENGTH, SpaceConfig(attention_factor=1.0, factor_step=1e-4))


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
    yarn = Space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor="yarn"))
    assert yarn.regime(candidate).attention_factor == 0.1 * math.log(8) + 1
    assert Space(GEOMETRY, TARGET_LENGTH, SpaceConfig(attention_factor=0.9)).regime(candidate).attention_factor == 0.9


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
        ({"attention_factor": math.nan}, "got nan"),
        ({"attention_factor_max": 0.5}, "at least 1"),
        ({"attention_factor_step": 0.0}, "attention_factor_step"),
        ({"retained_tokens": []}, "retained_tokens"),
        ({"retained_tokens": [-1, 0]}, "retained_tokens"),
        ({"retained_tokens": [TARGET_LENGTH + 1]}, "retained_tokens"),
    ],
)
def test_impossible_spaces_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Space(GEOMETRY, TARGET_LENGTH, SpaceConfig(**change))  # type: ignore[arg-type]


def test_a_regime_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="expected 8 factors, got 3"):
        SPACE.repair(Regime(name="x", max_length=9, factors=(1.0, 1.0, 1.0)))
