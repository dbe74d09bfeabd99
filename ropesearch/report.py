"""What a job came to, as text for a terminal and as JSON for programs."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import Finding
from ropesearch.evaluate.interval import paired_interval
from ropesearch.evaluate.needle import NeedleEvaluation
from ropesearch.evaluate.perplexity import Evaluation
from ropesearch.evaluate.table import aligned, of_last, perplexity_text, render_table
from ropesearch.rope.regime import Regime
from ropesearch.score.objective import Objective
from ropesearch.search.run import SearchResult
from ropesearch.search.space import SEARCHED

_NUM_FRONT_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """A finished search: its folder, its checkpoint folder, the result, the held-out rows that report it, and the cells
    that could not be scored.
    """

    run_folder: Path
    checkpoint_folder: Path
    rope_config: RopeConfig
    result: SearchResult
    rows: Sequence[Evaluation]
    failures: Sequence[str]
    findings: Sequence[Finding]
    needle_rows: Sequence[NeedleEvaluation] = ()

    @property
    def exit_code(self) -> int:
        """0 where the folder that was written is what its rope_config.json says, else 1."""
        return 0 if all(finding.ok for finding in self.findings) else 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values: the folders and what rope_config.json holds."""
        return {
            "run": str(self.run_folder),
            "checkpoint": str(self.checkpoint_folder),
            "rope_config": self.rope_config.to_json(),
            "failures": list(self.failures),
            "scoring_seconds": self.result.scoring_seconds,
        }

    def to_text(self) -> str:
        """Perplexities by method and split, the price on short inputs, and where the checkpoint is."""
        result, target_length = self.result, self.rope_config.target_length
        original_length = self.rope_config.geometry.original_length
        regime = result.regime
        cells = {(row.method, row.length): row for row in self.rows}
        selected: dict[str, str] = {}
        for finalist in result.finalists:  # best first; of the candidates only the best is shown
            score = finalist.selection_score
            selected.setdefault(
                finalist.method, "failed" if score is None else _value_text(result.objective.value(score))
            )
        won = cells[(result.method, target_length)]
        num_documents = len(won.window_nats)
        documents = f"{num_documents} held-out document{'s' if num_documents > 1 else ''}"
        lines = [["method", "search", "selection", "held out", f"nats per token above {result.method} (95 % interval)"]]
        for row in (row for row in self.rows if row.length == target_length):
            searched = result.search_scores.get(row.method)
            lines.append(
                [
                    row.method,
                    "-" if searched is None else _value_text(result.objective.value(searched)),
                    selected.get(row.method, "-"),
                    perplexity_text(row.nats, row.tokens),
                    "" if row is won else above_text(row, won),
                ]
            )
        before, after = (cells.get((method, original_length)) for method in ("unscaled", result.method))
        price = "not known"
        if before and after:
            price = short_price_text(before, after)
        parts = [
            f"perplexity at {target_length} tokens{of_last(_last_tokens(self.rope_config.search))} ({documents})",
            aligned(lines),
            "",
            *_needle_lines(self.needle_rows),
            f"chosen: {result.method} (trial {result.trial_number} of {result.num_trials}, "
            f"{result.num_failed} failed), attention factor {regime.attention_factor:.3f}, "
            f"factors {regime.factors[0]:.2f} to {regime.factors[-1]:.2f}"
            + (f", retained tokens {regime.retained_tokens}" if regime.retained_tokens else ""),
            _cost_text(result),
            *_racing_lines(result),
            f"price on short inputs: {price}",
            *(f"not scored: {failure}" for failure in self.failures),
        ]
        if result.objective != Objective():
            parts.append(f"objective: {result.objective.to_text()} (columns search and selection: its exponential)")
        excess = result.finalists[0].excess_nats
        if excess is not None:
            parts.append(_guard_text(result, excess))
        parts += _front_lines(result)
        if result.method != "searched":
            beat = f"no candidate {_better_than(excess)} {result.method} on the selection windows"
            if not result.course:
                beat = "no candidate was scored to its end, the best baseline is what is left"
            parts.append(f"{beat}, so rope_config.json holds that")
        parts += [f"note: {limit}" for limit in loader_limits(self.rope_config)]
        parts += [finding.message for finding in self.findings if not finding.ok]
        verify_command = shlex.join(["ropesearch", "verify", str(self.checkpoint_folder)])
        state = "NOT verified" if self.exit_code else "as its rope_config.json says"
        state = f"{state}; all levels: {verify_command}" if self.findings else "without weights, so not verified"
        parts += [
            "",
            f"run         {self.run_folder}  (rope_config.json, factors.png, course.png, study.journal, log.txt)",
            f"checkpoint  {self.checkpoint_folder}  ({state})",
        ]
        return "\n".join(parts)


