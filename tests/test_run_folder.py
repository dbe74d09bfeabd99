"""ropesearch/run_folder.py: the name of a run, its files, its log."""

import json
import logging
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ropesearch.errors import BindingError, InputError
from ropesearch.run_folder import LOGGED_IN, RunFolder, versions
from ropesearch.stopping import Stopped

ASKED: dict[str, Any] = {"model": {"path": "m"}, "seed": 1, "run": None, "budget": {"minutes": None}}
WITHOUT = ("run", "budget")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_asked_names_the_folder() -> None:
    run = RunFolder.of("search", None, ASKED, WITHOUT)
    assert run.path.is_dir() and re.fullmatch(r"runs/search-[0-9a-f]{12}", str(run.path))
    assert list(run.path.iterdir()) == []
    reordered = dict(reversed(ASKED.items()))
    assert RunFolder.of("search", None, reordered, WITHOUT) == run
    for same in ({"run": "x"}, {"budget": {"minutes": 5}}):
        assert RunFolder.of("search", None, ASKED | same, WITHOUT) == run
    for other in ({"seed": 2}, {"model": {"path": "n"}}, {"more": 0}):
        assert RunFolder.of("search", None, ASKED | other, WITHOUT) != run
    assert RunFolder.of("evaluate", None, ASKED, WITHOUT) != run
    assert RunFolder.of("search", None, ASKED, ("run",)) != run


def test_a_given_folder_is_taken_with_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    assert RunFolder.of("search", "a", ASKED, ()) == RunFolder(Path("a"), "search")
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["file"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert RunFolder.of("search", "~/runs", ASKED, ()).path == tmp_path / "home" / "runs"
    assert RunFolder.of("search", "~no-such-user/runs", ASKED, ()).path.is_dir()


@pytest.mark.parametrize("run", ["file", "file/below", "x" * 300, "unwritable"])
def test_a_path_that_can_be_no_folder_is_refused(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    if run == "unwritable":
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # permission bits do not bind root
    with pytest.raises(
        InputError,
        match=rf"^run: expected a folder that can be written to, got {run} \([A-Z].*; give another with run=",
    ):
        RunFolder.of("search", run, ASKED, ())
    assert (tmp_path / "file").read_text() == "content"


def test_a_path_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(InputError, match="expected a folder that can be written to, got a"):
        RunFolder.of("search", "a\0b", ASKED, ())


@pytest.mark.parametrize("error", [InputError("wrong"), BindingError("another")])
def test_a_new_folder_goes_when_the_input_is_wrong(error: Exception, tmp_path: Path) -> None:
    run = RunFolder.of("search", None, ASKED, ())
    assert run.is_new
    with pytest.raises(type(error)), run.logged():
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_anything_in_it_stays(tmp_path: Path) -> None:
    run = RunFolder.of("search", "a", ASKED, ())
    with pytest.raises(InputError), run.logged():
        run.describe(ASKED)
        raise InputError("found late")
    assert (tmp_path / "a" / "config.json").exists() and (tmp_path / "a" / "log.txt").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.txt").write_text("of a run that was killed early\n")
    run = RunFolder.of("search", "b", ASKED, ())
    assert not run.is_new
    with pytest.raises(InputError), run.logged():
        raise InputError("wrong")
    assert (tmp_path / "b" / "log.txt").read_text().startswith("of a run that was killed early")
    run = RunFolder.of("search", "c", ASKED, ())
    with pytest.raises(ZeroDivisionError), run.logged():
        raise ZeroDivisionError
    assert (tmp_path / "c" / "log.txt").exists()  # a fault of ours: its traceback is wanted


def refuse(**_: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_describe_writes_the_configuration_and_versions(tmp_path: Path) -> None:
    RunFolder(tmp_path, "search").describe(ASKED)
    assert json.loads((tmp_path / "config.json").read_text()) == {"job": "search", **ASKED}
    written = json.loads((tmp_path / "versions.json").read_text())
    assert written == versions()
    for library in ("ropesearch", "torch", "transformers", "optuna", "numpy"):
        assert written[library] == version(library)
    assert written["python"] == platform.python_version()
    assert re.fullmatch(r"[0-9a-f]{40}", written.get("ropesearch_commit", "0" * 40))


def test_versions_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "ropesearch_commit" not in versions() and "torch" in versions()


def test_the_log_holds_what_the_program_says_within_the_block(tmp_path: Path) -> None:
    logger = logging.getLogger("ropesearch.some.module")
    before = (logging.getLogger("ropesearch").level, logging.getLogger("ropesearch").handlers[:])
    with RunFolder(tmp_path, "search").logged():
        logger.info("in h\u00e9\udcff")
        logger.debug("too much")
        logging.getLogger("other").warning("not ours")
    logger.info("after")
    with RunFolder(tmp_path, "search").logged():
        logger.info("again")
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("INFO ", 1)[1] for line in lines] == [
        "ropesearch.some.module: in h\u00e9\\udcff",
        "ropesearch.some.module: again",
    ]
    assert (logging.getLogger("ropesearch").level, logging.getLogger("ropesearch").handlers) == before


def test_a_fault_of_ours_is_logged_and_says_where(tmp_path: Path) -> None:
    before = (logging.getLogger("ropesearch").level, logging.getLogger("ropesearch").handlers[:])
    error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError) as caught, RunFolder(tmp_path, "search").logged():
        raise error
    assert caught.value is error and error.__notes__ == [f"{LOGGED_IN}{tmp_path / 'log.txt'}"]
    text = (tmp_path / "log.txt").read_text()
    assert "Traceback (most recent call last)" in text and "ZeroDivisionError: ours" in text
    assert (logging.getLogger("ropesearch").level, logging.getLogger("ropesearch").handlers) == before


def test_what_was_asked_wrongly_is_not_logged(tmp_path: Path) -> None:
    """The folder may be that of another run."""
    (tmp_path / "log.txt").write_text("of another run\n")
    with pytest.raises(InputError) as caught, RunFolder(tmp_path, "search").logged():
        raise InputError("theirs")
    assert not hasattr(caught.value, "__notes__")
    assert (tmp_path / "log.txt").read_text() == "of another run\n"


@pytest.mark.parametrize(("stop", "by"), [(KeyboardInterrupt(), "an interrupt"), (Stopped("SIGTERM"), "SIGTERM")])
def test_an_interruption_is_no_error(stop: KeyboardInterrupt, by: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunFolder(tmp_path, "search").logged():
        raise stop
    assert (tmp_path / "log.txt").read_text().endswith(f" INFO ropesearch: stopped by {by}\n")
    assert logging.getLogger("ropesearch").handlers == []
