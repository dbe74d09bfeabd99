"""Folders and files that may not be written, and things in the place where the run should be."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropesearch import cli
from tests import runs

NOBODY = 65534
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that is mounted read-only; `run` in it is a folder."""
    place = tmp_path / "read-only"
    (place / "run").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        (place / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def one_message(capsys: Captured) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("ropesearch: ")
    return err


@pytest.mark.parametrize("run", ["run", "new", "new/below"])
def test_a_run_folder_that_is_mounted_read_only(
    run: str, read_only: Path, toy_folder: Path, corpus: Path, capsys: Captured
) -> None:
    assert cli.main(runs.search_words(toy_folder, corpus, read_only / run, 1)) == 2
    expected = f"run: expected a folder that can be written to, got {read_only / run} (Read-only file system); "
    assert one_message(capsys) == f"ropesearch: {expected}give another with run=\n"


def test_a_cache_folder_that_is_mounted_read_only(
    read_only: Path, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = [word for word in runs.search_words(toy_folder, corpus, tmp_path / "run", 1) if word != "cache=null"]
    assert cli.main([*words, f"cache={read_only / 'cache'}"]) == 2
    message = one_message(capsys)
    assert str(read_only / "cache") in message and "(Read-only file system); name another" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["file", "below a file", "dangling link", "loop of links", "too long a name"])
def test_what_can_be_no_run_folder(what: str, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    run = {
        "file": "file", "below a file": "file/run", "dangling link": "dangling", "loop of links": "loop",
        "too long a name": "x" * 300,
    }[what]  # fmt: skip
    before = sorted(tmp_path.iterdir())
    assert cli.main(runs.search_words(toy_folder, corpus, tmp_path / run, 1)) == 2
    assert "run: expected a folder that can be written to, got " in one_message(capsys)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("name", ["study.journal", "log.txt", "search.lock", "workers", "rope_config.json"])
def test_a_folder_or_file_in_the_place_of_a_file_of_the_run(
    name: str, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if name == "workers":
        (run / name).write_text("content")
    else:
        (run / name / "below").mkdir(parents=True)
    assert cli.main(runs.search_words(toy_folder, corpus, run, 1)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ropesearch: ") and str(run / name) in last
    assert (run / name).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_permissions_of_another_user(toy_folder: Path, corpus: Path) -> None:
    """A parent and a run folder that root owns, a journal that may not be written, and a cache that nobody may make."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(toy_folder, place / "model")
        shutil.copytree(corpus, place / "texts")
        (place / "owned").mkdir()
        (place / "open").mkdir()
        words = runs.search_words(place / "model", place / "texts", place / "open" / "finished", 1)
        assert cli.main(words) == 0  # which also imports all that the other user may not read
        for path in [place, *place.rglob("*")]:
            path.chmod(0o755 if path in (place, place / "owned") or "model" in path.parts else 0o777)
        (place / "open" / "finished" / "study.journal").chmod(0o444)
        with_cache = [f"cache={place / 'owned' / 'cache'}" if word == "cache=null" else word for word in words]
        cases = [
            (place / "new", words, "run: expected a folder that can be written to, got "),
            (place / "owned", words, "run: expected a folder that can be written to, got "),
            (place / "open" / "finished", words, "finished/study.journal: the system refused to write or read "),
            (place / "open" / "new", with_cache, "expected a cache folder that can be read and written "),
        ]
        for folder, asked, expected in cases:
            code, errors = as_nobody([f"run={folder}" if word.startswith("run=") else word for word in asked])
            assert (code, errors.count("ropesearch: ")) == (2, 1) and "Traceback" not in errors, errors
            assert expected in errors and "(Permission denied)" in errors, errors
        assert not (place / "new").exists() and list((place / "owned").iterdir()) == []


def as_nobody(words: list[str]) -> tuple[int, str]:
    """The command line in a forked process of a user for whom permissions count: its exit code and standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                sys.stderr = errors
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                code = cli.main(words)
            finally:
                errors.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read()
