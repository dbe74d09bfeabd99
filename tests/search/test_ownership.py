import subprocess
import sys
from pathlib import Path

from ropesearch.search.ownership import claimed, exclusive, is_held

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


def test_a_claim_is_one_processes_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    assert not is_held(path)
    process, held = start("claimed", path)
    try:
        assert held == "True" and is_held(path)
        with claimed(path) as mine:
            assert not mine
    finally:
        stop(process)
    assert not is_held(path)
    with claimed(path) as mine:
        assert mine
    assert not path.exists()


def test_the_exclusive_lock_is_freed_by_death(tmp_path: Path) -> None:
    process, _ = start("exclusive", tmp_path)
    stop(process)
    with exclusive(tmp_path):
        pass
