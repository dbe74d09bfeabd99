"""A disk that is full at any write: one message, nothing half written, and the same command goes on afterwards."""

import errno
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropesearch import cli, pipeline
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError
from ropesearch.files import write_bytes
from tests import runs
from tests.faults.operations import full_disk_from, leftovers
from tests.search.analytic import run
from tests.search.test_worker import contents

NUM_TRIALS = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def finished(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, folder, NUM_TRIALS)) == 0
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path, but_bytes: int) -> Path:
    """A file that leaves so many bytes free."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize - but_bytes))
    return filler


def check_whole(folder: Path, finished: Path) -> None:
    """The run is what one without a fault has left."""
    assert runs.trials_of(folder) == runs.trials_of(finished)
    for name in ("rope_config.json", "checkpoint/rope_config.json", "checkpoint/model.safetensors"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in finished.iterdir()}
    assert leftovers(folder) == []


def check_no_half(folder: Path) -> None:
    """What is there under its name is whole."""
    if (folder / "checkpoint").exists():
        assert cli.main(["verify", str(folder), "levels=[digest,table]"]) == 0
    if (folder / "rope_config.json").exists():
        RopeConfig.read(folder)
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("free_bytes", [0, pytest.param(40_000, marks=pytest.mark.slow), 250_000])
def test_a_search_on_a_full_disk(
    free_bytes: int,
    small_disk: Path,
    finished: Path,
    toy_folder: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = small_disk / "run"
    words = runs.search_words(toy_folder, corpus, folder, NUM_TRIALS)
    filler = fill(small_disk, free_bytes)
    capsys.readouterr()
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and err.count("ropesearch: ") == 1 and "Traceback" not in err and "Logging error" not in err
    assert last.startswith("ropesearch: ") and str(small_disk) in last
    again = f"go on with: {shlex.join(['ropesearch', *words])}"
    reason, remedies = {
        0: ("(No space left on device)", ("give another with run=", again)),  # whether or not a folder can be made
        40_000: ("(No space left on device)", (again,)),
        250_000: ("bytes of free disk space for the weights", ("free some, or link the weights (weights=link)",)),
    }[free_bytes]
    assert reason in last and last.endswith(remedies)
    check_no_half(folder)
    filler.unlink()
    assert cli.main(words) == 0
    check_whole(folder, finished)


def test_a_limit_on_the_length_of_files(
    finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ulimit -f`, as clusters set it: the system sends SIGXFSZ, which ends a program that does not ignore it."""
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", NUM_TRIALS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        assert cli.main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert f"ropesearch: {tmp_path / 'run' / 'study.journal'}: the system refused to write or read (File too" in err
    assert cli.main(words) == 0
    check_whole(tmp_path / "run", finished)


@pytest.mark.parametrize("number", [pytest.param(range(2, 70, 11), id="some"), pytest.param(range(10_000), id="all", marks=pytest.mark.slow)])  # fmt: skip # noqa: E501
def test_a_study_on_a_disk_that_is_full_from_some_write_on(number: range, tmp_path: Path) -> None:
    run(tmp_path / "whole", NUM_TRIALS)
    expected = contents(tmp_path / "whole")
    for at in number:
        folder = tmp_path / str(at)
        with full_disk_from(at) as counter:
            try:
                run(folder, NUM_TRIALS)
            except OSError as error:
                assert error.errno == errno.ENOSPC and str(folder) in str(error.filename), at
        if counter.number <= at:
            break
        run(folder, NUM_TRIALS)
        assert contents(folder) == expected and leftovers(folder) == [], f"full from operation {at}"
    assert at > 40


def check_result(
    finished: Path, words: list[str], folder: Path, numbers: range, capsys: pytest.CaptureFixture[str]
) -> int:
    """Write the result of a finished study on a disk that is full from each of the operations on."""
    for at in numbers:
        folder.mkdir()
        (folder / "study.journal").write_bytes((finished / "study.journal").read_bytes())
        with full_disk_from(at) as counter:
            code = cli.main(words)
        err = capsys.readouterr().err
        if counter.number <= at:
            assert code == 0
            return at
        if code == 0:  # all was written but the worker's last sign of life
            check_whole(folder, finished)
            folder.rename(folder.with_name(f"run{at}"))
            continue
        assert code == 2 and err.splitlines()[-1].startswith("ropesearch: "), (at, err)
        assert "No space left" in err and err.count("ropesearch: ") == 1 and "Traceback" not in err, (at, err)
        check_no_half(folder)
        assert cli.main(words) == 0
        check_whole(folder, finished)
        capsys.readouterr()
        folder.rename(folder.with_name(f"run{at}"))
    return numbers.stop


@pytest.mark.parametrize("numbers", [pytest.param(range(4, 70, 32), id="some"), pytest.param(range(10_000), id="all", marks=pytest.mark.slow)])  # fmt: skip # noqa: E501
def test_a_result_on_a_disk_that_is_full_from_some_write_on(
    numbers: range, finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    picture = (finished / "course.png").read_bytes()
    for name in ("plot_factors", "plot_course"):  # drawn thus, they take most of the time
        monkeypatch.setattr(pipeline, name, lambda path, *_: write_bytes(path, picture))
    folder = tmp_path / "run"
    words = runs.search_words(toy_folder, corpus, folder, NUM_TRIALS)
    assert check_result(finished, words, folder, numbers, capsys) > 60


def test_a_full_cache_folder_names_itself(
    small_disk: Path, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in runs.search_words(toy_folder, corpus, tmp_path / "run", 1) if word != "cache=null"]
    fill(small_disk, 0)
    assert cli.main([*words, f"cache={small_disk / 'cache'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ropesearch: {small_disk / 'cache'}/") and "(No space left on device); name another" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_full_output_and_log_do_not_end_a_search(small_disk: Path, finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path) -> None:  # fmt: skip # noqa: E501
    """Standard output and error go to a disk that is full, as does what needs /tmp: the run is whole all the same."""
    fill(small_disk, 0)
    with (small_disk / "out").open("w") as out:
        environment = {**os.environ, "TMPDIR": str(small_disk)}
        command = [sys.executable, "-m", "ropesearch.cli"]
        words = runs.search_words(toy_folder, corpus, tmp_path / "run", NUM_TRIALS)
        done = subprocess.run([*command, *words], stdout=out, stderr=out, env=environment, check=False)
    assert done.returncode == 2  # the result could not be printed
    check_whole(tmp_path / "run", finished)


def test_an_internal_error_with_a_full_tmp_is_one_line(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk, 0)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))

    def broken(job: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(pipeline, "verify", broken)
    assert cli.main(["verify", "folder"]) == 70
    expected = "internal error: ZeroDivisionError: by zero; no traceback could be written (No space left on device)"
    assert capsys.readouterr().err == f"ropesearch: {expected}\n"


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_copied(
    small_disk: Path, finished: Path, toy_folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "run"
    words = runs.search_words(toy_folder, corpus, folder, NUM_TRIALS)
    assert cli.main([*words, "weights=none"]) == 0
    fill(small_disk, 60_000)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: pytest.fail("copied") if "safetensors" in str(_) else None)
        from ropesearch.artifact.folder import write_checkpoint_folder

        with pytest.raises(InputError, match="bytes of free disk space for the weights"):
            write_checkpoint_folder(toy_folder, small_disk / "other", RopeConfig.read(folder))
    assert leftovers(small_disk) == [] and not (small_disk / "other").exists()
