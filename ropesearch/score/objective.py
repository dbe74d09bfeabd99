"""What a search minimises, and the guard that it must keep, as functions of one score.

Under one table for all lengths, a token's nats in a causal model do not depend on what follows it. So the first tokens
of a window score as they would alone, and every length is a sum over the same forward pass. Needles (LongRoPE2, Shang
et al. 2025, sec. 3.2) are windows of their own among the others: of them, only the answers at their ends count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ropesearch.errors import InputError
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score

if TYPE_CHECKING:
    from ropesearch.data.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens at positions start .. length - 1, and the weight of their nats per token."""

    length: int
    weight: float
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The weighted mean of its parts' nats per token, and the guard; by default the mean over all that is scored.

    The nats per token of the windows' answers have `needle_weight` in [0, 1], all that comes from windows without an
    answer the rest. With a weight of 1 and no guard, windows without an answer are not needed.

    With `short_tokens`, the nats per token of so many first tokens of the windows without an answer are a second
    objective. With a guard, the first `guarded_tokens` of each window may have at most exp(tolerance_nats) times the
    perplexity that the unscaled model has on them, read alone.
    """

    parts: Sequence[Part] = ()
    guarded_tokens: int | None = None
    tolerance_nats: float = 0.0
    needle_weight: float = 0.0
    short_tokens: int | None = None

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """The positions of windows without an answer that have to be scored and summed by themselves, or None for all
        alike."""
        firsts = dict.fromkeys((self.guarded_tokens, self.short_tokens))
        short = [(0, num_tokens) for num_tokens in firsts if num_tokens is not None]
        return [*((part.start, part.length) for part in self.parts), *short] or None

    @property
    def needs_text(self) -> bool:
        """Whether anything of windows without an answer counts."""
        return self.needle_weight < 1 or self.guarded_tokens is not None or self.short_tokens is not None

    @property
    def num_values(self) -> int:
        """How many objectives a study has."""
        return 1 if self.short_tokens is None else 2

    def values(self, score: Score) -> list[float]:
        """The value of each objective, in nats per token, the less the better; both from one score."""
        if self.short_tokens is None:
            return [self.value(score)]
        return [self.value(score), span_nats_per_token(_text(score), 0, self.short_tokens)]

    def value(self, score: Score) -> float:
        """Nats per token, the less the better, from a score of `spans` and of the answers that have a weight.

        Raises InputError for a score of windows without what counts.
        """
        if not self.needle_weight:
            return self._text_value(score)
        needles = score.of_windows(with_answer=True)
        if needles is None:
            raise _no_answers()
        if self.needle_weight == 1:
            return needles.nats_per_token
        parts = self.needle_weight * needles.nats_per_token, (1 - self.needle_weight) * self._text_value(_text(score))
        return math.fsum(parts)

    @property
    def has_like_windows(self) -> bool:
        """Whether it is one value, and a mean over windows that are alike: without a second objective, and without
        needles, whose windows are of two kinds.
        """
        return not self.needle_weight and self.num_values == 1

    def window_values(self, score: Score, guard_weight: float = 0.0) -> NDArray[np.float64]:
        """What each window adds, float64 (num_windows,): their mean is `value`, plus `guard_weight` times the nats per
        token of the guarded tokens. They are the sums over a window that `token_weights` weighs.

        Raises InputError for a score of windows without what counts.
        """
        num_windows = len(score.nats)
        has_answer = [score.has_answer(index) for index in range(num_windows)]
        if self.needle_weight and not any(has_answer):
            raise _no_answers()
        num_answer_tokens = int(score.window_tokens[has_answer].sum())
        num_text = num_windows - sum(has_answer)
        values = np.zeros(num_windows)
        for index, window in enumerate(score.windows()):
            if has_answer[index]:
                values[index] = self.needle_weight * num_windows / num_answer_tokens * window.total_nats
                continue
            if self.needle_weight < 1:
                values[index] = (1 - self.needle_weight) * self._text_value(window)
            if self.guarded_tokens is not None and guard_weight:
                values[index] += guard_weight * span_nats_per_token(window, 0, self.guarded_tokens)
            values[index] *= num_windows / num_text
        return values

    def _text_value(self, score: Score) -> float:
        if not self.parts:
            return score.nats_per_token
        weighted = math.fsum(part.weight * span_nats_per_token(score, part.start, part.length) for part in self.parts)
        return weighted / math.fsum(part.weight for part in self.parts)

    def token_weights(
        self, windows: "Windows", index: int, last_tokens: int | None, guard_weight: float = 0.0
    ) -> NDArray[np.float64]:
        """The weights, float64 (length,), of the nats of each token of a window: the mean over all windows of the
        weighted sums is `value`, plus `guard_weight` times the nats per token of the guarded tokens. `last_tokens` as
        in the configuration, None for all but the first token.
        """
        length_tokens = windows.length_tokens
        weights = np.zeros(length_tokens)
        answers = [length_tokens - start for start in windows.answer_starts if start]
        if windows.answer_start(index):
            if self.needle_weight:
                weights[windows.answer_start(index) :] = self.needle_weight * windows.num_windows / sum(answers)
            return weights
        share = (1 - self.needle_weight) * windows.num_windows / (windows.num_windows - len(answers))
        parts = self.parts or [
            Part(length=length_tokens, weight=1.0, start=length_tokens - (last_tokens or length_tokens))
        ]
        total = math.fsum(part.weight for part in parts)
        for part in parts:
            first = max(part.start, 1)  # nothing predicts the first token
            weights[first : part.length] += share * part.weight / total / (part.length - first)
        if self.guarded_tokens is not None:
            of_text = windows.num_windows / (windows.num_windows - len(answers))
            weights[1 : self.guarded_tokens] += guard_weight * of_text / (self.guarded_tokens - 1)
        return weights

    def excess_nats(self, score: Score, unscaled: Score | None) -> float | None:
        """By how many nats per token a score exceeds what the guard allows, at most 0 where it keeps it; None without
        a guard. `unscaled` is the unscaled model's score of the same windows, or of their first `guarded_tokens`.

        Raises InputError where there is a guard and no `unscaled`.
        """
        if self.guarded_tokens is None:
            return None
        if unscaled is None:
            raise InputError("objective: expected the unscaled model's score, which the guard is measured against")
        allowed = span_nats_per_token(_text(unscaled), 0, self.guarded_tokens) + self.tolerance_nats
        return span_nats_per_token(_text(score), 0, self.guarded_tokens) - allowed

    def to_json(self) -> dict[str, Any]:
        """What makes its values, as JSON values."""
        return {
            "parts": [{"start": part.start, "length": part.length, "weight": part.weight} for part in self.parts],
            "guarded_tokens": self.guarded_tokens,
            "tolerance_nats": self.tolerance_nats,
            "needle_weight": self.needle_weight,
            "short_tokens": self.short_tokens,
        }

    def to_text(self) -> str:
        """It in words, for a report."""
        total = math.fsum(part.weight for part in self.parts)
        named = [
            f"{part.weight / total:.3g} at {part.length} tokens" + (f" (from {part.start} on)" if part.start else "")
            for part in self.parts
        ]
        text = "nats per token" + (f", weighted {', '.join(named)}" if named else " of all scored tokens")
        if self.needle_weight == 1:
            text = "nats per token of the needles' answers"
        elif self.needle_weight:
            text = f"{self.needle_weight:.3g} of nats per token of the needles' answers, the rest {text} of plain text"
        if self.short_tokens is not None:
            text = f"{text}; second objective: nats per token of the first {self.short_tokens} tokens"
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
    needle_weight = config.needle_weight
    if not config.lengths and increase is None and not config.two_objectives:
        return Objective(needle_weight=needle_weight)
    parts = [
        Part(length=length, weight=weight, start=0 if config.last_tokens is None else length - config.last_tokens)
        for length, weight in zip(lengths, weights or [1.0] * len(lengths), strict=True)
        if needle_weight < 1
    ]
    return Objective(
        parts=tuple(parts),
        guarded_tokens=None if increase is None else original_length,
        tolerance_nats=0.0 if increase is None else math.log1p(increase),
        needle_weight=needle_weight,
        short_tokens=original_length if config.two_objectives else None,
    )


def _no_answers() -> InputError:
    return InputError("objective: expected a score of windows with answers, which have a weight, got none")


def _text(score: Score) -> Score:
    """The part of a score that comes from windows without an answer."""
    text = score.of_windows(with_answer=False)
    if text is None:
        raise InputError("objective: expected a score of windows of plain text too, got answers alone")
    return text


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
