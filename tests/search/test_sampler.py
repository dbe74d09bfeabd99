"""One suite for all samplers: what each of them keeps in every space."""

import dataclasses
import json
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.baselines import baseline_regimes
from ropesearch.search.config import (
    OPTIMIZERS,
    BlockwiseConfig,
    CMAESConfig,
    EvolutionConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    RandomConfig,
    SpaceConfig,
    TPEConfig,
)
from ropesearch.search.optimizers import make_sampler
from ropesearch.search.parameters import parameters, suggest
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.space import SEARCHED, Candidate, Space
from ropesearch.search.spaces import make_space
from ropesearch.search.trials import (
    CANDIDATE,
    COST,
    GUARD,
    METHOD,
    PLAN,
    REGIME,
    SCORE,
    Step,
    candidate_json,
    regime_json,
    step_key,
)
from tests.search.analytic import NUM_WINDOWS, TARGET_LENGTH, make_geometry

RETAINED = [0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256]
SPACES = {
    "longrope": SpaceConfig(),
    "paper": SpaceConfig(retained_tokens=RETAINED, attention_factor="longrope"),
    "held": SpaceConfig(num_pairs_at_one=2, num_pairs_at_ratio=3, max_factor_over_ratio=1),
    "piecewise": SpaceConfig(
        num_pairs_at_one="search", num_pairs_at_ratio="search", max_factor_over_ratio=1, retained_tokens=[0, 8]
    ),
    "longrope2": SpaceConfig(critical_pair="search", max_factor_over_ratio=2),
    "critical pair": SpaceConfig(critical_pair=3, max_factor_over_ratio=2, retained_tokens=[0, 8]),
}
CONFIGS: dict[str, OptimizerConfig] = {
    "evolution": EvolutionConfig(num_population=8, num_parents=4, num_mutations=3, num_crossovers=3),
    "random": RandomConfig(),
    "tpe": TPEConfig(num_startup=6, num_knots=4),
    "cmaes": CMAESConfig(num_population=5),
    "blockwise": BlockwiseConfig(num_increments=4),
    "gradient": GradientConfig(),
}
each_sampler = pytest.mark.parametrize("name", CONFIGS)
each_space = pytest.mark.parametrize("space_name", SPACES)
NUM_TRIALS = 26  # besides the baselines
SCORE_TOKENS, STEP_TOKENS = 16, 32
NUM_BASELINES = 4


def sampler_of(name: str, space_name: str, seed: int = 0) -> CandidateSampler:
    space = make_space(make_geometry(), TARGET_LENGTH, SPACES[space_name])
    return made(space, CONFIGS[name], seed)


def made(space: Space, config: OptimizerConfig, seed: int = 0, with_seeds: bool = True) -> CandidateSampler:
    seeds = baseline_regimes(space.geometry, space.target_length)[1:] if with_seeds else []
    return make_sampler(space, config, seed, seeds, NUM_BASELINES, NUM_WINDOWS, Objective(), RacingConfig())


PLACES = np.linspace(-1, 1, 8)
LATE = np.log(7) / (1 + np.exp(-8 * (PLACES - 0.15)))  # log factors that rise late, as good tables do
CURVES = {8: LATE, 2: LATE[[0, -1]], 4: LATE[::2]}


def distance(regime: Regime, curve: NDArray[np.float64] | None = None) -> float:
    """Least at a curve that no seed hits."""
    aim = CURVES[len(regime.factors)] if curve is None else curve
    off = ((np.log(regime.factors) - aim) ** 2).mean()
    return float(off + 20 * (regime.attention_factor - 1.12) ** 2 + 1e-3 * regime.retained_tokens)


def step_of(regime: Regime, window: int, curve: NDArray[np.float64] | None = None) -> Step:
    """`distance` and its derivatives as central differences; the windows differ by a slope that cancels out."""
    logs = np.log([*regime.factors, regime.attention_factor])
    slope = 0.05 * (1 if window % 2 else -1)

    def value(logs: NDArray[np.float64]) -> float:
        moved = dataclasses.replace(
            regime, factors=tuple(np.exp(logs[:-1]).tolist()), attention_factor=float(np.exp(logs[-1]))
        )
        return distance(moved, curve) + slope * float(logs[:-1].mean())

    # Factors are at least 1: there the difference is taken to one side of it, from a little above.
    above = np.maximum(logs, np.append(np.full(len(logs) - 1, 1e-6), -np.inf))
    steps = 1e-6 * np.eye(len(logs))
    gradient = [(value(above + step) - value(above - step)) / 2e-6 for step in steps]
    return Step(window=window, nats_per_token=value(logs), gradient=tuple(gradient))


