import json
import shutil
import threading
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ropesearch.errors import InputError
from ropesearch.search import journal as journal_module
from ropesearch.search.journal import Journal, drop_torn_tail

PATH = "study.journal"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A journal of one study with three trials."""
    path = tmp_path / PATH
    study = optuna.create_study(storage=JournalStorage(Journal(path)), study_name="s")
    for value in (3.0, 1.0, 2.0):
        trial = study.ask()
        trial.set_user_attr("text", "two\nlines, and \x00 and \u20ac")
        study.tell(trial, value)
    return path


def values(path: Path) -> list[float | None]:
    study = optuna.load_study(storage=JournalStorage(Journal(path)), study_name="s")
    return [trial.value for trial in study.get_trials()]


def test_a_journal_cut_at_every_byte_of_its_last_line_opens_and_goes_on(written: Path, tmp_path: Path) -> None:
    content = written.read_bytes()
    start = content.rindex(b"\n", 0, len(content) - 1) + 1
    for end in range(start, len(content)):
        torn = tmp_path / f"torn{end}"
        torn.write_bytes(content[:end])
        assert values(torn) == [3.0, 1.0, None]
        study = optuna.load_study(storage=JournalStorage(Journal(torn)), study_name="s")
        study.tell(2, 7.0)
        assert study.ask().number == 3
        assert values(torn) == [3.0, 1.0, 7.0, None]


def test_a_tail_torn_while_another_worker_is_at_work_is_dropped_before_its_next_append(written: Path) -> None:
    other = optuna.load_study(storage=JournalStorage(Journal(written)), study_name="s")
    assert len(other.get_trials()) == 3
    with written.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"dead","trial_')
    trial = other.ask()
    trial.set_user_attr("a", 1)
    other.tell(trial, 9.0)
    assert values(written) == [3.0, 1.0, 2.0, 9.0]


def test_a_journal_without_one_whole_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / PATH
    path.write_bytes(b'{"op_code":0,"worker' + b"x" * 200_000)
    drop_torn_tail(path)
    assert path.read_bytes() == b""
    drop_torn_tail(path)
    drop_torn_tail(tmp_path / "absent")


def test_a_torn_tail_longer_than_one_read_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / PATH
    path.write_bytes(b"kept\n" + b"x" * 200_000)
    drop_torn_tail(path)
    assert path.read_bytes() == b"kept\n"


@pytest.mark.parametrize(
    "damage",
    [
        b"\n",
        b"\x00" * 40 + b"\n",
        b'{"op_code":8,"worker_id":"w","trial_id":1,"user_a\n',
        b'{"op_code":8,"worker_id":"w","trial_id":99,"user_attr":{"a":1}}\n',
        b'{"op_code":8,"worker_id":"w","trial_id":"1","user_attr":{"a":1}}\n',
        b'{"op_code":6,"worker_id":"w","trial_id":1}\n',
        b'{"op_code":77,"worker_id":"w"}\n',
        b'{"op_code":4,"study_id":0,"datetime_start":null}\n',
        b"[]\n",
        b"\xff\xfe\n",
    ],
)
@pytest.mark.parametrize("place", [0, 4, -1])
def test_a_damaged_line_is_named_and_nothing_is_dropped(written: Path, damage: bytes, place: int) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    lines[place] = damage
    content = b"".join(lines)
    written.write_bytes(content)
    with pytest.raises(InputError, match=rf"line {place % len(lines) + 1} is not a line"):
        Journal(written)
    assert written.read_bytes() == content


def test_operations_written_together_are_one_append(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(written)
    storage = JournalStorage(journal)
    study = optuna.load_study(storage=storage, study_name="s")
    trial = study.ask()
    appends: list[int] = []
    whole = JournalFileBackend.append_logs

    def counted(self: Journal, logs: list[dict[str, object]]) -> None:
        appends.append(len(logs))
        whole(self, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", counted)
    with journal.together():
        trial.set_user_attr("a", 1)
        trial.suggest_float("x", 0, 1)
        trial.set_user_attr("b", [1.1, 2.2])
    assert appends == [3]
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
        study = optuna.load_study(storage=JournalStorage(Journal(written)), study_name="s")
        for _ in range(15):
            study.tell(study.ask(), 0.0)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(written).count(0.0) == 45


def test_the_lock_of_a_dead_writer_is_taken_after_the_grace_period(
    written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = shutil.copy(written, tmp_path / "copy")
    Path(f"{copy}.lock").touch()
    monkeypatch.setattr(journal_module, "_GRACE_SECONDS", 3)
    assert values(Path(copy)) == [3.0, 1.0, 2.0]


def test_what_this_module_knows_of_the_format_is_what_optuna_writes(written: Path) -> None:
    for line in written.read_bytes().splitlines():
        operation = json.loads(line)
        assert journal_module._KEYS[operation["op_code"]] <= operation.keys()
    assert {int(code) for code in optuna.storages.journal._storage.JournalOperation} >= set(journal_module._KEYS)
