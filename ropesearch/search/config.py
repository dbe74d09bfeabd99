"""What a search can be told. Standard library only: what is wrong in itself is refused before torch is loaded."""

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

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
        "0.1 ln ratio + 1; a number of at least 1 = held at it",
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

    def check(self, target_length: int) -> None:
        """Raise InputError for what describes no space of tables for target_length tokens, whatever the model."""
        if not (math.isfinite(self.max_factor_over_ratio) and self.max_factor_over_ratio >= 1):
            raise InputError(
                f"space.max_factor_over_ratio: expected at least 1, so that linear interpolation is inside, "
                f"got {self.max_factor_over_ratio}"
            )
        _check_above_0("space.factor_step", self.factor_step)
        for name in ("num_pairs_at_one", "num_pairs_at_ratio"):
            value = getattr(self, name)
            if value != "search" and not (isinstance(value, int) and value >= 0):
                raise InputError(f"space.{name}: expected 'search' or a number of pairs from 0 on, got {value!r}")
        if self.critical_pair is not None:
            self._check_critical_pair()
        elif self.num_pairs_at_ratio != 0 and self.max_factor_over_ratio != 1:
            raise InputError(
                "space.max_factor_over_ratio: expected 1 with pairs at the ratio (space.num_pairs_at_ratio), as "
                f"factors do not decrease, got {self.max_factor_over_ratio}"
            )
        if self.attention_factor == "search":
            _check_above_0("space.attention_factor_step", self.attention_factor_step)
            if not (math.isfinite(self.attention_factor_max) and self.attention_factor_max > 1):
                raise InputError(
                    "space.attention_factor_max: expected a finite number above 1, which is the smallest attention "
                    f"factor, got {self.attention_factor_max}; space.attention_factor=1 holds it there"
                )
            num_grid_steps("space.attention_factor_step", self.attention_factor_step, 1.0, self.attention_factor_max)
        elif self.attention_factor not in ("longrope", "yarn"):
            _check_held_attention(self.attention_factor)
        kept = self.retained_tokens
        if not kept or len(set(kept)) < len(kept) or min(kept) < 0 or max(kept) > target_length:
            raise InputError(
                "space.retained_tokens: expected one or more different numbers of tokens from 0 to target_length = "
                f"{target_length}, got {list(kept)}"
            )

    def _check_critical_pair(self) -> None:
        pair = self.critical_pair
        if pair != "search" and not (isinstance(pair, int) and pair >= 0):
            raise InputError(f"space.critical_pair: expected null, 'search' or a pair from 0 on, got {pair!r}")
        for name in ("num_pairs_at_one", "num_pairs_at_ratio"):
            if getattr(self, name) != 0:
                raise InputError(
                    f"space.{name}: expected 0 with a critical pair (space.critical_pair), as that leaves no pair to "
                    f"hold, got {getattr(self, name)!r}"
                )
        if not self.max_factor_over_ratio > 1:
            raise InputError(
                "space.max_factor_over_ratio: expected more than 1 with a critical pair (space.critical_pair), as "
                f"factors lie at or above the ratio from there on, got {self.max_factor_over_ratio}"
            )


def num_grid_steps(key: str, step: float, low: float, high: float) -> int:
    """How many steps of the decimal number `step`, above 0, lead from `low` to at most `high`.

    Raises InputError, naming `key`, where that are none or more than a million.
    """
    exact = Fraction(repr(float(step)))
    # A rounding of `high` costs no step.
    num_steps = (Fraction(high) - Fraction(low) + exact * Fraction(1, 10**6)) // exact if math.isfinite(high) else 0
    if not 1 <= num_steps <= 10**6:
        remedy = "a smaller step" if num_steps < 1 else "a larger step, or a shorter target_length"
        raise InputError(
            f"{key}: expected a step that leaves 2 to a million values from {low:g} to {high:g}, got {step}; "
            f"ask for {remedy}"
        )
    return int(num_steps)


