"""ropesearch/launch/slurm.py against stand-ins for Slurm's commands; tests/cluster/ has the real ones."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from ropesearch import cli, config
from ropesearch.errors import InputError
from ropesearch.launch.config import SlurmConfig
from ropesearch.launch.slurm import Task, submit
from ropesearch.run_folder import RunFolder

Captured = pytest.CaptureFixture[str]
SBATCH = """#!/bin/sh
cp "$1" {folder}/submitted-$(ls {folder} | grep -c submitted).sh
echo "Submitted batch job 17"
"""
REFUSING = """#!/bin/sh
echo "sbatch: error: invalid partition specified: nowhere" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
exit 1
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that keeps what it is given, and an srun."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, script in (("sbatch", SBATCH.format(folder=folder)), ("srun", "#!/bin/sh\n")):
        write_command(folder, name, script)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def write_command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def never(words: Sequence[str]) -> int:
    raise AssertionError("a worker ran here")


def tasks_of(folder: Path) -> list[Any]:
    """The words of the tasks that submitit has put down for an array."""
    found = [DelayedSubmission.load(path).function for path in sorted(folder.rglob("*_submitted.pkl"))]
    assert all(isinstance(task, Task) for task in found)
    return found


def test_every_setting_reaches_slurm(commands: Path, tmp_path: Path) -> None:
    asked = SlurmConfig(
        num_workers=3,
        minutes=90,
        partition="gpu",
        account="me",
        qos="long",
        constraint="a100|h100",
        gres="gpu:a100:1",
        num_cpus=6,
        memory_gigabytes=1.5,
    )
    run = tmp_path / "a run"
    submission = submit(asked, run, never, ["search", "a model", "run=x"])
    assert submission.jobs == ["17_0", "17_1", "17_2"]
    (file,) = commands.glob("submitted-*.sh")
    lines = set(file.read_text().splitlines())
    assert {
        "#SBATCH --array=0-2%3", "#SBATCH --time=90", "#SBATCH --partition=gpu", "#SBATCH --account=me",
        "#SBATCH --qos=long", "#SBATCH --constraint='a100|h100'", "#SBATCH --gres=gpu:a100:1",
        "#SBATCH --cpus-per-task=6", "#SBATCH --mem=1536M", "#SBATCH --requeue", "#SBATCH --signal=USR2@120",
        "#SBATCH --open-mode=append", f"#SBATCH --output='{run}/slurm/%A_%a/%A_%a_0_log.out'",
    } <= lines  # fmt: skip
    assert [task._words for task in tasks_of(run / "slurm")] == [["search", "a model", "run=x"]] * 3


def test_what_is_not_asked_is_left_to_slurm(commands: Path, tmp_path: Path) -> None:
    assert submit(SlurmConfig(), tmp_path / "run", never, ["search"]).jobs == ["17"]
    (file,) = commands.glob("submitted-*.sh")
    given = re.findall(r"^#SBATCH --([a-z-]+)", file.read_text(), flags=re.MULTILINE)
    assert not {"partition", "account", "qos", "constraint", "gres", "mem", "array"} & set(given)


def test_what_slurm_refuses_is_one_line(commands: Path, tmp_path: Path) -> None:
    write_command(commands, "sbatch", REFUSING)
    with pytest.raises(InputError, match=r"Slurm refused the workers: sbatch: error: invalid partition .*: nowhere"):
        submit(SlurmConfig(partition="nowhere"), tmp_path, never, ["search"])


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="expected Slurm's commands, got no sbatch and no srun"):
        submit(SlurmConfig(), tmp_path, never, ["search"])


def test_without_submitit_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(InputError, match=r"launcher=slurm needs submitit: pip install 'ropesearch\[slurm\]'"):
        submit(SlurmConfig(), tmp_path, never, ["search"])


