"""Stopping a command by a signal: the first one unwinds it, the next one ends the process at once.

Everything that a job writes may be cut short at any moment, so ending at once is safe; unwinding only tidies up and
lets a library finish what it is in.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

# A terminal's Ctrl-C; what schedulers send before they stop a job; a terminal or connection that went away.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

INTERRUPTED = 130
STOPPED = 75


class Stopped(KeyboardInterrupt):
    """A signal came; raised where the main thread was. No Exception, so that nothing takes it for a failure."""


class Stopping:
    """What the signals of this process have asked for. `again` is the command that goes on with what was stopped."""

    def __init__(self, again: str) -> None:
        self._again = again
        self._signal: signal.Signals | None = None
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
        """Heed signals within the block, or to the end of the process; those that are ignored stay so (nohup).

        Python lets only the main thread heed signals: elsewhere this does nothing.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._heed)
        try:
            yield
        finally:
            self._over = True
            if not until_the_end:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def say(self) -> None:
        """Say once, on standard error, what happened and how to go on."""
        if self._said:
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

    def _heed(self, number: int, frame: object) -> None:
        first = self._signal is None
        if first:
            self._signal = signal.Signals(number)
        if first and not self._over:
            raise Stopped
        if not self._over:
            self.say()
        os._exit(self.exit_code)
