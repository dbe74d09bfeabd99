"""Where a study is kept: the journal in its run folder, PostgreSQL, or a gRPC proxy in front of it.

What differs between them is hidden here: how the storage is opened, how one lock is held by all workers of the study,
how a connection that is lost is waited for, and under which name the study of a run folder is found again.
"""

import abc
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.trial import FrozenTrial

from ropesearch.errors import InputError, UnreachableError
from ropesearch.files import write_json
from ropesearch.search.journal import Journal
from ropesearch.search.ownership import exclusive
from ropesearch.search.sharing_config import GrpcConfig, JournalConfig, PostgresqlConfig, StorageConfig

JOURNAL_NAME = "study.journal"
STUDY_NAME = "ropesearch"
WHERE_NAME = "study.json"  # of a study that is not in the run folder: its name, and where it is

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10
_PATIENCE_SECONDS = 600.0
_LONGEST_PAUSE_SECONDS = 15.0
_LOCK_SECONDS = 60  # after which the server takes the lock from a client that holds it and is silent
_TABLES_LOCK = "ropesearch: tables"

_Block = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An open storage: the name of the run's study in it, `exclusive`, a lock that one worker of the study holds at a
    time, `together`, a block whose writes arrive as one where the storage can do that, and `close`, for the end.
    """

    storage: BaseStorage
    study_name: str
    exclusive: _Block
    together: _Block
    close: Callable[[], None] = lambda: None


def open_store(run_folder: Path, config: StorageConfig) -> Store:
    """Open the storage of the study in `run_folder`; its name is made up and kept there when it is new.

    Raises InputError when the folder's study is elsewhere, the journal is damaged, a library is missing, or a server
    refuses, UnreachableError when none answers.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(config, JournalConfig):
        if (run_folder / WHERE_NAME).exists():
            raise InputError(
                f"{run_folder} holds a search whose study is kept elsewhere ({_shown_place(run_folder)}), and "
                "storage=journal was asked; give that storage, or another run folder"
            )
        journal = Journal(run_folder / JOURNAL_NAME)
        return Store(
            storage=_replayed(journal, run_folder),
            study_name=STUDY_NAME,
            exclusive=lambda: exclusive(run_folder),
            together=journal.together,
        )
    if (run_folder / JOURNAL_NAME).exists():
        raise InputError(
            f"{run_folder} holds a search whose study is in {JOURNAL_NAME}, and another storage was asked; leave "
            "storage= out, or give another run folder"
        )
    _check_place(run_folder, config)
    lock: Callable[[str], AbstractContextManager[None]]
    if isinstance(config, PostgresqlConfig):
        was_begun = (run_folder / WHERE_NAME).exists()
        rdb = open_postgresql(config.url, _PATIENCE_SECONDS if was_begun else 0.0)
        storage, close = optuna.storages.get_storage(rdb), functools.partial(_close, rdb)
        lock = functools.partial(_locked, rdb.engine)
    elif isinstance(config, GrpcConfig):
        storage = _open_grpc(config)
        close = storage.close

        def lock(study_name: str) -> AbstractContextManager[None]:
            return exclusive(run_folder)
    else:
        raise InputError(f"storage: expected a known one, got {type(config).__name__}")
    with contextlib.ExitStack() as refused:
        refused.callback(close)
        study_name, is_there = _study_name(run_folder, config)  # not before a server has answered
        patient = Patient(storage)
        if is_there:
            try:
                patient.get_study_id_from_name(study_name)
            except KeyError as error:
                raise InputError(
                    f"{run_folder / WHERE_NAME} names the study {study_name}, which is not in the storage that was "
                    f"asked; give the one that it was begun in ({_shown_place(run_folder)}), or another run folder"
                ) from error
        refused.pop_all()
    return Store(
        storage=patient,
        study_name=study_name,
        exclusive=lambda: lock(study_name),
        together=contextlib.nullcontext,
        close=close,
    )