def score_of(value: float) -> Score:
    """That of windows with `step_of`'s slopes left out."""
    return Score(nats=np.full((NUM_WINDOWS, 1), max(value, 0.0)), tokens=np.ones((NUM_WINDOWS, 1), int),
                 block_edges=np.array([0, 1]))  # fmt: skip


def trial_of(
    number: int,
    attributes: dict[str, Any],
    value: float | None,
    state: TrialState = TrialState.COMPLETE,
    excess: float | None = None,
) -> FrozenTrial:
    if value is not None and SCORE not in attributes:
        attributes = {**attributes, SCORE: score_of(value).to_json()}
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=value if state is TrialState.COMPLETE else None,
        datetime_start=None,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs=attributes,
        system_attrs={} if excess is None else {f"constraints:{GUARD}": excess},
        intermediate_values={},
    )


def carrying(candidate: Candidate) -> dict[str, Any]:
    return {METHOD: SEARCHED, CANDIDATE: candidate_json(candidate)}


def changed(trial: FrozenTrial, value: float | None, state: TrialState = TrialState.COMPLETE) -> FrozenTrial:
    return trial_of(trial.number, trial.user_attrs, value, state)


def baseline_trials(space: Space, curve: NDArray[np.float64] | None = None) -> list[FrozenTrial]:
    regimes = baseline_regimes(space.geometry, space.target_length)
    return [
        trial_of(number, {METHOD: regime.name, REGIME: regime_json(regime)}, distance(regime, curve))
        for number, regime in enumerate(regimes)
    ]


def proposed(
    sampler: CandidateSampler,
    trials: list[FrozenTrial],
    begun: dict[str, Any] | None = None,
    curve: NDArray[np.float64] | None = None,
    last_step: int | None = None,
) -> dict[str, Any]:
    """What the next trial carries when its candidate is known, from what it carried when it was begun; without a
    candidate where `last_step` fails.
    """
    number = len(trials)
    attributes = dict(begun or {METHOD: SEARCHED})
    if PLAN not in attributes:
        plan = sampler.plan(trials, number)
        if plan is not None:
            attributes[PLAN] = json.loads(json.dumps(plan))
    while PLAN in attributes:
        running = trial_of(number, attributes, None, TrialState.RUNNING)
        asked = sampler.next_step([*trials, running], number)
        if asked is None:
            break
        if asked.place == last_step:
            return attributes
        step = step_of(asked.regime, asked.window, curve)
        attributes = {**attributes, step_key(asked.place): json.loads(json.dumps(step.to_json()))}
    running = trial_of(number, attributes, None, TrialState.RUNNING)
    candidate = sampler.propose([*trials, running], number)
    num_steps = sum(key.startswith("step_") for key in attributes)
    return {
        **attributes,
        **carrying(candidate),
        REGIME: regime_json(sampler.space.regime(candidate)),
        COST: SCORE_TOKENS + num_steps * STEP_TOKENS,
    }


def run(
    sampler: CandidateSampler, num_trials: int, failing: int = 0, curve: NDArray[np.float64] | None = None
) -> list[FrozenTrial]:
    """A study of the baselines and so many candidates; after the first three every `failing`-th fails, of those with
    gradient steps in the second step.
    """
    trials = baseline_trials(sampler.space, curve)
    for number in range(NUM_BASELINES, NUM_BASELINES + num_trials):
        fails = failing and number > NUM_BASELINES + 3 and (number - NUM_BASELINES) % failing == 0
        attributes = proposed(sampler, trials, curve=curve, last_step=1 if fails else None)
        if fails:
            trials.append(trial_of(number, attributes, None, TrialState.FAIL))
        else:
            (candidate,) = candidates_of([trial_of(number, attributes, None)])
            trials.append(trial_of(number, attributes, distance(sampler.space.regime(candidate), curve)))
    return trials


