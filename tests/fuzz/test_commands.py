"""Any command line ends in 0, 1, 2 or 3 with one line where it is wrong, and what it refuses leaves nothing behind."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch import cli, config
from tests import runs, toys
from tests.artifact import examples

ODD_WORDS = (
    *("", " ", "null", "true", "nan", "inf", "-1", "0", "1", "2", "1e9", "1e400", "0x10", "-0.0", "1_000", "\u0661"),
    *("[]", "[1]", "[1,2", "[[]]", "[null]", "[table]", "[digest,digest]", "{a: 1}", "${oc.env:HOME}", "a=b", "'", '"'),
    *(
        "\\",
        "\n",
        "\x00",
        "\ud800",
        "\u00e9",
        "~",
        "~nobody/x",
        "/dev/null",
        "..",
        "x" * 300,
        "9" * 25,
        "cpu",
        "cuda:7",
    ),
)
ODD_TEXTS = st.one_of(
    st.sampled_from(ODD_WORDS), st.integers(-3, 300).map(str), st.floats().map(repr), st.text(max_size=6)
)
KEYS = {name: {key.name: key for key in config.keys_of(job.schema)} for name, job in config.JOBS.items()}
JOBS = {name: list(keys) for name, keys in KEYS.items()}
# Keys that make a run long, or write where other tests look; they get values of their own below.
KEPT = {"budget.num_trials", "run", "to", "cache", "training.num_steps", "training.num_step_rows"}


WHOLE = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 256, 257, -1, 10**6, 2**31, 2**63, 10**30]),
    st.integers(-3, 300),
).map(str)
NUMBERS = st.one_of(
    st.sampled_from(["0", "-0.0", "0.01", "0.5", "1", "1.0", "1.25", "1e-9", "1e-300", "5e-324", "1e300", "-1", "100"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)


def values_of(key: config.Key) -> st.SearchStrategy[str]:
    """Texts that mean something under the key's type, in range or not."""
    kinds = str(key.type)
    if key.choices:
        names = st.sampled_from(key.choices)
        return st.lists(names, max_size=3).map(lambda some: f"[{','.join(some)}]") if "list" in kinds else names
    if "list" in kinds:
        return st.lists(WHOLE, max_size=3).map(lambda some: f"[{', '.join(some)}]")
    if "bool" in kinds:
        return st.sampled_from(["true", "false"])
    parts = [strategy for name, strategy in (("int", WHOLE), ("float", NUMBERS)) if name in kinds]
    parts += [st.just("null")] if "None" in kinds else []
    texts = ["search", "longrope", "yarn", "cpu", "auto", "main", "text", "train", "runs/x"]
    return st.one_of(*parts, *([st.sampled_from(texts)] if "str" in kinds else []))


class Place:
    """A folder of its own for every example: what a command may read, and the only place where it may write."""

    def __init__(self, root: Path, shared: Path) -> None:
        self.root = root
        self.given = root / "given"
        self.given.mkdir()
        for name in ("model", "corpus", "written", "searched"):
            shutil.copytree(shared / name, self.given / name, symlinks=True)
        self.before = self.files(self.given)

    @staticmethod
    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def run(self, words: list[str]) -> tuple[int, str]:
        """Exit code and standard error, after checking what holds for every command."""
        out, err = io.StringIO(), io.StringIO()
        working_directory, tempdir = Path.cwd(), tempfile.tempdir
        (self.root / "tmp").mkdir(exist_ok=True)
        (self.root / "here").mkdir(exist_ok=True)
        os.chdir(self.root / "here")
        tempfile.tempdir = str(self.root / "tmp")
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(words)
        finally:
            os.chdir(working_directory)
            tempfile.tempdir = tempdir
        assert code in (0, 1, 2, 3), (words, err.getvalue())
        assert "Traceback" not in err.getvalue()
        assert list((self.root / "tmp").iterdir()) == [], words
        assert self.files(self.given) == self.before, words
        if code == 2:
            assert err.getvalue().startswith("ropesearch: ") or "usage: " in err.getvalue(), (words, err.getvalue())
            assert out.getvalue() == ""
            left = [path for path in self.root.rglob("*") if self.given not in (path, *path.parents)]
            left = [path for path in left if path not in (self.root / "tmp", self.root / "here")]
            assert [path for path in left if "cache" not in path.parts] == [], words
            assert not [path for path in left if path.name.startswith(".")], words
        return code, err.getvalue()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    written = examples.write_example(folder)
    written.rename(folder / "written")
    (folder / "source").rename(folder / "model")
    runs.write_corpus(folder / "corpus", num_documents=4, num_words=90)
    searched = good("search", folder) | {"run": str(folder / "searched"), "cache": "null"}
    assert cli.main(["search", *(f"{key}={value}" for key, value in searched.items())]) == 0
    return folder


