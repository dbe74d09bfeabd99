"""The steps of a fine-tuning, from the first or from where a state was saved, and the held-out measurements on the way.

What a step does depends on the weights before it, the seed and its number alone: rows are drawn anew for every step,
and nothing else is remembered. So a run that was killed and goes on ends with the same bytes (one process, same kind of
machine and thread count).
"""

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ropesearch import files, stopping
from ropesearch.data.mixture import LONG, SHORT, MicroBatch, Mixture
from ropesearch.data.windows import Windows
from ropesearch.errors import TrainingError
from ropesearch.model.load import LoadedModel
from ropesearch.rope.regime import Regime
from ropesearch.score.forward import is_out_of_memory
from ropesearch.score.gradient import recomputed
from ropesearch.score.score import perplexity
from ropesearch.seeding import stream
from ropesearch.train.config import TrainingConfig
from ropesearch.train.loss import RowLoss
from ropesearch.train.processes import Processes
from ropesearch.train.regimes import RegimeSwitch
from ropesearch.train.spikes import SpikeWatch
from ropesearch.train.state import TrainingStates
from ropesearch.train.weights import whole

_log = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
METRICS = "metrics.jsonl"
_MOST_NATS = 100.0  # per held-out token; guessing one of a million costs 14
_REMEDY = "give a lower training.peak_learning_rate, more warm-up steps, or training.precision=float32, in a new run"
STATES = "states"


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Windows that are measured under one regime on the way."""

    name: str
    regime: str
    windows: Windows


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Nats of each window of a `HeldOut`, float64 (num_windows,), after some steps; each has as many scored tokens."""

    name: str
    window_nats: NDArray[np.float64]
    num_window_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens)."""
        return perplexity(float(self.window_nats.sum()), self.num_window_tokens * len(self.window_nats))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """What became of a step: sums over all rows by bucket, and how fast it went. `measured` is what was measured after
    it (for step 0: before the first)."""

    step: int
    learning_rate: float
    gradient_norm: float
    regime_of: Mapping[int, str]
    nats: Mapping[int, float]
    tokens: Mapping[int, int]
    divergence_nats: float
    tokens_per_second: float
    measured: Sequence[Measurement] = ()

    def nats_per_token(self, regime: str) -> float | None:
        """The loss of a regime's rows; None where the step had none."""
        buckets = [bucket for bucket, name in self.regime_of.items() if name == regime and self.tokens[bucket]]
        tokens = sum(self.tokens[bucket] for bucket in buckets)
        return sum(self.nats[bucket] for bucket in buckets) / tokens if tokens else None

    def to_json(self) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        return {
            "step": self.step,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
            "nats": {str(bucket): nats for bucket, nats in self.nats.items()},
            "tokens": {str(bucket): tokens for bucket, tokens in self.tokens.items()},
            "regimes": {str(bucket): name for bucket, name in self.regime_of.items()},
            "divergence_nats": self.divergence_nats,
            "tokens_per_second": round(self.tokens_per_second, 1),
            **({"held_out": _held_out_json(self.measured)} if self.measured else {}),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "StepEvent":
        """The event of a line of metrics.jsonl."""
        return cls(
            step=line["step"],
            learning_rate=line["learning_rate"],
            gradient_norm=line["gradient_norm"],
            regime_of={int(bucket): name for bucket, name in line["regimes"].items()},
            nats={int(bucket): nats for bucket, nats in line["nats"].items()},
            tokens={int(bucket): tokens for bucket, tokens in line["tokens"].items()},
            divergence_nats=line["divergence_nats"],
            tokens_per_second=line["tokens_per_second"],
            measured=_measured_from(line.get("held_out", {})),
        )


class FineTuning:
    """One fine-tuning in a run folder: `run` goes to the last step, or raises where it is stopped."""

    def __init__(
        self,
        loaded: LoadedModel,
        loss: RowLoss,
        mixture: Mixture,
        regimes: Mapping[str, Regime],
        config: TrainingConfig,
        *,
        held_out: Sequence[HeldOut],
        folder: Path,
        identity: Mapping[str, Any],
        seed: int,
        processes: Processes,
        compute_dtype: torch.dtype,
        stored_dtypes: Mapping[str, torch.dtype],
        on_event: Callable[[StepEvent], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._loaded = loaded
        self._loss = loss
        self._mixture = mixture
        self._switch = RegimeSwitch(loaded, regimes)
        self._config = config
        self._held_out = held_out
        self._folder = folder
        self._seed = seed
        self._processes = processes
        self._compute_dtype = compute_dtype
        self._stored_dtypes = stored_dtypes
        self._on_event = on_event
        self._on_note = on_note
        self._spikes = SpikeWatch()
        self._parameters = {name: each for name, each in loss.named_parameters() if each.requires_grad}
        self._optimizer = _optimizer(self._parameters, config)
        self._states = TrainingStates(folder / STATES, identity, config.num_kept_states, processes)

    def run(self) -> dict[int, list[Measurement]]:
        """Train; returns what was measured, by number of steps done (0: before the first).

        A scheduler's signal lets the micro-batch under way end; then the state after the last whole step is saved, and
        Stopped is raised. Raises TrainingError for a loss or gradient that is not finite and where memory does not
        suffice, OSError where the disk does not; the states saved before stay.
        """
        with stopping.finishing(lambda: True):
            done, damaged = self._states.load(self._parameters, self._optimizer)
            for place in damaged:
                self._on_note(f"{place}: expected a whole state, got a damaged one, which is passed over")
            if done or damaged:
                self._on_note(f"going on from step {done} of {self._config.num_steps}")
            measured = self._recalled(done)
            if done == 0:
                measured[0] = self._measure(0)
                self._record(StepEvent(step=0, learning_rate=0.0, gradient_norm=0.0, regime_of={}, nats={}, tokens={},
                                       divergence_nats=0.0, tokens_per_second=0.0, measured=measured[0]))  # fmt: skip
            last_saved = done
            for step in range(done, self._config.num_steps):
                stopping.raise_if_lost()
                event = self._step(step)
                if event is None:
                    if done > last_saved:
                        self._save(done)
                    raise stopping.Stopped(stopping.asked_by() or "SIGTERM")  # or, it came to another process alone
                done = step + 1
                is_last = done == self._config.num_steps
                if is_last:
                    self._round()
                if is_last or done % self._config.measure_every_steps == 0:
                    measured[done] = self._measure(done)
                    event = dataclasses.replace(event, measured=measured[done])
                self._record(event)
                if is_last or done % self._config.save_every_steps == 0:
                    self._save(done)
                    last_saved = done
        return measured

    def _save(self, done: int) -> None:
        self._states.save(done, self._parameters, self._optimizer)
        _log.info("state after step %d saved", done)

    def _step(self, step: int) -> StepEvent | None:
        """One optimizer step; None, with weights as they were, where a signal asks to stop."""
        started = time.monotonic()
        batch = self._mixture.batch(step, self._config.num_step_rows)
        num_scored = sum(micro.num_scored for micro in batch)
        buckets = sorted({micro.bucket for micro in batch})
        sums = torch.zeros(len(buckets) + 1, dtype=torch.float64)
        self._optimizer.zero_grad(set_to_none=True)
        try:
            for place, (micro, counts) in enumerate(self._own(batch)):
                if self._processes.any(stopping.asked_by() is not None):
                    return None
                nats, divergence = self._backward(micro, counts, num_scored, (step, place))
                if counts:
                    sums[buckets.index(micro.bucket)] += nats
                    sums[-1] += divergence
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise TrainingError(
                f"step {step + 1}: expected memory for a row of {batch[-1].token_ids.size:,} tokens, got none "
                f"left ({reason}); give training.checkpoint_activations=true, training.adapter=lora, more processes "
                "(torchrun, which share the weights), or a larger device"
            ) from None
        sums = self._processes.summed(sums)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.clip_norm)
        gradient_norm = float(whole(norm))
        total = float(sums[:-1].sum()) / num_scored
        if not (math.isfinite(total) and math.isfinite(gradient_norm)):
            raise TrainingError(
                f"step {step + 1}: expected a finite loss and gradient, got a loss of {total} nats per token and a "
                f"gradient norm of {gradient_norm}; weights were left as they were: {_REMEDY} (the rate was at most "
                f"{self._config.peak_learning_rate:g})"
            )
        rate = self._config.learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        tokens = {bucket: sum(micro.num_scored for micro in batch if micro.bucket == bucket) for bucket in buckets}
        return StepEvent(
            step=step + 1,
            learning_rate=rate,
            gradient_norm=gradient_norm,
            regime_of={micro.bucket: micro.regime for micro in batch},
            nats={bucket: float(nats) for bucket, nats in zip(buckets, sums, strict=False)},
            tokens=tokens,
            divergence_nats=float(sums[-1]),
            tokens_per_second=sum(micro.token_ids.size for micro in batch) / max(time.monotonic() - started, 1e-9),
        )

    def _own(self, batch: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This process's micro-batches in order, and whether each counts.

        At every place all processes have the same regime. Where its rows do not divide by the processes, those without
        one go through the same row as the first does, which counts for nothing: sharded weights need every process.
        """
        own = []
        for regime in (SHORT, LONG):
            rows = [micro for micro in batch if micro.regime == regime]
            for start in range(0, len(rows), self._processes.num_processes):
                place = start + self._processes.rank
                counts = place < len(rows)
                own.append((rows[place] if counts else rows[start], counts))
        return own

    def _backward(
        self, micro: MicroBatch, counts: bool, num_scored: int, place: tuple[int, int]
    ) -> tuple[float, float]:
        """Add a micro-batch's gradient; returns its nats and its divergence from the base."""
        device = self._processes.device
        token_ids, position_ids, is_scored = (
            torch.from_numpy(each).to(device) for each in (micro.token_ids, micro.position_ids, micro.is_scored)
        )
        distils = self._config.distill_weight > 0 and micro.regime == SHORT
        torch.manual_seed(int(stream(self._seed, "train.dropout", place[0]).integers(2**62)) + place[1])
        again = recomputed(self._loaded.model) if self._config.checkpoint_activations else contextlib.nullcontext()
        with self._switch.within(micro.regime), self._in_precision(), again:
            nats, divergence = self._loss(token_ids, position_ids, is_scored & counts, distils)
            # Sharded gradients are means over the processes.
            weighted = (nats + self._config.distill_weight * divergence) * self._processes.num_processes / num_scored
            weighted.backward()
        return float(nats.detach()), float(divergence.detach())

    def _round(self) -> None:
        """Make the weights what they will be stored as, so that what is measured last is what is written."""
        for name, parameter in self._parameters.items():
            dtype = self._stored_dtypes.get(name.removeprefix("model."), torch.float32)
            parameter.data.copy_(parameter.data.to(dtype))

    def _measure(self, done: int) -> list[Measurement]:
        """The held-out windows under their regimes after `done` steps, shared out to the processes; in evaluation mode.

        Raises TrainingError where they show that the weights are ruined.
        """
        self._loss.eval()
        result = []
        for held_out in self._held_out:
            windows, found = held_out.windows, []
            for start in range(0, windows.num_windows, self._processes.num_processes):
                place = start + self._processes.rank
                index = place if place < windows.num_windows else start
                token_ids = torch.from_numpy(windows.token_ids[index : index + 1].astype(np.int64))
                token_ids = token_ids.to(self._processes.device)
                is_scored = torch.ones_like(token_ids, dtype=torch.bool)
                is_scored[:, 0] = False
                positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
                with torch.no_grad(), self._switch.within(held_out.regime), self._in_precision():
                    nats, _ = self._loss(token_ids, positions, is_scored)
                found.append((place, float(nats)))
            window_nats = torch.zeros(windows.num_windows, dtype=torch.float64)
            for place, value in found:
                if place < windows.num_windows:
                    window_nats[place] = value
            window_nats = self._processes.summed(window_nats)
            num_window_tokens = windows.length_tokens - 1
            nats_per_token = float(window_nats.mean()) / num_window_tokens
            if not nats_per_token <= _MOST_NATS:  # nor where it is not a number
                remedy = f"the weights are ruined: {_REMEDY}; what was saved before stays"
                raise TrainingError(
                    f"after step {done}: expected at most {_MOST_NATS:g} nats per token on the held-out windows "
                    f"({held_out.name}), got {nats_per_token:.4g}; "
                    f"{remedy if done else 'the weights to begin with are ruined already: give others'}"
                )
            result.append(Measurement(held_out.name, window_nats.numpy(), num_window_tokens))
        self._loss.train()
        return result

    def _in_precision(self) -> Any:
        enabled = self._compute_dtype != torch.float32 and self._processes.is_alone  # else the shards' policy does it
        return torch.autocast(self._processes.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _record(self, event: StepEvent) -> None:
        loss = event.nats_per_token(LONG) or event.nats_per_token(SHORT)
        if loss is not None and (said := self._spikes.seen(event.step, loss)):
            self._on_note(said)
        if self._processes.is_first:
            path = self._folder / METRICS
            with files.naming(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event.to_json(), allow_nan=False) + "\n")
        self._on_event(event)

    def _recalled(self, done: int) -> dict[int, list[Measurement]]:
        """What was measured up to the step that is gone on from; lines of later steps are taken out of the file."""
        path = self._folder / METRICS
        lines = [event for event in recorded_events(self._folder) if done and event["step"] <= done]
        self._processes.wait_for_all()
        if self._processes.is_first:
            files.write_bytes(path, "".join(json.dumps(event) + "\n" for event in lines).encode())
        for event in lines:
            self._spikes.recall(event)
        return {event["step"]: _measured_from(event["held_out"]) for event in lines if "held_out" in event}


def recorded_events(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run folder's metrics.jsonl, but for one that was cut short; see `StepEvent.to_json`."""
    path = folder / METRICS
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a line that was cut short
            events.append(json.loads(line))
    return events


def _optimizer(parameters: Mapping[str, torch.nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [each for each in parameters.values() if each.ndim > 1]
    vectors = [each for each in parameters.values() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.peak_learning_rate, betas=BETAS)


def _held_out_json(measured: Sequence[Measurement]) -> dict[str, Any]:
    return {
        each.name: {"window_nats": each.window_nats.tolist(), "num_window_tokens": each.num_window_tokens}
        for each in measured
    }


def _measured_from(value: Mapping[str, Any]) -> list[Measurement]:
    return [
        Measurement(name, np.array(each["window_nats"], dtype=np.float64), each["num_window_tokens"])
        for name, each in value.items()
    ]
