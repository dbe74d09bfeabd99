"""`ropesearch status`: how far a search or fine-tuning is, told without what these need to work, torch above all."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropesearch.config import StatusJob
from ropesearch.evaluate.table import aligned, perplexity_text
from ropesearch.run_folder import CONFIG, job_of
from ropesearch.score.score import perplexity
from ropesearch.search.status import ScoredTrial, SearchStatus, UnfinishedTrial, WorkerSign, read_status
from ropesearch.strict_json import read_json_object

_NUM_ID_DIGITS = 8  # of a worker's id that are shown
_NUM_REASONS = 5


def status(job: StatusJob) -> "StatusOutcome | FineTuningStatusOutcome":
    """Look at the search or fine-tuning in a run folder, from any machine that sees it; nothing is written, and no
    worker waits.

    Raises InputError for a folder that holds neither, and for a study that is damaged.
    """
    run_folder = Path(job.path).expanduser()
    if job_of(run_folder) == "finetune":
        return FineTuningStatusOutcome.read(run_folder)
    return StatusOutcome(run_folder=run_folder, status=read_status(run_folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningStatusOutcome:
    """How far the fine-tuning of a run folder is: its last step, of how many (None where that cannot be read), tokens
    per second, and the step of the last measurement with the held-out perplexity of each regime.
    """

    run_folder: Path
    step: int = 0
    num_steps: int | None = None
    is_finished: bool = False
    tokens_per_second: float = 0.0
    measured_step: int | None = None
    held_out_perplexity: Mapping[str, float] = field(default_factory=dict)
    exit_code: int = 0

    @classmethod
    def read(cls, run_folder: Path) -> "FineTuningStatusOutcome":
        """What its files say; of a file that is missing or cut off, what is there."""
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found["num_steps"] = int(read_json_object(run_folder / CONFIG)["training"]["num_steps"])
        metrics = run_folder / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
                event = json.loads(line)
                found |= {"step": int(event["step"]), "tokens_per_second": float(event["tokens_per_second"])}
                if held_out := event.get("held_out"):
                    perplexities = {name: _perplexity(of) for name, of in held_out.items()}
                    found |= {"measured_step": found["step"], "held_out_perplexity": perplexities}
        return cls(run_folder=run_folder, is_finished=(run_folder / "rope_config.json").is_file(), **found)

    def to_json(self) -> dict[str, Any]:
        """All that is known, as JSON values."""
        return {
            "run": str(self.run_folder),
            "state": "finished" if self.is_finished else "fine-tuning",
            "step": self.step,
            "num_steps": self.num_steps,
            "tokens_per_second": self.tokens_per_second,
            "measured_step": self.measured_step,
            "held_out_perplexity": dict(self.held_out_perplexity),
        }

    def to_text(self) -> str:
        """A line for each thing that is known."""
        state = "fine-tuning, finished" if self.is_finished else "fine-tuning"
        of = "" if self.num_steps is None else f" of {self.num_steps}"
        lines = [("run", f"{self.run_folder}  ({state})"), ("step", f"{self.step}{of}")]
        if self.tokens_per_second:
            lines.append(("speed", f"{self.tokens_per_second:,.0f} tokens/s"))
        if self.held_out_perplexity:
            shown = ", ".join(f"{name} {value:.2f}" for name, value in self.held_out_perplexity.items())
            lines.append(("held out", f"perplexity at step {self.measured_step}: {shown}"))
        lines.append(("more", "log.txt, metrics.jsonl"))
        return "\n".join(f"{name:<8}  {text}" for name, text in lines)


def _perplexity(measured: Mapping[str, Any]) -> float:
    return perplexity(math.fsum(measured["window_nats"]), measured["num_window_tokens"] * len(measured["window_nats"]))


def _chosen(result: Path | None) -> dict[str, Any] | None:
    """What the selection windows chose, not always the best on the search windows; None where that is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(result.read_bytes())["search"] if result is not None else {}
        return {"method": str(record["method"]), "trial_number": int(record["trial_number"])}
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOutcome:
    """How far the search of a run folder is."""

    run_folder: Path
    status: SearchStatus
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """All that is known, as JSON values."""
        found = self.status
        waiting = [trial.number for trial in found.unfinished if trial.waits]
        return {
            "run": str(self.run_folder),
            "state": found.state,
            "trials": {
                "num_complete": found.num_complete,
                "num_stopped": found.num_stopped,
                "num_failed": sum(found.failures.values()),
                "failures": dict(found.failures),
                "running": [asdict(trial) for trial in found.unfinished if not trial.waits],
                "waiting": waiting,
            },
            "best": _trial_json(found.best),
            "best_baseline": _trial_json(found.best_baseline),
            "num_forward_equivalent_tokens": found.num_tokens,
            "scoring_seconds": found.scoring_seconds,
            "tokens_per_second": found.tokens_per_second,
            "seconds_left": found.seconds_left,
            "workers": [asdict(sign) for sign in found.workers],
            "result": None if found.result is None else str(found.result),
            "chosen": _chosen(found.result),
        }

    def to_text(self) -> str:
        """A line for each thing that is known, the running trials, and the workers."""
        found = self.status
        lines = [("run", f"{self.run_folder}  ({found.state})")]
        if not found.has_study:
            lines.append(("trials", "none yet: the study has not begun"))
        else:
            lines.append(("trials", _trials_text(found)))
            lines += [("", f"{number} failed: {reason}") for reason, number in _main_failures(found)]
            lines += [("best", _trial_text(found.best)), ("baseline", _trial_text(found.best_baseline))]
            lines.append(("spent", _spent_text(found)))
        if found.seconds_left is not None:
            lines.append(("left", f"about {_duration(found.seconds_left)} on the search windows"))
        if found.result is not None:
            chosen = _chosen(found.result)
            which = "" if chosen is None else f"  ({chosen['method']}, trial {chosen['trial_number']})"
            lines.append(("result", f"{found.result}{which}"))
        parts = ["\n".join(f"{name:<8}  {text}" for name, text in lines)]
        running = [trial for trial in found.unfinished if not trial.waits]
        if running:
            rows = [[str(trial.number), _short(trial.worker), _done(trial, found)] for trial in running]
            parts += ["", aligned([["trial", "worker", "done"], *rows])]
        parts += _worker_lines(found.workers)
        return "\n".join(parts)


