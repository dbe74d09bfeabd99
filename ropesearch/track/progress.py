"""Progress of long work: a bar on a terminal, and a line every so often where there is none."""

import contextlib
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LINE_EVERY_SECONDS = 30.0


class ProgressDisplay:
    """A context manager that shows how far work is and one note (such as the best score so far) on standard error.

    Without a terminal it prints a line at the start and end of each phase and at most every 30 seconds between.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        """quiet: show nothing, for all but one of several processes that do the same."""
        self._quiet = quiet
        console = Console(file=sys.stderr, force_terminal=sys.stderr.isatty() and not quiet)
        self._bar: Progress | None = None
        if console.is_interactive and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=console,
            )
        self._phase = ""
        self._fraction = self._first_fraction = 0.0
        self._phase_started = self._last_line = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def show(self, phase: str, fraction: float, note: str = "") -> None:
        """Report that `fraction` (0 to 1) of the named phase is done."""
        fraction = min(max(fraction, 0.0), 1.0)
        begins = phase != self._phase
        note = " ".join(note.split())
        if self._bar:
            if begins:
                self._bar.add_task(phase, total=1.0, completed=fraction, note=note)
            self._bar.update(self._bar.task_ids[-1], completed=fraction, note=note)
        else:
            now = time.monotonic()
            if begins:
                self._phase_started, self._first_fraction = now, fraction
            ends = fraction == 1.0 > self._fraction
            if begins or ends or now - self._last_line >= _LINE_EVERY_SECONDS:
                self._last_line = now
                self._line(f"{phase} {fraction:.0%}", note, self._time_left(now, fraction))
        self._phase, self._fraction = phase, fraction

    def say(self, message: str) -> None:
        """Show one line for good, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            self._line(message)

    def _time_left(self, now: float, fraction: float) -> str:
        """From the pace since the phase was first shown: what a run had done before it went on took no time here."""
        if fraction == 1.0 or fraction <= self._first_fraction:
            return ""
        seconds = (now - self._phase_started) * (1 - fraction) / (fraction - self._first_fraction)
        return f"{seconds:.0f} s left"

    def _line(self, *parts: str) -> None:
        if self._quiet:
            return
        with contextlib.suppress(OSError):  # a reader that went away, or a full disk: the work goes on unseen
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)
