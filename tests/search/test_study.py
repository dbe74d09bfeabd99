from pathlib import Path

import optuna
import pytest

from ropesearch.errors import InputError
from ropesearch.search.journal import Journal
from ropesearch.search.storage import JOURNAL_NAME, STUDY_NAME
from ropesearch.search.study import open_study
from tests.search.analytic import FINGERPRINTS, make_sampler


def test_a_study_is_opened_again_with_the_same_fingerprints(tmp_path: Path) -> None:
    first = open_study(tmp_path / "run", FINGERPRINTS, make_sampler())
    first.study.tell(first.study.ask(), 0.1 + 0.2)
    again = open_study(tmp_path / "run", FINGERPRINTS, make_sampler())
    assert [trial.value for trial in again.study.get_trials()] == [0.1 + 0.2]
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "run" / JOURNAL_NAME))
    )
    assert optuna.load_study(study_name=STUDY_NAME, storage=storage).user_attrs["fingerprints"] == FINGERPRINTS


def test_other_fingerprints_are_refused_by_name_with_both_values(tmp_path: Path) -> None:
    open_study(tmp_path, FINGERPRINTS, make_sampler())
    other = {**FINGERPRINTS, "weights": "sha256:ff", "dtype": "float32"}
    del other["seed"]
    with pytest.raises(InputError) as caught:
        open_study(tmp_path, other, make_sampler())
    text = str(caught.value)
    assert "weights: sha256:00 there, sha256:ff asked" in text
    assert "dtype: (nothing) there, float32 asked" in text
    assert "seed: 0 there, (nothing) asked" in text
    assert "windows" not in text
    assert "another run folder" in text


def test_a_study_killed_before_its_fingerprints_were_written_is_taken_over(tmp_path: Path) -> None:
    storage = optuna.storages.JournalStorage(Journal(tmp_path / JOURNAL_NAME))
    study = optuna.create_study(study_name=STUDY_NAME, storage=storage)
    assert open_study(tmp_path, FINGERPRINTS, make_sampler()).study.user_attrs["fingerprints"] == FINGERPRINTS
    assert study.user_attrs["fingerprints"] == FINGERPRINTS


def test_the_studies_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    optuna.create_study(study_name=STUDY_NAME, storage=storage).ask()
    content = path.read_bytes()
    with pytest.raises(InputError, match=r"line 1 is not what a search writes there: .* use another run folder"):
        open_study(tmp_path, FINGERPRINTS, make_sampler())
    assert path.read_bytes() == content


def test_a_journal_that_this_optuna_cannot_replay_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / JOURNAL_NAME).append_logs([{"op_code": 77, "worker_id": "w"}])
    with pytest.raises(InputError, match="cannot be replayed by the optuna that is installed here"):
        open_study(tmp_path, FINGERPRINTS, make_sampler())


def test_nested_fingerprints_are_compared_leaf_by_leaf(tmp_path: Path) -> None:
    open_study(tmp_path, FINGERPRINTS, make_sampler())
    other = {**FINGERPRINTS, "windows": {"search": "ff", "selection": "02"}}
    with pytest.raises(InputError) as caught:
        open_study(tmp_path, other, make_sampler())
    assert "\n  windows.search: 01 there, ff asked\n" in str(caught.value) and "selection" not in str(caught.value)
