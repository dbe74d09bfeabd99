"""A real PostgreSQL server on this machine, from Debian's package postgresql, for the time of a test."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.processes import daemon, free_ports, wait_until

PASSWORD = "correct horse"
_USER = "ropesearch"
_PROGRAMS = ("initdb", "postgres", "createdb", "pg_isready")


@dataclass(frozen=True, slots=True)
class Postgres:
    """A database server in `folder`, reached at `port` of 127.0.0.1; it asks for PASSWORD."""

    folder: Path
    port: int
    account: str | None  # of the system, that it runs under; None: this process's own

    def new_database(self) -> str:
        """The URL, without password, of an empty database."""
        name = f"study_{uuid.uuid4().hex[:12]}"
        environment = {"PATH": _search_path(), "PGPASSWORD": PASSWORD}
        command = ["createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", _USER, name]
        subprocess.run(command, env=environment, check=True, timeout=60)
        return f"postgresql+psycopg://{_USER}@127.0.0.1:{self.port}/{name}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serve what is in the folder within the block; may be entered again and again."""
        command = [
            "postgres",
            "-D",
            str(self.folder / "data"),
            "-p",
            str(self.port),
            "-k",
            str(self.folder),
            "-c",
            "fsync=off",
        ]
        ready = ["pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]

        def answers() -> bool:
            return subprocess.run(ready, env={"PATH": _search_path()}, timeout=60).returncode == 0

        with daemon(command, str(self.folder / "log.txt"), user=self.account, PATH=_search_path(), LC_ALL="C"):
            wait_until(answers, "PostgreSQL answers")
            yield


def missing() -> str | None:
    """Why no PostgreSQL can be started here; None where it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    return f"not installed: {', '.join(absent)} (Debian: postgresql)" if absent else None


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """Start a server with a user's name and password, stop it at the end; skips where that cannot be done."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    account = _account()
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as name:  # a socket's path must be short
        folder = Path(name)
        if account is not None:
            shutil.chown(folder, account)
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = ["initdb", "-D", str(folder / "data"), "-U", _USER, "-A", "scram-sha-256", f"--pwfile={password}"]
        command += ["--no-sync", "--encoding=UTF8", "--locale=C"]
        environment = {"PATH": _search_path(), "LC_ALL": "C"}
        done = subprocess.run(command, env=environment, user=account, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        server = Postgres(folder, free_ports(1)[0], account)
        with server.serving():
            yield server


def _account() -> str | None:
    """An unprivileged account of the system where this process is root, as whom PostgreSQL does not run."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _search_path() -> str:
    """PATH with the folders of Debian's package, the newest version first."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name, reverse=True)
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])
