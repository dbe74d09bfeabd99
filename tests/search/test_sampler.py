"""One suite for all samplers: what each of them keeps in every space."""

import dataclasses
import json
import subprocess
import sys
from functools import cache

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.search.baselines import baseline_regimes
from ropesearch.search.config import (
    OPTIMIZERS,
    BlockwiseConfig,
    CMAESConfig,
    EvolutionConfig,
    OptimizerConfig,
    RandomConfig,
    SpaceConfig,
    TPEConfig,
)
from ropesearch.search.optimizers import make_sampler
from ropesearch.search.parameters import parameters
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.space import Candidate
from ropesearch.search.spaces import make_space
from ropesearch.search.trials import CANDIDATE, GUARD, candidate_json
from tests.search.analytic import TARGET_LENGTH, make_geometry

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
}
each_sampler = pytest.mark.parametrize("name", CONFIGS)
each_space = pytest.mark.parametrize("space_name", SPACES)
NUM_TRIALS = 26


def sampler_of(name: str, space_name: str, seed: int = 0, num_baselines: int = 0) -> CandidateSampler:
    space = make_space(make_geometry(), TARGET_LENGTH, SPACES[space_name])
    seeds = baseline_regimes(space.geometry, TARGET_LENGTH)[1:]
    return make_sampler(space, CONFIGS[name], seed, seeds, num_baselines)


PLACES = np.linspace(-1, 1, 8)
LATE = np.log(7) / (1 + np.exp(-8 * (PLACES - 0.15)))  # log factors that rise late, as good tables do
CURVES = {8: LATE, 2: LATE[[0, -1]], 4: LATE[::2]}


def distance(regime: Regime, curve: NDArray[np.float64] | None = None) -> float:
    """Least at a curve that no seed hits."""
    aim = CURVES[len(regime.factors)] if curve is None else curve
    off = ((np.log(regime.factors) - aim) ** 2).mean()
    return float(off + 20 * (regime.attention_factor - 1.12) ** 2 + 1e-3 * regime.retained_tokens)


def trial_of(
    number: int,
    candidate: Candidate | None,
    value: float | None,
    state: TrialState = TrialState.COMPLETE,
    excess: float | None = None,
) -> FrozenTrial:
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=value if state is TrialState.COMPLETE else None,
        datetime_start=None,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={} if candidate is None else {CANDIDATE: candidate_json(candidate)},
        system_attrs={} if excess is None else {f"constraints:{GUARD}": excess},
        intermediate_values={},
    )


def run(
    sampler: CandidateSampler, num_trials: int, failing: int = 0, curve: NDArray[np.float64] | None = None
) -> list[FrozenTrial]:
    """A study of so many trials; of the candidates after the seeds every `failing`-th fails."""
    trials: list[FrozenTrial] = []
    for number in range(num_trials):
        candidate = sampler.propose(trials, number)
        fails = failing and number > 3 and number % failing == 0
        state = TrialState.FAIL if fails else TrialState.COMPLETE
        trials.append(trial_of(number, candidate, distance(sampler.space.regime(candidate), curve), state))
    return trials


@cache
def whole(name: str, space_name: str) -> list[FrozenTrial]:
    return run(sampler_of(name, space_name), NUM_TRIALS)


def candidates_of(trials: list[FrozenTrial]) -> list[Candidate]:
    return [
        Candidate(tuple(value[0]), value[1], value[2]) for value in (trial.user_attrs[CANDIDATE] for trial in trials)
    ]


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


@each_sampler
@each_space
def test_the_seeds_come_first(name: str, space_name: str) -> None:
    sampler = sampler_of(name, space_name, num_baselines=4)
    geometry = sampler.space.geometry
    given = [method(geometry, TARGET_LENGTH) for method in (methods.linear, methods.ntk, methods.yarn)]
    expected = list(dict.fromkeys(sampler.space.repair(regime) for regime in given))
    trials: list[FrozenTrial] = []
    for number in range(4, 4 + len(expected)):
        candidate = sampler.propose(trials, number)
        trials.append(trial_of(number, candidate, 1.0))
    assert candidates_of(trials) == expected


@each_sampler
@each_space
def test_a_proposal_depends_on_study_seed_and_number_only(name: str, space_name: str) -> None:
    trials = whole(name, space_name)
    for number in range(NUM_TRIALS):  # a restart at any trial
        again = sampler_of(name, space_name).propose(trials[:number], number)
        assert again == candidates_of(trials)[number], number
    first = len(sampler_of(name, space_name).seeds)
    other = run(sampler_of(name, space_name, seed=1), first + 6)
    assert candidates_of(other)[first:] != candidates_of(trials)[first : first + 6]


def test_another_process_proposes_the_same() -> None:
    code = (
        "from tests.search.test_sampler import *\n"
        "found = [[trial.user_attrs[CANDIDATE] for trial in whole(name, 'piecewise')] for name in CONFIGS]\n"
        "print(json.dumps(found))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [
        [trial.user_attrs[CANDIDATE] for trial in whole(name, "piecewise")] for name in CONFIGS
    ]


