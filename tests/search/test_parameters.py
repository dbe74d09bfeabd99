from collections.abc import Mapping
from typing import Any

import optuna
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.search.config import SpaceConfig
from ropesearch.search.parameters import distributions, parameters, suggest
from ropesearch.search.space import Candidate, Space
from ropesearch.search.spaces import make_space
from tests.search.analytic import TARGET_LENGTH, make_geometry
from tests.search.test_space import candidates

SPACE = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig(retained_tokens=[0, 4, 8]))


def candidate_of(space: Space, values: Mapping[str, Any]) -> Candidate:
    """The candidate of any sampler's parameters, which need not be non-decreasing (see Space.decode)."""
    return space.decode(
        [
            dimension.choices.index(values[dimension.name]) if dimension.choices else values[dimension.name]
            for dimension in space.dimensions
        ]
    )


@settings(deadline=None)
@given(st.data())
def test_parameters_stand_for_their_candidate(data: st.DataObject) -> None:
    candidate = data.draw(candidates(SPACE))
    values = parameters(SPACE, candidate)
    assert candidate_of(SPACE, values) == candidate
    for name, distribution in distributions(SPACE).items():
        assert distribution._contains(distribution.to_internal_repr(values[name]))


def test_the_distributions_are_the_grid() -> None:
    found = distributions(SPACE)
    assert list(found) == [*(f"factor_{pair}" for pair in range(8)), "attention_factor", "retained_tokens"]
    assert found["factor_3"] == optuna.distributions.FloatDistribution(1.0, 10.0, step=0.01)
    assert found["attention_factor"] == optuna.distributions.FloatDistribution(1.0, 1.5, step=0.001)
    assert found["retained_tokens"] == optuna.distributions.CategoricalDistribution((0, 4, 8))
    held = make_space(make_geometry(12), TARGET_LENGTH, SpaceConfig(attention_factor="yarn"))
    assert list(distributions(held)) == [f"factor_{pair:02d}" for pair in range(12)]


def test_samplers_of_optuna_itself_can_search_the_space() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask()
    suggest(SPACE, trial)
    assert SPACE.contains(candidate_of(SPACE, trial.params))