def test_a_path_that_submitit_would_change_is_refused(commands: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run: expected a path without %"):
        submit(SlurmConfig(), tmp_path / "100%j", never, ["search"])
    assert not list(commands.glob("submitted-*"))


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_a_task_ends_with_the_code_of_its_command(code: int) -> None:
    """And its command takes USR2 itself, which submitit heeds before and after."""
    seen: list[Any] = []

    def main(words: Sequence[str]) -> int:
        seen.extend([list(words), signal.getsignal(signal.SIGUSR2)])
        return code

    def of_submitit(*_: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGUSR2, of_submitit)
    try:
        with pytest.raises(SystemExit) if code else contextlib.nullcontext() as ended:
            Task(main, ["search", "x"])()
        assert signal.getsignal(signal.SIGUSR2) is of_submitit
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ended is None or ended.value.code == code
    assert seen == [["search", "x"], signal.SIG_DFL]


@pytest.mark.parametrize(("num_workers", "job"), [(1, "19"), (3, "17_2")])
@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_script_requeues_what_was_stopped(
    code: int, num_workers: int, job: str, commands: Path, tmp_path: Path
) -> None:
    """The script that submitit has made, with an srun that ends with that code."""
    submit(SlurmConfig(num_workers=num_workers), tmp_path / "run", never, ["search"])
    (file,) = commands.glob("submitted-*.sh")
    write_command(commands, "srun", f"#!/bin/sh\nexit {code}\n")
    write_command(commands, "scontrol", f'#!/bin/sh\necho "$@" >> {commands}/said\n')
    # Of a single worker that was submitted from within a task of an array, the array is another's.
    slurm = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    assert subprocess.run(["bash", str(file)], env=os.environ | slurm).returncode == code
    said = commands / "said"
    assert (said.read_text() if said.exists() else "") == (f"requeue {job}\n" if code == 75 else "")


def test_the_next_time_is_the_same_call() -> None:
    task = Task(never, ["search", "x"])
    assert task.checkpoint().function is task and task.checkpoint().args == ()


def words_of(run: Path) -> list[str]:
    (task,) = tasks_of(run / "slurm")
    assert task._main is cli.main
    return list(task._words)


def test_the_command_submits_itself_without_its_launcher(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """With the same run folder as it would have here, absolute; and values are words, whatever they hold."""
    monkeypatch.chdir(tmp_path)
    words = ["a=b[1]", "corpus.path=${x},y", "target_length=64", "budget.num_trials=3"]
    Path("a=b[1]").mkdir()
    launcher = ["launcher=slurm", "launcher.partition=gpu", "launcher.num_workers=1"]
    monkeypatch.setattr("ropesearch.data.config.CorpusConfig.check", lambda self: None)
    assert cli.main(["search", *words, *launcher]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert words_of(run) == ["search", *words, f"run={run}"]
    assert capsys.readouterr().out == (
        f"submitted 1 worker: 17\nlogs      {run}/slurm\nlook      ropesearch status {run}\n"
    )
    here = config.compose("search", "a=b[1]", words[1:])
    found = RunFolder.of("search", None, config.plain(here), without=config.NOT_IN_ITS_NAME)
    assert found.path.absolute() == run and found.is_new


def test_a_run_folder_that_is_given_is_made_absolute(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["search", "m", "corpus.path=a-dataset", "target_length=64", "run=my runs/x", "launcher=slurm", "--json"]
    assert cli.main(words) == 0
    run = tmp_path / "my runs" / "x"
    assert words_of(run)[-1] == f"run={run}"
    assert capsys.readouterr().out.split() == ["{", '"run":', *f'"{run}",'.split(), '"jobs":', "[", '"17"', "]", "}"]


def test_what_is_wrong_is_said_before_anything_is_submitted(commands: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ["search", "m", "corpus.path=a-dataset", f"run={tmp_path / 'run'}", "launcher=slurm"]
    for wrong in (["target_length=64", "sede=1"], [], ["target_length=64", "optimizer.num_starts=0"]):
        assert cli.main([*words, *wrong]) == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"job": "evaluate"}')
    assert cli.main([*words, "target_length=64"]) == 2
    assert "which holds one of the job evaluate" in capsys.readouterr().err
    assert not list(commands.glob("submitted-*"))


def test_submitting_needs_no_heavy_library(commands: Path, tmp_path: Path) -> None:
    code = "import sys; from ropesearch.cli import main; print(main(sys.argv[1:])); print(*sys.modules)"
    words = ["search", "m", "corpus.path=a-dataset", "target_length=64", f"run={tmp_path / 'run'}", "launcher=slurm"]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, *words], capture_output=True, text=True)
    *_, exit_code, modules = done.stdout.splitlines()
    assert exit_code == "0", done.stderr
    assert not {"torch", "transformers", "datasets", "optuna"} & set(modules.split())
