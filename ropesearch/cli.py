"""`ropesearch JOB [PATH] [key=value ...]`: from the words of the command line to a job, and from its end to an exit code."""

import difflib
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropesearch import __version__, config
from ropesearch.errors import InputError, RopesearchError

_INTERNAL_ERROR = 70
_INTERRUPTED = 130
_KEY_VALUE = re.compile(r"[+~]*[A-Za-z_][A-Za-z0-9_.@]*=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0 done, 1 the answer is no, 2 the input is wrong, 3 no candidate could be
    scored, 70 our own fault (traceback in a log file), 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except RopesearchError as error:
        print(f"ropesearch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"ropesearch: interrupted; go on with: {shlex.join(['ropesearch', *words])}", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _INTERRUPTED
    except Exception as error:
        log = _log_with_traceback(error)
        print(f"ropesearch: internal error: {type(error).__name__}; the traceback is in {log}", file=sys.stderr)
        return _INTERNAL_ERROR


def _run(words: list[str]) -> int:
    flags = {word for word in words if word in ("--help", "-h", "--version", "--json")}
    rest = [word for word in words if word not in flags]
    unknown = next((word for word in rest if word.startswith("-")), None)
    if unknown is not None:
        raise InputError(f"{unknown}: no such option; expected --help, --version or --json (settings are key=value)")
    if "--version" in flags:
        print(f"ropesearch {__version__}")
        return 0
    asks_help = bool(flags & {"--help", "-h"})
    if not rest:
        print(_list_of_jobs(), file=sys.stdout if asks_help else sys.stderr)
        return 0 if asks_help else InputError.exit_code
    job_name, *details = rest
    if job_name not in config.JOBS:
        near = difflib.get_close_matches(job_name, config.JOBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(config.JOBS)}"
        raise InputError(f"{job_name}: no such job{hint}")
    if asks_help:
        print(_help_page(job_name))
        return 0
    job_config = config.compose(job_name, *_path_and_overrides(job_name, details))

    from ropesearch import pipeline

    outcome = getattr(pipeline, job_name)(job_config)
    print(json.dumps(outcome.to_json(), indent=2, allow_nan=False) if "--json" in flags else outcome.to_text())
    return int(outcome.exit_code)


def _path_and_overrides(job_name: str, details: list[str]) -> tuple[str | None, list[str]]:
    names = {key.name for key in config.keys_of(config.JOBS[job_name].schema)}
    paths: list[str] = []
    overrides: list[str] = []
    for word in details:
        is_key = _KEY_VALUE.match(word) and (word.partition("=")[0] in names or not Path(word).exists())
        (overrides if is_key else paths).append(word)
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
    lines = [f"usage: ropesearch {job_name} [{job.path_meaning}] [key=value ...] [--json]", "", job.schema.__doc__ or ""]
    groups = {name: choices for name, choices in config.groups_of(job.schema).items() if len(choices) > 1}
    if groups:
        lines += ["", "presets (group=choice):", *(f"  {name}={' | '.join(groups[name])}" for name in groups)]
    lines += ["", f"keys ({job.path_meaning} is short for {job.main_key}):"]
    for key in config.keys_of(job.schema):
        lines.append(f"  {key.name}={_shown(key.default)}")
        lines.append(f"      {config.type_name(key)}: {key.meaning}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = json.dumps(config.plain(value), separators=(",", ":"))
    return text.replace('"', "")


def _log_with_traceback(error: Exception) -> str:
    """The log file that holds the traceback: the run's, where one was open, else one made for it."""
    notes = getattr(error, "__notes__", [])
    if notes:
        return str(notes[-1])
    with tempfile.NamedTemporaryFile("w", prefix="ropesearch-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    return file.name


if __name__ == "__main__":
    sys.exit(main())
