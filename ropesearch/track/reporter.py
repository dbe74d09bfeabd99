"""The process that writes one run of Weights & Biases: JSON lines on its input, the run folder its working folder.

All of `wandb` happens here, so that whatever becomes of it (a server that hangs, a crash of its core) cannot reach the
job. The first message says which run it is; then come trials or steps, the result, and how it ended. An input that
ends without that word is the death of the job. On its output stands the reason when it gave up, and nothing otherwise.
"""

import io
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ropesearch.rope.geometry import Geometry, LayerRope
from ropesearch.rope.regime import Regime
from ropesearch.track.plots import factors_figure, png, positions_figure
from ropesearch.track.weights_and_biases import without_folders

_SEARCHED = "searched"
# What a run gets when the job that it belongs to was killed, and how long it may then take to end.
_KILLED = 1
_KILLED_SECONDS = 15.0
_GRACE_SECONDS = 5.0
# Without a server, `wandb.init` gives up after a few seconds, when it does not answer after these and some more.
_INIT_SECONDS = 10.0
# The table of trials is logged when it has grown by this: all its versions together are then a few times the last one.
_TABLE_GROWTH = 1.5
_TABLE = (
    "trial",
    "state",
    "method",
    "nats_per_token",
    "perplexity",
    "num_forward_equivalent_tokens",
    "seconds",
    "attention_factor",
    "retained_tokens",
    "stopped_after_windows",
    "reason",
    "factors",
)
_BLOCKS = ("method", "trial", "first_position", "end_position", "nats_per_token")


class _Writer:
    """One run, from its first message to its end."""

    def __init__(self, run: Any, begin: Mapping[str, Any], logged: set[int]) -> None:
        self._run = run
        self._logged = logged
        self._begin = begin
        self._trials: list[Mapping[str, Any]] = []
        self._baselines: dict[str, Mapping[str, Any]] = {}
        self._best: Mapping[str, Any] | None = None
        self._num_in_table = 0
        self._is_pictured = True
        self._is_last = False

    def trial(self, message: Mapping[str, Any]) -> None:
        """Log a finished trial."""
        row = message["trial"]
        self._is_last = False
        self._trials.append(row)
        if row["method"] != _SEARCHED:
            self._baselines[row["method"]] = row
        if message["is_best_candidate"]:
            self._best = row
        if message["is_best_candidate"] or row["method"] != _SEARCHED:
            self._is_pictured = False
        blocks = ("block_edges", "block_nats", "block_tokens")
        values = {key: value for key, value in row.items() if key not in blocks}
        self.row({**values, **message["so_far"]})

    def row(self, values: Mapping[str, Any]) -> None:
        """Log what belongs to one trial or step, unless an earlier process of the run has."""
        if values[self._begin["counter"]] not in self._logged:
            self._run.log(_finite(values))

    def picture(self, *, last: bool = False) -> None:
        """Log what is out of date of the study: its pictures, and its table when it has grown by much, or for the
        `last` time.
        """
        import wandb

        if self._begin["job_type"] != "study" or not self._trials or self._is_last:
            return
        geometry, target_length = _geometry(self._begin["geometry"]), self._begin["target_length"]
        values: dict[str, Any] = {}
        num_in_table = self._num_in_table
        if len(self._trials) > (num_in_table if last else num_in_table * _TABLE_GROWTH):
            num_in_table = len(self._trials)
            rows = [[_finite(row).get(column) for column in _TABLE] for row in self._trials]
            values["trials"] = wandb.Table(columns=list(_TABLE), data=rows)
        if last or not self._is_pictured:
            shown = {**self._baselines, **({_SEARCHED: self._best} if self._best else {})}
            regimes = {name: _regime(row, target_length) for name, row in shown.items() if row["factors"]}
            values["factors_plot"] = _image(factors_figure(geometry, target_length, regimes))
            by_position = {name: _by_position(row) for name, row in shown.items() if row["block_nats"]}
            if by_position:
                values["loss_by_position_plot"] = _image(positions_figure(by_position))
                if last:
                    rows = [[name, shown[name]["trial"], *block] for name in by_position for block in by_position[name]]
                    values["loss_by_position"] = wandb.Table(columns=list(_BLOCKS), data=rows)
        if values:
            self._run.log(values)
        self._num_in_table, self._is_pictured, self._is_last = num_in_table, True, last

    def result(self, message: Mapping[str, Any]) -> None:
        """Log what the job came to, and its file as an artifact."""
        import wandb

        self._run.summary.update(_finite(message["summary"]))
        artifact = wandb.Artifact(message["artifact"], type="rope_config", metadata=message["metadata"])
        artifact.add_file(message["file"])
        self._run.log_artifact(artifact)


def main() -> None:
    """Read the messages and write the run; ends with 0 when the run was finished."""
    messages, reason = os.dup(0), os.dup(1)  # for this process alone: what it starts inherits neither
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    failure: Exception | None
    try:
        failure = _report(messages)
    except Exception as error:  # of any kind: what it says is all that the job may learn of it
        failure = error
    if failure is not None:
        said = " ".join(without_folders(f"{type(failure).__name__}: {failure}").split())
        os.write(reason, said[:500].encode())
        os._exit(1)  # whatever wandb would still wait for