def _check_above_0(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{key}: expected a finite number above 0, got {value}")


def _check_held_attention(value: str | float) -> None:
    """Of what is neither "search" nor a formula's name."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 1):
        raise InputError(
            'space.attention_factor: expected "search", "longrope", "yarn" or a number of at least 1, as no method '
            f"makes attention over more tokens flatter, got {value!r}; give 1 to leave it as it was trained"
        )


@dataclass(kw_only=True)
class OptimizerConfig:
    """What a sampler can be told; each sampler has its own keys."""

    def check(self) -> None:
        """Raise InputError for a value out of range."""


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

    def check(self) -> None:
        """Raise InputError for a value out of range, or generations without children."""
        for name in ("num_mutations", "num_crossovers", "num_generations"):
            _check_at_least(name, getattr(self, name), 0)
        _check_at_least("num_population", self.num_population, 1)
        _check_at_least("num_parents", self.num_parents, 2)
        if self.num_mutations + self.num_crossovers < 1:
            raise InputError(
                "optimizer.num_mutations, optimizer.num_crossovers: expected at least one child per generation, got "
                "none"
            )
        probability = self.mutation_probability
        if not (math.isfinite(probability) and 0 < probability <= 1):
            raise InputError(f"optimizer.mutation_probability: expected more than 0 and at most 1, got {probability}")


@dataclass(kw_only=True)
class RandomConfig(OptimizerConfig):
    """Independent draws, the measure of what the other samplers are worth."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        _check_at_least("num_candidates", self.num_candidates, 1)


@dataclass(kw_only=True)
class TPEConfig(OptimizerConfig):
    """Optuna's tree-structured Parzen estimator."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")
    num_startup: int = setting(32, "scored candidates before the estimator: the seeds, and draws near the best of them")
    num_draws: int = setting(24, "draws from the density of good candidates, of which the most promising is proposed")
    num_knots: int | None = setting(
        8, "pairs whose log factors are searched, evenly spread, the others interpolated; null = every pair's"
    )

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        for name in ("num_candidates", "num_startup", "num_draws"):
            _check_at_least(name, getattr(self, name), 1)
        if self.num_knots is not None:
            _check_at_least("num_knots", self.num_knots, 2)


@dataclass(kw_only=True)
class CMAESConfig(OptimizerConfig):
    """CMA-ES, begun at the best seed."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")
    num_population: int = setting(8, "scored candidates per generation")
    initial_sigma: float = setting(
        0.5, "standard deviation of the first generation, in those of a random candidate's coordinates"
    )

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        _check_at_least("num_candidates", self.num_candidates, 1)
        _check_at_least("num_population", self.num_population, 4)
        _check_above_0("optimizer.initial_sigma", self.initial_sigma)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"optimizer.{name}: expected at least {least}, got {value}")


@dataclass(kw_only=True)
class GradientConfig(OptimizerConfig):
    """Stochastic gradient steps on factors and attention factor, each on one window, and moves of the best."""

    num_candidates: int = setting(
        128, "candidates after which the search ends: legs of descents, which cost gradient steps besides, and moves"
    )
    num_starts: int = setting(1, "how many of the baselines, the best first, descents begin at")

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        for name in ("num_candidates", "num_starts"):
            _check_at_least(name, getattr(self, name), 1)


@dataclass(kw_only=True)
class BlockwiseConfig(OptimizerConfig):
    """The block-wise incremental search of DCIS, begun at the best seed."""

    num_candidates: int = setting(1344, "candidates after which the search ends, the seeds included")
    num_increments: int = setting(
        6, "candidates for each block of pairs: increments on its factors, over a range (DCIS's released code: 10)"
    )

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        _check_at_least("num_candidates", self.num_candidates, 1)
        _check_at_least("num_increments", self.num_increments, 2)


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "evolution": EvolutionConfig,
    "random": RandomConfig,
    "tpe": TPEConfig,
    "cmaes": CMAESConfig,
    "gradient": GradientConfig,
    "blockwise": BlockwiseConfig,
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
    finalists = "finalists"


@dataclass(kw_only=True)
class RacingConfig:
    """When the scoring of a hopeless candidate is stopped before its last window."""

    mark: RacingMark = setting(
        RacingMark.finalists,
        "a candidate is stopped when it is clearly worse than: finalists = the last finalist so far (of "
        "optimizer=gradient: likely worse than the best); none = never",
    )