def good(job_name: str, given: Path) -> dict[str, str]:
    """The settings of a tiny job that works."""
    windows = {f"corpus.num_{split}_windows": "1" for split in ("search", "selection", "held_out")}
    corpus = {"corpus.path": str(given / "corpus"), "cache": str(given.parent / "cache"), **windows}
    return {
        "search": {
            "model.path": str(given / "model"),
            "target_length": "128",
            "budget.num_trials": "1",
            "optimizer.num_candidates": "3",
            "selection.num_finalists": "1",
            "run": str(given.parent / "run"),
            **corpus,
        },
        "finetune": {
            "path": str(given / "written"),
            "run": str(given.parent / "run"),
            "training.num_steps": "1",
            "training.num_step_rows": "2",
            "training.num_warmup_steps": "0",
            "mixture.needle_share": "0",
            **corpus,
        },
        "evaluate": {"path": str(given / "written"), "run": str(given.parent / "run"), "lengths": "[64]", **corpus},
        "verify": {"path": str(given / "written"), "max_logits_tokens": "70"},
        "export": {"path": str(given / "written"), "to": str(given.parent / "exported"), "cache": corpus["cache"]},
        "status": {"path": str(given / "searched")},
    }[job_name]


def some_command(data: st.DataObject, given: Path) -> list[str]:
    job_name = data.draw(st.sampled_from(sorted(JOBS)))
    values = good(job_name, given)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([key for key in JOBS[job_name] if key not in KEPT]))
        odd = ODD_TEXTS | st.sampled_from([str(given / "model"), str(given / "corpus"), str(given)])
        values[key] = data.draw(odd if data.draw(st.integers(0, 3)) == 0 else values_of(KEYS[job_name][key]))
    words = [job_name, *(f"{key}={value}" for key, value in values.items())]
    extra = data.draw(st.sampled_from([*["none"] * 12, "key", "path", "twice", "flag", "preset"]))
    if extra == "key":
        key = data.draw(st.sampled_from(JOBS[job_name]))
        words.append(
            data.draw(st.sampled_from([f"+{key}=1", f"~{key}", f"{key}x=1", f"{key[:-1]}=1", key, f"x.{key}=1"]))
        )
    elif extra == "path":
        words.append(data.draw(ODD_TEXTS | st.just(str(given / "written"))))
    elif extra == "twice":
        words.append(data.draw(st.sampled_from(words)))
    elif extra == "flag":
        words.append(data.draw(st.sampled_from(["--json", "--jsn", "-", "--", "--json=1"])))
    elif extra == "preset":
        words.append(
            data.draw(st.sampled_from(["space=longrope", "space=x", "optimizer=", "model=causal_lm", "corpus=schema"]))
        )
    return words


def try_command(data: st.DataObject, shared: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name), shared)
        place.run(some_command(data, place.given))


@settings(max_examples=70)
@given(data=st.data())
def test_any_command_ends_well(shared: Path, data: st.DataObject) -> None:
    try_command(data, shared)


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_any_command_ends_well_a_longer_look(shared: Path, data: st.DataObject) -> None:
    try_command(data, shared)


