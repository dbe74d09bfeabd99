"""Servers that tests start and stop: what they need to be found, waited for and ended."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence


def free_ports(number: int) -> list[int]:
    """So many ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 180) -> None:
    """Return when the condition holds; raise TimeoutError with `what` when it does not in time."""
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_seconds} s: {what}")
        time.sleep(0.1)


def end(process: "subprocess.Popen[bytes]", timeout_seconds: float = 10) -> None:
    """End a process by SIGTERM and, where it does not heed it, by SIGKILL."""
    process.terminate()
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def daemon(
    command: Sequence[str], log: str, *, user: str | None = None, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A server in the foreground, as another user where one is given; of the environment it has what is given."""
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, user=user, cwd="/"
        )
    try:
        yield process
    finally:
        end(process)