def open_for_reading(run_folder: Path) -> tuple[BaseStorage, str] | None:
    """The storage of the study in `run_folder`, and the study's name in it; None where there is none yet. Nothing is
    written.

    Raises InputError as `open_store` does.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if (run_folder / WHERE_NAME).exists():
        study_name, place = _named(run_folder)
        if place["name"] == "postgresql":
            with _postgresql_errors(place["url"]):
                options = {**_engine_options(), "poolclass": sqlalchemy.pool.NullPool}
                storage = RDBStorage(place["url"], engine_kwargs=options, skip_table_creation=True)
            return storage, study_name
        return _open_grpc(GrpcConfig(host=place["host"], port=place["port"])), study_name
    path = run_folder / JOURNAL_NAME
    try:
        return _replayed(Journal(path, read_only=True), run_folder), STUDY_NAME
    except FileNotFoundError:
        return None


def _replayed(journal: Journal, run_folder: Path) -> JournalStorage:
    try:
        return JournalStorage(journal)
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(
            f"{run_folder / JOURNAL_NAME} cannot be replayed by the optuna that is installed here ({error!r}); go on "
            f"with the versions in {run_folder / 'versions.json'}, or start the search in another run folder"
        ) from error


def _place(config: StorageConfig) -> dict[str, Any]:
    if isinstance(config, PostgresqlConfig):
        return {"name": "postgresql", "url": config.url}
    if isinstance(config, GrpcConfig):
        return {"name": "grpc", "host": config.host, "port": config.port}
    raise InputError(f"storage: expected a server, got {type(config).__name__}")


def _shown_place(run_folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        place = json.loads((run_folder / WHERE_NAME).read_bytes())["storage"]
        return ", ".join(f"storage{'' if key == 'name' else f'.{key}'}={value}" for key, value in place.items())
    return f"{WHERE_NAME} cannot be read"


def _study_name(run_folder: Path, config: StorageConfig) -> tuple[str, bool]:
    """The name of the run folder's study, and whether it must be in the storage already, as that was another one when
    it was begun. The first to link its file there decides, on any file system.
    """
    path, place = run_folder / WHERE_NAME, _place(config)
    if not path.exists():
        own = run_folder / f".{WHERE_NAME}.{uuid.uuid4().hex[:8]}.part"
        write_json(own, {"study_name": f"{STUDY_NAME}-{uuid.uuid4().hex}", "storage": place})
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            own.unlink()
    name, there = _named(run_folder)
    return name, there != place


def _check_place(run_folder: Path, config: StorageConfig) -> None:
    """InputError where the run folder's study is in another kind of storage."""
    asked = _place(config)["name"]
    if (run_folder / WHERE_NAME).exists() and _named(run_folder)[1]["name"] != asked:
        raise InputError(
            f"{run_folder} holds a search whose study is kept elsewhere ({_shown_place(run_folder)}), and "
            f"storage={asked} was asked; give that storage, or another run folder"
        )


