"""What a search can be told. Standard library only; values are checked where they are used, with an InputError."""

import math
from dataclasses import dataclass
from enum import Enum

from ropesearch.errors import InputError
from ropesearch.settings import setting


@dataclass(kw_only=True)
class SpaceConfig:
    """The set of candidates: factors that do not decrease with the pair, attention factor, retained tokens."""

    factor_step: float = setting(0.01, "distance between two neighbouring factors of a pair, in factor units")
    max_factor_over_ratio: float = setting(1.25, "the largest factor, as a multiple of target_length / original_length")
    num_pairs_at_one: int | str = setting(
        0,
        "retained pairs at the fast end: how many first pairs are held at factor 1, or 'search' = searched with the "
        "factors",
    )
    num_pairs_at_ratio: int | str = setting(
        0,
        "retained pairs at the slow end: how many last pairs are held at target_length / original_length, or 'search'; "
        "other than 0 it needs max_factor_over_ratio=1, as factors do not decrease",
    )
    critical_pair: int | str | None = setting(
        None,
        "null = every pair has a factor of its own; a pair = LongRoPE2's space: factors from the ratio up from that "
        "pair on, and an NTK curve before it; 'search' = that pair is searched with the factors, from the first of "
        "fewer than ten turns in original_length to the first of less than one",
    )
    attention_factor: str | float = setting(
        "search",
        "'search' = searched with the factors; 'longrope' = sqrt(1 + ln ratio / ln original_length); 'yarn' = "
        "0.1 ln ratio + 1; a number = held at it",
    )
    attention_factor_max: float = setting(1.5, "the largest attention factor that is searched (the smallest is 1)")
    attention_factor_step: float = setting(
        0.001,
        "distance between two neighbouring attention factors when it is searched",
    )
    retained_tokens: list[int] = setting(
        [0],
        "how many first tokens may keep their unscaled angles, in tokens; more than one value = searched "
        "(LongRoPE: 0,1,2,4,8,12,16,20,24,28,32,64,128,256)",
    )


@dataclass(kw_only=True)
class OptimizerConfig:
    """What a sampler can be told; each sampler has its own keys."""


@dataclass(kw_only=True)
class EvolutionConfig(OptimizerConfig):
    """LongRoPE's evolution; the defaults are the paper's."""

    num_population: int = setting(
        64, "candidates before the first generation: the seeds (linear, NTK, YaRN, given tables) and mutants of these"
    )
    num_parents: int = setting(32, "best candidates of everything finished that a generation takes its parents from")
    num_mutations: int = setting(16, "mutants per generation")
    num_crossovers: int = setting(16, "crossovers per generation")
    mutation_probability: float = setting(0.3, "probability that a mutation or crossover touches a pair, in (0, 1]")
    num_generations: int = setting(
        40,
        "generations after the first population; 64 + 40 * 32 = 1,344 candidates by default",
    )


@dataclass(kw_only=True)
class RandomConfig(OptimizerConfig):
    """Independent draws, the measure of what the other samplers are worth."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")


@dataclass(kw_only=True)
class TPEConfig(OptimizerConfig):
    """Optuna's tree-structured Parzen estimator."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")
    num_startup: int = setting(32, "scored candidates before the estimator: the seeds, and draws near the best of them")
    num_draws: int = setting(24, "draws from the density of good candidates, of which the most promising is proposed")


@dataclass(kw_only=True)
class CMAESConfig(OptimizerConfig):
    """CMA-ES, begun at the best seed."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")
    num_population: int = setting(8, "scored candidates per generation")
    initial_sigma: float = setting(
        0.5, "standard deviation of the first generation, in those of a random candidate's coordinates"
    )


@dataclass(kw_only=True)
class GradientConfig(OptimizerConfig):
    """Stochastic gradient steps on factors and attention factor, each on one window, then an evolutionary polish."""

    num_candidates: int = setting(
        32, "candidates after which the search ends; those before the polish cost gradient steps besides"
    )
    num_starts: int = setting(2, "how many of the baselines, the best first, descents begin at")


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "evolution": EvolutionConfig,
    "random": RandomConfig,
    "tpe": TPEConfig,
    "cmaes": CMAESConfig,
    "gradient": GradientConfig,
}


@dataclass(kw_only=True)
class BudgetConfig:
    """When a search ends: at the first limit reached, counted over the whole study; null = no such limit."""

    num_trials: int | None = setting(None, "candidates (the baselines are not counted)")
    forward_equivalent_tokens: int | None = setting(
        None,
        "tokens through the model, forward passes; the baselines count",
    )
    minutes: float | None = setting(None, "minutes of scoring, summed over trials and workers; the baselines count")
    patience_trials: int | None = setting(None, "candidates in a row without a better score")

    def check(self) -> None:
        """Raise InputError unless every limit is null or a number above 0."""
        for name in ("num_trials", "forward_equivalent_tokens", "minutes", "patience_trials"):
            limit = getattr(self, name)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise InputError(f"budget.{name}: expected a number above 0, or null for no limit, got {limit}")


@dataclass(kw_only=True)
class SelectionConfig:
    """The choice among the finalists."""

    num_finalists: int = setting(
        8,
        "best searched candidates that are scored again, beside the baselines, on the selection windows",
    )

    def check(self) -> None:
        """Raise InputError unless there is at least one finalist."""
        if self.num_finalists < 1:
            raise InputError(f"selection.num_finalists: expected at least 1, got {self.num_finalists}")


class RacingMark(Enum):
    """Which finished candidate a new one has to reach."""

    none = "none"
    parents = "parents"
    finalists = "finalists"


@dataclass(kw_only=True)
class RacingConfig:
    """When the scoring of a hopeless candidate is stopped before its last window."""

    mark: RacingMark = setting(
        RacingMark.parents,
        "a candidate is stopped when it is clearly worse than: parents = the last of those that later candidates are "
        "made from, and of the finalists; finalists = the last finalist so far; none = never",
    )


class StorageName(Enum):
    """Where a study can be kept."""

    journal = "journal"


@dataclass(kw_only=True)
class StorageConfig:
    """Where the study is kept."""

    name: StorageName = setting(
        StorageName.journal, "journal = Optuna's journal file, study.journal in the run folder (one machine)"
    )
