from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropesearch.cli import main
from tests import runs
from tests.cluster import postgres, slurm

NUM_TRIALS = 120  # of searches that are stopped: they last some seconds


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    """A Slurm of two nodes, for the tests of one file; skips where it is not installed."""
    with slurm.running() as found:
        yield found


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[postgres.Postgres]:
    """A PostgreSQL server, for the tests of one file; skips where it is not installed."""
    with postgres.running() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: postgres.Postgres, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty database, whose password is in PGPASSWORD."""
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    return postgres_server.new_database()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def undisturbed(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The trials of a search of NUM_TRIALS candidates that was never stopped."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(runs.search_words(toy_folder, corpus, run, NUM_TRIALS)) == 0
    return runs.trials_of(run)
