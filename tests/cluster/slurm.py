"""A real Slurm of virtual nodes on this machine, from Debian's packages slurm-wlm and munge, for the time of a test.

Everything it keeps lies in one folder in /tmp (a socket's path must be short); no file of the system is touched.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.processes import daemon, free_ports, wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

# A requeued job waits cred_expire, by default two minutes; the memory of ended jobs has to outlast a test.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
KillWait=5
MinJobAge=3600
MpiDefault=none
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running Slurm with the partitions `low`, whose jobs those of `high` preempt, and `high`."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, folder: Path | None = None) -> str:
        """What a command (sbatch, scontrol, ...) prints; AssertionError with its errors when it fails."""
        done = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self, job: str) -> dict[str, str]:
        """The states of a job by the id of its array's task (or of the job itself), such as {"3_0": "RUNNING"}."""
        states = {}
        for line in self.run("scontrol", "--oneliner", "show", "job", job).splitlines():
            values = dict(word.split("=", 1) for word in line.split() if "=" in word)
            task = values.get("ArrayTaskId")
            states[values["JobId"] if task is None else f"{values['ArrayJobId']}_{task}"] = values["JobState"]
        return states

    def wait(self, job: str, timeout_seconds: float = 300) -> dict[str, str]:
        """The states of a job when all its tasks have ended."""

        def ended() -> bool:
            return all(state in _ENDED for state in self.states(job).values())

        wait_until(ended, f"job {job} ended", timeout_seconds)
        return self.states(job)


def missing() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else None


@contextlib.contextmanager
def running(num_nodes: int = 2, num_cpus: int = 8) -> Iterator[Slurm]:
    """Start a Slurm whose nodes have so many (pretended) CPUs and two (pretended) GPUs each, stop it at the end; skips
    where that cannot be done.
    """
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        folder = Path(name)
        config = _write_config(folder, num_nodes, num_cpus)
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        # Jobs find the commands of the Python that runs the tests.
        path = os.pathsep.join([str(Path(sys.executable).parent), _search_path()])
        slurm = Slurm(folder, {**ours, "SLURM_CONF": str(config), "PATH": path})
        system = {"PATH": _search_path(), "SLURM_CONF": str(config), "LC_ALL": "C"}
        with contextlib.ExitStack() as stack:

            def start(log: str, *command: str) -> None:
                stack.enter_context(daemon(command, str(folder / f"{log}.log"), **system))

            files = [f"--{kind}={folder}/munge.{end}" for kind, end in (("key-file", "key"), ("socket", "sock"))]
            files += [f"--{kind}={folder}/munged.{end}" for kind, end in (("pid-file", "pid"), ("seed-file", "seed"))]
            start("munged", "munged", "--foreground", "--force", f"--log-file={folder}/munged.log", *files)
            wait_until((folder / "munge.sock").exists, "munged listens")
            start("slurmctld", "slurmctld", "-D", "-f", str(config))
            for number in range(num_nodes):
                start(f"slurmd-n{number}", "slurmd", "-D", "-f", str(config), "-N", f"n{number}")
            try:
                try:
                    wait_until(lambda: _num_idle(slurm) == num_nodes, "all nodes are idle")
                except TimeoutError as error:
                    raise TimeoutError(f"{error}\n{_logs(folder)}") from error
                yield slurm
            finally:
                _cancel_all(slurm)


def _write_config(folder: Path, num_nodes: int, num_cpus: int) -> Path:
    for name in ("state", *(f"spool-n{number}" for number in range(num_nodes))):
        (folder / name).mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    host = socket.gethostname().partition(".")[0]
    port, *ports = free_ports(1 + num_nodes)
    nodes = [
        f"NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={host} Port={of_node} CPUs={num_cpus} Gres=gpu:2 "
        "RealMemory=4096 State=UNKNOWN"
        for number, of_node in enumerate(ports)
    ]
    values = {"host": host, "user": getpass.getuser(), "folder": folder, "port": port, "nodes": "\n".join(nodes)}
    # Slurm wants a device for each GPU, whichever it is.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(**values))
    return config


def _num_idle(slurm: Slurm) -> int:
    command = ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=30)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def _cancel_all(slurm: Slurm) -> None:
    """End all jobs; a controller that does not answer must not keep the test from its end."""

    def answer(*command: str) -> str:
        limited = ["timeout", "-k", "1", "5", *command]
        return subprocess.run(limited, env=slurm.environment, capture_output=True, text=True).stdout

    answer("scancel", "--full", "--user", getpass.getuser())
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not answer("squeue", "-h").strip(), "all jobs ended", 15)


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.log"))


def _search_path() -> str:
    """PATH with the folders of daemons, which ordinary users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
