"""Progress of long work: a bar on a terminal, and a line every so often where there is none."""

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

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
        self._phase = ""
        self._phase_started = self._last_line = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, phase: str, fraction: float, note: str = "") -> None:
        """Report that `fraction` (0 to 1) of the named phase is done."""
        fraction = min(max(fraction, 0.0), 1.0)
        if self._bar:
            if phase != self._phase:
                self._bar.add_task(phase, total=1.0, note=note)
            self._bar.update(self._bar.task_ids[-1], completed=fraction, note=note)
        else:
            now = time.monotonic()
            if phase != self._phase:
                self._phase_started = self._last_line = now
                self._line(phase, note, "")
            elif fraction == 1.0 or now - self._last_line >= _LINE_EVERY_SECONDS:
                self._last_line = now
                left = (now - self._phase_started) * (1 - fraction) / fraction if fraction else 0.0
                self._line(f"{phase} {fraction:.0%}", note, f"{left:.0f} s left" if fraction < 1 else "")
        self._phase = phase

    def _line(self, *parts: str) -> None:
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)
