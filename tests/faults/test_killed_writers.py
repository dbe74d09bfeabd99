"""A search that is killed at any operation on the disk goes on as if nothing had happened, and leaves no litter."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ropesearch import files
from ropesearch.run_folder import RunFolder
from ropesearch.search.presence import read_signs
from tests.faults.operations import died_at, leftovers
from tests.search.analytic import run
from tests.search.test_worker import contents

NUM_TRIALS = 2


def check_deaths(tmp_path: Path, numbers: range) -> int:
    """Die at each of the operations in turn; returns at how many a search died before it came to its end."""
    run(tmp_path / "whole", NUM_TRIALS)
    expected = contents(tmp_path / "whole")
    for number in numbers:
        folder = tmp_path / str(number)
        if not died_at(number, lambda folder=folder: run(folder, NUM_TRIALS)):  # type: ignore[misc]
            return number
        run(folder, NUM_TRIALS)
        assert contents(folder) == expected, f"died at operation {number}"
        assert leftovers(folder) == [], f"died at operation {number}"
    return numbers.stop


def test_a_search_that_dies_at_some_operations(tmp_path: Path) -> None:
    assert check_deaths(tmp_path, range(3, 60, 8)) > 50


@pytest.mark.slow
def test_a_search_that_dies_at_any_operation(tmp_path: Path) -> None:
    assert check_deaths(tmp_path, range(10_000)) > 60


HOLD = """
import sys
from pathlib import Path
from ropesearch.files import folder_beside, written_beside
path = Path(sys.argv[1])
with written_beside(path / "file") as file, folder_beside(path / "folder") as folder:
    (folder / "inside").write_text("half")
    file.write(b"half")
    print("there", flush=True)
    sys.stdin.read()
"""


def writer(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_what_a_killed_writer_leaves_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    killed, living = writer(tmp_path), writer(tmp_path)
    killed.kill()
    killed.communicate()
    assert len(leftovers(tmp_path)) == 4
    RunFolder.of("search", str(tmp_path), {}, ())
    assert len(leftovers(tmp_path)) == 2
    living.communicate("")
    assert living.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}
    assert (tmp_path / "folder" / "inside").read_text() == "half"


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    names = [".a.0123abcd.part", ".a.txt.0123abcd.part", "a.0123abcd.part", ".a.0123abc.part", ".a.0123abcd.partial"]
    for name in [*names, ".0123abcd.part"]:
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").touch()
    (tmp_path / ".link.0123abcd.part").symlink_to(tmp_path / "elsewhere")
    files.remove_leftovers(tmp_path, "a.txt")
    assert not (tmp_path / names[1]).exists() and (tmp_path / names[0]).exists()
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *names[2:], ".0123abcd.part", "elsewhere", ".link.0123abcd.part",
    }  # fmt: skip
    files.remove_leftovers(tmp_path / "absent")


def test_a_writer_that_is_stopped_delays_the_others_and_harms_nothing(tmp_path: Path) -> None:
    """A process that is suspended for long (a laptop that sleeps, Ctrl-Z) comes back to a study that went on."""
    shared = tmp_path / "shared"
    shared.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "tests.search.analytic", str(shared), "8", "0.05"])
    try:
        while not (shared / "calls").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGCONT)
    run(shared, 8)
    assert process.wait(timeout=120) == 0
    trials = contents(shared)[:-1]
    assert len(trials) == 12 and all(state.is_finished() for _, state, *_ in trials)
    assert len({str(attributes["candidate"]) for *_, attributes in trials[4:]}) == 8
    assert {sign["because"] for sign in read_signs(shared)} == {"done"}
    assert not list((shared / "workers").glob("*.lock"))
