"""The space as Optuna's parameters, so that its dashboard and any of its samplers can be used."""

from typing import Any

from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from ropesearch.search.space import Candidate, Space


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One for each of the space's dimensions, in their order."""
    return {
        dimension.name: CategoricalDistribution(dimension.choices)
        if dimension.choices
        else FloatDistribution(dimension.low, dimension.high, step=dimension.step)
        for dimension in space.dimensions
    }


def parameters(space: Space, candidate: Candidate) -> dict[str, Any]:
    """The values of `distributions(space)` that stand for `candidate`."""
    return {
        dimension.name: dimension.choices[int(value)] if dimension.choices else value
        for dimension, value in zip(space.dimensions, space.encode(candidate).tolist(), strict=True)
    }


def suggest(space: Space, trial: Trial) -> None:
    """Have `trial` take a value for every parameter, from its sampler."""
    for dimension in space.dimensions:
        if dimension.choices:
            trial.suggest_categorical(dimension.name, dimension.choices)
        else:
            trial.suggest_float(dimension.name, dimension.low, dimension.high, step=dimension.step)
