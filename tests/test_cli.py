"""ropesearch/cli.py: words to jobs, ends to exit codes, and nothing but results on standard output."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ropesearch
from ropesearch import __version__, config
from ropesearch.cli import main
from ropesearch.errors import BindingError, InputError, NothingScoredError
from ropesearch.run_folder import RunFolder

HEAVY = {"torch", "transformers", "datasets", "optuna"}
Captured = pytest.CaptureFixture[str]


@dataclass
class Outcome:
    text: str = "the text"
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"value": 1.5}

    def to_text(self) -> str:
        return self.text


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs do nothing; this holds the configs that they were asked for."""
    return replaced_jobs(monkeypatch, Outcome())


def replaced_jobs(monkeypatch: pytest.MonkeyPatch, outcome: Outcome | BaseException) -> list[Any]:
    configs: list[Any] = []

    def job(job_config: Any) -> Outcome:
        configs.append(job_config)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    replace_pipeline(monkeypatch, **dict.fromkeys(config.JOBS, job))
    return configs


def replace_pipeline(monkeypatch: pytest.MonkeyPatch, **jobs: Any) -> None:
    """Other jobs, without the libraries that the real ones import."""
    stub = types.SimpleNamespace(**jobs)
    for module in {job.module for job in config.JOBS.values()}:
        monkeypatch.setitem(sys.modules, module, stub)
        monkeypatch.setattr(ropesearch, module.partition(".")[2], stub, raising=False)


