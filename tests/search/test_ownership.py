import subprocess
import sys
from pathlib import Path

from ropesearch.search.ownership import claimed, exclusive, is_alive, working

HOLD = """
import sys, time
from pathlib import Path
from ropesearch.search.ownership import {name}
with {name}(Path(sys.argv[1])) as held:
    print(held, flush=True)
    time.sleep(60)
"""


def start(name: str, path: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(name=name), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_a_worker_lives_as_long_as_its_process(tmp_path: Path) -> None:
    process, worker = start("working", tmp_path)
    try:
        assert is_alive(tmp_path, worker)
    finally:
        stop(process)
    assert not is_alive(tmp_path, worker)


def test_a_worker_ends_with_its_block_and_leaves_no_file(tmp_path: Path) -> None:
    with working(tmp_path) as first, working(tmp_path) as second:
        assert first != second
        assert is_alive(tmp_path, first) and is_alive(tmp_path, second)
    assert not is_alive(tmp_path, first)
    assert not is_alive(tmp_path, "never seen")
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_claim_is_one_processes_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    process, held = start("claimed", path)
    try:
        assert held == "True"
        with claimed(path) as mine:
            assert not mine
    finally:
        stop(process)
    with claimed(path) as mine:
        assert mine
    assert not path.exists()


def test_the_exclusive_lock_is_freed_by_death(tmp_path: Path) -> None:
    process, _ = start("exclusive", tmp_path)
    stop(process)
    with exclusive(tmp_path):
        pass
