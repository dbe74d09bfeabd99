"""An objective without a model, and a worker process on it.

`python -m tests.search.analytic FOLDER NUM_TRIALS DELAY [OPTIMIZER]`: the worker appends a line to FOLDER/calls for
every scoring or gradient step that it begins and for every one that it ends, and one, "ready", before it waits for
FOLDER/hold to be taken away.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ropesearch.errors import ScoringError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.search.baselines import baseline_regimes, seed_regimes
from ropesearch.search.config import (
    BudgetConfig,
    EvolutionConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    SelectionConfig,
    SpaceConfig,
)
from ropesearch.search.optimizers import make_sampler as sampler_of
from ropesearch.search.presence import working
from ropesearch.search.run import SearchResult, run_search
from ropesearch.search.sampler import CandidateSampler
from ropesearch.search.spaces import make_space
from ropesearch.search.study import open_study
from ropesearch.search.trials import Step

TARGET_LENGTH = 2048
NUM_WINDOWS = 2  # of the scores below
FINGERPRINTS = {"weights": "sha256:00", "windows": {"search": "01", "selection": "02"}, "seed": 0}
EVOLUTION = EvolutionConfig(num_population=8, num_parents=4, num_mutations=3, num_crossovers=3)


def make_geometry(num_pairs: int = 8, original_length: int = 256) -> Geometry:
    return Geometry(
        model_type="llama",
        head_dim=2 * num_pairs,
        rotary_dim=2 * num_pairs,
        original_length=original_length,
        rope_theta=10000.0,
    )


BASELINES = baseline_regimes(make_geometry(), TARGET_LENGTH)
SEEDS = seed_regimes(BASELINES)


def make_sampler(
    seed: int = 0, optimizer: OptimizerConfig = EVOLUTION, num_baselines: int = 4, **space: object
) -> CandidateSampler:
    """A sampler with the paper's seeds."""
    made = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig(**space))  # type: ignore[arg-type]
    return sampler_of(made, optimizer, seed, SEEDS, num_baselines, NUM_WINDOWS, Objective(), RacingConfig())


def make_score(nats_per_token: float) -> Score:
    """Two windows of two blocks of four tokens; the two windows differ."""
    nats = nats_per_token * 4 * np.array([[0.5, 1.5], [0.75, 1.25]])
    return Score(nats=nats, tokens=np.full((2, 2), 4), block_edges=np.array([0, 4, 8]))


def distance(regime: Regime) -> float:
    """A separable quadratic in log factors and attention factor, least at a ramp that no method hits."""
    ramp = np.linspace(0.1, math.log(9), len(regime.factors))
    return float(((np.log(regime.factors) - ramp) ** 2).sum()) + 20 * (regime.attention_factor - 1.25) ** 2


def evaluate(regime: Regime, split: str) -> Score:
    """Nats that fall towards the optimum; a fifth of the searched regimes, known by their values, cannot be scored."""
    if regime.name == "searched" and round(100 * sum(regime.factors)) % 5 == 0:
        raise ScoringError("nats are not a number")
    return make_score((1.0 if split == "search" else 1.5) + distance(regime))


def differentiate(regime: Regime, window: int, guard_weight: float = 0.0) -> Step:
    """As `evaluate` on one of the two windows, which differ by a slope; some regimes, known by their values, fail."""
    if round(1e6 * sum(regime.factors)) % 13 == 0:
        raise ScoringError("a gradient is not finite")
    logs = np.log(regime.factors)
    ramp = np.linspace(0.1, math.log(9), len(logs))
    slope = 0.2 if window % 2 else -0.2
    by_attention = 40 * (regime.attention_factor - 1.25) * regime.attention_factor
    return Step(
        window=window,
        nats_per_token=1 + distance(regime) + slope * float(logs.sum()),
        gradient=(*(2 * (logs - ramp) + slope).tolist(), by_attention),
    )


def run(
    folder: Path,
    num_trials: int = 30,
    seed: int = 0,
    score: object = evaluate,
    optimizer: OptimizerConfig = EVOLUTION,
    **changes: object,
) -> SearchResult:
    arguments: dict[str, object] = {
        "differentiate": differentiate,
        "step_cost_tokens": 32,
        "baselines": BASELINES,
        "cost_tokens": 16,
        "budget": BudgetConfig(num_trials=num_trials),
        "selection": SelectionConfig(num_finalists=3),
    }
    return search_in(folder, make_sampler(seed, optimizer), score, **(arguments | changes))


def search_in(
    folder: Path,
    sampler: CandidateSampler,
    score: Any,
    *,
    fingerprints: Any = FINGERPRINTS,
    objective: Any = Objective(),  # noqa: B008
    lease_seconds: Any = 60.0,
    **arguments: Any,
) -> SearchResult:
    """Work on the search in `folder` as a worker of its own."""
    opened = open_study(folder, fingerprints, sampler, objective.num_values)
    with working(folder, lease_seconds) as presence:
        return run_search(opened, sampler, score, presence=presence, objective=objective, **arguments)


def main(folder: str, num_trials: str, delay: str, optimizer: str = "evolution") -> None:
    calls = os.open(Path(folder) / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def slow(function: Callable[..., Any], regime: Regime, of: str | int, *rest: float) -> Any:
        key = f"{of} {regime.factors} {regime.attention_factor}"
        os.write(calls, f"begin {key}\n".encode())
        time.sleep(float(delay))
        try:
            return function(regime, of, *rest)
        finally:
            os.write(calls, f"end {key}\n".encode())

    os.write(calls, b"ready\n")
    while (Path(folder) / "hold").exists():
        time.sleep(0.01)
    run(
        Path(folder),
        int(num_trials),
        score=partial(slow, evaluate),
        differentiate=partial(slow, differentiate),
        optimizer={"evolution": EVOLUTION, "gradient": GradientConfig(num_starts=2)}[optimizer],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
