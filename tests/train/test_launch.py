"""ropesearch/train/launch.py: the exit code of what torchrun starts, and signals passed on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # torch and torchrun take seconds to start


def launched(program: str, tmp_path: Path) -> "subprocess.Popen[str]":
    path = tmp_path / "program.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + program)
    command = [sys.executable, "-m", "ropesearch.train.launch", "--nproc-per-node=2", "--standalone", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("sys.exit(75)", 75),
        ("sys.exit(2) if rank else time.sleep(60)", 2),
    ],
)
def test_it_ends_with_what_its_processes_end_with(program: str, code: int, tmp_path: Path) -> None:
    process = launched(program, tmp_path)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR2", 75)])
def test_signals_are_passed_on(name: str, code: int, tmp_path: Path) -> None:
    program = (
        "def heed(number, frame):\n"
        "    open(f'heeded-{rank}', 'w').write(signal.Signals(number).name)\n"
        "    sys.exit(75)\n"
        "for name in ('SIGTERM', 'SIGUSR2', 'SIGINT'):\n"
        "    signal.signal(signal.Signals[name], heed)\n"
        "open(f'ready-{rank}', 'w').close()\n"
        "time.sleep(60)\n"
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        process = launched(program, tmp_path)
    finally:
        os.chdir(before)
    end = time.monotonic() + 120
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.Signals[name])
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert [(tmp_path / f"heeded-{rank}").read_text() for rank in range(2)] == [name, name]
