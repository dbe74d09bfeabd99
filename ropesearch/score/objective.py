"""What a search minimises, and the guard that it must keep, as functions of one score.

Under one table for all lengths, a token's nats in a causal model do not depend on what follows it. So the first tokens
of a window score as they would alone, and every length is a sum over the same forward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropesearch.errors import InputError
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens at positions start .. length - 1, and the weight of their nats per token."""

    length: int
    weight: float
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The weighted mean of its parts' nats per token, and the guard; by default the mean over all that is scored.

    With a guard, the first `guarded_tokens` of each window may have at most exp(tolerance_nats) times the perplexity
    that the unscaled model has on them, read alone.
    """

    parts: Sequence[Part] = ()
    guarded_tokens: int | None = None
    tolerance_nats: float = 0.0

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """The positions that have to be scored and summed by themselves, or None for all alike."""
        if not self.parts:
            return None
        guarded = [] if self.guarded_tokens is None else [(0, self.guarded_tokens)]
        return [*((part.start, part.length) for part in self.parts), *guarded]

    def value(self, score: Score) -> float:
        """Nats per token, the less the better, from a score of `spans`."""
        if not self.parts:
            return score.nats_per_token
        weighted = math.fsum(part.weight * span_nats_per_token(score, part.start, part.length) for part in self.parts)
        return weighted / math.fsum(part.weight for part in self.parts)

    def excess_nats(self, score: Score, unscaled: Score | None) -> float | None:
        """By how many nats per token a score exceeds what the guard allows, at most 0 where it keeps it; None without
        a guard. `unscaled` is the unscaled model's score of the same windows, or of their first `guarded_tokens`.

        Raises InputError where there is a guard and no `unscaled`.
        """
        if self.guarded_tokens is None:
            return None
        if unscaled is None:
            raise InputError("objective: expected the unscaled model's score, which the guard is measured against")
        allowed = span_nats_per_token(unscaled, 0, self.guarded_tokens) + self.tolerance_nats
        return span_nats_per_token(score, 0, self.guarded_tokens) - allowed

    def to_json(self) -> dict[str, Any]:
        """What makes its values, as JSON values."""
        return {
            "parts": [{"start": part.start, "length": part.length, "weight": part.weight} for part in self.parts],
            "guarded_tokens": self.guarded_tokens,
            "tolerance_nats": self.tolerance_nats,
        }

    def to_text(self) -> str:
        """It in words, for a report."""
        total = math.fsum(part.weight for part in self.parts)
        named = [
            f"{part.weight / total:.3g} at {part.length} tokens" + (f" (from {part.start} on)" if part.start else "")
            for part in self.parts
        ]
        text = "nats per token" + (f", weighted {', '.join(named)}" if named else " of all scored tokens")
        if self.guarded_tokens is None:
            return text
        increase = math.expm1(self.tolerance_nats)
        return (
            f"{text}; guard: perplexity on the first {self.guarded_tokens} tokens at most {100 * increase:.3g} % above "
            "the unscaled model's"
        )


def objective_of(config: ScoringConfig, target_length: int, original_length: int) -> Objective:
    """The objective of a search on windows of `target_length` tokens.

    Raises InputError when lengths, weights or the guard do not fit.
    """
    config.check_search(target_length)
    lengths, weights = config.lengths or [target_length], config.length_weights
    increase = config.max_short_perplexity_increase
    if not config.lengths and increase is None:
        return Objective()
    parts = [
        Part(length=length, weight=weight, start=0 if config.last_tokens is None else length - config.last_tokens)
        for length, weight in zip(lengths, weights or [1.0] * len(lengths), strict=True)
    ]
    if increase is None:
        return Objective(parts=tuple(parts))
    return Objective(parts=tuple(parts), guarded_tokens=original_length, tolerance_nats=math.log1p(increase))


def span_nats_per_token(score: Score, start: int, stop: int) -> float:
    """Nats per token at positions start .. stop - 1, which have to be bounds of blocks.

    Raises InputError where they are not, or nothing was scored between them.
    """
    edges = score.block_edges.tolist()
    if start not in edges or stop not in edges:
        raise InputError(f"score: expected block edges at {start} and {stop}, got {edges}")
    blocks = slice(edges.index(start), edges.index(stop))
    num_tokens = int(score.tokens[:, blocks].sum())
    if not num_tokens:
        raise InputError(f"score: expected scored tokens from {start} to {stop - 1}, got none")
    return math.fsum(score.nats[:, blocks].ravel().tolist()) / num_tokens
