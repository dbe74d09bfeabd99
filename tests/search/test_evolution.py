import subprocess
import sys

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.search import evolution
from ropesearch.search.baselines import baseline_regimes
from ropesearch.search.config import EvolutionConfig, SpaceConfig
from ropesearch.search.evolution import EvolutionSampler
from ropesearch.search.parameters import parameters
from ropesearch.search.space import Candidate, Space
from ropesearch.search.spaces import make_space
from ropesearch.search.trials import CANDIDATE, ESTIMATE, candidate_json, recorded_candidate
from ropesearch.seeding import stream
from tests.search.analytic import EVOLUTION, TARGET_LENGTH, distance, make_geometry

GENERATION = EVOLUTION.num_mutations + EVOLUTION.num_crossovers
SPACE = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig())
SEEDS = baseline_regimes(SPACE.geometry, TARGET_LENGTH)[1:]


def make_sampler(seed: int = 0, space: Space = SPACE) -> EvolutionSampler:
    return EvolutionSampler(space, EVOLUTION, seed, baseline_regimes(space.geometry, space.target_length)[1:], 0)


def make_trial(
    number: int, candidate: Candidate | None, value: float | None = 1.0, state: TrialState = TrialState.COMPLETE
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
        system_attrs={},
        intermediate_values={},
    )


def run(sampler: EvolutionSampler, num_trials: int) -> list[FrozenTrial]:
    trials: list[FrozenTrial] = []
    for number in range(num_trials):
        candidate = sampler.propose(trials, number)
        trials.append(make_trial(number, candidate, distance(sampler.space.regime(candidate))))
    return trials


def candidates_of(trials: list[FrozenTrial]) -> list[object]:
    return [trial.user_attrs[CANDIDATE] for trial in trials]


def test_defaults_are_the_papers() -> None:
    sampler = EvolutionSampler(SPACE, EvolutionConfig(), 0, SEEDS, 0)
    assert sampler.num_candidates == 1344
    assert EvolutionConfig().mutation_probability == 0.3


def test_the_seeds_come_first_and_are_the_true_methods() -> None:
    sampler = make_sampler()
    first = [sampler.propose(run(sampler, number), number) for number in range(3)]
    geometry = SPACE.geometry
    given = [method(geometry, TARGET_LENGTH) for method in (methods.linear, methods.ntk, methods.yarn)]
    assert first == [SPACE.repair(regime) for regime in given]
    for candidate, regime in zip(first, given, strict=True):
        found = SPACE.regime(candidate)
        assert np.abs(np.subtract(found.factors, regime.factors)).max() <= 0.005 + 1e-12
        assert abs(found.attention_factor - regime.attention_factor) <= 0.0005 + 1e-12


def test_no_candidate_is_proposed_twice_and_all_lie_in_the_space() -> None:
    trials = run(make_sampler(), 120)
    found = [Candidate(tuple(value[0]), value[1], value[2]) for value in candidates_of(trials)]  # type: ignore[index]
    assert len(set(found)) == 120
    assert all(SPACE.contains(candidate) for candidate in found)


def test_another_seed_gives_other_candidates() -> None:
    assert candidates_of(run(make_sampler(0), 40))[3:] != candidates_of(run(make_sampler(1), 40))[3:]


def test_a_proposal_depends_on_study_seed_and_number_only() -> None:
    trials = run(make_sampler(), 40)
    for number in (1, 5, 20, 33):
        again = make_sampler()  # one that has proposed nothing yet
        assert candidate_json(again.propose(trials[:number], number)) == candidates_of(trials)[number]


