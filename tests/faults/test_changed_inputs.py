"""Weights, configuration, tokenizer or corpus that change between two starts or while a search runs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropesearch import cli, pipeline, scoring
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.schema import RopeConfig
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.load import load_model
from tests import runs, toys

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def model(toy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_folder, tmp_path / "model"))


@pytest.fixture
def words(model: Path, texts: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(texts, tmp_path / "texts")
    return runs.search_words(model, tmp_path / "texts", tmp_path / "run", 1)


def change_weights(model: Path) -> None:
    """In place, as `cp` writes: the file stays the same one."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, model / "other", metadata={"format": "pt"})
    with (model / "model.safetensors").open("r+b") as file:
        file.write((model / "other").read_bytes())
    (model / "other").unlink()


def change_config(model: Path) -> None:
    toys.edit_config(model, {"rms_norm_eps": 0.25})


def change_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    value = json.loads(path.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(value))


def change_corpus(model: Path) -> None:
    for path in (model.parent / "texts").iterdir():
        path.write_text("changed " + path.read_text())


CHANGES = [
    (change_weights, "  weights: sha256:"),
    (change_config, "  config: sha256:"),
    (change_tokenizer, "  scoring.search.windows: "),
    (change_corpus, "  scoring.selection.windows: "),
]


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Do something before the scoring of that number."""
    score = scoring.score_windows
    calls = []

    def acting(*arguments: object, **keywords: object) -> object:
        calls.append(1)
        if len(calls) == number:
            action()
        return score(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "score_windows", acting)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("change", "difference"), CHANGES)
def test_a_change_between_two_starts_is_refused_by_name(
    change: Callable[[Path], None], difference: str, words: list[str], model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Captured,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        stop_at(patch, 3, interrupt)
        assert cli.main(words) == 130
    journal, description = tmp_path / "run" / "study.journal", tmp_path / "run" / "config.json"
    before = journal.read_bytes(), description.read_bytes()
    change(model)
    capsys.readouterr()
    assert cli.main([*words[:-1], "cache=null"]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'run'} holds a search of something else:\n" in err
    assert difference in err and err.endswith("to go on with it, or use another run folder\n")
    assert (journal.read_bytes(), description.read_bytes()) == before


def test_weights_that_change_under_a_running_search_are_not_scored_and_not_shipped(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert cli.main([word.replace(f"run={tmp_path}/run", f"run={tmp_path}/whole") for word in words]) == 0
    original = (model / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        stop_at(patch, 3, lambda: change_weights(model))
        capsys.readouterr()
        assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "expected weights with the digest sha256:" in err and err.count("sha256:") == 2
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert runs.trials_of(run) == runs.trials_of(whole)  # those of the weights that were loaded
    assert not (run / "checkpoint").exists()
    assert cli.main(words) == 2  # and the folder is still that of the other weights
    (model / "model.safetensors").write_bytes(original)
    assert cli.main(words) == 0
    assert (run / "rope_config.json").read_bytes() == (whole / "rope_config.json").read_bytes()


def test_weights_that_are_cut_under_a_running_search_do_not_end_it_with_a_bus_error(
    words: list[str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stop_at(monkeypatch, 3, lambda: os.truncate(model / "model.safetensors", 100))
    assert cli.main(words) == 2
    assert "ropesearch: " in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_a_loaded_model_does_not_depend_on_its_files(dtype: DType, model: Path) -> None:
    loaded = load_model(ModelConfig(path=str(model), dtype=dtype, device="cpu"))
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(4000)
        file.write(b"\x11" * (file.seek(0, 2) - 4000))
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.model.state_dict().items())


def between(monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[], None], *, after: bool) -> None:
    """Do something before or after the pipeline's call of `name`."""
    original = getattr(pipeline, name)

    def acting(*arguments: object, **keywords: object) -> object:
        if not after:
            action()
        result = original(*arguments, **keywords)
        if after:
            action()
        return result

    monkeypatch.setattr(pipeline, name, acting)


@pytest.mark.parametrize(
    ("change", "name", "after", "message"),
    [
        (change_weights, "load_model", False, "changed while the job was reading it"),
        (change_weights, "load_model", True, "changed while the job was reading it"),
        (change_weights, "ProgressDisplay", True, "expected the weights that the job began with, sha256:"),
        (change_config, "ProgressDisplay", True, "expected the config.json that the job began with, sha256:"),
        (change_tokenizer, "ProgressDisplay", True, "expected the tokenizer that the job began with, sha256:"),
        (change_tokenizer, "load_tokenizer", True, "tokenizer.json changed while the job was reading it"),
        (change_config, "read_geometry", True, "config.json changed while the job was reading it"),
    ],
)
def test_a_change_while_a_search_starts_is_found(
    change: Callable[[Path], None], name: str, after: bool, message: str, words: list[str], model: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured,
) -> None:  # fmt: skip
    between(monkeypatch, name, lambda: change(model), after=after)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert f"{model}: " in err and message in err
    if (tmp_path / "run" / "study.journal").exists():
        assert [trial[6] for trial in runs.trials_of(tmp_path / "run")] in ([], [None])


def test_files_that_are_touched_but_not_changed_are_no_change(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup makes hard links, a copy is put in the place of the original: other times and inodes, the same bytes."""

    def touch() -> None:
        os.link(model / "model.safetensors", tmp_path / "backup")
        os.utime(model / "config.json", (0, 0))
        shutil.copy(model / "tokenizer.json", tmp_path / "copy")
        os.replace(tmp_path / "copy", model / "tokenizer.json")

    between(monkeypatch, "open_study", touch, after=True)
    assert cli.main(words) == 0


def test_a_corpus_that_changes_under_a_running_search_is_not_read_again(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert cli.main([word.replace(f"run={tmp_path}/run", f"run={tmp_path}/whole") for word in words]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: change_corpus(model))
        assert cli.main(words) == 0
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert RopeConfig.read(run) == RopeConfig.read(whole)
    capsys.readouterr()
    assert cli.main(words) == 2
    assert "scoring.held_out.windows: " in capsys.readouterr().err


def test_an_evaluation_whose_weights_change_is_refused(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert cli.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    counts = [word for word in words if word.startswith("corpus")]
    asked = ["evaluate", str(checkpoint), f"run={tmp_path / 'evaluation'}", "cache=null", *counts]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        between(patch, "load_unscaled", lambda: change_weights(checkpoint), after=False)
        assert cli.main(asked) == 2
    assert "changed while the job was reading it" in capsys.readouterr().err
    assert not (tmp_path / "evaluation" / "evaluation.json").exists()
    assert cli.main(asked) == 1
    assert capsys.readouterr().err.count("sha256:") == 2
    assert checkpoint_binding(checkpoint).digest != RopeConfig.read(checkpoint).checkpoint.digest
