import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import optuna
import pytest
import sqlalchemy
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from ropesearch.errors import InputError, UnreachableError
from ropesearch.search.sharing_config import GrpcConfig, JournalConfig, PostgresqlConfig, WorkerConfig
from ropesearch.search.storage import Patient, is_away, open_for_reading, open_store, patiently
from ropesearch.search.study import open_study
from tests.search.analytic import FINGERPRINTS, make_sampler

NOWHERE = "postgresql+psycopg://somebody@127.0.0.1:{}/study"


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "expected postgresql"),
        ("postgresql://me@host/db", r"expected postgresql\+psycopg://"),
        ("postgresql+psycopg://me@host", "expected postgresql"),
        ("mysql://host/db", "expected postgresql"),
        ("sqlite:///study.db", "SQLite locks no rows, .* storage=journal"),
        ("postgresql+psycopg://me:secret@host:1/db", r"\(postgresql\+psycopg://me:\*\*\*@host:1/db\).* PGPASSWORD"),
        ("postgresql+psycopg://me@[host/db", "expected postgresql"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        PostgresqlConfig(url=url).check()
    assert "secret" not in str(caught.value)


def test_a_proxy_needs_a_host_and_a_port() -> None:
    with pytest.raises(InputError, match=r"storage\.host: expected the host of the proxy"):
        GrpcConfig().check()
    with pytest.raises(InputError, match=r"storage\.port: expected from 1 to 65535, got 0"):
        GrpcConfig(host="here", port=0).check()
    GrpcConfig(host="here").check()


@pytest.mark.parametrize("lease_seconds", [0.0, 0.5, 1e9])
def test_leases_that_are_refused(lease_seconds: float) -> None:
    with pytest.raises(InputError, match=r"worker\.lease_seconds: expected from 1 to 86400"):
        WorkerConfig(lease_seconds=lease_seconds).check()
    with pytest.raises(InputError, match=r"worker\.grace_seconds: expected from 0"):
        WorkerConfig(grace_seconds=-1.0).check()


def test_no_server_is_said_at_once_and_binds_the_run_folder_to_nothing(tmp_path: Path) -> None:
    url = NOWHERE.format(free_port())
    with pytest.raises(UnreachableError, match=r"storage\.url: no PostgreSQL server answers at .*refused"):
        open_store(tmp_path, PostgresqlConfig(url=url))
    assert list(tmp_path.iterdir()) == []
    begun_at(tmp_path, url)
    with pytest.raises(UnreachableError, match=r"storage\.url: no PostgreSQL server answers at"):
        open_for_reading(tmp_path)


def test_a_server_of_a_search_that_was_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("ropesearch.search.storage._PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("time.sleep", pauses.append)
    url = NOWHERE.format(free_port())
    begun_at(tmp_path, url)
    with pytest.raises(UnreachableError, match="go on with the same command when it is back"):
        open_store(tmp_path, PostgresqlConfig(url=url))
    assert UnreachableError.exit_code == 75


def begun_at(folder: Path, url: str) -> None:
    place = {"name": "postgresql", "url": url}
    (folder / "study.json").write_text(json.dumps({"study_name": "ropesearch-0", "storage": place}))


def test_no_proxy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropesearch.search.storage._CONNECT_SECONDS", 0.1)
    with pytest.raises(UnreachableError, match=r"storage\.host: expected a gRPC proxy at 127\.0\.0\.1:.*got no answer"):
        open_store(tmp_path, GrpcConfig(host="127.0.0.1", port=free_port()))


def test_a_run_folder_has_one_storage(tmp_path: Path) -> None:
    url = NOWHERE.format(free_port())
    (tmp_path / "server").mkdir()
    begun_at(tmp_path / "server", url)
    with pytest.raises(InputError, match=r"kept elsewhere \(storage=postgresql, storage\.url=postgresql.*\), and"):
        open_store(tmp_path / "server", JournalConfig())
    with pytest.raises(InputError, match="storage=grpc was asked"):
        open_store(tmp_path / "server", GrpcConfig(host="127.0.0.1"))
    open_study(tmp_path / "journal", FINGERPRINTS, make_sampler())
    with pytest.raises(InputError, match=r"whose study is in study\.journal, and another storage was asked"):
        open_store(tmp_path / "journal", PostgresqlConfig(url=url))
    assert not (tmp_path / "journal" / "study.json").exists()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"study_name": "a"}', b'{"study_name": "a", "storage": {"name": "grpc"}}']
)
def test_a_damaged_name_of_the_study_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_bytes(content)
    for opened in (lambda: open_store(tmp_path, GrpcConfig(host="h")), lambda: open_for_reading(tmp_path)):
        with pytest.raises(InputError, match=r"study\.json: expected the name of the run's study"):
            opened()