def _report(messages: int) -> Exception | None:
    """Write the run to its end; returns what kept something out of it that is more than a row."""
    batches = _batches(messages)
    begin, *rest = next(batches)
    run, logged = _started(begin)
    writer = _Writer(run, begin, logged)
    result, exit_code, seconds = None, _KILLED, _KILLED_SECONDS
    for batch in itertools.chain([rest], batches):
        for message in batch:
            if message["kind"] == "trial":
                writer.trial(message)
            elif message["kind"] == "step":
                writer.row(message["values"])
            elif message["kind"] == "result":
                result = message
            else:
                exit_code, seconds = message["exit_code"], message["seconds"]
        if not select.select([messages], [], [], 0)[0]:  # nothing is waiting to be logged
            _attempted(writer.picture)  # what fails is drawn anew with the next trials
    # The job kills what is late, but it may be gone; the group is that of a session of its own.
    watchdog = threading.Timer(seconds + _GRACE_SECONDS, os.killpg, (0, signal.SIGKILL))
    watchdog.daemon = True
    watchdog.start()
    failure = _attempted(lambda: writer.picture(last=True))
    if result is not None:
        failure = _attempted(lambda: writer.result(result)) or failure
    run.finish(exit_code=exit_code)
    return failure


def _attempted(what: Callable[[], None]) -> Exception | None:
    """Do what may need a server; a row does not. Returns what went wrong: it is no reason to lose the rows to come."""
    try:
        what()
    except Exception as error:
        return error
    return None


def _started(begin: Mapping[str, Any]) -> tuple[Any, set[int]]:
    """The run, begun or gone on with, and the numbers of the trials or steps that it holds already."""
    import wandb

    settings = wandb.Settings(
        root_dir=os.getcwd(),
        console="off",
        silent=True,
        host="",
        program="",
        disable_git=True,
        disable_code=True,
        save_code=False,
        disable_job_creation=True,
        init_timeout=_INIT_SECONDS,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=0.5,
        x_graphql_retry_max=3,
        x_graphql_retry_wait_min_seconds=0.5,
        x_graphql_retry_wait_max_seconds=2.0,
    )
    counter = begin["counter"]
    is_caught_up = begin["job_type"] != "worker"  # else only what is new is told
    logged = _in_files(begin["id"], counter) if is_caught_up and not begin["online"] else set()
    run = wandb.init(
        project=begin["project"],
        id=begin["id"],
        name=begin["name"],
        group=begin["group"],
        job_type=begin["job_type"],
        mode="online" if begin["online"] else "offline",
        resume="allow",
        config=begin["config"],
        settings=settings,
    )
    run.define_metric(counter)
    run.define_metric("*", step_metric=counter, step_sync=False)
    if is_caught_up and begin["online"]:
        logged = set(range(int(run.summary.get(counter, -1)) + 1))  # they are logged in order
    return run, logged


def _in_files(run_id: str, counter: str) -> set[int]:
    """The trials or steps that the files of a run's earlier processes hold. Without a server nobody else knows.

    What was cut short or damaged counts as far as it can be read: no more of it can be uploaded.
    """
    found: set[int] = set()
    for path in sorted(Path("wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if record["type"] == "history" and counter in record["history"]["item"]:
                found.add(record["history"]["item"][counter])
    return found


def _batches(descriptor: int) -> Iterator[list[Any]]:
    """The messages that are there, each time some are."""
    pending = b""
    while piece := os.read(descriptor, 1 << 20):
        *lines, pending = (pending + piece).split(b"\n")
        if lines:
            yield [json.loads(line) for line in lines]


def _image(figure: Figure) -> Any:
    import wandb
    from PIL import Image

    return wandb.Image(Image.open(io.BytesIO(png(figure))))


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without None, and without numbers, or lists with numbers, that are not finite."""

    def is_whole(value: Any) -> bool:
        if isinstance(value, float):
            return math.isfinite(value)
        return value is not None and (not isinstance(value, list) or all(map(is_whole, value)))

    return {key: value for key, value in values.items() if is_whole(value)}


def _geometry(value: Mapping[str, Any]) -> Geometry:
    layers = value["layer_types"]
    return Geometry(**{**value, "layer_types": layers and {name: LayerRope(**layers[name]) for name in layers}})


def _regime(row: Mapping[str, Any], target_length: int) -> Regime:
    return Regime(
        name=row["method"],
        max_length=target_length,
        factors=tuple(row["factors"]),
        attention_factor=row["attention_factor"],
        retained_tokens=row["retained_tokens"],
    )


def _by_position(row: Mapping[str, Any]) -> Sequence[tuple[int, int, float]]:
    """First position, end, and nats per token of each position block with a scored token."""
    edges = row["block_edges"]
    blocks = zip(edges, edges[1:], row["block_nats"], row["block_tokens"], strict=False)
    return [(start, end, nats / tokens) for start, end, nats, tokens in blocks if tokens]
