"""Small searches for tests, run in this process or as a command that can be killed, and what their studies hold."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

TARGET_LENGTH = 128
OTHER_TRANSFORMERS = "ROPESEARCH_OTHER_TRANSFORMERS"


def write_corpus(folder: Path, num_documents: int = 9, num_words: int = 60) -> Path:
    """Documents of random words, each longer than TARGET_LENGTH tokens of the toy tokenizer."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(num_documents):
        words = ["".join(random.choice(list("abcdefgh"), size=random.integers(2, 8))) for _ in range(num_words)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


def search_words(model: Path, corpus: Path, run: Path, num_trials: int = 12) -> list[str]:
    """The command line of a search on a toy: 3 windows a split."""
    return [
        "search",
        str(model),
        f"corpus.path={corpus}",
        f"run={run}",
        f"target_length={TARGET_LENGTH}",
        f"budget.num_trials={num_trials}",
        "corpus.num_search_windows=3",
        "corpus.num_selection_windows=3",
        "corpus.num_held_out_windows=3",
        "optimizer=evolution",
        "optimizer.num_population=6",
        "optimizer.num_parents=4",
        "selection.num_finalists=2",
        "cache=null",
    ]


def started(words: list[str], **environment: str) -> "subprocess.Popen[str]":
    """The command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ropesearch.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def study_of(run: Path) -> optuna.Study:
    """A run folder's study, read by Optuna alone."""
    path = str(run / "study.journal")
    storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path, grace_period=5)))
    return optuna.load_study(study_name=None, storage=storage)


def trials_of(run: Path) -> list[tuple[Any, ...]]:
    """Number, state, value, parameters, method and regime of every trial in a run folder's study."""
    return [
        (
            trial.number,
            trial.state,
            trial.values,
            trial.params,
            trial.user_attrs.get("method"),
            trial.user_attrs.get("regime"),
            trial.user_attrs.get("score"),
        )
        for trial in study_of(run).get_trials()
    ]


def other_transformers(version: str) -> Path | None:
    """The folder that holds another version of transformers, where `make test-slow` has put it."""
    root = os.environ.get(OTHER_TRANSFORMERS)
    folder = Path(root or "") / version
    return folder.absolute() if root and folder.is_dir() else None
