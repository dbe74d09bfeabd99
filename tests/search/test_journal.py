import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path

import optuna
import pytest
from optuna import Study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ropesearch.errors import InputError
from ropesearch.search.journal import Journal

PATH = "study.journal"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal of one study with three trials."""
    path = tmp_path / PATH
    study = optuna.create_study(storage=JournalStorage(Journal(path)), study_name="s")
    for value in (3.0, 1.0, 2.0):
        trial = study.ask()
        trial.set_user_attr("text", 'two\nlines, "check":"0", and \x00 and \u20ac')
        study.tell(trial, value)
    return path


def study_in(path: Path) -> Study:
    return optuna.load_study(storage=JournalStorage(Journal(path)), study_name="s")


def values(path: Path) -> list[float | None]:
    return [trial.value for trial in study_in(path).get_trials()]


def test_plain_optuna_reads_what_was_written(written: Path) -> None:
    study = optuna.load_study(storage=JournalStorage(JournalFileBackend(str(written))), study_name="s")
    own = study_in(written)
    assert [trial.value for trial in study.get_trials()] == [3.0, 1.0, 2.0]
    assert study.get_trials() == own.get_trials()


def test_every_line_is_bound_to_all_before_it(written: Path) -> None:
    check = ""
    for line in written.read_bytes().splitlines():
        head, digits = line[: -len(',"check":"0123456789abcdef"}')], line[-18:-2].decode()
        check = hashlib.sha256(check.encode() + head + b"}").hexdigest()[:16]
        assert digits == check == json.loads(line)["check"]


def test_a_journal_cut_at_every_byte_of_its_last_line_opens_and_goes_on(written: Path, tmp_path: Path) -> None:
    content = written.read_bytes()
    start = content.rindex(b"\n", 0, len(content) - 1) + 1
    for end in range(start, len(content)):
        torn = tmp_path / f"torn{end}"
        torn.write_bytes(content[:end])
        assert values(torn) == [3.0, 1.0, None]
        study = study_in(torn)
        study.tell(2, 7.0)
        assert study.ask().number == 3
        assert values(torn) == [3.0, 1.0, 7.0, None]


def test_a_tail_torn_while_another_worker_is_at_work_is_dropped_before_its_next_append(written: Path) -> None:
    other = study_in(written)
    assert len(other.get_trials()) == 3
    with written.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"dead","trial_')
    trial = other.ask()
    trial.set_user_attr("a", 1)
    other.tell(trial, 9.0)
    assert values(written) == [3.0, 1.0, 2.0, 9.0]


def test_a_journal_without_one_whole_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / PATH
    path.write_bytes(b'{"op_code":0,"worker' + b"x" * 3_000_000)
    optuna.create_study(storage=JournalStorage(Journal(path)), study_name="s")
    assert values(path) == [] and path.stat().st_size < 300


def test_operations_written_together_are_one_append(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(written)
    study = optuna.load_study(storage=JournalStorage(journal), study_name="s")
    trial = study.ask()
    writes: list[int] = []
    write = os.write

    def counted(descriptor: int, content: bytes) -> int:
        writes.append(content.count(b"\n"))
        return write(descriptor, content)

    monkeypatch.setattr("os.write", counted)
    with journal.together():
        trial.set_user_attr("a", 1)
        trial.suggest_float("x", 0, 1)
        trial.set_user_attr("b", [1.1, 2.2])
    assert writes == [3]
    found = study.get_trials()[-1]
    assert (found.user_attrs, set(found.params)) == ({"a": 1, "b": [1.1, 2.2]}, {"x"})
    with pytest.raises(RuntimeError), journal.together():
        trial.set_user_attr("c", 1)
        raise RuntimeError
    assert "c" not in study.get_trials()[-1].user_attrs
    study.tell(trial, 1.0)
    assert study.get_trials()[-1].state is TrialState.COMPLETE


def test_many_writers_lose_nothing(written: Path) -> None:
    def write() -> None:
        study = study_in(written)
        for _ in range(15):
            study.tell(study.ask(), 0.0)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(written).count(0.0) == 45


def test_a_writer_waits_for_another_and_then_writes_behind_it(written: Path) -> None:
    first, second = study_in(written), study_in(written)
    with written.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: second.tell(second.ask(), 8.0))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join()
    first.tell(first.ask(), 9.0)
    assert values(written) == [3.0, 1.0, 2.0, 8.0, 9.0]


def test_one_storage_after_another_on_one_journal(written: Path) -> None:
    journal = Journal(written)
    for _ in range(2):
        study = optuna.load_study(storage=JournalStorage(journal), study_name="s")
        assert len(study.get_trials()) == 3


@pytest.mark.parametrize("by", ["removal", "replacement", "cut"])
def test_a_journal_taken_away_is_named_and_nothing_is_put_in_its_place(written: Path, by: str) -> None:
    study = study_in(written)
    study.get_trials()
    content = written.read_bytes()
    if by == "removal":
        written.unlink()
    elif by == "replacement":
        written.rename(written.with_suffix(".old"))
        written.write_bytes(content)
    else:
        os.truncate(written, 10)
    with pytest.raises(InputError, match="while the search was at work; give the same command again"):
        study.ask()
    assert not written.exists() if by == "removal" else written.read_bytes() == content[: 10 if by == "cut" else None]


def test_a_folder_in_the_place_of_the_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got a folder"):
        Journal(tmp_path)
