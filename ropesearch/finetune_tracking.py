"""What a fine-tuning tells Weights & Biases: one run, with a row for each step and what it came to.

What is told is in the run folder's metrics.jsonl, which is read from its beginning by each process that writes the run:
so what an earlier one had no time to tell is not missing, and what it has told is known from the run.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ropesearch.artifact.schema import FILE_NAME, RopeConfig
from ropesearch.files import sha256_of_json, write_json
from ropesearch.score.score import perplexity
from ropesearch.track.config import TrackConfig
from ropesearch.track.tracker import END_SECONDS, GRACE_SECONDS, Tracker, entry, kept_run_id
from ropesearch.track.weights_and_biases import Claim, Reporter
from ropesearch.train.loop import StepEvent, recorded_events


class FinetuneTracker(Tracker["_Run"]):
    """Tracks one fine-tuning, from its first process."""

    def __init__(self, config: TrackConfig, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(config, folder, say, job="fine-tuning")

    def __enter__(self) -> "FinetuneTracker":
        return self

    def begin(self, identity: Mapping[str, Any], weights: str, asked: Mapping[str, Any]) -> None:
        """Begin to track: `identity` is what the result depends on, `weights` the digest of the base, `asked` the job's
        configuration.
        """
        self._begin(lambda about: _Run(self._folder, sha256_of_json(identity), about), asked, weights)

    def update(self, event: StepEvent) -> None:
        """Log a step, whose line is in metrics.jsonl now."""
        self._do(lambda run: run.update(event))

    def result(self, rope_config: RopeConfig) -> None:
        """Log what came out; rope_config.json is in the run folder now."""
        self._do(lambda run: run.send_result(rope_config))


class _Run:
    """The run of a fine-tuning, which one process at a time writes.

    Methods return why it cannot be written any more, None where all is well, and raise OSError where files, locks or
    processes are refused.
    """

    def __init__(self, folder: Path, fingerprint: str, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._files = folder / "wandb"
        self._id = kept_run_id(self._files / "finetune.json", fingerprint)
        self._about = about
        self._claim = Claim(self._files / f"{self._id}.lock")
        self._reporter: Reporter | None = None
        self._result: str | None = None

    def update(self, event: StepEvent) -> str | None:
        """Log the step, and before the first one all that the file holds."""
        if self._reporter is not None:
            self._send(self._reporter, event)
        elif self._claim.held():  # else an earlier process's reporter is about to end
            self._reporter = self._begun()
        return None if self._reporter is None else self._reporter.failure

    def send_result(self, rope_config: RopeConfig) -> str | None:
        """Log what came out, if that was not logged before."""
        if rope_config.fingerprint == self._reported():
            return None
        deadline = time.monotonic() + END_SECONDS
        while not self._claim.held():
            if time.monotonic() > deadline:
                return "another process still writes its run; the same command again logs what is missing"
            time.sleep(0.05)
        if self._reporter is None:
            self._reporter = self._begun()
        self._result = rope_config.fingerprint
        training, base = rope_config.training or {}, rope_config.base_checkpoint
        held_out = {
            f"held_out_perplexity/{row['method']}/{row['length']}": perplexity(row["nats"], row["tokens"])
            for row in rope_config.evaluation
            if row["measure"] == "perplexity"
        }
        self._reporter.send(
            {
                "kind": "result",
                "summary": {
                    "result/num_training_tokens": training.get("num_training_tokens"),
                    "result/num_processes": training.get("num_processes"),
                    **held_out,
                },
                "artifact": f"rope_config-{self._id}",
                "metadata": {
                    "checkpoint_digest": rope_config.checkpoint.digest,
                    "base_checkpoint_digest": None if base is None else base.digest,
                    "target_length": rope_config.target_length,
                },
                "file": FILE_NAME,
            }
        )
        return self._reporter.failure

    def end(self, exit_code: int, seconds: float) -> str | None:
        """Finish the run, within so many seconds and some more."""
        failure = None
        if self._reporter is not None:
            deadline = time.monotonic() + seconds + GRACE_SECONDS
            self._reporter.end(exit_code, seconds)
            failure = self._reporter.closed(deadline)
            if self._result is not None and failure is None:
                write_json(self._files / "reported.json", {"result": self._result})
        self._claim.release()
        return failure

    def _begun(self) -> Reporter:
        begin = {
            **self._about,
            "config": {"fine_tuning": self._id, **self._about["config"]},
            "group": self._id,
            "id": self._id,
            "name": self._folder.name,
            "job_type": "finetune",
            "counter": "step",
        }
        reporter = Reporter(self._folder, begin, self._claim)
        for event in recorded_events(self._folder):
            self._send(reporter, StepEvent.from_json(event))
        return reporter

    @staticmethod
    def _send(reporter: Reporter, event: StepEvent) -> None:
        reporter.send({"kind": "step", "values": row_of(event)})

    def _reported(self) -> Any:
        """The result that an earlier process has logged. It only saves a run without anything new in it."""
        return entry(self._files / "reported.json", "result")


def row_of(event: StepEvent) -> dict[str, Any]:
    """The values of a step's row: nats per token by regime and by bucket, and the held-out perplexity where it was
    measured. Before the first step there is nothing else.
    """
    row: dict[str, Any] = {"step": event.step}
    if event.step > 0:
        row |= {
            "learning_rate": event.learning_rate,
            "gradient_norm": event.gradient_norm,
            "tokens_per_second": round(event.tokens_per_second, 1),
        }
        for regime in event.regime_of.values():
            row[f"nats_per_token/{regime}"] = event.nats_per_token(regime)
        for bucket, num_tokens in event.tokens.items():
            row[f"nats_per_token/bucket_{bucket}"] = event.nats[bucket] / num_tokens if num_tokens else None
    return row | {f"held_out_perplexity/{each.name}": each.perplexity for each in event.measured}