class Unreachable(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "nobody there"


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LOST = sqlalchemy.exc.OperationalError("select", {}, Exception("server closed the connection"))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (raised_from(StorageInternalError("commit"), LOST), True),
        (raised_from(StorageInternalError("commit"), sqlalchemy.exc.DataError("too long", {}, Exception())), False),
        (StorageInternalError("commit"), False),
        (Unreachable(grpc.StatusCode.UNAVAILABLE), True),
        (Unreachable(grpc.StatusCode.UNKNOWN), True),
        (Unreachable(grpc.StatusCode.INVALID_ARGUMENT), False),
        (KeyError("study"), False),
        (sqlalchemy.exc.OperationalError("connect", {}, Exception("FATAL:  password authentication failed")), False),
        (sqlalchemy.exc.OperationalError("connect", {}, Exception('FATAL:  database "x" does not exist')), False),
        (sqlalchemy.exc.OperationalError("connect", {}, Exception("FATAL:  the database system is starting up")), True),
        (sqlalchemy.exc.OperationalError("x", {}, Exception("FATAL:  terminating connection due to ...")), True),
        (raised_from(StorageInternalError("commit"), sqlalchemy.exc.PendingRollbackError("rolled back")), True),
    ],
)
def test_which_errors_are_lost_connections(error: Exception, lost: bool) -> None:
    assert is_away(error) is lost


class Waiting:
    """A clock that only moves while something sleeps."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def failing(errors: list[Exception], result: Any = "answer") -> Callable[[], Any]:
    def call() -> Any:
        if errors:
            raise errors.pop(0)
        return result

    return call


def test_a_lost_connection_is_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting()
    assert patiently(failing([LOST] * 7), clock=waiting, sleep=waiting.sleep) == "answer"
    assert waiting.pauses == [0.5, 1, 2, 4, 8, 15, 15]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the study's storage cannot be reached, trying again",
        "the study's storage is reached again after 46 s",
    ]


def test_patience_ends_with_what_to_do() -> None:
    waiting = Waiting()
    with pytest.raises(
        UnreachableError, match=r"could not be reached for 6\d\d seconds .* go on with the same command"
    ):
        patiently(failing([LOST] * 1000), clock=waiting, sleep=waiting.sleep)
    assert 600 <= waiting() < 616


def test_other_errors_are_not_tried_again() -> None:
    for error in (KeyError("no"), UpdateFinishedTrialError("told")):
        waiting = Waiting()
        with pytest.raises(type(error)):
            patiently(failing([error]), clock=waiting, sleep=waiting.sleep)
        assert waiting.pauses == []


def test_a_trial_that_was_told_although_the_answer_was_lost_is_told() -> None:
    waiting = Waiting()
    assert patiently(failing([LOST, UpdateFinishedTrialError("told")]), clock=waiting, sleep=waiting.sleep) is True


class Flaky(InMemoryStorage):
    """Loses the connection at every other call, before or behind it in turn."""

    num_calls = 0


def flaky(name: str) -> Any:
    original = getattr(InMemoryStorage, name)

    def method(self: Flaky, *args: Any, **kwargs: Any) -> Any:
        Flaky.num_calls += 1
        if Flaky.num_calls % 4 == 1:
            raise LOST
        result = original(self, *args, **kwargs)
        if Flaky.num_calls % 4 == 3:
            raise LOST
        return result

    return method


for _name in ("create_new_trial", "set_trial_state_values", "set_trial_user_attr", "get_all_trials", "set_trial_param"):
    setattr(Flaky, _name, flaky(_name))


def test_a_study_on_a_flaky_storage_is_as_on_a_sound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    found = []
    for storage in (InMemoryStorage(), Patient(Flaky())):
        study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
        for number in range(30):
            trial = study.ask()
            trial.set_user_attr("place", number)
            study.tell(trial, trial.suggest_float("x", 0, 1))
        trials = [trial for trial in study.get_trials() if "place" in trial.user_attrs]
        found.append([(trial.user_attrs, trial.params.keys(), trial.state) for trial in trials])
    assert found[0] == found[1] and Flaky.num_calls > 100


def test_a_trial_with_a_number_is_made_once_though_answers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    storage = Patient(Flaky())
    study_id = storage.create_new_study([StudyDirection.MINIMIZE])
    for number in range(20):
        template = create_trial(state=TrialState.RUNNING, user_attrs={"place": number})
        template.number = number
        trial_id = storage.create_new_trial(study_id, template)
        assert storage.get_trial(trial_id).number == number
    assert [trial.user_attrs for trial in storage.get_all_trials(study_id)] == [{"place": i} for i in range(20)]


def test_every_method_of_a_storage_is_patient() -> None:
    public = {name for name in dir(BaseStorage) if not name.startswith("_")}
    assert public <= set(vars(Patient))
