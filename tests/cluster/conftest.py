from collections.abc import Iterator

import pytest

from tests.cluster import postgres, slurm


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