_LEAST_OF_INTERVAL = 3  # documents: the interval of two is no more than both of them

# Methods of a fine-tuning's held-out rows: the weights before it and after it, each under the regime for the length.
BEFORE, AFTER = "before fine-tuning", "fine-tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneOutcome:
    """A finished fine-tuning: its folder, its checkpoint folder, and the rope_config.json with the held-out rows."""

    run_folder: Path
    checkpoint_folder: Path
    rope_config: RopeConfig
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """0 where the folder that was written is what its rope_config.json says, else 1."""
        return 0 if self.findings and all(finding.ok for finding in self.findings) else 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values: the folders and what rope_config.json holds."""
        return {
            "run": str(self.run_folder),
            "checkpoint": str(self.checkpoint_folder),
            "rope_config": self.rope_config.to_json(),
        }

    def to_text(self) -> str:
        """Perplexity before and after at the two lengths, and where the checkpoint is."""
        rows = {(row["method"], row["length"]): _Windows.of(row) for row in self.rope_config.evaluation}
        lines = [["length", "regime", "before", "after", "change (95 % interval)"]]
        num_documents = 0
        worse: list[str] = []
        for regime in self.rope_config.regimes:
            before, after = (rows[method, regime.max_length] for method in (BEFORE, AFTER))
            num_documents = len(before.window_nats)
            cells = [perplexity_text(sum(each.window_nats), sum(each.window_tokens)) for each in (before, after)]
            change, is_worse = _change(after, before)
            lines.append([f"{regime.max_length:,}", regime.name, *cells, change])
            if is_worse:
                worse.append(
                    f"note: worse than before at {regime.max_length:,} tokens; where that is not meant, give a lower "
                    "training.peak_learning_rate or other mixture.shares in a new run"
                )
        verify_command = shlex.join(["ropesearch", "verify", str(self.checkpoint_folder)])
        state = "NOT verified" if self.exit_code else "as its rope_config.json says"
        parts = [
            f"perplexity ({num_documents} held-out document{'s' if num_documents > 1 else ''})",
            aligned(lines),
            *self._before_lines(),
            "",
            *worse,
            *(f"note: {limit}" for limit in loader_limits(self.rope_config)),
            *(finding.message for finding in self.findings if not finding.ok),
            "",
            f"run         {self.run_folder}  (rope_config.json, metrics.jsonl, log.txt)",
            f"checkpoint  {self.checkpoint_folder}  ({state}; all levels: {verify_command})",
        ]
        return "\n".join(parts)

    def _before_lines(self) -> list[str]:
        """What `before` is: not what the base's folder serves, which has one table."""
        short, long = self.rope_config.regimes
        if short.is_same_table(long):
            return []
        before = "before: the base's weights under the same two tables"
        training = self.rope_config.training or {}
        if training.get("base", {}).get("num_regimes", 1) > 1:
            return [before]
        served = f"serves up to {short.max_length:,} tokens with the {long.name} one too"
        return [f"{before}; the base's own folder {served}"]


