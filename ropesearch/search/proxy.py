"""A gRPC proxy in front of a PostgreSQL server: the workers' reads are answered by one process instead of the server.

    python -m ropesearch.search.proxy postgresql+psycopg://USER@HOST:PORT/DATABASE [--host 0.0.0.0] [--port 13000]

It runs until it is stopped; workers wait for it to come back. It asks nobody for a password: let it listen only where
the workers alone can reach it.
"""

import argparse
import sys

from optuna.storages import get_storage, run_grpc_proxy_server

from ropesearch.errors import RopesearchError
from ropesearch.search.sharing_config import PostgresqlConfig
from ropesearch.search.storage import open_postgresql


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="A gRPC proxy in front of a PostgreSQL server.")
    parser.add_argument("url", metavar="URL", help="postgresql+psycopg://USER@HOST:PORT/DATABASE")
    parser.add_argument("--host", default="localhost", help="address to listen at (default localhost)")
    parser.add_argument("--port", type=int, default=13000, help="port to listen at (default 13000)")
    options = parser.parse_args()
    try:
        PostgresqlConfig(url=options.url).check()
        run_grpc_proxy_server(get_storage(open_postgresql(options.url)), host=options.host, port=options.port)
    except RopesearchError as error:
        print(f"proxy: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
