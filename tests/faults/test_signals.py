"""Signals to a real search: one line with the command that goes on, an exit code that says so, and nothing lost."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ropesearch.stopping import Stopping
from tests import runs

SCORING = """
import os, sys, time
from ropesearch import cli, scoring
score = scoring.score_windows
def slow(*arguments, **keywords):
    os.write(1, b"scoring\\n")
    time.sleep(0.3)
    return score(*arguments, **keywords)
scoring.score_windows = slow
sys.argv[0] = "ropesearch"
sys.exit(cli.main())
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def scoring(words: list[str], *prefix: str) -> "subprocess.Popen[str]":
    """A search that scores slowly, at its third scoring."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", SCORING, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "scoring\n"
    return process


@pytest.fixture(scope="module")
def whole(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of the same that no signal has met."""
    from ropesearch import cli

    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, folder, 2)) == 0
    return folder


def check_goes_on(words: list[str], folder: Path, whole: Path) -> None:
    from ropesearch import cli

    assert cli.main(words) == 0
    assert runs.trials_of(folder) == runs.trials_of(whole)
    assert (folder / "rope_config.json").read_bytes() == (whole / "rope_config.json").read_bytes()


@pytest.mark.parametrize(
    ("signals", "code", "what"),
    [
        ([signal.SIGTERM], 75, "stopped by SIGTERM"),
        pytest.param([signal.SIGHUP], 75, "stopped by SIGHUP", marks=pytest.mark.slow),
        ([signal.SIGINT, signal.SIGINT], 130, "interrupted"),
    ],
    ids=["SIGTERM", "SIGHUP", "SIGINT twice"],
)
def test_a_signal_stops_a_search_that_goes_on(
    signals: list[signal.Signals], code: int, what: str, toy_folder: Path, corpus: Path, tmp_path: Path, whole: Path
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
    process = scoring(words)
    for number in signals:
        process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == code
    assert errors.splitlines()[-1] == f"ropesearch: {what}; go on with: {shlex.join(['ropesearch', *words])}"
    assert errors.count("ropesearch: ") == 1 and "Traceback" not in errors and "Exception ignored" not in errors
    check_goes_on(words, tmp_path / "run", whole)


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_so(toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    """nohup: the terminal goes away, the search does not."""
    process = scoring(runs.search_words(toy_folder, corpus, tmp_path / "run", 1), "nohup")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert (tmp_path / "run" / "rope_config.json").exists()


@pytest.mark.slow
def test_a_terminal_that_goes_away_leaves_a_search_that_goes_on(
    toy_folder: Path, corpus: Path, tmp_path: Path, whole: Path
) -> None:
    """A connection that breaks: SIGHUP, and nothing can be written to the terminal any more."""
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
    controller, terminal = pty.openpty()
    command = f"import os; os.setsid(); import fcntl, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0)\n{SCORING}"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *words], stdout=subprocess.PIPE, stderr=terminal, stdin=terminal, text=True
    )
    os.close(terminal)
    reader = threading.Thread(target=drain, args=(controller,), daemon=True)
    reader.start()
    assert process.stdout is not None and process.stdout.readline() == "scoring\n"
    os.close(controller)
    process.communicate(timeout=600)
    reader.join()
    assert process.returncode == 75
    check_goes_on(words, tmp_path / "run", whole)


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1024):
            pass
    except OSError:
        return


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 1.0, 1.6, 2.4, 3.4, 4.5])
def test_two_interrupts_at_any_moment_leave_one_line(
    seconds: float, toy_folder: Path, corpus: Path, tmp_path: Path, whole: Path
) -> None:
    """From Python's own start on; before the program is there, Python itself answers."""
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
    process = subprocess.Popen(
        [sys.executable, "-c", "from ropesearch import cli; print('up', flush=True); cli.main()", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    time.sleep(seconds)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    _, errors = process.communicate(timeout=600)
    assert "Traceback" not in errors and "Exception ignored" not in errors, errors
    if process.returncode:  # else the search had finished
        assert process.returncode == 130 and errors.count("go on with: ") == 1, (process.returncode, errors)
    check_goes_on(words, tmp_path / "run", whole)


UNWINDING = """
import os, signal, sys
from ropesearch import stopping
stopping_ = stopping.Stopping("the command")
with stopping_.listening(until_the_end=True):
    try:
        try:
            os.kill(os.getpid(), signal.{first})
        finally:
            os.kill(os.getpid(), signal.{second})
            print("not reached")
    finally:
        print("not reached either")
"""


@pytest.mark.parametrize(
    ("first", "second", "code", "what"),
    [("SIGINT", "SIGINT", 130, "interrupted"), ("SIGTERM", "SIGINT", 75, "stopped by SIGTERM")],
)
def test_the_second_signal_ends_the_process_wherever_it_is(first: str, second: str, code: int, what: str) -> None:
    command = [sys.executable, "-c", UNWINDING.format(first=first, second=second)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"ropesearch: {what}; go on with: the command\n"


IN_AN_IMPORT = """
try:
    os.kill(os.getpid(), signal.{name})
finally:
    print("not reached")
"""


@pytest.mark.parametrize(
    ("name", "code", "what"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 75, "stopped by SIGTERM")]
)
def test_the_first_signal_ends_the_process_within_an_import(name: str, code: int, what: str, tmp_path: Path) -> None:
    """pybind11 aborts where an exception comes out of what it calls while a module of it is set up, as torch's are."""
    (tmp_path / "slow_to_import.py").write_text("import os, signal\n" + IN_AN_IMPORT.format(name=name))
    stopping = "from ropesearch import stopping\nwith stopping.Stopping('the command').listening(until_the_end=True):"
    command = [sys.executable, "-c", f"{stopping}\n    import slow_to_import"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"ropesearch: {what}; go on with: the command\n"


IGNORED = """
import os, signal
from ropesearch import stopping

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

with stopping.Stopping("the command").listening(until_the_end=True):
    Finalized()
    print("not reached")
"""


@pytest.mark.parametrize(
    ("name", "code", "what"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 75, "stopped by SIGTERM")]
)
def test_a_signal_within_a_finalizer_ends_the_process(name: str, code: int, what: str) -> None:
    """Where Python ignores what is raised, says so, and goes on."""
    command = [sys.executable, "-c", IGNORED.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"ropesearch: {what}; go on with: the command\n"


def test_what_is_ignored_otherwise_is_said_as_before() -> None:
    code = IGNORED.replace("os.kill(os.getpid(), signal.{name})", "raise KeyError('lost')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "not reached\n") and "KeyError: 'lost'" in done.stderr


AT_THE_END = """
import atexit, os, signal
from ropesearch import cli
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
cli.main()
"""


def test_a_signal_after_the_end_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "") and done.stdout.startswith("ropesearch ")


def test_a_signal_while_an_error_is_reported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ropesearch import cli

    monkeypatch.setattr(cli, "_say", lambda text: signal.raise_signal(signal.SIGINT))
    assert cli.main(["no such job"]) == 130
    assert capsys.readouterr().err.startswith("ropesearch: interrupted; go on with: ")


def test_an_error_that_a_library_makes_of_a_signal_is_the_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ropesearch import cli, pipeline

    def converting(job: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ImportError("could not be imported") from error

    monkeypatch.setattr(pipeline, "verify", converting)
    assert cli.main(["verify", "folder"]) == 75
    assert capsys.readouterr().err == "ropesearch: stopped by SIGTERM; go on with: ropesearch verify folder\n"


def test_handlers_are_put_back_and_other_threads_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    within, hooks = [], [sys.unraisablehook]

    def listen() -> None:
        with Stopping("again").listening(until_the_end=False):
            within.append({number: signal.getsignal(number) for number in before})
            hooks.append(sys.unraisablehook)

    listen()
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert set(within[0].values()).isdisjoint(before.values()) and within[1] == before
    assert {number: signal.getsignal(number) for number in before} == before
    assert hooks[1] is not hooks[0] and hooks[2] is hooks[0] and sys.unraisablehook is hooks[0]


@pytest.mark.slow
def test_a_reader_of_the_progress_that_goes_away_does_not_end_the_search(
    toy_folder: Path, corpus: Path, tmp_path: Path, whole: Path
) -> None:
    """`ropesearch search ... 2>&1 | head -1`: the search comes to its end, unseen."""
    reading, writing = os.pipe()
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
    process = subprocess.Popen([sys.executable, "-m", "ropesearch.cli", *words], stdout=writing, stderr=writing)
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    assert process.wait(timeout=600) == 0
    assert (tmp_path / "run" / "rope_config.json").read_bytes() == (whole / "rope_config.json").read_bytes()
