"""What can be told about how the workers of one study share it; stdlib only."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from ropesearch.errors import InputError
from ropesearch.settings import setting

_POSTGRESQL = "postgresql+psycopg"


@dataclass(kw_only=True)
class StorageConfig:
    """Where the study is kept."""

    def check(self) -> None:
        """Raise InputError for a place that no server could be at."""


@dataclass(kw_only=True)
class JournalConfig(StorageConfig):
    """Optuna's journal file, study.journal in the run folder: one machine, or a shared file system with locks."""


@dataclass(kw_only=True)
class PostgresqlConfig(StorageConfig):
    """A PostgreSQL server that all workers reach."""

    url: str = setting(
        "", "postgresql+psycopg://USER@HOST:PORT/DATABASE; the password comes from PGPASSWORD or ~/.pgpass"
    )

    def check(self) -> None:
        """Raise InputError for a url of another kind, or with a password in it."""
        expected = "storage.url: expected postgresql+psycopg://USER@HOST:PORT/DATABASE, got"
        try:
            parts = urlsplit(self.url)
            has_password = parts.password is not None
        except ValueError as error:
            raise InputError(f"{expected} {self.url!r} ({error})") from error
        if has_password:
            shown = f"{parts.scheme}://{parts.username}:***@{parts.netloc.rpartition('@')[2]}{parts.path}"
            raise InputError(
                f"{expected} one with a password in it ({shown}), which would end up in logs and in the run folder; "
                "leave it out, and give it as PGPASSWORD or in ~/.pgpass"
            )
        if parts.scheme.startswith("sqlite"):
            raise InputError(
                f"{expected} {self.url!r}: SQLite locks no rows, so several workers score one candidate more than "
                "once; on one machine take storage=journal"
            )
        if parts.scheme != _POSTGRESQL or not parts.path.strip("/"):
            raise InputError(f"{expected} {self.url!r}")


@dataclass(kw_only=True)
class GrpcConfig(StorageConfig):
    """Optuna's gRPC proxy in front of a PostgreSQL server, for hundreds of workers."""

    host: str = setting("", "where the proxy runs")
    port: int = setting(13000, "its port")

    def check(self) -> None:
        """Raise InputError where host or port cannot be one."""
        if not self.host:
            raise InputError("storage.host: expected the host of the proxy, got none; give storage.host=...")
        if not 0 < self.port < 1 << 16:
            raise InputError(f"storage.port: expected from 1 to 65535, got {self.port}")


STORAGES: dict[str, type[StorageConfig]] = {
    "journal": JournalConfig,
    "postgresql": PostgresqlConfig,
    "grpc": GrpcConfig,
}


@dataclass(kw_only=True)
class WorkerConfig:
    """How a worker lives beside others."""

    lease_seconds: float = setting(
        60.0, "a worker that has given no sign of life for so long, as another one saw, has lost its trial to that one"
    )
    grace_seconds: float = setting(
        20.0,
        "after SIGTERM or SIGUSR2 a trial that is done sooner is finished first; a scheduler kills when its own grace "
        "is over, so keep below that",
    )

    def check(self) -> None:
        """Raise InputError for a lease too short to give signs in, or a grace below 0."""
        if not 1 <= self.lease_seconds <= 86_400:
            raise InputError(f"worker.lease_seconds: expected from 1 to 86400, got {self.lease_seconds}")
        if not 0 <= self.grace_seconds <= 86_400:
            raise InputError(f"worker.grace_seconds: expected from 0 to 86400, got {self.grace_seconds}")