def _named(run_folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of the run folder's study, and where it is, as the folder's file says."""
    path = run_folder / WHERE_NAME
    try:
        found = json.loads(path.read_bytes())
        name, place = str(found["study_name"]), found["storage"]
        keys = {"postgresql": {"name", "url"}, "grpc": {"name", "host", "port"}}[place["name"]]
        if place.keys() != keys:
            raise ValueError(f"expected {sorted(keys)}, got {sorted(place)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: expected the name of the run's study and where it is, got something else ({error!r}); restore "
            "it from a copy, or use another run folder"
        ) from error
    return name, place


def _engine_options() -> dict[str, Any]:
    return {
        "pool_pre_ping": True,
        "connect_args": {
            "connect_timeout": _CONNECT_SECONDS,
            "application_name": "ropesearch",
            # A server that vanished without a word is noticed within a minute.
            "keepalives_idle": 20,
            "keepalives_interval": 10,
            "keepalives_count": 3,
        },
    }


@contextlib.contextmanager
def _postgresql_errors(url: str) -> Iterator[None]:
    """Within the block, what a server or a missing library raises is an InputError."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"storage=postgresql needs psycopg: pip install 'ropesearch[postgresql]' ({error})") from error
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        if is_away(error):
            raise UnreachableError(
                f"storage.url: no PostgreSQL server answers at {url} ({_reason(error)}); give the same command again "
                "when it does"
            ) from error
        raise InputError(
            f"storage.url: expected a PostgreSQL server that lets this user make tables, got {_reason(error)} from "
            f"{url}; check the server, the password (PGPASSWORD or ~/.pgpass) and the rights"
        ) from error


def open_postgresql(url: str, patience_seconds: float = 0.0) -> RDBStorage:
    """The server's storage, its tables made where they are not there yet.

    Raises InputError when the server refuses, UnreachableError when none answers for `patience_seconds`.
    """
    with _postgresql_errors(url):
        if patience_seconds:
            patiently(lambda: _engine_of(url).connect().close(), patience_seconds=patience_seconds)
        _engine_of(url).connect().close()  # where none ever answered, that is said and not waited for
        with _locked(_engine_of(url), _TABLES_LOCK):  # two workers at once would make the tables twice
            return RDBStorage(url, engine_kwargs=_engine_options())


def _close(rdb: RDBStorage) -> None:
    rdb.remove_session()
    rdb.engine.dispose()


def _engine_of(url: str) -> Any:
    """Connections that are closed after use."""
    return sqlalchemy.create_engine(
        url, poolclass=sqlalchemy.pool.NullPool, connect_args=_engine_options()["connect_args"]
    )


@contextlib.contextmanager
def _locked(engine: Any, name: str) -> Iterator[None]:
    """Hold an advisory lock to the end of a transaction, which the server ends where the client falls silent."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)

    def begun() -> Any:
        connection = engine.connect()
        connection.execute(sqlalchemy.text(f"SET LOCAL idle_in_transaction_session_timeout = '{_LOCK_SECONDS}s'"))
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        return connection

    connection = patiently(begun)
    try:
        yield
    finally:
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):  # a lost connection has freed it
            connection.close()


def _open_grpc(config: GrpcConfig) -> BaseStorage:
    try:
        from optuna.storages import GrpcStorageProxy

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            storage = GrpcStorageProxy(host=config.host, port=config.port)
        storage.wait_server_ready(timeout=_CONNECT_SECONDS)
    except ImportError as error:
        raise InputError(f"storage=grpc needs grpcio: pip install 'ropesearch[grpc]' ({error})") from error
    except ConnectionError as error:
        raise UnreachableError(
            f"storage.host: expected a gRPC proxy at {config.host}:{config.port}, got no answer in {_CONNECT_SECONDS} "
            "seconds; start it with python -m ropesearch.search.proxy"
        ) from error
    return storage


def patiently(
    call: Callable[[], Any],
    *,
    patience_seconds: float = _PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """What `call` returns; tried again, with growing pauses, while the storage cannot be reached.

    Raises UnreachableError when that took `patience_seconds`.
    """
    started, pause = clock(), 0.5
    has_waited = False
    while True:
        try:
            result = call()
        except UpdateFinishedTrialError:
            if has_waited:  # the call before has arrived, only its answer was lost
                return True
            raise
        except Exception as error:
            if not is_away(error):
                raise
            waited = clock() - started
            if waited >= patience_seconds:
                raise UnreachableError(
                    f"the study's storage could not be reached for {waited:.0f} seconds ({_reason(error)}); what was "
                    "scored is kept: go on with the same command when it is back"
                ) from error
            if not has_waited:
                _log.warning("the study's storage cannot be reached, trying again: %s", _reason(error))
            has_waited = True
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        else:
            if has_waited:
                _log.warning("the study's storage is reached again after %.0f s", clock() - started)
            return result


def is_away(error: BaseException | None) -> bool:
    """Whether an error of a storage, or what led to it, is a connection that broke or was not answered; one that was
    refused by a server that is there (a wrong password, no such database) is not.
    """
    while error is not None:
        refusal = re.search(
            r"FATAL:\s+(?!\s|the database system is|terminating connection)|no password supplied", str(error)
        )
        if refusal:
            return False
        name, libraries = type(error).__name__, {base.__module__.partition(".")[0] for base in type(error).__mro__}
        if "sqlalchemy" in libraries and (
            name in ("OperationalError", "InterfaceError", "PendingRollbackError")
            or getattr(error, "connection_invalidated", False)
        ):
            return True
        if "grpc" in libraries and str(getattr(error, "code", lambda: "")()) in (
            "StatusCode.UNAVAILABLE",
            "StatusCode.UNKNOWN",  # what the proxy answers where its own database is away
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    """The innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    details = getattr(error, "details", None)
    return " ".join(str(details() if callable(details) else error).split())


def _patient_method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return patiently(lambda: getattr(self._inner, name)(*args, **kwargs))

    return method


def _patient(storage_class: type) -> type:
    for name in dir(BaseStorage):
        if not name.startswith("_") and callable(getattr(BaseStorage, name)) and name not in vars(storage_class):
            setattr(storage_class, name, _patient_method(name))
    return abc.update_abstractmethods(storage_class)


@_patient
class Patient(BaseStorage):
    """A storage whose every call is made patiently.

    A call whose answer was lost is made again. That is safe: attributes are set to the same values, a trial that was
    told twice stays as it was, and one that is made from a template with a number is not made twice.
    """

    def __init__(self, inner: BaseStorage) -> None:
        self._inner = inner

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """As the storage's. The template's number is how many trials there are; nobody else makes one meanwhile."""
        num_calls = 0

        def create() -> int:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1 and template_trial is not None:
                made = self._inner.get_all_trials(study_id, deepcopy=False)[template_trial.number :]
                if made:  # the call before has arrived, only its answer was lost
                    return int(made[0]._trial_id)
            return int(self._inner.create_new_trial(study_id, template_trial))

        trial_id: int = patiently(create)
        return trial_id
