"""How far a search is, as its study and its workers' last signs of life tell. It is only looked at.

What is counted comes from the study alone. What workers last said of themselves (their files in the run folder) only
tells which of them still live, and so which unfinished trials wait for another worker.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.run_folder import LAUNCHER_FOLDER
from ropesearch.search.budget import spent_seconds, spent_tokens
from ropesearch.search.presence import read_signs
from ropesearch.search.storage import JOURNAL_NAME, WHERE_NAME, open_for_reading
from ropesearch.search.trials import (
    COST,
    FAILURE,
    METHOD,
    NUM_STEPS,
    OWNER,
    PLAN,
    REUSED_FROM,
    SCORE,
    SECONDS,
    is_searched,
    ranked,
    step_key,
    violation,
    window_key,
)

_LEASE_SECONDS = 60.0  # where neither a worker nor the run says its own
_NUM_RECENT = 32  # finished trials whose pace counts
_SEARCH_PHASE = "search windows"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSign:
    """What a worker last said of itself. `state` is "working", "silent" (working when last seen, and nothing since for
    longer than its lease) or "ended"; `fraction`, in [0, 1], is of its phase, that of the search windows of the budget.
    """

    worker: str
    state: str
    because: str | None
    phase: str | None
    fraction: float
    trial_number: int | None
    slurm_job: str | None
    device: str | None
    began: str | None
    silent_seconds: float  # since its file was last written


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedTrial:
    """A trial that a worker scores, or that waits for one, as its own has ended, is silent or was never seen.

    `num_windows` of them were scored one by one so far (trials that are not raced show none before the end), and
    `num_steps` gradient steps made.
    """

    number: int
    method: str | None
    worker: str | None
    waits: bool
    num_windows: int
    num_steps: int
    num_planned_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrial:
    """A trial that was scored: its objective on the search windows, and by how much it breaks the guard, 0.0 where it
    keeps it or there is none."""

    number: int
    method: str
    nats_per_token: float
    excess_nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStatus:
    """How far the search of a run folder is.

    `num_tokens` counts forward-equivalent tokens, of finished and unfinished trials; `tokens_per_second` is the pace of
    the last finished trials times the number of workers at work, `seconds_left` what the search windows take at that
    pace; None where nobody works or nothing is known. `num_search_windows` is None until one trial is scored.
    """

    has_study: bool
    num_complete: int
    num_stopped: int
    failures: Mapping[str, int]
    unfinished: Sequence[UnfinishedTrial]
    best: ScoredTrial | None
    best_baseline: ScoredTrial | None
    num_search_windows: int | None
    num_tokens: int
    scoring_seconds: float
    tokens_per_second: float | None
    seconds_left: float | None
    workers: Sequence[WorkerSign]
    result: Path | None

    @property
    def is_worked_on(self) -> bool:
        """Whether any worker lives."""
        return any(sign.state == "working" for sign in self.workers)

    @property
    def state(self) -> str:
        """In one word: "running", "finished", "stopped" (begun, nobody works, no result) or "new" (nothing scored)."""
        if self.is_worked_on:
            return "running"
        if self.result is not None and not self.unfinished:
            return "finished"
        return "stopped" if self.has_study else "new"


def read_status(run_folder: Path) -> SearchStatus:
    """Look at the search in a run folder, also while workers write to it; nothing is written, and no lock taken but
    that of a reader on the journal, while it is read.

    Raises InputError for a folder that holds no search, and for a study that is damaged, as the search does.
    """
    config = _config(run_folder)
    workers = _workers(run_folder, config)
    study = _read_study(run_folder)
    trials = [] if study is None else study
    scored = ranked(trials)
    baselines = [trial for trial in scored if not is_searched(trial)]
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    pace = _tokens_per_second(trials, sum(sign.state == "working" for sign in workers))
    result = run_folder / "rope_config.json"
    return SearchStatus(
        has_study=study is not None,
        num_complete=len(scored),
        num_stopped=sum(trial.state is TrialState.PRUNED for trial in trials),
        failures=Counter(str(trial.user_attrs.get(FAILURE, "no reason was kept")) for trial in failed),
        unfinished=_unfinished(trials, workers),
        best=_scored(scored),
        best_baseline=_scored(baselines),
        num_search_windows=len(scored[0].user_attrs[SCORE]["nats"]) if scored else None,
        num_tokens=spent_tokens(trials),
        scoring_seconds=spent_seconds(trials),
        tokens_per_second=pace,
        seconds_left=_seconds_left(trials, workers, pace),
        workers=workers,
        result=result if result.is_file() else None,
    )


def _config(run_folder: Path) -> Mapping[str, Any]:
    """What the run's config.json holds; empty where the search has just begun and has not written it yet."""
    expected = f"expected the run folder of a search, got {run_folder}"
    if not run_folder.is_dir():
        raise InputError(f"path: {expected}, which is {'a file' if run_folder.exists() else 'not there'}")
    path = run_folder / "config.json"
    try:
        value = json.loads(path.read_bytes())
        job = value["job"]
    except FileNotFoundError:
        if any((run_folder / name).exists() for name in (JOURNAL_NAME, WHERE_NAME, "log.txt", LAUNCHER_FOLDER)):
            return {}
        raise InputError(f"path: {expected}, which holds neither config.json nor {JOURNAL_NAME}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"path: {expected}, whose config.json is not that of a run") from error
    if job != "search":
        raise InputError(f"path: {expected}, which holds a run of the job {job}")
    return dict(value)


def _read_study(run_folder: Path) -> list[FrozenTrial] | None:
    """The trials of the run's study; None where there is none yet."""
    opened = open_for_reading(run_folder)
    if opened is None:
        return None
    storage, study_name = opened
    try:
        study = storage.get_study_id_from_name(study_name)
    except KeyError:  # made, and nothing written yet
        return None
    return list(storage.get_all_trials(study, deepcopy=False))


def _workers(run_folder: Path, config: Mapping[str, Any]) -> list[WorkerSign]:
    """The last signs of all workers, those at work first, then by when they began."""
    lease_seconds = config.get("worker", {}).get("lease_seconds", _LEASE_SECONDS)
    signs = [_sign(sign, lease_seconds) for sign in read_signs(run_folder)]
    order = {"working": 0, "silent": 1, "ended": 2}
    return sorted((sign for sign in signs if sign is not None), key=lambda sign: order[sign.state])


def _sign(value: Mapping[str, Any], lease_seconds: float) -> WorkerSign | None:
    """What a worker's file says; None where it says something else."""
    silent_seconds: float = value["silent_seconds"]
    try:
        ended = value["state"] == "ended"
        is_silent = silent_seconds > float(value.get("lease_seconds", lease_seconds))
        return WorkerSign(
            worker=str(value["worker"]),
            state="ended" if ended else "silent" if is_silent else "working",
            because=value.get("because"),
            phase=value.get("phase"),
            fraction=float(value.get("fraction") or 0.0),
            trial_number=value.get("trial"),
            slurm_job=value.get("slurm_job"),
            device=value.get("device"),
            began=value.get("began"),
            silent_seconds=silent_seconds,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _unfinished(trials: Sequence[FrozenTrial], workers: Sequence[WorkerSign]) -> list[UnfinishedTrial]:
    living = {sign.worker for sign in workers if sign.state == "working"}
    found = []
    for trial in trials:
        if trial.state.is_finished():
            continue
        known = trial.user_attrs
        plan = known.get(PLAN) or {}
        found.append(
            UnfinishedTrial(
                number=trial.number,
                method=known.get(METHOD),
                worker=known.get(OWNER),
                waits=known.get(OWNER) not in living,
                num_windows=_num_present(known, window_key),
                num_steps=_num_present(known, step_key),
                num_planned_steps=plan.get(NUM_STEPS, 0),
            )
        )
    return found


def _num_present(attributes: Mapping[str, Any], key: Any) -> int:
    number = 0
    while key(number) in attributes:
        number += 1
    return number


def _scored(best_first: Sequence[FrozenTrial]) -> ScoredTrial | None:
    for trial in best_first:
        return ScoredTrial(
            number=trial.number,
            method=str(trial.user_attrs[METHOD]),
            nats_per_token=float(trial.values[0]),
            excess_nats=violation(trial),
        )
    return None


def _tokens_per_second(trials: Sequence[FrozenTrial], num_working: int) -> float | None:
    """Of the trials that finished last, those aside that took over the score of another."""
    finished = [trial for trial in trials if trial.state.is_finished() and REUSED_FROM not in trial.user_attrs]
    recent = sorted(finished, key=lambda trial: (trial.datetime_complete, trial.number))[-_NUM_RECENT:]
    seconds = math.fsum(trial.user_attrs.get(SECONDS, 0.0) for trial in recent)
    tokens = sum(trial.user_attrs.get(COST, 0) for trial in recent)
    return num_working * tokens / seconds if num_working and seconds > 0 else None


def _seconds_left(
    trials: Sequence[FrozenTrial], workers: Sequence[WorkerSign], tokens_per_second: float | None
) -> float | None:
    """What is left of the budget, as the worker that was furthest has said, at the pace of all since."""
    searching = [sign for sign in workers if sign.state == "working" and sign.phase == _SEARCH_PHASE]
    if not tokens_per_second or not searching:
        return None
    said = max(searching, key=lambda sign: sign.fraction)
    spent = spent_tokens([trial for trial in trials if trial.state.is_finished()])
    spent_then = spent - tokens_per_second * said.silent_seconds
    if spent_then <= 0 or not 0 < said.fraction <= 1:
        return None
    return max(0.0, spent_then * (1 - said.fraction) / said.fraction / tokens_per_second - said.silent_seconds)
