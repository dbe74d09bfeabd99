"""Submitting the workers of a search to Slurm, through submitit.

The plugin hydra-submitit-launcher is not used: its launcher waits for all jobs to end and tells no job's id before, it
wants Hydra to run the job, with Hydra's own folders and logs, and it gives each job its values in Hydra's grammar.
"""

import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropesearch.errors import InputError
from ropesearch.launch.config import SlurmConfig
from ropesearch.run_folder import LAUNCHER_FOLDER
from ropesearch.stopping import STOPPED

_SIGNAL_SECONDS = 120  # before the time limit
_ANY_NUMBER_OF_TIMES = 1_000_000  # the search's budget ends it


@dataclass(frozen=True, slots=True)
class Submission:
    """Workers that were submitted: the Slurm job of each."""

    run_folder: Path
    jobs: Sequence[str]
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """The run folder and the jobs as JSON values."""
        return {"run": str(self.run_folder), "jobs": list(self.jobs)}

    def to_text(self) -> str:
        """What was submitted, where its logs will be, and how to look at it."""
        return "\n".join(
            [
                f"submitted {len(self.jobs)} worker{'s' if len(self.jobs) > 1 else ''}: {', '.join(self.jobs)}",
                f"logs      {self.run_folder / LAUNCHER_FOLDER}",
                f"look      {shlex.join(['ropesearch', 'status', str(self.run_folder)])}",
            ]
        )


class Task:
    """What a task of the array calls: a command line, whose exit code is the job's.

    `main` heeds what Slurm says before a time limit (USR2) and at a preemption (TERM): it hands back its trial and
    returns 75. For that code the batch script has the job requeued, and the next time this is called as it is here. The
    script does it, and not submitit, as a job that is cancelled gets TERM too, and must not come back: its script ends.
    """

    def __init__(self, main: Callable[[Sequence[str]], int], words: Sequence[str]) -> None:
        self._main = main
        self._words = words

    def __call__(self) -> None:
        """Run the command line."""
        of_submitit = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        try:
            code = self._main(self._words)
        finally:
            signal.signal(signal.SIGUSR2, of_submitit)
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """What submitit calls the next time when its own handler is met, before and after the call: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(
    config: SlurmConfig, run_folder: Path, main: Callable[[Sequence[str]], int], words: Sequence[str]
) -> Submission:
    """Submit an array of workers, each of which calls `main(words)`, which returns an exit code, on its node.

    Raises InputError where there is no submitit or no Slurm, or Slurm refuses what is asked.
    """
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError as error:
        raise InputError(f"launcher=slurm needs submitit: pip install 'ropesearch[slurm]' ({error})") from error
    absent = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if absent:
        raise InputError(
            f"launcher=slurm: expected Slurm's commands, got no {' and no '.join(absent)}; give the command on a login "
            "node of the cluster"
        )
    if "%" in str(run_folder):
        raise InputError(f"run: expected a path without %, which Slurm and submitit would replace, got {run_folder}")
    memory = config.memory_gigabytes
    # submitit makes no array of one job.
    this_job = "$SLURM_JOB_ID" if config.num_workers == 1 else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    asked = {
        "job_name": "ropesearch",
        "time": config.minutes,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "gres": config.gres,
        "cpus_per_task": config.num_cpus,
        "mem": None if memory is None else f"{round(1024 * memory)}M",
    }
    executor = SlurmExecutor(folder=run_folder / LAUNCHER_FOLDER / "%j", max_num_timeout=_ANY_NUMBER_OF_TIMES)
    executor.update_parameters(
        **{name: value for name, value in asked.items() if value is not None},
        signal_delay_s=_SIGNAL_SECONDS,
        array_parallelism=config.num_workers,
        stderr_to_stdout=True,
        teardown=[
            "code=$?",
            f'[ "$code" != {STOPPED} ] || scontrol requeue "{this_job}"',
            'exit "$code"',
        ],
        additional_parameters={"requeue": True},
    )
    task = Task(main, words)
    try:
        with executor.batch():
            jobs = [executor.submit(task) for _ in range(config.num_workers)]
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [line for line in str(error).splitlines() if line.startswith("sbatch: ")] or str(error).splitlines()
        raise InputError(f"launcher: Slurm refused the workers: {' '.join(lines)}") from error
    return Submission(run_folder, [job.job_id for job in jobs])