@pytest.mark.parametrize("job_name", sorted(JOBS))
def test_the_command_that_is_changed_works(shared: Path, tmp_path: Path, job_name: str) -> None:
    place = Place(tmp_path, shared)
    words = [job_name, *(f"{key}={value}" for key, value in good(job_name, place.given).items())]
    assert place.run(words)[0] == 0


def with_changes(given: Path, job_name: str, **changes: Any) -> list[str]:
    values = good(job_name, given) | {key.replace("__", "."): str(value) for key, value in changes.items()}
    return [job_name, *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.parametrize(
    ("job_name", "changes"),
    [
        ("search", {"model__device": "cuda:7"}),
        ("search", {"model__attention": "flash_attention_2"}),
        ("search", {"run": "a\0b"}),
        ("search", {"target_length": 64}),
        ("evaluate", {"device": "cuda:7"}),
    ],
)
def test_what_only_loading_can_find_leaves_nothing(
    shared: Path, tmp_path: Path, job_name: str, changes: dict[str, Any]
) -> None:
    place = Place(tmp_path, shared)
    assert place.run(with_changes(place.given, job_name, **changes))[0] == 2
    assert not (tmp_path / "run").exists()


def test_damaged_checkpoints_leave_nothing(shared: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, shared)
    toys.edit_config(place.given / "model", {"intermediate_size": 65})
    toys.edit_config(place.given / "written", {"rms_norm_eps": 0.5})
    place.before = place.files(place.given)
    code, message = place.run(with_changes(place.given, "search"))
    assert code == 2 and "tensors of other shapes" in message
    code, message = place.run(with_changes(place.given, "evaluate"))
    assert code == 1 and "$.rms_norm_eps" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("job_name", "folder"), [("search", "model"), ("evaluate", "written")])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_a_checkpoint_makes_no_job_wait(
    shared: Path, tmp_path: Path, job_name: str, folder: str, name: str
) -> None:
    place = Place(tmp_path, shared)
    path = place.given / folder / name
    path.unlink()
    os.mkfifo(path)
    place.before = place.files(place.given)
    code, message = place.run(with_changes(place.given, job_name))
    assert code == 2 and str(path.parent) in message


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_written(shared: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, shared)
    shutil.rmtree(place.given / "model")
    toys.write_checkpoint(place.given / "model", vocab_size=60)
    place.before = place.files(place.given)
    code, message = place.run(with_changes(place.given, "search"))
    assert code == 2 and "expected token ids below 60, the rows of the model's embedding, got " in message


@pytest.mark.parametrize(
    "words",
    [
        ["search", "m", "corpus.path=c", "target_length=9", "budget.num_trials=0"],
        ["search", "m", "corpus.path=c", "target_length=9", "budget.minutes=-1"],
        ["search", "m", "corpus.path=c", "target_length=9", "selection.num_finalists=0"],
        ["search", "m", "corpus.path=c", "target_length=9", "objective.num_blocks=0"],
        ["search", "m", "corpus.path=c", "target_length=9", "objective.last_tokens=9"],
        ["search", "m", "corpus.path=c", "target_length=-5"],
        ["evaluate", "f", "corpus.path=c", "lengths=[64,1]"],
        ["evaluate", "f", "corpus.path=c", "lengths=[64,64]"],
        ["export", "f", "to=x", "single_table=true"],
        ["export", "f", "to=x", "corpus.path=c"],
        ["verify", "f", "levels=[]"],
        ["verify", "f", "max_logits_tokens=0"],
    ],
)
def test_values_that_are_wrong_in_themselves_are_found_before_torch_is_loaded(words: list[str]) -> None:
    code = "import sys; from ropesearch import cli; code = cli.main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not {"torch", "transformers", "optuna"} & set(done.stdout.split())


def test_some_commands_as_processes(shared: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, shared)
    environment = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    for words, code in (
        (with_changes(place.given, "verify", levels="[digest,table]"), 0),
        (with_changes(place.given, "search", model__device="cuda:7"), 2),
    ):
        process = runs.started(words, **environment)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, (words, err)
        assert "Traceback" not in out + err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "given"]