@each_sampler
@pytest.mark.parametrize("space_name", ["longrope", "piecewise"])
def test_failed_trials_do_no_harm(name: str, space_name: str) -> None:
    sampler = sampler_of(name, space_name)
    trials = run(sampler, 40, failing=3)
    assert len(set(candidates_of(trials))) == 40
    scored = [trial.value for trial in trials if trial.state is TrialState.COMPLETE]
    assert min(scored[3:]) < min(scored[:3])  # it still finds better than the seeds
    everything = [trial_of(trial.number, candidates_of([trial])[0], None, TrialState.FAIL) for trial in trials]
    assert sampler.space.contains(sampler.propose(everything, 40))
    nameless = [trial_of(number, None, None, TrialState.FAIL) for number in range(3)]  # killed while it was asked
    assert sampler.space.contains(sampler.propose(nameless, 3))


@each_sampler
@each_space
def test_a_trial_that_is_still_running_is_neither_waited_for_nor_repeated(name: str, space_name: str) -> None:
    sampler = sampler_of(name, space_name)
    trials = list(whole(name, space_name)[:20])
    for number in (1, 7, 19):
        trials[number] = trial_of(number, candidates_of(trials)[number], None, TrialState.RUNNING)
    found = sampler.propose(trials, 20)
    assert sampler.space.contains(found) and found not in candidates_of(trials)
    asked = trial_of(20, None, None, TrialState.RUNNING)  # the one that is proposed for, as Optuna shows it
    assert sampler.propose([*trials, asked], 20) == found


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
    sampler = make_sampler(space, CONFIGS[name], 0, baseline_regimes(space.geometry, 512)[1:], 0)
    trials = run(sampler, space.num_candidates)
    assert len(set(candidates_of(trials))) == space.num_candidates == num_candidates
    with pytest.raises(InputError, match=f"exhausted: all its {num_candidates} candidates"):
        sampler.propose(trials, num_candidates)


@each_sampler
def test_without_seeds_it_searches_all_the_same(name: str) -> None:
    sampler = make_sampler(make_space(make_geometry(), TARGET_LENGTH, SpaceConfig()), CONFIGS[name], 0, [], 0)
    assert len(set(candidates_of(run(sampler, 14)))) == 14


@each_sampler
def test_it_is_an_optuna_sampler(name: str) -> None:
    sampler = sampler_of(name, "longrope")
    study = optuna.create_study(sampler=sampler)
    for number in range(12):
        trial = study.ask(sampler.infer_relative_search_space(study, None))
        expected = candidates_of(whole(name, "longrope"))[number]
        assert trial.params == parameters(sampler.space, expected)
        trial.set_user_attr(CANDIDATE, candidate_json(expected))
        study.tell(trial, distance(sampler.space.regime(expected)))
    state = {**study.user_attrs, **study._storage.get_study_system_attrs(study._study_id)}
    for trial in study.get_trials():
        state |= trial.user_attrs | trial.system_attrs
    assert set(state) == {CANDIDATE}  # nothing else is kept, so nothing is pickled


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
    ],
)
def test_counts_out_of_range_are_refused(name: str, key: str) -> None:
    if not hasattr(CONFIGS[name], key):
        return
    space = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig())
    with pytest.raises(InputError, match=f"optimizer.{key}: expected at least"):
        make_sampler(space, type(CONFIGS[name])(**{key: -1}), 0, [], 0)


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
    seeds = baseline_regimes(space.geometry, TARGET_LENGTH)[1:]
    samplers = [make_sampler(space, configs[name], seed, seeds, 0) for seed in range(3)]
    runs = [run(sampler, num_trials, curve=curve) for sampler in samplers]
    of_seeds = [min(trial.values[0] for trial in trials[: len(samplers[0].seeds)]) for trials in runs]
    assert min(of_seeds) > (0.4 if space_name != "longrope2" else 0.06)  # the best of linear, NTK, YaRN
    return [min(trial.values[0] for trial in trials) for trials in runs]


@pytest.mark.parametrize(
    ("name", "space_name", "num_trials"),
    [
        ("evolution", "longrope", 120),
        ("tpe", "longrope", 60),
        ("cmaes", "longrope", 110),
        ("blockwise", "longrope", 110),
        ("evolution", "longrope2", 100),
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
            make_sampler(space, CMAESConfig(initial_sigma=sigma), 0, [], 0)


@pytest.mark.parametrize("name", ["evolution", "tpe", "cmaes", "blockwise"])
def test_what_breaks_the_guard_ranks_last(name: str) -> None:
    """Two studies that differ in nothing but this: in one the better half of the candidates is not allowed."""
    sampler = sampler_of(name, "longrope")
    free = whole(name, "longrope")
    middle = float(np.median([trial.values[0] for trial in free]))
    candidates = candidates_of(free)
    guarded = [
        trial_of(trial.number, candidates[trial.number], trial.values[0], excess=middle - trial.values[0])
        for trial in free
    ]
    last = [
        trial_of(
            trial.number, candidates[trial.number], 10 + middle - trial.values[0] if excess > 0 else trial.values[0]
        )
        for trial in free
        for excess in [middle - trial.values[0]]
    ]  # the same order, by values alone
    for number in (NUM_TRIALS, NUM_TRIALS + 3):
        assert sampler.propose(guarded, number) == sampler.propose(last, number)
        assert sampler.propose(guarded, number) != sampler.propose(free, number)