def in_a_process(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code`, then the names of all modules on a line of their own, then main's exit code."""
    lines = ["import sys", "from ropesearch.cli import main", code, "code = main(sys.argv[1:])", "print(*sys.modules)"]
    script = "\n".join([*lines, "sys.exit(code)"])
    command = [sys.executable, "-W", "error", "-c", script, *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_no_job_lists_the_jobs_and_is_wrong(capsys: Captured) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for name, job in config.JOBS.items():
        assert re.search(rf"^  {name} +{re.escape(job.summary)}$", err, re.MULTILINE)
    assert main(["--json"]) == 2
    assert capsys.readouterr() == ("", err)
    assert main(["--help"]) == main(["-h"]) == 0
    assert capsys.readouterr() == (err + err, "")


@pytest.mark.parametrize("job_name", config.JOBS)
def test_help_of_a_job_lists_every_key_with_type_default_and_meaning(job_name: str, capsys: Captured) -> None:
    assert main([job_name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for key in config.keys_of(config.JOBS[job_name].schema):
        default = json.dumps(config.plain(key.default), separators=(",", ":")).replace('"', "")
        assert f"\n  {key.name}={default}\n      {config.type_name(key)}: {key.meaning}\n" in out
        if key.preset:  # under the heading of the preset that has it
            section = out.split(f"\n  with {key.preset}:\n")[1].split("\n  with ")[0]
            assert f"  {key.name}={default}\n      {config.type_name(key)}: {key.meaning}\n" in section + "\n"
        else:  # and no other under it
            above = out.split(f"\n  {key.name}={default}\n")[0].split("\n  with ")
            assert len(above) == 1 or above[-1].startswith("any preset:")
    assert f"{config.JOBS[job_name].path_meaning} is short for {config.JOBS[job_name].main_key}" in out
    assert main(["-h", job_name, "whatever", "zzz=1"]) == 0  # help first, whatever else is wrong


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"ropesearch {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serch"], "serch: no such job; did you mean search?"),
        (["zzz"], "zzz: no such job; expected one of search, finetune, evaluate, verify, export, status"),
        (["verify", "--jsn"], "--jsn: no such option; did you mean --json? (settings are key=value)"),
        (["-x", "verify"], "-x: no such option; expected --help, --version or --json (settings are key=value)"),
        (["verify", "a", "b"], "expected one path, got 2: a, b; settings are key=value"),
        (["verify", "pth=a"], "pth: no such key; did you mean path? (see --help for all keys)"),
        (["verify", "+path=a"], "+path: no such key; did you mean path? (see --help for all keys)"),
        (["verify", "~path"], "~path: expected key=value; did you mean path?"),
        (["verify", "levels"], "levels: expected key=value; did you mean levels?"),
        (["verify", "a", "path=a"], "path: given as a bare path (a) and as a key; give it once"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], message: str, asked: list[Any], capsys: Captured) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"ropesearch: {message}\n")
    assert asked == []


@pytest.mark.parametrize(
    "name", ["a=b", "lr=1,b=[2]", "path=x", "space=longrope", "levels", "~levels", "it's $HOME ${x}"]
)
def test_bare_paths(
    name: str, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A word with = is a path where one is there, unless its key is known; a leading ./ always makes it one."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["verify", f"./{name}"]) == main(["verify", str(tmp_path / name)]) == main(["verify", name]) == 0
    assert [job.path for job in asked[:2]] == [f"./{name}", str(tmp_path / name)]
    assert asked[2].path == ("x" if name == "path=x" else name)


def test_a_preset_is_a_preset_even_beside_a_folder_of_that_name(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space=longrope").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["search", "m", "corpus.path=c", "target_length=9", "space=longrope"]) == 0
    assert asked[0].model.path == "m"


def test_a_word_too_long_for_a_file_name_is_an_unknown_key(capsys: Captured) -> None:
    assert main(["verify", "zzz=" + "x" * 5000]) == 2
    assert capsys.readouterr().err.startswith("ropesearch: zzz: no such key")


def test_settings_reach_the_job_and_its_result_is_printed(asked: list[Any], capsys: Captured) -> None:
    assert main(["verify", "folder", "levels=[table]", "max_logits_tokens=5"]) == 0
    assert (asked[0].path, [level.name for level in asked[0].levels], asked[0].max_logits_tokens) == (
        "folder",
        ["table"],
        5,
    )
    assert capsys.readouterr() == ("the text\n", "")
    assert main(["--json", "verify", "folder"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"value": 1.5} and err == ""


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (Outcome(exit_code=1), 1, ""),
        (InputError("wrong"), 2, "ropesearch: wrong\n"),
        (BindingError("other weights"), 1, "ropesearch: other weights\n"),
        (NothingScoredError("none"), 3, "ropesearch: none\n"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ends_and_exit_codes(
    outcome: Any, code: int, message: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    replaced_jobs(monkeypatch, outcome)
    assert main(["verify", "folder", *flags]) == code
    out, err = capsys.readouterr()
    assert err == message
    assert (out != "") == isinstance(outcome, Outcome)


def test_interrupted_tells_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    replaced_jobs(monkeypatch, KeyboardInterrupt())
    corpus = tmp_path / "it's [a] $HOME"
    corpus.mkdir()
    words = ["search", "my model", f"corpus.path={corpus}", "target_length=9", "space.retained_tokens=[0,4]"]
    assert main(words) == 130
    out, err = capsys.readouterr()
    prefix = "ropesearch: interrupted; go on with: "
    assert out == "" and err.startswith(prefix) and err.count("\n") == 1
    assert shlex.split(err.removeprefix(prefix)) == ["ropesearch", *words]


def test_internal_errors_leave_one_line_and_a_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = ZeroDivisionError("division\nby zero")
    error.add_note("a note of another library")
    replaced_jobs(monkeypatch, error)
    assert main(["verify", "folder"]) == 70
    out, err = capsys.readouterr()
    (log,) = tmp_path.iterdir()
    assert out == ""
    assert err == f"ropesearch: internal error: ZeroDivisionError: division by zero; the traceback is in {log}\n"
    assert "Traceback (most recent call last)" in log.read_text() and "in job" in log.read_text()


def test_internal_errors_within_a_run_are_in_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    def job(_: Any) -> None:
        with RunFolder(tmp_path, "verify").logged():
            raise ZeroDivisionError

    replace_pipeline(monkeypatch, verify=job)
    assert main(["verify", "folder"]) == 70
    assert capsys.readouterr().err.endswith(f"; the traceback is in {tmp_path / 'log.txt'}\n")
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["search"], "model.path, corpus.path, target_length"),
        (["search", "m", "target_length=9"], "corpus.path"),
        (["evaluate", "corpus.path=c"], "path"),
        (["verify"], "path"),
        (["export", "f"], "to"),
        (["status"], "path"),
    ],
)
def test_missing_values_are_named(words: list[str], missing: str, asked: list[Any], capsys: Captured) -> None:
    assert main(words) == 2
    assert asked == []
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"ropesearch: {missing}: expected a value, got none; ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("space.factor_step=-0.01", "space.factor_step: expected a finite number above 0, got -0.01"),
        ("space.max_factor_over_ratio=0.9", "space.max_factor_over_ratio: expected at least 1"),
        ("space.attention_factor=longropes", 'space.attention_factor: expected "search", "longrope", "yarn"'),
        ("space.attention_factor=0.5", "space.attention_factor: expected "),
        ("space.attention_factor_max=1", "space.attention_factor_max: expected a finite number above 1"),
        ("space.attention_factor_step=1", "space.attention_factor_step: expected a step that leaves 2 to a million"),
        ("space.num_pairs_at_one=many", "space.num_pairs_at_one: expected 'search' or a number of pairs from 0 on"),
        ("space.num_pairs_at_ratio=2", "space.max_factor_over_ratio: expected 1 with pairs at the ratio"),
        ("space.retained_tokens=[]", "space.retained_tokens: expected one or more different numbers of tokens"),
        ("space.retained_tokens=[0,-4]", "space.retained_tokens: "),
        ("space.retained_tokens=[4,4]", "space.retained_tokens: "),
        ("space.retained_tokens=[65]", "space.retained_tokens: "),
        ("objective.lengths=[16,32]", "objective.lengths: expected different lengths from 2 to target_length = 64"),
        ("objective.lengths=[64,64]", "objective.lengths: "),
        ("objective.length_weights=[1]", "objective.length_weights: expected one for each of the 0 objective.lengths"),
        ("objective.max_short_perplexity_increase=-1", "objective.max_short_perplexity_increase: expected at least 0"),
        ("objective.last_tokens=64", "objective.last_tokens: expected from 1 to 63"),
        ("objective.num_blocks=0", "objective.num_blocks: "),
        ("optimizer.num_starts=0", "optimizer.num_starts: expected at least 1, got 0"),
        ("optimizer=evolution optimizer.num_parents=1", "optimizer.num_parents: expected at least 2, got 1"),
        ("optimizer=evolution optimizer.mutation_probability=0", "optimizer.mutation_probability: expected more than"),
        ("selection.num_finalists=0", "selection.num_finalists: expected at least 1"),
        ("budget.minutes=0", "budget.minutes: expected a number above 0"),
        ("launcher=slurm launcher.num_workers=0", "launcher.num_workers: expected at least 1, got 0"),
        ("launcher=slurm launcher.minutes=4", "launcher.minutes: expected at least 5, got 4"),
        ("launcher=slurm launcher.num_cpus=0", "launcher.num_cpus: expected at least 1"),
        ("launcher=slurm launcher.memory_gigabytes=0", "launcher.memory_gigabytes: expected a number above 0"),
        ("launcher.gres=gpu:1", "launcher.gres: a key of launcher=slurm, got launcher=local; choose that preset"),
        ("tables=[none.csv]", "tables: none.csv: expected a file with a table, got no such file"),
        ("tables=[.]", "tables: .: expected a file with a table, got a folder; name the file in it"),
        ("tables=[~nobody-of-this-name/a.csv]", "tables: '~nobody-of-this-name/a.csv': expected a file with a table"),
        ("tables=[large.csv]", "tables: large.csv: expected a table of at most 4194304 bytes, got a larger file"),
    ],
)
def test_what_is_wrong_in_itself_is_refused_before_the_job_begins(
    word: str, message: str, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("large.csv").write_bytes(bytes((4 << 20) + 1))
    words = ["search", "m", "corpus.path=a-dataset", "target_length=64"]
    assert main(words) == 0 and len(asked) == 1
    assert main([*words, *word.split()]) == 2
    assert len(asked) == 1
    out, err = capsys.readouterr()
    assert out == "the text\n" and err.startswith(f"ropesearch: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("job", ["search m target_length=64", "evaluate folder"])
def test_a_corpus_that_is_not_there_is_refused_before_the_job_begins(
    job: str, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("texts.txt", "../a/b/c", "~nobody-of-this-name", "x" * 5000):
        assert main([*job.split(), f"corpus.path={path}"]) == 2
        assert "corpus.path: " in capsys.readouterr().err
    Path("split/search").mkdir(parents=True)
    assert main([*job.split(), "corpus.path=split"]) == 2
    assert "got search without selection, held_out" in capsys.readouterr().err
    assert main(["evaluate", "folder", "corpus.path=a-dataset", "objective.lengths=[16,4]"]) == 2
    assert "objective.num_blocks: expected windows of at least 8 tokens" in capsys.readouterr().err
    assert asked == []


WORDS = st.one_of(
    st.sampled_from(["search", "evaluate", "verify", "--json", "--help", "-h", "--version", "", "=", "-", "--"]),
    st.sampled_from(
        ["seed=1", "seed=x", "path=", "run=a", "lengths=[1,2]", "levels=[table]", "space=longrope", "+seed", "~run=1"]
    ),
    st.text(st.characters(exclude_characters="\0"), max_size=6),
)


@given(st.lists(WORDS, max_size=5))
@settings(max_examples=150)
def test_any_words_end_in_a_known_exit_code(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        replaced_jobs(monkeypatch, Outcome())
        monkeypatch.setattr(config, "_composed", lambda job_name, _: config.JOBS[job_name].schema())
        assert main(words) in (0, 2)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 2),
        (["--help"], 0),
        (["search", "--help"], 0),
        (["search", "m", "target_lenght=5"], 2),
        (["verify"], 2),
        (["search", "m", "corpus.path=a", "target_length=64", "space.factor_step=-1"], 2),
        (["search", "m", "corpus.path=a", "target_length=64", "tables=[no-such-file]"], 2),
        (["search", "m", "corpus.path=no/such/folder", "target_length=64"], 2),
    ],
)
def test_help_and_wrong_input_need_no_heavy_library(words: list[str], code: int) -> None:
    done = in_a_process("", *words)
    assert done.returncode == code
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ropesearch.config" in loaded and not HEAVY & loaded
    assert "Traceback" not in done.stderr


def test_the_terminals_encoding_never_ends_a_job_badly() -> None:
    stub = """
import types, ropesearch
outcome = types.SimpleNamespace(to_text=lambda: "runs/h\\u00e9\\udcff", exit_code=0)
ropesearch.pipeline = sys.modules["ropesearch.pipeline"] = types.SimpleNamespace(verify=lambda job: outcome)
"""
    done = in_a_process(stub, "verify", "folder", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, r"runs/h\xe9\udcff")
    done = in_a_process(stub, "verify", "h\u00e9=\u4e2d", "a", "b", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stderr.isascii() and "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_internal_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ropesearch.cli", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_sigterm_ends_with_75_and_the_command_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    replace_pipeline(monkeypatch, verify=lambda job: signal.raise_signal(signal.SIGTERM))
    assert main(["verify", "a folder"]) == 75
    assert capsys.readouterr().err.endswith("go on with: ropesearch verify 'a folder'\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(job: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x")

    replace_pipeline(monkeypatch, verify=full)
    assert main(["verify", "x"]) == 2
    assert capsys.readouterr().err.startswith("ropesearch: runs/x: the system refused to write or read (No space left")
