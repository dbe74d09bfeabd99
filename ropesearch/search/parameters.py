"""The space as Optuna's parameters, so that its dashboard and any of its samplers can be used."""

import math
from collections.abc import Mapping
from typing import Any

from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from ropesearch.search.space import Candidate, Space


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One float for each pair, then attention_factor and retained_tokens if searched: the order of `encode`."""
    width = len(str(space.num_pairs - 1))
    highest = float(space.factor_grid[-1])
    even = math.isclose(highest, 1 + space.max_factor_steps * space.factor_step)  # else the ratio lies off the grid
    found: dict[str, BaseDistribution] = {
        f"factor_{pair:0{width}d}": FloatDistribution(1.0, highest, step=space.factor_step if even else None)
        for pair in range(space.num_pairs)
    }
    if space.searches_attention:
        highest = float(space.attention_grid[-1])
        found["attention_factor"] = FloatDistribution(1.0, highest, step=space.attention_step)
    if len(space.retained_choices) > 1:
        found["retained_tokens"] = CategoricalDistribution(space.retained_choices)
    return found


def parameters(space: Space, candidate: Candidate) -> dict[str, Any]:
    """The values of `distributions(space)` that stand for `candidate`."""
    values: list[Any] = space.encode(candidate).tolist()
    if len(space.retained_choices) > 1:
        values[-1] = candidate.retained_tokens
    return dict(zip(distributions(space), values, strict=True))


def candidate_of(space: Space, values: Mapping[str, Any]) -> Candidate:
    """The candidate of any sampler's parameters, which need not be non-decreasing (see Space.decode)."""
    vector = [values[name] for name in distributions(space)]
    if len(space.retained_choices) > 1:
        vector[-1] = space.retained_choices.index(vector[-1])
    return space.decode(vector)


def suggest(space: Space, trial: Trial) -> None:
    """Have `trial` take a value for every parameter, from its sampler."""
    for name, distribution in distributions(space).items():
        if isinstance(distribution, FloatDistribution):
            trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step)
        else:
            trial.suggest_categorical(name, space.retained_choices)