@cache
def whole(name: str, space_name: str) -> list[FrozenTrial]:
    return run(sampler_of(name, space_name), NUM_TRIALS)


def candidates_of(trials: list[FrozenTrial]) -> list[Candidate]:
    """Of all that have one: not of baselines."""
    values = [trial.user_attrs[CANDIDATE] for trial in trials if CANDIDATE in trial.user_attrs]
    return [Candidate(tuple(value[0]), value[1], value[2]) for value in values]


def test_all_optimizers_are_under_test() -> None:
    assert {name: type(config) for name, config in CONFIGS.items()} == OPTIMIZERS


@each_sampler
@each_space
def test_candidates_lie_in_the_space_and_none_comes_twice(name: str, space_name: str) -> None:
    space = sampler_of(name, space_name).space
    found = candidates_of(whole(name, space_name))
    assert len(set(found)) == NUM_TRIALS
    for candidate in found:
        assert space.contains(candidate)
        factors = np.array(space.regime(candidate).factors)
        assert (np.diff(factors) >= 0).all() and factors[0] >= 1 and factors[-1] <= space.factor_grid[-1]
        assert set(factors[space.moving_pairs(candidate)].tolist()) <= set(space.factor_grid.tolist())
    if space_name == "held":
        for candidate in found:
            assert space.regime(candidate).factors[:2] == (1, 1)
            assert space.regime(candidate).factors[-3:] == (8, 8, 8)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gradient"])
@each_space
def test_the_seeds_come_first(name: str, space_name: str) -> None:
    """But for gradients, which begin at the baselines' scores."""
    sampler = sampler_of(name, space_name)
    given = [method(sampler.space.geometry, TARGET_LENGTH) for method in (methods.linear, methods.ntk, methods.yarn)]
    expected = list(dict.fromkeys(sampler.space.repair(regime) for regime in given))
    assert candidates_of(whole(name, space_name))[: len(expected)] == expected


@each_sampler
@each_space
def test_a_proposal_depends_on_study_seed_and_number_only(name: str, space_name: str) -> None:
    """A restart at any trial, and at any gradient step."""
    trials = whole(name, space_name)
    num_steps = 0
    for number in range(NUM_BASELINES, len(trials)):
        attributes = trials[number].user_attrs
        begun = [{METHOD: SEARCHED}]
        for key, value in attributes.items():
            if key == PLAN or key.startswith("step_"):
                begun.append({**begun[-1], key: value})
                num_steps += key != PLAN
        for left in begun:
            again = proposed(sampler_of(name, space_name), trials[:number], left)
            assert list(again.items()) == [item for item in attributes.items() if item[0] != SCORE], number
    assert (num_steps >= NUM_WINDOWS) is (name == "gradient")
    first = NUM_BASELINES + len(sampler_of(name, space_name).seeds)
    other = run(sampler_of(name, space_name, seed=1), first + 14 - NUM_BASELINES)
    assert [trial.user_attrs for trial in other[first:]] != [trial.user_attrs for trial in trials[first : first + 14]]


