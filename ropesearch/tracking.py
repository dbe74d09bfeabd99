"""What a search tells Weights & Biases, and when: one run for the study, one for each worker.

Trials are logged in the order of their numbers, each when all before it are finished. So a run of the study always
holds the first so many trials, and whoever writes it next knows from that number what is missing.
"""

import dataclasses
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropesearch.artifact.schema import FILE_NAME, RopeConfig
from ropesearch.files import sha256_of_json, write_json
from ropesearch.rope.geometry import Geometry
from ropesearch.score.score import perplexity
from ropesearch.search.ownership import exclusive
from ropesearch.search.run import SearchResult
from ropesearch.search.study import OpenStudy
from ropesearch.search.trials import (
    COST,
    FAILURE,
    GUARD,
    METHOD,
    REGIME,
    SECONDS,
    STOPPED_AFTER,
    is_searched,
    rank,
    recorded_score,
)
from ropesearch.search.worker import SEARCH, SearchEvent
from ropesearch.track.config import TrackConfig
from ropesearch.track.tracker import GRACE_SECONDS, Tracker, entry, kept_run_id
from ropesearch.track.weights_and_biases import Claim, Reporter, TrialRow, without_folders

_STATES = {"COMPLETE": "complete", "PRUNED": "stopped", "FAIL": "failed"}

Trial = Any  # Optuna's FrozenTrial


