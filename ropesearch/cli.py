"""`ropesearch JOB [PATH] [key=value ...]`: from the words of a command line to a job, from its end to an exit code."""

import contextlib
import difflib
import errno
import importlib
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from ropesearch import __version__, config
from ropesearch.errors import InputError, RopesearchError
from ropesearch.launch.config import SlurmConfig
from ropesearch.run_folder import LOGGED_IN, RunFolder
from ropesearch.stopping import Stopped, Stopping

_INTERNAL_ERROR = 70
# What the system says of full, broken, locked and unreachable disks.
_REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE,
    errno.ENOLCK,
)  # fmt: skip
_FLAGS = ("--help", "-h", "--version", "--json")
_KEY_VALUE = re.compile(r"[+~]*[A-Za-z_][A-Za-z0-9_.@]*=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0 done, 1 the answer is no, 2 the input is wrong, 3 no candidate
    could be scored or a training cannot go on, 70 our own fault (traceback in a log file), 75 stopped by SIGTERM or
    SIGHUP, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    again = shlex.join(["ropesearch", *words])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this; what else it was told is not known
        again = f"torchrun ... -m ropesearch.cli {shlex.join(words)}"
    stopping = Stopping(again if os.environ.get("RANK", "0") == "0" else None)
    with stopping.listening(until_the_end=arguments is None):
        try:
            try:
                return _run(words)
            except Exception as error:
                if not stopping.asked:  # else a library has made an error of it
                    return _failed(error, again)
        except Stopped as stopped:
            stopping.take(stopped)
        except KeyboardInterrupt:
            pass
        stopping.say()
        if arguments is None:
            stopping.end()
        return stopping.exit_code


def _failed(error: Exception, again: str) -> int:
    """Say in one line what went wrong; returns the exit code."""
    if isinstance(error, RopesearchError):
        _say(f"ropesearch: {error}")
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        place = f"{error.filename}: " if error.filename else ""
        _say(
            f"ropesearch: {place}the system refused to write or read ({error.strerror}); what was computed is kept: "
            f"make room or give another place, then go on with: {again}"
        )
        return InputError.exit_code
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    _say(f"ropesearch: internal error: {summary}; {_where_the_traceback_is(error)}")
    return _INTERNAL_ERROR


def _run(words: list[str]) -> int:
    flags = {word for word in words if word in _FLAGS}
    rest = [word for word in words if word not in flags]
    unknown = next((word for word in rest if word.startswith("-")), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, _FLAGS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; expected --help, --version or --json"
        raise InputError(f"{unknown}: no such option{hint} (settings are key=value)")
    if "--version" in flags:
        _print(f"ropesearch {__version__}")
        return 0
    asks_help = bool(flags & {"--help", "-h"})
    if not rest:
        if asks_help:
            _print(_list_of_jobs())
            return 0
        print(_list_of_jobs(), file=sys.stderr)
        return InputError.exit_code
    job_name, *details = rest
    if job_name not in config.JOBS:
        near = difflib.get_close_matches(job_name, config.JOBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(config.JOBS)}"
        raise InputError(f"{job_name}: no such job{hint}")
    if asks_help:
        _print(_help_page(job_name))
        return 0
    path, overrides = _path_and_overrides(job_name, details)
    job_config = config.compose(job_name, path, overrides)
    config.expect_given(job_name, job_config)
    job_config.check()

    launcher = getattr(job_config, "launcher", None)
    if isinstance(launcher, SlurmConfig):
        outcome = _submitted(launcher, job_config, path, overrides)
    else:
        outcome = getattr(importlib.import_module(config.JOBS[job_name].module), job_name)(job_config)
    _print(json.dumps(outcome.to_json(), indent=2, allow_nan=False) if "--json" in flags else outcome.to_text())
    return int(outcome.exit_code)


def _submitted(launcher: SlurmConfig, job_config: config.SearchJob, path: str | None, overrides: list[str]) -> Any:
    """Submit the workers of a search; each gets these words, but for the launcher's, and all one run folder."""
    from ropesearch.launch.slurm import submit

    run = RunFolder.of("search", job_config.run, config.plain(job_config), without=config.NOT_IN_ITS_NAME)
    run_folder = run.path.absolute()
    kept = [word for word in overrides if not re.match(r"(run|launcher(\.\w+)?)=", word)]
    words = ["search", *([] if path is None else [path]), *kept, f"run={run_folder}"]
    worker = importlib.import_module("ropesearch.cli").main  # by a name that a node can import, which __main__ is not
    return submit(launcher, run_folder, worker, words)


def _path_and_overrides(job_name: str, details: list[str]) -> tuple[str | None, list[str]]:
    """The bare path and the settings. What looks like a setting of an unknown key is a path where one is there."""
    schema = config.JOBS[job_name].schema
    names = {key.name for key in config.keys_of(schema)} | set(config.groups_of(schema))
    paths: list[str] = []
    overrides: list[str] = []
    for word in details:
        name, equals, _ = word.partition("=")
        is_key = bool(equals and name in names)
        looks_like_key = _KEY_VALUE.match(word) or name.lstrip("+~") in names
        (overrides if is_key or (looks_like_key and not os.path.exists(word)) else paths).append(word)
    if len(paths) > 1:
        raise InputError(f"expected one path, got {len(paths)}: {', '.join(paths)}; settings are key=value")
    return (paths[0] if paths else None), overrides


def _list_of_jobs() -> str:
    lines = [
        "ropesearch: make a model with rotary position embeddings read further than it was trained to",
        "",
        "usage: ropesearch JOB [PATH] [key=value ...] [--json]",
        "",
        *(f"  {name:<10} {job.summary}" for name, job in config.JOBS.items()),
        "",
        "ropesearch JOB --help lists a job's keys.",
    ]
    return "\n".join(lines)


def _help_page(job_name: str) -> str:
    job = config.JOBS[job_name]
    lines = [
        f"usage: ropesearch {job_name} [{job.path_meaning}] [key=value ...] [--json]",
        "",
        job.schema.__doc__ or "",
    ]
    groups = {name: choices for name, choices in config.groups_of(job.schema).items() if len(choices) > 1}
    if groups:
        lines += ["", "presets (group=choice):", *(f"  {name}={' | '.join(groups[name])}" for name in groups)]
    lines += ["", f"keys ({job.path_meaning} is short for {job.main_key}):"]
    preset = None
    for key in config.keys_of(job.schema):
        if key.preset != preset:
            lines.append(f"  with {key.preset or 'any preset'}:")
        preset = key.preset
        lines.append(f"  {key.name}={_shown(key.default)}")
        lines.append(f"      {config.type_name(key)}: {key.meaning}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = json.dumps(config.plain(value), separators=(",", ":"))
    return text.replace('"', "")


def _print(text: str) -> None:
    """Print with escapes for what the terminal's encoding lacks; flushed, so that a closed pipe is noticed here."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        if not isinstance(error, BrokenPipeError):  # else the reader has seen enough
            error.filename = "standard output"
            raise


def _say(text: str) -> None:
    """One line on standard error, where somebody may be there to read it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _where_the_traceback_is(error: Exception) -> str:
    """The sentence that names the log file with the traceback: the run's, where one was open, else one made for it."""
    for note in getattr(error, "__notes__", []):
        if note.startswith(LOGGED_IN):
            return str(note)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ropesearch-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError as refusal:
        return f"no traceback could be written ({refusal.strerror})"
    return f"{LOGGED_IN}{file.name}"


if __name__ == "__main__":
    sys.exit(main())