def _trials_text(found: SearchStatus) -> str:
    num_waiting = sum(trial.waits for trial in found.unfinished)
    parts = [f"{found.num_complete} complete", f"{found.num_stopped} stopped by racing"]
    parts += [f"{sum(found.failures.values())} failed", f"{len(found.unfinished) - num_waiting} running"]
    return ", ".join([*parts, f"{num_waiting} waiting for a worker"])


def _main_failures(found: SearchStatus) -> list[tuple[str, int]]:
    """The reasons that trials failed for, the most frequent first, the rare ones summed up."""
    counted = Counter(found.failures).most_common()
    shown = [(" ".join(reason.split()), number) for reason, number in counted[:_NUM_REASONS]]
    rest = sum(number for _, number in counted[_NUM_REASONS:])
    return [*shown, ("other reasons", rest)] if rest else shown


def _trial_text(trial: ScoredTrial | None) -> str:
    if trial is None:
        return "none scored yet"
    breaks = f", breaks the guard by {trial.excess_nats:.4f} nats per token" if trial.excess_nats else ""
    score = f"{trial.nats_per_token:.4f} nats per token, perplexity {perplexity_text(trial.nats_per_token, 1)}"
    return f"{score} ({trial.method}, trial {trial.number}){breaks}"


def _trial_json(trial: ScoredTrial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    value = perplexity(trial.nats_per_token, 1)
    return {**asdict(trial), "perplexity": value if math.isfinite(value) else None}


def _spent_text(found: SearchStatus) -> str:
    spent = f"{found.num_tokens:,} forward-equivalent tokens in {_duration(found.scoring_seconds)} of scoring"
    if found.tokens_per_second is None:
        return spent
    num_working = sum(sign.state == "working" for sign in found.workers)
    workers = f"{num_working} worker{'s' if num_working > 1 else ''}"
    return f"{spent}; now about {found.tokens_per_second:,.0f} tokens a second ({workers})"


def _done(trial: UnfinishedTrial, found: SearchStatus) -> str:
    parts = []
    if trial.num_planned_steps:
        parts.append(f"{trial.num_steps} of {trial.num_planned_steps} gradient steps")
    if trial.num_windows:
        of = f" of {found.num_search_windows}" if found.num_search_windows else ""
        parts.append(f"{trial.num_windows}{of} windows")
    return ", ".join(parts) or "begun"


def _worker_lines(workers: Sequence[WorkerSign]) -> list[str]:
    """Those that did not end, one a line; the others by why they did."""
    present = [sign for sign in workers if sign.state != "ended"]
    ended = Counter(sign.because or "unknown" for sign in workers if sign.state == "ended")
    lines = []
    if present:
        rows = [
            [
                _short(sign.worker),
                sign.state,
                f"{sign.phase} {sign.fraction:.0%}" if sign.phase else "-",
                sign.slurm_job or "-",
                sign.device or "-",
                f"{_duration(sign.silent_seconds)} ago",
            ]
            for sign in present
        ]
        lines = ["", aligned([["worker", "state", "at", "Slurm job", "device", "last seen"], *rows])]
    if ended:
        reasons = ", ".join(f"{number} {because}" for because, number in ended.most_common())
        lines += ["", f"workers that ended: {reasons}"]
    return lines


def _short(worker: str | None) -> str:
    return "-" if worker is None else worker[:_NUM_ID_DIGITS]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