def test_another_process_proposes_the_same() -> None:
    code = (
        "from tests.search.test_sampler import *\n"
        "found = [[trial.user_attrs for trial in whole(name, 'piecewise')] for name in CONFIGS]\n"
        "print(json.dumps(found))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [[trial.user_attrs for trial in whole(name, "piecewise")] for name in CONFIGS]


@each_sampler
@pytest.mark.parametrize("space_name", ["longrope", "piecewise"])
def test_failed_trials_do_no_harm(name: str, space_name: str) -> None:
    sampler = sampler_of(name, space_name)
    trials = run(sampler, 40, failing=2)
    with_candidate = candidates_of(trials)
    num_failed_legs = sum(CANDIDATE not in trial.user_attrs for trial in trials[NUM_BASELINES:])
    assert (num_failed_legs > 0) is (name == "gradient")
    assert len(set(with_candidate)) == 40 - num_failed_legs
    searched = [trial.value for trial in trials[NUM_BASELINES:] if trial.state is TrialState.COMPLETE]
    assert min(searched[3:]) < min(trial.values[0] for trial in trials[:NUM_BASELINES])
    everything = [changed(trial, None, TrialState.FAIL) for trial in trials]
    found = proposed(sampler, everything)
    assert PLAN not in found and sampler.space.contains(candidates_of([trial_of(44, found, None)])[0])
    # Killed while they were asked.
    nameless = [*trials[:NUM_BASELINES], *(trial_of(number, {}, None, TrialState.FAIL) for number in range(4, 7))]
    assert sampler.space.contains(candidates_of([trial_of(7, proposed(sampler, nameless), None)])[0])


@each_sampler
@each_space
def test_a_trial_that_is_still_running_is_neither_waited_for_nor_repeated(name: str, space_name: str) -> None:
    sampler = sampler_of(name, space_name)
    trials = list(whole(name, space_name)[: NUM_BASELINES + 20])
    for number in (5, 11, 23):
        trials[number] = changed(trials[number], None, TrialState.RUNNING)
    found = proposed(sampler, trials)
    (candidate,) = candidates_of([trial_of(24, found, None)])
    assert sampler.space.contains(candidate) and candidate not in candidates_of(trials)
    # The one that is proposed for may be shown as it was asked, without anything.
    if PLAN not in found:
        assert sampler.propose([*trials, trial_of(24, {}, None, TrialState.RUNNING)], 24) == candidate


@each_sampler
@pytest.mark.parametrize(
    ("num_pairs", "num_candidates", "change"),
    [
        (2, 20, {"factor_step": 0.5}),
        (4, 32, {"factor_step": 1.0, "critical_pair": "search", "max_factor_over_ratio": 2.0}),
    ],
)
def test_a_small_space_is_searched_to_its_end(
    name: str, num_pairs: int, num_candidates: int, change: dict[str, object]
) -> None:
    config = SpaceConfig(attention_factor=1.1, retained_tokens=[0, 3], **change)  # type: ignore[arg-type]
    space = make_space(make_geometry(num_pairs), 512, config)
    sampler = made(space, CONFIGS[name])
    trials = run(sampler, space.num_candidates)
    assert len(set(candidates_of(trials))) == space.num_candidates == num_candidates
    with pytest.raises(InputError, match=f"exhausted: all its {num_candidates} candidates"):
        proposed(sampler, trials)


@each_sampler
def test_without_seeds_it_searches_all_the_same(name: str) -> None:
    sampler = made(make_space(make_geometry(), TARGET_LENGTH, SpaceConfig()), CONFIGS[name], with_seeds=False)
    assert len(set(candidates_of(run(sampler, 14)))) == 14


@each_sampler
def test_it_is_an_optuna_sampler(name: str) -> None:
    """Its parameters are those of its candidates, none as long as gradient steps are left."""
    sampler = sampler_of(name, "longrope")
    trials = whole(name, "longrope")
    study = optuna.create_study(sampler=sampler)
    for trial in trials[:NUM_BASELINES]:
        study.add_trial(optuna.trial.create_trial(value=trial.value, user_attrs=trial.user_attrs))
    for expected in trials[NUM_BASELINES : NUM_BASELINES + 12]:
        trial = study.ask()
        for key, value in expected.user_attrs.items():
            if key == PLAN or key.startswith("step_"):
                assert optuna.Trial(study, trial._trial_id).relative_params == {}
                trial.set_user_attr(key, value)
        trial = optuna.Trial(study, trial._trial_id)
        suggest(sampler.space, trial)
        (candidate,) = candidates_of([expected])
        assert trial.params == parameters(sampler.space, candidate)
        for key in (METHOD, CANDIDATE, REGIME, COST, SCORE):
            trial.set_user_attr(key, expected.user_attrs[key])
        study.tell(trial, expected.value)
    assert {**study.user_attrs, **study._storage.get_study_system_attrs(study._study_id)} == {}
    for trial, expected in zip(study.get_trials(), trials, strict=False):
        # Nothing else is kept, so nothing is pickled.
        assert trial.system_attrs == {} and trial.user_attrs == expected.user_attrs


@each_sampler
@pytest.mark.parametrize(
    "key",
    [
        "num_candidates",
        "num_population",
        "num_startup",
        "num_draws",
        "num_knots",
        "num_generations",
        "num_increments",
        "num_starts",
    ],
)
def test_counts_out_of_range_are_refused(name: str, key: str) -> None:
    if not hasattr(CONFIGS[name], key):
        return
    space = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig())
    with pytest.raises(InputError, match=f"optimizer.{key}: expected at least"):
        made(space, type(CONFIGS[name])(**{key: -1}))


