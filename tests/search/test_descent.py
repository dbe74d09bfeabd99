"""ropesearch/search/descent.py on objectives with known optima, each window with its own noise."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.search import descent as module
from ropesearch.search.config import SpaceConfig
from ropesearch.search.descent import Descent
from ropesearch.search.spaces import make_space
from ropesearch.search.trials import Step
from tests.search.analytic import TARGET_LENGTH, make_geometry

Logs = NDArray[np.float64]
SPACE = make_space(make_geometry(16), TARGET_LENGTH, SpaceConfig())
LINEAR = methods.linear(SPACE.geometry, TARGET_LENGTH)
NTK = methods.ntk(SPACE.geometry, TARGET_LENGTH)
NUM_WINDOWS = 8
PLACES = np.linspace(-1, 1, 16)
AIM = np.append(np.log(7) / (1 + np.exp(-8 * (PLACES - 0.15))), math.log(1.12))


def logs_of(regime: Regime) -> Logs:
    return np.log([*regime.factors, regime.attention_factor])


class Bowl:
    """A quadratic over logs, least at `aim`; each window adds a slope, and these cancel out."""

    def __init__(self, curvature: Logs, noise: float = 0.0, aim: Logs = AIM) -> None:
        self.curvature, self.aim = curvature, aim
        slopes = np.random.default_rng(5).normal(size=(NUM_WINDOWS, len(aim)))
        self.slopes = noise * np.sqrt(curvature) * (slopes - slopes.mean(axis=0))

    def excess(self, regime: Regime) -> float:
        return float(0.5 * self.curvature @ (logs_of(regime) - self.aim) ** 2)

    def step(self, regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        off = logs_of(regime) - self.aim
        value = 2.0 + self.excess(regime) + float(self.slopes[window] @ off)
        return Step(
            window=window, nats_per_token=value, gradient=tuple((self.curvature * off + self.slopes[window]).tolist())
        )


def begin(step: Callable[[Regime, int], Step], start: Regime = LINEAR, seed: int = 0, chain: int = 0) -> Descent:
    values = np.array([step(start, window).nats_per_token for window in range(NUM_WINDOWS)])
    return Descent(SPACE, start, values, seed, chain)


def descend(step: Callable[[Regime, int], Step], num_passes: int, start: Regime = LINEAR) -> Descent:
    descent = begin(step, start)
    for _ in range(num_passes * NUM_WINDOWS):
        descent.advance(step(descent.regime, descent.window))
    return descent


EVEN = np.append(np.full(16, 0.05), 5.0)
STEEP = np.append(np.geomspace(1e-3, 1.0, 16), 20.0)  # over four orders of magnitude
FLAT_END = np.append(np.geomspace(1.0, 1e-3, 16), 20.0)
BOWLS = {"even": EVEN, "steep": STEEP, "flat end": FLAT_END}


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("first_part", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("name", BOWLS)
def test_it_reaches_the_optimum_whatever_the_first_length(
    name: str, first_part: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 12 passes nine tenths of what the start leaves to gain, for steps ten times too long and too short."""
    monkeypatch.setattr(module, "_FIRST_PART", first_part)
    bowl = Bowl(BOWLS[name], noise)
    descent = descend(bowl.step, 12)
    assert bowl.excess(descent.best) < 0.1 * bowl.excess(LINEAR)


