"""Searches whose study is on a real PostgreSQL server, directly and through a real gRPC proxy."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropesearch.errors import InputError
from ropesearch.search.config import BudgetConfig, SelectionConfig
from ropesearch.search.presence import working
from ropesearch.search.run import SearchResult, run_search
from ropesearch.search.sharing_config import GrpcConfig, PostgresqlConfig, StorageConfig
from ropesearch.search.status import read_status
from ropesearch.search.storage import open_for_reading
from ropesearch.search.study import open_study
from ropesearch.search.trials import OWNER
from tests.cluster import postgres
from tests.cluster.processes import free_ports, wait_until
from tests.search import analytic
from tests.search.test_worker import Killed, dying_after, same

pytestmark = pytest.mark.slow

NUM_TRIALS = 20


def search(folder: Path, storage: StorageConfig | None, score: Any = analytic.evaluate) -> SearchResult:
    sampler = analytic.make_sampler()
    opened = open_study(folder, analytic.FINGERPRINTS, sampler, storage=storage)
    with contextlib.closing(opened.store), working(folder, 60) as presence:
        return run_search(
            opened,
            sampler,
            score,
            baselines=analytic.BASELINES,
            cost_tokens=16,
            budget=BudgetConfig(num_trials=NUM_TRIALS),
            selection=SelectionConfig(num_finalists=3),
            presence=presence,
        )


def scored(folder: Path, storage: StorageConfig | None) -> list[Any]:
    opened = open_study(folder, analytic.FINGERPRINTS, analytic.make_sampler(), storage=storage)
    volatile = {OWNER, "seconds"}
    with contextlib.closing(opened.store):
        return [
            (
                trial.number,
                trial.state,
                trial.values,
                trial.params,
                {key: value for key, value in trial.user_attrs.items() if key not in volatile},
            )
            for trial in opened.study.get_trials()
        ]


@contextlib.contextmanager
def proxy(url: str) -> Iterator[GrpcConfig]:
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "ropesearch.search.proxy", url, "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    try:
        yield GrpcConfig(host="localhost", port=port)
    finally:
        process.terminate()
        process.wait(60)


def test_the_same_search_on_every_storage(postgres_url: str, tmp_path: Path) -> None:
    journal = search(tmp_path / "journal", None)
    expected = scored(tmp_path / "journal", None)
    direct = PostgresqlConfig(url=postgres_url)
    assert same(search(tmp_path / "server", direct), journal)
    assert scored(tmp_path / "server", direct) == expected
    assert not (tmp_path / "server" / "study.journal").exists()
    with proxy(postgres_url) as through:
        assert same(search(tmp_path / "proxy", through), journal)
        assert scored(tmp_path / "proxy", through) == expected
        assert read_status(tmp_path / "proxy").num_complete == read_status(tmp_path / "server").num_complete > 10


def test_no_password_lies_in_the_run_folder(postgres_url: str, tmp_path: Path) -> None:
    search(tmp_path, PostgresqlConfig(url=postgres_url))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or postgres.PASSWORD.encode() not in path.read_bytes()


def test_a_wrong_password_is_an_error_of_the_user(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong")
    with pytest.raises(InputError, match=r"password authentication failed.*PGPASSWORD") as caught:
        search(tmp_path, PostgresqlConfig(url=postgres_url))
    assert "wrong" not in str(caught.value)


def test_a_killed_search_goes_on(postgres_url: str, tmp_path: Path) -> None:
    storage = PostgresqlConfig(url=postgres_url)
    whole = search(tmp_path / "whole", None)
    for num_calls in (0, 2, 7, 11):
        with pytest.raises(Killed):
            search(tmp_path / "killed", storage, dying_after(num_calls))
    assert same(search(tmp_path / "killed", storage), whole)
    assert scored(tmp_path / "killed", storage) == scored(tmp_path / "whole", None)


def test_two_run_folders_share_a_database(postgres_url: str, tmp_path: Path) -> None:
    storage = PostgresqlConfig(url=postgres_url)
    for name in ("one", "other"):
        search(tmp_path / name, storage)
    names = {opened[1] for name in ("one", "other") if (opened := open_for_reading(tmp_path / name))}
    assert len(names) == 2


def test_a_database_without_the_study_is_refused(
    postgres_server: postgres.Postgres, postgres_url: str, tmp_path: Path
) -> None:
    search(tmp_path, PostgresqlConfig(url=postgres_url))
    with pytest.raises(InputError, match=r"is not in the storage that was asked; give the one that it was begun in"):
        search(tmp_path, PostgresqlConfig(url=postgres_server.new_database()))


def test_the_lock_is_one_workers_at_a_time_and_freed_by_a_lost_connection(postgres_url: str, tmp_path: Path) -> None:
    storage = PostgresqlConfig(url=postgres_url)
    store = open_study(tmp_path, analytic.FINGERPRINTS, analytic.make_sampler(), storage=storage).store
    order: list[str] = []
    held, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with store.exclusive():
            held.set()
            may_end.wait(60)
            order.append("first")

    def second() -> None:
        with store.exclusive():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert held.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    assert order == []
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second"]
    store.close()


def stop(server: postgres.Postgres, how: signal.Signals) -> None:
    """A shutdown that breaks all connections: fast (SIGINT) or immediate (SIGQUIT), as after a crash."""
    pid_file = server.folder / "data" / "postmaster.pid"
    os.kill(int(pid_file.read_text().split()[0]), how)
    wait_until(lambda: not pid_file.exists(), "PostgreSQL is down")


# The connections that the server breaks are never closed on this side.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_goes_away_within_a_scoring_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    with contextlib.ExitStack() as stack, postgres.running() as server:
        calls: list[str] = []
        timers: list[threading.Timer] = []

        def scoring(regime: Any, split: str) -> Any:
            calls.append(f"{split} {regime.factors} {regime.attention_factor}")
            if len(calls) in (6, 12):
                stop(server, signal.SIGINT if len(calls) == 6 else signal.SIGQUIT)
                timers.append(threading.Timer(2.0, lambda: stack.enter_context(server.serving())))
                timers[-1].start()
            return analytic.evaluate(regime, split)

        result = search(tmp_path / "run", PostgresqlConfig(url=server.new_database()), scoring)
        for timer in timers:
            timer.join(60)
    assert same(result, search(tmp_path / "whole", None))
    assert len(calls) == len(set(calls)) and len(timers) == 2
    assert sum("is reached again" in record.message for record in caplog.records) >= 2
    gc.collect()  # so that they are lost here, and not in another test