@dataclass(frozen=True, slots=True)
class _Windows:
    """The nats and tokens of each window of a row of rope_config.json."""

    window_nats: Sequence[float]
    window_tokens: Sequence[int]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "_Windows":
        return cls(row["window_nats"], row["window_tokens"])


def _change(after: _Windows, before: _Windows) -> tuple[str, bool]:
    """Of perplexity, and whether it is worse; by the interval, where there are documents enough for one."""
    if len(after.window_nats) < _LEAST_OF_INTERVAL:
        difference = (sum(after.window_nats) - sum(before.window_nats)) / sum(after.window_tokens)
        return _increase(difference), difference > 0
    interval = paired_interval(after, before)
    change, low, high = (_increase(each) for each in (interval.difference, interval.low, interval.high))
    return f"{change} ({low} to {high})", interval.low > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOutcome:
    """Rows of perplexity by method, length and position, and the methods that could not be scored."""

    run_folder: Path
    rows: Sequence[Evaluation]
    failures: Sequence[str]
    last_tokens: int | None = None  # that were scored of each window; None: all
    regimes: Sequence[Regime] = ()  # the result's, each measured at the lengths that it serves
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """The rows as JSON values."""
        return {
            "run": str(self.run_folder),
            "regimes": [{"name": regime.name, "max_length": regime.max_length} for regime in self.regimes],
            "evaluation": [row.to_json() for row in self.rows],
            "failures": list(self.failures),
        }

    def to_text(self) -> str:
        """The tables, for a terminal."""
        return "\n".join(
            [
                render_table(self.rows, self.last_tokens),
                *self._regime_lines(),
                *(f"not scored: {failure}" for failure in self.failures),
                "",
                f"run  {self.run_folder}  (evaluation.json)",
            ]
        )

    def _regime_lines(self) -> list[str]:
        if len(self.regimes) < 2:
            return []
        served = ", ".join(f"{regime.name} up to {regime.max_length} tokens" for regime in self.regimes)
        return ["", f"{SEARCHED}: {served}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """What `verify` found."""

    folder: Path
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """0 where all is as rope_config.json says, else 1."""
        return 0 if all(finding.ok for finding in self.findings) else 1

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON values."""
        rows = [
            {"level": each.level.name, "ok": each.ok, "note": each.is_note, "message": each.message}
            for each in self.findings
        ]
        return {"folder": str(self.folder), "verified": self.exit_code == 0, "findings": rows}

    def to_text(self) -> str:
        """One line a finding, and the answer."""
        lines = [f"{_outcome_of(each)}  {each.level.name:<7} {each.message}" for each in self.findings]
        return "\n".join([*lines, "verified" if self.exit_code == 0 else "NOT verified"])


def _outcome_of(finding: Finding) -> str:
    if finding.is_note:
        return "note"
    return "ok  " if finding.ok else "FAIL"


def _value_text(nats_per_token: float) -> str:
    return perplexity_text(nats_per_token, 1)


def _cost_text(result: SearchResult) -> str:
    """What guided the search has cost; the choice among the finalists and the report come on top."""
    tokens = result.num_forward_equivalent_tokens
    scores = tokens / result.num_tokens_of_a_score if result.num_tokens_of_a_score else 0.0
    return (
        f"cost: {tokens:,} forward-equivalent tokens, those of {scores:.1f} scorings of the search windows; "
        f"{result.scoring_seconds:.0f} s of scoring; ended by {result.stopped_because}"
    )


def _racing_lines(result: SearchResult) -> list[str]:
    if not result.num_stopped:
        return []
    whole = result.num_forward_equivalent_tokens + result.num_saved_tokens
    candidates = "candidate was" if result.num_stopped == 1 else "candidates were"
    return [
        f"racing: {result.num_stopped} {candidates} stopped before the last window, which saved "
        f"{result.num_saved_tokens / whole:.0%} of the search's tokens"
    ]


def _needle_lines(rows: Sequence[NeedleEvaluation]) -> list[str]:
    if not rows:
        return []
    table = [[row.method, perplexity_text(row.nats, row.tokens), str(row.num_right)] for row in rows]
    return [
        f"answers to {len(rows[0].window_right)} held-out needles at {rows[0].length} tokens",
        aligned([["method", "perplexity", "right"], *table]),
        "",
    ]


def _guard_text(result: SearchResult, excess: float) -> str:
    """How the candidates and the result, which exceeds it by `excess` nats per token, stand to the guard."""
    num_kept, num_scored = result.num_candidates_in_guard, len(result.course)
    if num_kept == num_scored:
        kept = f"all {num_scored} scored candidates keep it" if num_kept else "no candidate was scored"
    else:
        kept = f"{num_kept or 'none'} of {num_scored} scored candidates {'keep' if num_kept != 1 else 'keeps'} it"
    increase = _increase(excess + result.objective.tolerance_nats, num_decimals=2)
    stands = "keeps it" if excess <= 0 else "BREAKS it, the least of all finalists"
    return (
        f"guard: {kept} on the search windows; on the selection windows {result.method}, at {increase}, {stands} "
        f"(by {abs(excess):.4f} nats per token)"
    )


def _front_lines(result: SearchResult) -> list[str]:
    """The front of two objectives, thinned out where it is long."""
    front = result.front
    if not front:
        return []
    last = _NUM_FRONT_LINES - 1
    shown = [front[index] for index in sorted({round(place * (len(front) - 1) / last) for place in range(last + 1)})]
    table = [
        [str(point.trial_number), point.method]
        + [_value_text(nats) for nats in (point.long_nats_per_token, point.short_nats_per_token)]
        for point in shown
    ]
    lines = aligned([["trial", "method", "long", "short"], *table])
    return [
        f"front of both objectives: {len(front)} of {len(result.points)} scored trials on the search windows "
        f"(front.json, front.png){'; some of them:' if len(shown) < len(front) else ':'}",
        lines,
    ]


def _better_than(excess: float | None) -> str:
    """What no candidate did better than the result: the guard goes first, and then the objective."""
    if excess is None:
        return "beat"
    return "that keeps the guard beat" if excess <= 0 else "comes nearer to keeping the guard than"


def _last_tokens(search: Mapping[str, Any]) -> int | None:
    """How many last tokens of each window the search scored, where it was asked for some only."""
    objective = search.get("objective")
    return objective.get("last_tokens") if isinstance(objective, Mapping) else None


def short_price_text(before: Evaluation, after: Evaluation) -> str:
    """What short inputs have paid for `after`: both perplexities, and by which part the second is above the first."""
    return (
        f"perplexity at {before.length} tokens {perplexity_text(before.nats, before.tokens)} {before.method}, "
        f"{perplexity_text(after.nats, after.tokens)} now "
        f"({_increase(after.nats / after.tokens - before.nats / before.tokens)})"
    )


def above_text(row: Evaluation, won: Evaluation) -> str:
    """By how many nats per token `row` lies above `won`, with a 95 % interval where there are documents enough."""
    if len(row.window_nats) < _LEAST_OF_INTERVAL:
        return _signed(row.nats / row.tokens - won.nats / won.tokens, ".4f")
    interval = paired_interval(row, won)
    difference, low, high = (_signed(each, ".4f") for each in (interval.difference, interval.low, interval.high))
    return f"{difference} ({low} to {high})"


def _increase(nats_per_token: float, num_decimals: int = 1) -> str:
    """By which part a perplexity is higher that lies so many nats per token above another, in percent."""
    try:
        part = math.expm1(nats_per_token)
    except OverflowError:
        part = math.inf
    if part < 100:
        return _signed(part, f".{num_decimals}%")
    return f"{100 * part:+.2e}%"


def _signed(value: float, form: str) -> str:
    """`value` with its sign; what is shown as zero gets a plus."""
    text = f"{value:+{form}}"
    return text if any(digit in text for digit in "123456789") else text.replace("-", "+")
