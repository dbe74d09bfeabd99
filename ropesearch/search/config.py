"""What a search can be told. Standard library only; values are checked where they are used, with an InputError."""

from dataclasses import dataclass
from enum import Enum

from ropesearch.settings import setting


class SpaceName(Enum):
    """The spaces that can be searched."""

    longrope = "longrope"


@dataclass(kw_only=True)
class SpaceConfig:
    """The set of candidates."""

    name: SpaceName = setting(
        SpaceName.longrope,
        "which space: longrope = one non-decreasing factor per pair (LongRoPE, Table 4)",
    )
    factor_step: float = setting(0.01, "distance between two neighbouring factors of a pair, in factor units")
    max_factor_over_ratio: float = setting(1.25, "the largest factor, as a multiple of target_length / original_length")
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
class EvolutionConfig:
    """LongRoPE's evolution; the defaults are the paper's."""

    num_population: int = setting(
        64, "candidates before the first generation: linear, NTK, YaRN, given tables, and mutants of these"
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
class BudgetConfig:
    """When a search ends: at the first limit reached, counted over the whole study; null = no such limit."""

    num_trials: int | None = setting(None, "candidates (the baselines are not counted)")
    forward_equivalent_tokens: int | None = setting(
        None,
        "tokens through the model, forward passes; the baselines count",
    )
    minutes: float | None = setting(None, "minutes of scoring, summed over trials and workers; the baselines count")
    patience_trials: int | None = setting(None, "candidates in a row without a better score")


@dataclass(kw_only=True)
class SelectionConfig:
    """The choice among the finalists."""

    num_finalists: int = setting(
        8,
        "best searched candidates that are scored again, beside the baselines, on the selection windows",
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
