import subprocess

import pytest

from tests.cluster import postgres

pytestmark = pytest.mark.slow


def asked(url: str, command: str, password: str = postgres.PASSWORD) -> str:
    plain = url.replace("postgresql+psycopg", "postgresql")
    environment = {"PATH": postgres._search_path(), "PGPASSWORD": password}
    words = ["psql", "--no-psqlrc", "-At", "-c", command, plain]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


def test_databases_are_separate_and_kept(postgres_server: postgres.Postgres) -> None:
    first, second = postgres_server.new_database(), postgres_server.new_database()
    assert asked(first, "create table numbers (number int)") == "CREATE TABLE"
    assert asked(first, "insert into numbers values (7)") == "INSERT 0 1"
    assert asked(first, "select number from numbers") == "7"
    assert "does not exist" in asked(second, "select number from numbers")


def test_the_password_is_asked_for(postgres_url: str) -> None:
    assert "password authentication failed" in asked(postgres_url, "select 1", password="wrong")
    assert asked(postgres_url, "select 1") == "1"