@pytest.mark.parametrize("name", BOWLS)
def test_its_steps_become_short_at_the_optimum(name: str) -> None:
    """A tenth of the first length within 24 passes."""
    bowl = Bowl(BOWLS[name])
    descent = begin(bowl.step)
    while descent.part_of_first_length > 0.1:
        assert descent.num_steps < 24 * NUM_WINDOWS
        descent.advance(bowl.step(descent.regime, descent.window))
    assert bowl.excess(descent.best) < 0.1 * bowl.excess(LINEAR)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("first_part", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("name", BOWLS)
def test_two_passes_never_end_above_the_start(
    name: str, first_part: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For steps a hundred times too long, and noise that drowns the slope."""
    monkeypatch.setattr(module, "_FIRST_PART", first_part)
    bowl = Bowl(BOWLS[name], noise)
    assert bowl.excess(descend(bowl.step, 2).best) < bowl.excess(LINEAR)


def test_the_best_is_the_mean_of_the_four_steps_that_gained_most_over_the_start() -> None:
    """Whatever the windows' own levels; where a four has clearly gained less, the next step is made from the best, and
    is a quarter as long, down to a 64th.
    """
    bowl = Bowl(EVEN, 0.3)
    levels = 100.0 * np.arange(NUM_WINDOWS)

    def leveled(regime: Regime, window: int) -> Step:
        step = bowl.step(regime, window)
        return dataclasses.replace(step, nats_per_token=step.nats_per_token + float(levels[window]))

    descent = begin(leveled)
    assert descent.best.factors == pytest.approx(LINEAR.factors)
    num_returns, best, best_excess, before = 0, logs_of(LINEAR), 0.0, 1.0
    for index in range(40):
        points, excesses = [], []
        for _ in range(4):
            points.append(logs_of(descent.regime))
            step = leveled(descent.regime, descent.window)
            excesses.append(step.nats_per_token - leveled(LINEAR, descent.window).nats_per_token)
            descent.advance(step)
        mean, error = np.mean(excesses), np.std(excesses, ddof=1) / 2
        expected = before
        if mean < best_excess:
            best, best_excess = np.mean(points, axis=0), mean
            expected *= 1.25 if index else 1.0
        elif mean > best_excess + error:
            num_returns += 1
            expected = max(0.25 * expected, 1 / 64)
            longest = 0.05 * math.log(8) * expected
            assert np.abs(logs_of(descent.regime) - best).max() <= longest * (1 + 1e-9)
        before = descent.part_of_first_length
        assert before == pytest.approx(expected)
        np.testing.assert_allclose(logs_of(descent.best), best, rtol=0, atol=1e-12)
    assert num_returns > 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_with_a_weight_that_doubles_a_second_objective_comes_within_a_bound(seed: int, noise: float) -> None:
    """As for a guard: in eight legs at most a thirtieth of what the start has, where the first leg goes elsewhere."""
    long, short = Bowl(EVEN, noise), Bowl(EVEN, noise, aim=np.append(0.3 * AIM[:-1], 0.0))

    def step(regime: Regime, window: int, weight: float) -> Step:
        both = long.step(regime, window), short.step(regime, window)
        gradients = np.array([each.gradient for each in both])
        return Step(
            window=window,
            nats_per_token=both[0].nats_per_token + weight * both[1].nats_per_token,
            gradient=tuple((gradients[0] + weight * gradients[1]).tolist()),
        )

    def start_values(weight: float) -> Logs:
        return np.array([step(NTK, window, weight).nats_per_token for window in range(NUM_WINDOWS)])

    bound = short.excess(NTK) / 30
    descent = Descent(SPACE, NTK, start_values(0.0), seed, 0)
    weight, excesses = 0.0, []
    for _ in range(8):
        for _ in range(2 * NUM_WINDOWS):
            descent.advance(step(descent.regime, descent.window, weight))
        excesses.append(short.excess(descent.best))
        if excesses[-1] <= bound:
            break
        weight = 2 * weight or 1.0
        descent.forget(start_values(weight))
    assert excesses[-1] <= bound < excesses[0]


def test_after_another_objective_it_goes_on_from_where_it_is() -> None:
    """With steps as long as the first ones, and whatever the start has by it."""
    bowl = Bowl(EVEN, 0.3)
    descent = descend(bowl.step, 4)
    here = logs_of(descent.regime)
    assert descent.part_of_first_length != 1
    descent.forget(np.full(NUM_WINDOWS, -100.0))
    points = []
    for _ in range(4):
        points.append(logs_of(descent.regime))
        descent.advance(bowl.step(descent.regime, descent.window))
    np.testing.assert_array_equal(points[0], here)
    np.testing.assert_allclose(logs_of(descent.best), np.mean(points, axis=0), rtol=0, atol=1e-12)
    assert descent.part_of_first_length == 1


def test_steps_shrink_where_windows_contradict_each_other() -> None:
    """Down one slope that all windows share, they grow; with slopes that only cancel out, they end short."""
    descent = Descent(SPACE, methods.identity(SPACE.geometry, TARGET_LENGTH), np.zeros(NUM_WINDOWS), seed=0, chain=0)
    for _ in range(12):
        value = -float(logs_of(descent.regime).sum())
        descent.advance(Step(window=descent.window, nats_per_token=value, gradient=(-1.0,) * 17))
    assert descent.part_of_first_length > 1
    slopes = np.where(np.arange(NUM_WINDOWS) % 2, 1.0, -1.0)

    def contradicting(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        off = logs_of(regime) - AIM
        slope = 0.1 * slopes[window] * np.ones(17)
        # A bowl beside the noise: moving has a price.
        gradient = slope + 2.0 * off
        return Step(window=window, nats_per_token=float(slope @ off + off @ off), gradient=tuple(gradient.tolist()))

    start = Regime(name="x", max_length=TARGET_LENGTH, factors=tuple(np.exp(AIM[:-1])), attention_factor=1.12)
    contradicted = descend(contradicting, 6, start)
    assert contradicted.part_of_first_length < 0.3


def test_rugged_fast_pairs_do_not_lead_the_others_astray() -> None:
    """Fast pairs turn so often that their derivatives say nothing: the slow ones reach their optimum all the same."""
    frequencies = SPACE.geometry.inverse_frequencies() * TARGET_LENGTH
    bowl = Bowl(EVEN, 0.01)

    def rugged(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        step = bowl.step(regime, window)
        logs = logs_of(regime)[:-1]
        angles = frequencies * np.exp(-logs)
        ripple = 0.002 * np.sin(angles + window)[:6]
        slopes = -0.002 * np.cos(angles + window) * angles
        gradient = np.array(step.gradient)
        gradient[:6] += slopes[:6]
        return Step(
            window=window, nats_per_token=step.nats_per_token + float(ripple.sum()), gradient=tuple(gradient.tolist())
        )

    found = descend(rugged, 12)
    off = 0.5 * EVEN * (logs_of(found.best) - AIM) ** 2
    start = 0.5 * EVEN * (logs_of(LINEAR) - AIM) ** 2
    assert off[6:].sum() < 0.2 * start[6:].sum()


@pytest.mark.parametrize(
    "config",
    [
        SpaceConfig(),
        SpaceConfig(attention_factor=1.1),
        SpaceConfig(retained_tokens=[8]),
        SpaceConfig(num_pairs_at_one=2, num_pairs_at_ratio=3, max_factor_over_ratio=1),
        SpaceConfig(critical_pair="search", max_factor_over_ratio=2),
    ],
)
def test_every_point_lies_in_the_space_but_for_its_grid(config: SpaceConfig) -> None:
    space = make_space(make_geometry(16), TARGET_LENGTH, config)
    bowl = Bowl(STEEP, 0.5)
    descent = Descent(space, NTK, np.array([bowl.step(NTK, each).nats_per_token for each in range(NUM_WINDOWS)]), 0, 0)
    like = space.repair(NTK)
    for _ in range(3 * NUM_WINDOWS):
        for regime in (descent.regime, descent.best):
            logs = np.log(regime.factors)
            np.testing.assert_allclose(space.project_logs(logs, like), logs, rtol=0, atol=1e-12)
            assert space.attention_grid[0] - 1e-12 <= regime.attention_factor <= space.attention_grid[-1] + 1e-12
            assert min(regime.factors) >= 1
            assert regime.retained_tokens == space.repair(regime).retained_tokens  # what is descended is what is scored
        descent.advance(bowl.step(descent.regime, descent.window))
    assert descent.best != descent.regime


def test_a_replay_gives_the_same_point_bit_for_bit() -> None:
    bowl = Bowl(STEEP, 0.3)
    steps: list[Step] = []

    def noted(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
        steps.append(bowl.step(regime, window))
        return steps[-1]

    descent = descend(noted, 5)
    again = begin(bowl.step)
    for step in steps[NUM_WINDOWS:]:  # after the start's values
        assert again.window == step.window
        again.advance(step)
    assert again.regime == descent.regime and again.best == descent.best
    assert again.part_of_first_length == descent.part_of_first_length


def test_every_pass_visits_each_window_once_in_another_order() -> None:
    def order(seed: int, chain: int) -> list[list[int]]:
        descent = begin(Bowl(EVEN).step, seed=seed, chain=chain)
        visited = []
        for _ in range(4 * NUM_WINDOWS):
            visited.append(descent.window)
            descent.advance(Bowl(EVEN).step(descent.regime, descent.window))
        return [visited[start : start + NUM_WINDOWS] for start in range(0, len(visited), NUM_WINDOWS)]

    passes = order(0, 0)
    assert all(sorted(each) == list(range(NUM_WINDOWS)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    assert len({str(order(seed, chain)) for seed in (0, 1) for chain in (0, 1)}) == 4


def test_without_derivatives_it_stays_where_it_is() -> None:
    descent = Descent(SPACE, NTK, np.ones(NUM_WINDOWS), seed=0, chain=0)
    assert descent.best == descent.regime
    start = descent.regime
    for _ in range(2 * NUM_WINDOWS):
        descent.advance(Step(window=descent.window, nats_per_token=1.0, gradient=(0.0,) * 17))
    assert descent.regime.factors == pytest.approx(start.factors, rel=1e-14)


def test_no_first_step_turns_an_angle_by_more_than_its_bound() -> None:
    """Where the order is not in the way: a projection moves pairs that it makes equal together. It is a quarter of a
    step, as one window's derivatives agree with themselves.
    """
    descent = Descent(SPACE, NTK, np.ones(NUM_WINDOWS), seed=0, chain=0)
    before = logs_of(descent.regime)[:-1]
    descent.advance(Step(window=descent.window, nats_per_token=1.0, gradient=(1.0,) * 17))
    moved = before - logs_of(descent.regime)[:-1]
    turned = SPACE.geometry.inverse_frequencies() * TARGET_LENGTH * np.exp(-before) * moved
    np.testing.assert_allclose(turned[1:5], 3.0, rtol=1e-9)  # the first pair is at 1 already
    np.testing.assert_allclose(moved[-5:], 0.05 * math.log(8) / 4, rtol=1e-9)
    assert turned.max() <= 3.0 * (1 + 1e-9)