@cache
def best_of(name: str, space_name: str, num_trials: int) -> list[float]:
    """The least distance for seeds 0 to 2, by the sampler's defaults, and for evolution a population that fits."""
    configs = {
        **{other: kind() for other, kind in OPTIMIZERS.items()},
        "evolution": EvolutionConfig(num_population=16, num_parents=8),
    }
    if space_name == "longrope2":  # just above the ratio from the critical pair 5 on, and nearly twice it at the end
        config, num_pairs = dataclasses.replace(SPACES[space_name], attention_factor=1.12), 16
        right = np.log(8) + 0.01 + 0.65 * (np.arange(16) >= 13)
        curve = np.where(np.arange(16) < 5, right[5] * np.arange(16) / 5, right)
    else:
        config, num_pairs, curve = SPACES[space_name], 8, LATE
    space = make_space(make_geometry(num_pairs), TARGET_LENGTH, config)
    samplers = [made(space, configs[name], seed) for seed in range(3)]
    runs = [run(sampler, num_trials, curve=curve) for sampler in samplers]
    of_seeds = [min(trial.values[0] for trial in trials[:NUM_BASELINES]) for trials in runs]
    assert min(of_seeds) > (0.4 if space_name != "longrope2" else 0.06)  # the best of linear, NTK, YaRN
    return [min(trial.values[0] for trial in trials[NUM_BASELINES:]) for trials in runs]


@pytest.mark.parametrize(
    ("name", "space_name", "num_trials"),
    [
        ("evolution", "longrope", 120),
        ("tpe", "longrope", 60),
        ("cmaes", "longrope", 110),
        ("blockwise", "longrope", 110),
        ("evolution", "longrope2", 100),
        ("gradient", "longrope", 20),
        ("gradient", "longrope2", 60),
        ("blockwise", "longrope2", 60),
        ("blockwise", "piecewise", 110),
        pytest.param("evolution", "piecewise", 200, marks=pytest.mark.slow),
        pytest.param("tpe", "piecewise", 160, marks=pytest.mark.slow),
        pytest.param("cmaes", "piecewise", 160, marks=pytest.mark.slow),
    ],
)
def test_it_comes_nearer_to_the_optimum_than_random_draws(name: str, space_name: str, num_trials: int) -> None:
    """At most half of what as many random candidates leave of the distance, in the mean over three seeds."""
    assert np.mean(best_of(name, space_name, num_trials)) < 0.5 * np.mean(best_of("random", space_name, num_trials))


def test_a_step_that_is_no_number_is_refused() -> None:
    space = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig())
    for sigma in (0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="initial_sigma"):
            made(space, CMAESConfig(initial_sigma=sigma))


@pytest.mark.parametrize("name", ["evolution", "tpe", "cmaes", "blockwise"])
def test_what_breaks_the_guard_ranks_last(name: str) -> None:
    """Two studies that differ in nothing but this: in one the better half of the candidates is not allowed."""
    sampler = sampler_of(name, "longrope")
    free = whole(name, "longrope")
    middle = float(np.median([trial.values[0] for trial in free[NUM_BASELINES:]]))
    guarded, last = list(free[:NUM_BASELINES]), list(free[:NUM_BASELINES])
    for trial in free[NUM_BASELINES:]:
        excess = middle - trial.values[0]
        guarded.append(trial_of(trial.number, trial.user_attrs, trial.values[0], excess=excess))
        value = 10 + middle - trial.values[0] if excess > 0 else trial.values[0]
        last.append(changed(trial, value))  # the same order, by values alone
    for number in (len(free), len(free) + 3):
        assert sampler.propose(guarded, number) == sampler.propose(last, number)
        assert sampler.propose(guarded, number) != sampler.propose(free, number)