class SearchTracker(Tracker["_Runs"]):
    """Tracks one search. The run of the study is written by one worker at a time, by that which holds a lock in the run
    folder; the others are ready to go on with it.
    """

    def __init__(self, config: TrackConfig, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(config, folder, say, job="search")

    def __enter__(self) -> "SearchTracker":
        return self

    def begin(
        self,
        opened: OpenStudy,
        fingerprints: Mapping[str, Any],
        geometry: Geometry,
        target_length: int,
        asked: Mapping[str, Any],
    ) -> None:
        """Begin to track the study, which is open now; `asked` is the job's configuration."""
        of = {"geometry": dataclasses.asdict(geometry), "target_length": target_length}
        self._begin(
            lambda about: _Runs(self._folder, opened, sha256_of_json(fingerprints), {**about, **of}),
            asked,
            fingerprints["weights"],
        )
        self._do(lambda runs: runs.update())

    def update(self, event: SearchEvent) -> None:
        """Log what has been finished meanwhile, by this worker or another."""
        self._do(lambda runs: runs.update(event))

    def result(self, rope_config: RopeConfig, result: SearchResult) -> None:
        """Log what the search came to; rope_config.json is in the run folder now."""
        self._do(lambda runs: runs.send_result(rope_config, result))


class _Runs:
    """The runs of this process: its worker's, from its first trial on, and the study's, when it is its turn.

    Methods return why a run cannot be written any more, None where all is well, and raise OSError where files, locks or
    processes are refused.
    """

    def __init__(self, folder: Path, opened: OpenStudy, fingerprint: str, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._files = folder / "wandb"
        self._opened = opened
        with exclusive(folder):
            self._study_id = kept_run_id(self._files / "study.json", fingerprint)
        config = {"study": self._study_id, **about["config"]}
        self._about = {**about, "group": self._study_id, "config": config}
        self._study: Reporter | None = None
        self._worker: Reporter | None = None
        self._study_claim = Claim(self._files / f"{self._study_id}.lock")
        self._so_far = _SoFar()
        self._result: str | None = None

    def _trials(self) -> list[Trial]:
        trials: list[Trial] = self._opened.study.get_trials(deepcopy=False)
        return trials

    def update(self, event: SearchEvent | None = None) -> str | None:
        """Log what has been finished: by this worker, if that is what the event says, and of the study."""
        trials = self._trials()
        if event is not None and event.split == SEARCH and trials[event.trial_number].state.is_finished():
            if self._worker is None:
                self._worker = self._begun_worker()
            self._worker.trial(row_of(trials[event.trial_number]), is_best_candidate=False, so_far={})
        self._send_finished(trials)
        return next((run.failure for run in self._runs() if run.failure is not None), None)

    def _runs(self) -> list[Reporter]:
        return [run for run in (self._study, self._worker) if run is not None]

    def _begun_worker(self) -> Reporter:
        place = _place()
        suffixes = [] if place is None else [hashlib.sha256(place.encode()).hexdigest()[:8]]
        while True:
            suffix = suffixes.pop() if suffixes else uuid.uuid4().hex[:8]
            run_id = f"{self._study_id}-{suffix}"
            claim = Claim(self._files / f"{run_id}.lock")
            if claim.held():  # else another process has the same place
                name = f"{self._folder.name} worker {place or suffix}"
                return self._reporter(run_id, name, claim, is_study=False)

    def _send_finished(self, trials: Sequence[Trial]) -> None:
        """Log in the study's run what is missing of the trials before the first unfinished one, if it is this worker's
        turn.
        """
        num_finished = next((index for index, trial in enumerate(trials) if not trial.state.is_finished()), len(trials))
        if self._study is None:
            if num_finished <= (self._reported("num_trials") or 0) or not self._study_claim.held():
                return
            self._study = self._reporter(self._study_id, self._folder.name, self._study_claim, is_study=True)
        for trial in trials[self._so_far.num_trials : num_finished]:
            row = row_of(trial)
            is_best_candidate = self._so_far.add(trial, row)
            self._study.trial(row, is_best_candidate=is_best_candidate, so_far=self._so_far.values())

    def send_result(self, rope_config: RopeConfig, result: SearchResult) -> str | None:
        """Log in the study's run what the search came to, if it is this worker's turn and was not logged before."""
        if rope_config.fingerprint == self._reported("result") or not self._study_claim.held():
            return None
        if self._study is None:
            self._study = self._reporter(self._study_id, self._folder.name, self._study_claim, is_study=True)
        self._send_finished(self._trials())
        self._result = rope_config.fingerprint
        held_out = {
            f"held_out_perplexity/{row['method']}/{row['length']}": perplexity(row["nats"], row["tokens"])
            for row in rope_config.evaluation
            if row["measure"] == "perplexity"
        }
        self._study.send(
            {
                "kind": "result",
                "summary": {
                    "result/method": result.method,
                    "result/trial": result.trial_number,
                    "result/num_trials": result.num_trials,
                    "result/num_stopped": result.num_stopped,
                    "result/num_failed": result.num_failed,
                    "result/num_forward_equivalent_tokens": result.num_forward_equivalent_tokens,
                    "result/stopped_because": result.stopped_because,
                    **held_out,
                },
                "artifact": f"rope_config-{self._study_id}",
                "metadata": {
                    "checkpoint_digest": rope_config.checkpoint.digest,
                    "target_length": rope_config.target_length,
                    "method": result.method,
                },
                "file": FILE_NAME,
            }
        )
        return self._study.failure

    def end(self, exit_code: int, seconds: float) -> str | None:
        """Finish the runs, within so many seconds and some more."""
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        for run in self._runs():
            run.end(exit_code, seconds)
        failures = [failure for run in self._runs() if (failure := run.closed(deadline)) is not None]
        if self._study is not None and not failures:
            reported = {"num_trials": self._so_far.num_trials, "result": self._result or self._reported("result")}
            write_json(self._files / "reported.json", reported)
        self._study_claim.release()
        return failures[0] if failures else None

    def _reporter(self, run_id: str, name: str, claim: Claim, *, is_study: bool) -> Reporter:
        job_type = "study" if is_study else "worker"
        begin = {**self._about, "id": run_id, "name": name, "job_type": job_type, "counter": "trial"}
        return Reporter(self._folder, begin, claim)

    def _reported(self, key: str) -> Any:
        """What an earlier process has logged in the study's run. It only saves runs without anything new in them: what
        is missing in a run is known from the run.
        """
        return entry(self._files / "reported.json", key)


class _SoFar:
    """What the first trials of a study came to."""

    def __init__(self) -> None:
        self.num_trials = 0
        self._num_tokens = 0
        self._best: tuple[tuple[float, ...], TrialRow] | None = None
        self._best_candidate: tuple[float, ...] | None = None

    def add(self, trial: Trial, row: TrialRow) -> bool:
        """Count the next trial; returns whether it is the best candidate so far."""
        self.num_trials += 1
        self._num_tokens += row.num_forward_equivalent_tokens or 0
        if row.state != "complete":
            return False
        placed = rank(trial)
        if self._best is None or placed < self._best[0]:
            self._best = placed, row
        if not is_searched(trial) or (self._best_candidate is not None and placed > self._best_candidate):
            return False
        self._best_candidate = placed
        return True

    def values(self) -> dict[str, Any]:
        """The best trial and what was spent, for the row of the last one."""
        spent = {"spent/num_trials": self.num_trials, "spent/num_forward_equivalent_tokens": self._num_tokens}
        if self._best is None:
            return spent
        best = self._best[1]
        names = ("trial", "method", "nats_per_token", "perplexity")
        return {**spent, **{f"best/{name}": getattr(best, name) for name in names}}


def row_of(trial: Trial) -> TrialRow:
    """A finished trial as plain values."""
    known = trial.user_attrs
    score = recorded_score(trial)
    regime = known.get(REGIME) or {}
    values = trial.values if trial.state.name == "COMPLETE" else []
    reason = known.get(FAILURE)
    return TrialRow(
        trial=trial.number,
        method=known.get(METHOD, ""),
        state=_STATES[trial.state.name],
        reason=None if reason is None else without_folders(reason),
        stopped_after_windows=known.get(STOPPED_AFTER),
        nats_per_token=values[0] if values else None,
        perplexity=perplexity(values[0], 1) if values else None,
        short_nats_per_token=values[1] if len(values) > 1 else None,
        short_excess_nats=trial.constraints.get(GUARD),
        num_forward_equivalent_tokens=known.get(COST),
        seconds=known.get(SECONDS),
        factors=tuple(regime.get("factors", ())),
        attention_factor=regime.get("attention_factor"),
        retained_tokens=regime.get("retained_tokens"),
        block_edges=() if score is None else tuple(score.block_edges.tolist()),
        block_nats=() if score is None else tuple(score.nats.sum(axis=0).tolist()),
        block_tokens=() if score is None else tuple(score.tokens.sum(axis=0).tolist()),
    )


def _place() -> str | None:
    """Where a scheduler has put this process, the same when it starts it again; None without one."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    parts = list(job) if all(job) else [os.environ.get("SLURM_JOB_ID")]
    process = os.environ.get("SLURM_PROCID")
    return "_".join(filter(None, [*parts, process if process != "0" else None])) if parts[0] else None
