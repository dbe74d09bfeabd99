"""The study of a run folder: an Optuna study in a journal file, bound to what its scores depend on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from ropesearch.errors import InputError
from ropesearch.search.ownership import exclusive
from ropesearch.search.presence import Presence
from ropesearch.search.sharing_config import JournalConfig, StorageConfig
from ropesearch.search.storage import Store, open_store

_FINGERPRINTS = "fingerprints"
_CLAIM = "claim"


@dataclass(frozen=True, slots=True)
class OpenStudy:
    """An Optuna study, where it is kept, and its run folder."""

    study: Study
    store: Store
    run_folder: Path

    def trials(self) -> list[FrozenTrial]:
        """All trials of the study, by number; not to be changed."""
        trials: list[FrozenTrial] = self.study.get_trials(deepcopy=False)
        return trials

    def claim(self, key: str, presence: Presence) -> bool:
        """Whether this worker is the one that makes what the study will hold under `key`: the first to claim it, or
        the first after that one has died.
        """
        attribute = f"{_CLAIM}/{key}"
        with self.store.exclusive():
            holder = self.study.user_attrs.get(attribute)
            if holder not in (None, presence.id) and presence.is_alive(holder):
                return False
            self.study.set_user_attr(attribute, presence.id)
        return True

    def disclaim(self, key: str) -> None:
        """Free what this worker has claimed."""
        self.study.set_user_attr(f"{_CLAIM}/{key}", None)


def open_study(
    run_folder: Path,
    fingerprints: Mapping[str, Any],
    sampler: BaseSampler,
    num_objectives: int = 1,
    storage: StorageConfig | None = None,
) -> OpenStudy:
    """Open the study of `run_folder`, or begin it; by default it is kept in a journal there.

    `fingerprints` are JSON values that name all that scores and candidates depend on (weights, windows, how they are
    scored, space, optimizer, seed, ...). They are kept in the study.

    Raises InputError when the folder holds a study of other fingerprints, or for what `open_store` does.
    """
    asked = json.loads(json.dumps(fingerprints, allow_nan=False))
    run_folder.mkdir(parents=True, exist_ok=True)
    config = JournalConfig() if storage is None else storage
    if isinstance(config, JournalConfig):
        with exclusive(run_folder):
            return _opened(open_store(run_folder, config), run_folder, asked, sampler, num_objectives)
    store = open_store(run_folder, config)
    with store.exclusive():
        return _opened(store, run_folder, asked, sampler, num_objectives)


def _opened(
    store: Store, run_folder: Path, asked: Mapping[str, Any], sampler: BaseSampler, num_objectives: int
) -> OpenStudy:
    try:
        study = optuna.load_study(study_name=store.study_name, storage=store.storage, sampler=sampler)
    except KeyError:
        directions = ["minimize"] * num_objectives
        study = optuna.create_study(
            study_name=store.study_name, storage=store.storage, sampler=sampler, directions=directions
        )
    found = study.user_attrs.get(_FINGERPRINTS)
    if found is None:
        study.set_user_attr(_FINGERPRINTS, asked)
    else:
        _compare(run_folder, found, asked)
    return OpenStudy(study, store, run_folder)


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
