"""How windows are scored. Standard library only: configs are composed before torch is loaded."""

import math
from dataclasses import dataclass

from ropesearch.errors import InputError
from ropesearch.settings import setting


@dataclass(kw_only=True)
class ScoringConfig:
    """How windows are scored; `check` and `check_search` say whether the values can be used."""

    last_tokens: int | None = setting(
        None,
        "score only the last tokens of each window, this many; none: all but the first token, which nothing predicts",
    )
    chunk_tokens: int | None = setting(
        None,
        "tokens of a window that go through the model at once, with a key-value cache; none: the whole "
        "window. When memory runs out, smaller pieces are tried",
    )
    offload_cache: bool = setting(
        False,
        "whether the key-value cache of a window in chunks lies in the CPU's memory, one layer's at a time on the "
        "device; the scores are the same",
    )
    num_blocks: int = setting(8, "number of equal position blocks that a window's nats and tokens are kept in")
    lengths: list[int] = setting(
        [],
        "lengths in tokens at which a search scores the first tokens of each window, target_length among them; the "
        "objective is the weighted mean of their nats per token; empty: target_length alone",
    )
    length_weights: list[float] = setting([], "the weight of each of the lengths, above 0; empty: all the same")
    needle_weight: float = setting(
        0.0,
        "the weight in a search's objective, from 0 to 1, of the nats per token of answers: a needle is hidden near "
        "the start of a window, asked for at its end, and only the answer's tokens are scored; the windows of plain "
        "text have the rest. 1: needles alone (LongRoPE2)",
    )
    num_needle_windows: int = setting(
        10, "windows with a needle in each split, where needle_weight is above 0; their haystacks are its documents"
    )
    needle_depths: list[float] = setting(
        [0.0, 0.025, 0.05, 0.075, 0.1],
        "where needles stand, in turn, as parts of the haystack: 0 = before its first token, 1 = after its last",
    )
    max_short_perplexity_increase: float | None = setting(
        None,
        "a search's guard on short inputs: a candidate whose perplexity on the first original_length tokens exceeds "
        "the unscaled model's by more than this part of it (0.05 = 5 %) ranks after all others; null = no guard",
    )
    two_objectives: bool = setting(
        False,
        "whether a search also minimises, as a second objective, the nats per token of the first original_length "
        "tokens: it spreads along the front of both, front.json, and its result is the front's best by the first",
    )

    def check_search(self, target_length: int) -> None:
        """Raise InputError unless a search for target_length tokens can have this objective."""
        self.check(target_length)
        lengths, weights = self.lengths or [target_length], self.length_weights
        if len(set(lengths)) < len(lengths) or max(lengths) != target_length or min(lengths) < 2:
            raise InputError(
                "objective.lengths: expected different lengths from 2 to target_length = "
                f"{target_length} tokens, the last among them, got {self.lengths}"
            )
        if weights and len(weights) != len(self.lengths):
            raise InputError(
                f"objective.length_weights: expected one for each of the {len(self.lengths)} objective.lengths, "
                f"got {weights}"
            )
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise InputError(f"objective.length_weights: expected finite numbers above 0, got {weights}")
        increase = self.max_short_perplexity_increase
        if increase is not None and not (math.isfinite(increase) and increase >= 0):
            raise InputError(
                f"objective.max_short_perplexity_increase: expected at least 0, or null for no guard, got {increase}"
            )
        if self.last_tokens is not None and self.last_tokens >= min(lengths):
            raise InputError(
                f"objective.last_tokens: expected fewer than the {min(lengths)} tokens of the shortest of "
                f"objective.lengths, got {self.last_tokens}"
            )

    def check(self, length_tokens: int) -> None:
        """Raise InputError unless windows of `length_tokens` can be scored so."""
        if self.num_blocks < 1:
            raise InputError(f"objective.num_blocks: expected at least 1 position block, got {self.num_blocks}")
        if length_tokens < max(2, self.num_blocks):
            raise InputError(
                f"objective.num_blocks: expected windows of at least {max(2, self.num_blocks)} tokens for "
                f"{self.num_blocks} position blocks, got windows of {length_tokens}; "
                "ask for fewer blocks or longer windows"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise InputError(f"objective.chunk_tokens: expected at least 1 token, got {self.chunk_tokens}")
        if self.offload_cache and self.chunk_tokens is None:
            raise InputError(
                "objective.offload_cache: expected objective.chunk_tokens with it, as a window in one piece has no "
                "cache; give that too, or leave it out"
            )
        if self.last_tokens is not None and not 1 <= self.last_tokens < length_tokens:
            raise InputError(
                f"objective.last_tokens: expected from 1 to {length_tokens - 1} (windows have {length_tokens} tokens "
                f"and the first is never scored), got {self.last_tokens}"
            )
        if not 0 <= self.needle_weight <= 1:
            raise InputError(f"objective.needle_weight: expected a number from 0 to 1, got {self.needle_weight}")
        if self.num_needle_windows < 1:
            raise InputError(f"objective.num_needle_windows: expected at least 1, got {self.num_needle_windows}")
        if not self.needle_depths or not all(0 <= depth <= 1 for depth in self.needle_depths):
            raise InputError(f"objective.needle_depths: expected numbers from 0 to 1, got {self.needle_depths}")
        if self.needle_weight == 1 and (self.lengths or self.length_weights):
            raise InputError(
                "objective.lengths: they weigh windows of plain text, which objective.needle_weight=1 leaves out; "
                "leave them out too, or give plain text some weight"
            )
