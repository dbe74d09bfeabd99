"""Stopping a command by a signal: the first one unwinds it, or lets it finish what is nearly done; the next one ends
the process at once, as does the first one within an import.

Everything that a job writes may be cut short at any moment, so ending at once is safe; unwinding only tidies up and
lets a library finish what it is in. Compiled modules are not made to be unwound while they are set up: some abort.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

# A terminal's Ctrl-C; what schedulers send before they stop a job (Slurm's preemption TERM, its time limit what
# --signal names, here USR2); a terminal or connection that went away.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR2)
# One signal may come twice: from the scheduler, and from torchrun, which got it as well.
_TWICE_SECONDS = 10.0

INTERRUPTED = 130
STOPPED = 75


class Stopped(KeyboardInterrupt):
    """A signal came; raised where the main thread was. No Exception, so that nothing takes it for a failure."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


_is_nearly_done: Callable[[], bool] | None = None
_postponed: str | None = None
_raised: str | None = None


@contextlib.contextmanager
def finishing(is_nearly_done: Callable[[], bool]) -> Iterator[None]:
    """Let the block go to its end where a scheduler's first signal comes in it and `is_nearly_done()` then; Stopped is
    raised behind it. Otherwise, and for Ctrl-C, it is raised at once, as everywhere.
    """
    global _is_nearly_done, _postponed
    _is_nearly_done = is_nearly_done
    try:
        yield
    finally:
        _is_nearly_done = None
        postponed, _postponed = _postponed, None
    if postponed is not None:
        raise Stopped(postponed)


def asked_by() -> str | None:
    """Within `finishing`, the name of the signal that has come and waits for the end of its block, if one has."""
    return _postponed


def raise_if_lost() -> None:
    """Raise Stopped again where a signal has come and what was raised then has got lost in a library."""
    if _raised is not None:
        raise Stopped(_raised)


class Stopping:
    """What the signals of this process have asked for. `again` is the command that goes on with what was stopped; None
    where another process of the same job says it.
    """

    def __init__(self, again: str | None) -> None:
        self._again = again
        self._signal: signal.Signals | None = None
        self._signalled = 0.0  # when, on the monotonic clock
        self._said = False
        self._over = False

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 for an interrupt, 75 for a signal after which a scheduler may ask for the same again."""
        return INTERRUPTED if self._signal in (None, signal.SIGINT) else STOPPED

    @contextlib.contextmanager
    def listening(self, *, until_the_end: bool) -> Iterator[None]:
        """Heed signals within the block, or to the end of the process.

        Python lets only the main thread heed signals: elsewhere this does nothing.
        """
        global _raised
        before = {}
        hook = sys.unraisablehook
        heeds = threading.current_thread() is threading.main_thread()
        if heeds:
            for number in _SIGNALS:
                # One that is ignored stays so (nohup), and USR2 is left to who heeds it already.
                heeded = number is signal.SIGUSR2 and signal.getsignal(number) is not signal.SIG_DFL
                if signal.getsignal(number) is not signal.SIG_IGN and not heeded:
                    before[number] = signal.signal(number, self._heed)
            sys.unraisablehook = functools.partial(self._end_where_ignored, hook)
        try:
            yield
        finally:
            self._over = True
            if heeds and not until_the_end:
                _raised = None
                sys.unraisablehook = hook
                for number, handler in before.items():
                    signal.signal(number, handler)

    def take(self, stopped: Stopped) -> None:
        """Take note of a stop that another process of the same job was signalled for."""
        if self._signal is None:
            self._signal = signal.Signals[stopped.signal_name]

    def say(self) -> None:
        """Say once, on standard error, what happened and how to go on."""
        if self._said or self._again is None:
            return
        self._said = True
        what = "interrupted"
        if self._signal is not None and self.exit_code == STOPPED:
            what = f"stopped by {self._signal.name}"
        text = f"ropesearch: {what}; go on with: {self._again}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody may be there to read it
            sys.stderr.write(text)
            sys.stderr.flush()

    def end(self) -> NoReturn:
        """End the process without Python's own end, in which a further signal would kill it with another exit code."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(self.exit_code)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        global _postponed, _raised
        first = self._signal is None
        if first:
            self._signal = signal.Signals(number)
            self._signalled = time.monotonic()
        if first and not self._over:
            if number in _OF_SCHEDULERS and _is_nearly_done is not None and _is_nearly_done():
                _postponed = signal.Signals(number).name
                return
            if not _is_importing(frame):
                _raised = signal.Signals(number).name
                raise Stopped(_raised)
        is_twice = number in _OF_SCHEDULERS and time.monotonic() - self._signalled < _TWICE_SECONDS
        if _postponed is not None and is_twice:
            return
        self._end_at_once()

    def _end_where_ignored(self, hook: Callable[[Any], object], unraisable: Any) -> None:
        """Python goes on after what is raised in a finalizer or a C callback; here it does not."""
        if isinstance(unraisable.exc_value, Stopped):
            self._end_at_once()
        hook(unraisable)

    def _end_at_once(self) -> NoReturn:
        if not self._over:
            self.say()
        os._exit(self.exit_code)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported at `frame` or anywhere below it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
