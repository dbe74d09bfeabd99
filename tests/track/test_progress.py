"""ropesearch/track/progress.py: lines without a terminal, a bar on one, standard output left alone."""

import io
import sys

import pytest

from ropesearch.track import progress
from ropesearch.track.progress import ProgressDisplay


class Clock:
    """Stands in for the module's `time`."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, kind: str = "xterm") -> Terminal:
    """Make standard error a terminal of this kind. Called within a test, since pytest sets its own before each."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "200")
    return terminal


def test_lines_at_the_start_the_end_and_every_30_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        for step in range(101):
            display.show("search windows", step / 100, f"best {step}")
            clock.seconds += 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "search windows 0%  best 0",
        "search windows 30%  best 30  70 s left",
        "search windows 60%  best 60  40 s left",
        "search windows 90%  best 90  10 s left",
        "search windows 100%  best 100",
    ]


def test_each_phase_has_its_first_and_last_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        for phase, fraction in [
            ("a", 0.0),
            ("a", 0.5),
            ("a", 1.0),
            ("a", 1.0),
            ("b", 0.5),
            ("b", 0.7),
            ("b", 7.0),
            ("c", -1.0),
        ]:
            display.show(phase, fraction)
    assert capsys.readouterr().err.splitlines() == ["a 0%", "a 100%", "b 50%", "b 100%", "c 0%"]


def test_time_left_counts_what_was_done_here(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on at 80 % and did 1 % in 40 seconds has 19 times as long to go."""
    with ProgressDisplay() as display:
        display.show("search", 0.80)
        clock.seconds += 40
        display.show("search", 0.80)
        clock.seconds += 40
        display.show("search", 0.82)
    assert capsys.readouterr().err.splitlines() == ["search 80%", "search 80%", "search 82%  720 s left"]


def test_a_note_of_several_lines_is_one_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        display.show("search", 0.0, "failed:\n  out of\tmemory")
    assert capsys.readouterr().err == "search 0%  failed: out of memory\n"


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_what_asks_for_colours_does_not_make_a_terminal(
    name: str, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with ProgressDisplay() as display:
        display.show("search", 0.0)
    assert capsys.readouterr().err == "search 0%\n"


def test_a_terminal_without_control_sequences_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, "dumb")
    with ProgressDisplay() as display:
        display.show("search", 0.0)
    assert terminal.getvalue() == "search 0%\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = on_terminal(monkeypatch)
    with ProgressDisplay() as display:
        display.show("search windows", 0.25, "best 9.0 [/not markup] [red]")
        display.show("search windows", 0.5, "best 8.5 [/not markup] [red]")
        display.show("selection windows", 1.0, "best 8.0")
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    first, second, end = shown.replace("\r", "\n").splitlines()[-3:]
    assert "search windows" in first and "50%" in first and first.endswith("best 8.5 [/not markup] [red]")
    assert "selection windows" in second and "100%" in second and "best 8.0" in second
    assert end == "\x1b[?25h"  # the cursor is back
    assert capsys.readouterr().out == ""


def test_an_error_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), ProgressDisplay() as display:
        display.show("search", 0.5)
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[?25h")
    assert sys.stderr is terminal


def test_what_is_said_stays_and_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        display.say("note: [0, 2] of 4 layers")
    assert capsys.readouterr().err == "note: [0, 2] of 4 layers\n"
    terminal = on_terminal(monkeypatch)
    with ProgressDisplay() as display:
        display.say("note: [0, 2] of 4 layers")
        display.show("search", 0.5)
    assert "note: [0, 2] of 4 layers" in terminal.getvalue()