def test_another_process_proposes_the_same() -> None:
    code = (
        "from tests.search.test_evolution import *\n"
        "import json; print(json.dumps(candidates_of(run(make_sampler(), 40))))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(candidates_of(run(make_sampler(), 40)))


def test_parents_come_from_before_the_generation() -> None:
    sampler = make_sampler()
    first = EVOLUTION.num_population + GENERATION
    trials = run(sampler, first + GENERATION)
    changed = trials[:first] + [
        make_trial(trial.number, None, -1.0) for trial in trials[first:]
    ]  # same generation: whatever came out of it does not matter
    for number in range(first, first + GENERATION):
        assert sampler.propose(changed[:number], number) == sampler.propose(trials[:number], number)
    number = first + GENERATION
    assert sampler.propose(changed, number) != sampler.propose(trials, number)


def test_while_others_run_parents_come_from_all_that_is_finished() -> None:
    sampler = make_sampler()
    first = EVOLUTION.num_population
    trials = run(sampler, first + 4)
    best = Candidate((3, 5, 7, 11, 13, 17, 19, 23), 3, 0)
    running = [*trials[:first], make_trial(first, best, -100.0), make_trial(first + 1, None, state=TrialState.RUNNING)]
    assert sampler.propose(running, first + 2) != sampler.propose(trials[: first + 2], first + 2)
    alone = EvolutionSampler(SPACE, EvolutionConfig(num_population=3, num_parents=2), 0, SEEDS, 0)
    seeds = alone.seeds
    known = [make_trial(number, candidate, 1.0) for number, candidate in enumerate(seeds)]
    new = [make_trial(3, best, -1.0), make_trial(4, None, state=TrialState.RUNNING)]
    children = [alone.propose(known + new, number) for number in range(5, 60)]
    assert sum(np.not_equal(child.factor_steps, best.factor_steps).sum() <= 4 for child in children) > 20


def test_stopped_candidates_are_parents_by_what_they_looked_like() -> None:
    first = EVOLUTION.num_population
    trials = run(make_sampler(), first)
    for estimate, place in ((-1.0, 0), (1e9, first)):
        stopped = trials[3]
        stopped = make_trial(3, recorded_candidate(stopped), state=TrialState.PRUNED)
        stopped.set_user_attr(ESTIMATE, estimate)
        ranks: list[list[Candidate]] = []

        def offspring(space: Space, ranked: list[Candidate], *rest: object, of: list[object] = ranks) -> Candidate:  # type: ignore[assignment]
            of.append(list(ranked))
            return Candidate((1, 2, 3, 4, 5, 6, 7, 8), 0, 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evolution, "offspring", offspring)
            make_sampler().propose([*trials[:3], stopped, *trials[4:]], first)
        others = [recorded_candidate(trial) for trial in sorted(trials, key=lambda trial: trial.value)]
        others.remove(recorded_candidate(stopped))
        others.insert(place, recorded_candidate(stopped))
        assert ranks == [others[: EVOLUTION.num_parents]]


def test_failed_trials_have_no_children() -> None:
    sampler = make_sampler()
    first = EVOLUTION.num_population
    trials = run(sampler, first)
    failed = [*trials]
    failed[5] = make_trial(5, None, state=TrialState.FAIL)
    lowest = [*trials]
    lowest[5] = make_trial(5, None, 0.0)
    assert sampler.propose(failed, first) == sampler.propose(lowest, first)  # nothing to inherit from either
    everything = [
        make_trial(trial.number, Candidate(tuple(trial.user_attrs[CANDIDATE][0]), 0, 0), state=TrialState.FAIL)
        for trial in trials
    ]
    assert SPACE.contains(sampler.propose(everything, first))


def test_an_exhausted_space_is_reported() -> None:
    space = make_space(make_geometry(2), 512, SpaceConfig(factor_step=0.5, attention_factor=1.1))
    sampler = make_sampler(space=space)
    trials = run(sampler, space.num_candidates)
    assert len({str(value) for value in candidates_of(trials)}) == space.num_candidates == 10
    with pytest.raises(InputError, match="exhausted: all its 10 candidates"):
        sampler.propose(trials, 10)


def test_it_is_an_optuna_sampler() -> None:
    sampler = make_sampler()
    study = optuna.create_study(sampler=sampler)
    for number in range(30):
        trial = study.ask(sampler.infer_relative_search_space(study, None))
        expected = sampler.propose(study.get_trials(), number)
        assert trial.params == parameters(SPACE, expected)
        trial.set_user_attr(CANDIDATE, candidate_json(expected))
        study.tell(trial, distance(SPACE.regime(expected)))


def random_search(space: Space, seed: int, num_trials: int) -> float:
    rng = stream(seed, "test")
    drawn = [space.decode(rng.uniform(1, [*[10] * 8, 1.5])) for _ in range(num_trials)]
    return min(distance(space.regime(candidate)) for candidate in drawn)


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_the_optimum_where_random_search_does_not(seed: int) -> None:
    sampler = EvolutionSampler(SPACE, EvolutionConfig(num_population=16, num_parents=8), seed, SEEDS, 0)
    values = [trial.values[0] for trial in run(sampler, 250)]
    assert min(values[:3]) > 0.97  # the best seed
    assert min(values) < 0.1
    assert random_search(SPACE, seed, 2000) > 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_population": 0}, "num_population"),
        ({"num_parents": 1}, "num_parents"),
        ({"num_mutations": -1}, "num_mutations"),
        ({"num_mutations": 0, "num_crossovers": 0}, "at least one child per generation"),
        ({"num_generations": -1}, "num_generations"),
        ({"mutation_probability": 0.0}, "mutation_probability"),
        ({"mutation_probability": float("nan")}, "mutation_probability"),
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EvolutionSampler(SPACE, EvolutionConfig(**change), 0, SEEDS, 0)  # type: ignore[arg-type]
