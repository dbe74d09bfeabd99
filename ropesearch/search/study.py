"""The study of a run folder: an Optuna study in a journal file, bound to what its scores depend on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage

from ropesearch.errors import InputError
from ropesearch.search.journal import Journal
from ropesearch.search.ownership import exclusive, remove_dead

JOURNAL_NAME = "study.journal"
STUDY_NAME = "ropesearch"
_FINGERPRINTS = "fingerprints"


@dataclass(frozen=True, slots=True)
class OpenStudy:
    """An Optuna study and the journal that it is kept in."""

    study: Study
    journal: Journal
    run_folder: Path


def open_study(
    run_folder: Path, fingerprints: Mapping[str, Any], sampler: BaseSampler, num_objectives: int = 1
) -> OpenStudy:
    """Open the study of `run_folder`, or begin it.

    `fingerprints` are JSON values that name all that scores and candidates depend on (weights, windows, how they are
    scored, space, optimizer, seed, ...). They are kept in the study.

    Raises InputError when the folder holds a study of other fingerprints, or a journal that is damaged or another
    program's.
    """
    asked = json.loads(json.dumps(fingerprints, allow_nan=False))
    run_folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = run_folder / JOURNAL_NAME
    with exclusive(run_folder):
        remove_dead(run_folder)
        journal = Journal(path)
        try:
            storage = JournalStorage(journal)
        except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"{path} cannot be replayed by the optuna that is installed here ({error!r}); go on with the versions "
                f"in {run_folder / 'versions.json'}, or start the search in another run folder"
            ) from error
        if storage.get_all_studies():
            study = optuna.load_study(study_name=STUDY_NAME, storage=storage, sampler=sampler)
        else:
            directions = ["minimize"] * num_objectives
            study = optuna.create_study(study_name=STUDY_NAME, storage=storage, sampler=sampler, directions=directions)
        found = study.user_attrs.get(_FINGERPRINTS)
        if found is None:
            study.set_user_attr(_FINGERPRINTS, asked)
        else:
            _compare(run_folder, found, asked)
    return OpenStudy(study, journal, run_folder)


def _compare(run_folder: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    missing = "(nothing)"
    found, asked = dict(_leaves(found)), dict(_leaves(asked))
    differing = [
        f"  {key}: {_shown(found.get(key, missing))} there, {_shown(asked.get(key, missing))} asked"
        for key in sorted({*found, *asked})
        if found.get(key, missing) != asked.get(key, missing)
    ]
    if differing:
        raise InputError(
            f"{run_folder} holds a search of something else:\n"
            + "\n".join(differing)
            + "\nask for the same to go on with it, or use another run folder"
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values below nested objects, by dotted name."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
