"""ropesearch export: what it writes is what plain loaders serve, and the price is transformers' own."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ropesearch import cli
from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.load import find_folder
from ropesearch.artifact.schema import RopeConfig
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import Windows, build_windows
from ropesearch.evaluate.table import perplexity_text
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import load_model
from ropesearch.rope.regime import Regime
from ropesearch.score.score import perplexity
from tests import runs, toys
from tests.artifact import examples

COUNTS = {f"num_{split}_windows": 2 for split in ("search", "selection", "held_out")}
OF_THE_PAIR = [
    *(("searched", 64), ("short", 64), ("fine-tuned", 64)),  # the short regime's
    *(("searched", 256), ("fine-tuned", 256), ("yarn", 64), ("before fine-tuning", 64)),
]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned toy with two regimes in extended/, a searched one in searched/, texts in texts/."""
    place = tmp_path_factory.mktemp("export")
    source = toys.write_checkpoint(place / "source")
    rows = [{**examples.EVALUATION[0], "method": method, "length": length} for method, length in OF_THE_PAIR]
    for name, changes in (
        ("two", {"evaluation": rows, **examples.FINE_TUNED}),
        ("one", {}),
        ("retained", {"regimes": (examples.SHORT, dataclasses.replace(examples.LONG, retained_tokens=2))}),
    ):
        rope_config = examples.bound_rope_config(source, **changes)
        examples.write_checkpoint_folder(source, place / name, rope_config, allow_unportable=True)
    runs.write_corpus(place / "texts", num_documents=6, num_words=70)
    return place


def words(place: Path, name: str, destination: Path, *more: str) -> list[str]:
    corpus = [f"corpus.path={place / 'texts'}", *(f"corpus.{key}={value}" for key, value in COUNTS.items())]
    is_single = "single_table=true" in more
    return ["export", str(place / name), f"to={destination}", "cache=null", *more, *(corpus if is_single else [])]


def held_out(place: Path) -> Windows:
    config = CorpusConfig(path=str(place / "texts"), **COUNTS)
    windows = build_windows(config, toys.toy_tokenizer(), examples.TARGET_LENGTH, 0, None)["held_out"]
    return windows.cut(toys.ORIGINAL_LENGTH)


def perplexity_under(place: Path, regime: Regime | None) -> float:
    """exp of transformers' own mean loss on the held-out windows, of the source checkpoint under a regime."""
    loaded = load_model(ModelConfig(path=str(place / "source"), dtype=DType.float32, device="cpu"))

    def mean() -> float:
        with torch.no_grad():
            losses = [
                float(loaded.model(input_ids=ids[None], labels=ids[None]).loss)
                for ids in torch.from_numpy(held_out(place).token_ids.astype(np.int64))
            ]
        return float(np.exp(np.mean(losses)))

    if regime is None:
        return mean()
    with installed(loaded, regime):
        return mean()


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_long_table_alone_is_what_plain_transformers_serves(place: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert cli.main(words(place, "two", out, "single_table=true")) == 0
    before, after = RopeConfig.read(place / "two"), RopeConfig.read(out)
    assert after.regimes == (examples.LONG,) and after.to_json()["portable"] is True
    unchanged = ("checkpoint", "base_checkpoint", "training", "search", "versions", "geometry", "target_length")
    assert all(getattr(after, name) == getattr(before, name) for name in unchanged)

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    source = load_model(ModelConfig(path=str(place / "source"), dtype=DType.float32, device="cpu"))
    tokens = torch.arange(2, 258)[None]
    with torch.no_grad(), installed(source, examples.LONG, as_shipped=True):
        for length in (20, 64, 65, 256):
            found, expected = (each(input_ids=tokens[:, :length]).logits for each in (model, source.model))
            assert float((found - expected).abs().max()) <= 1e-5

    printed = capsys.readouterr().out
    short, long = (perplexity_under(place, regime) for regime in (None, examples.LONG))
    before_text, after_text = (perplexity_text(math.log(value), 1) for value in (short, long))
    assert f"price on short inputs: perplexity at 64 tokens {before_text} short, {after_text} now (" in printed
    assert "note: " not in printed and "as its rope_config.json says" in printed
    rows = {(row["method"], row["length"]): row for row in after.evaluation}
    assert list(rows) == [*OF_THE_PAIR[3:], ("short", 64), ("long", 64)]
    for method, value in (("short", short), ("long", long)):
        row = rows[method, 64]
        assert row["split"] == "held_out" and row["tokens"] == 2 * 63
        assert perplexity(row["nats"], row["tokens"]) == pytest.approx(value, rel=1e-6)
    assert short != pytest.approx(long, rel=1e-3)


def test_exported_once_more_it_tells_the_same_price(place: Path, tmp_path: Path, capsys: Captured) -> None:
    prices = []
    for of, to in ((place / "two", tmp_path / "one"), (tmp_path / "one", tmp_path / "other")):
        assert cli.main(["--json", *words(place, str(of), to, "single_table=true")]) == 0
        prices.append(json.loads(capsys.readouterr().out)["short_price"])
    assert prices[0] == prices[1] and [row["method"] for row in prices[1]] == ["short", "long"]


def test_two_regimes_are_written_as_they_are(place: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(place / "two", tmp_path / "run" / "checkpoint")
    assert cli.main(["--json", *words(tmp_path, "run", tmp_path / "new" / "out")]) == 0
    assert content_of(tmp_path / "new" / "out") == content_of(place / "two")
    said = json.loads(capsys.readouterr().out)
    assert said["verified"] is True and said["short_price"] == []
    assert said["limits"] == list(loader_limits(RopeConfig.read(place / "two"))) and len(said["limits"]) == 4
    assert said["rope_config"]["portable"] == ["regimes"]


def test_of_a_search_the_price_is_against_the_unscaled_model(place: Path, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["--json", *words(place, "one", tmp_path / "out", "single_table=true", "weights=link")]) == 0
    rows = json.loads(capsys.readouterr().out)["short_price"]
    assert [(row["method"], row["length"]) for row in rows] == [("unscaled", 64), ("searched", 64)]
    for row, regime in zip(rows, (None, examples.REGIME), strict=True):
        assert perplexity(row["nats"], row["tokens"]) == pytest.approx(perplexity_under(place, regime), rel=1e-6)
    assert RopeConfig.read(tmp_path / "out").regimes == (examples.REGIME,)
    link = tmp_path / "out" / "model.safetensors"
    assert link.is_symlink() and link.resolve() == (place / "one" / "model.safetensors").resolve()


@pytest.mark.parametrize(
    ("name", "more", "code", "message"),
    [
        ("two", ["single_table=true", "corpus.path="], 2, "corpus.path: the corpus path is missing"),
        (
            "two",
            ["corpus.path=texts"],
            2,
            "corpus.path: expected none without single_table=true, as nothing is measured",
        ),
        ("retained", ["single_table=true"], 2, "single_table: expected a long regime that one table can express"),
        ("source", [], 2, "expected a checkpoint folder with rope_config.json"),
        ("nowhere", [], 2, "nowhere: expected a checkpoint folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    place: Path, tmp_path: Path, capsys: Captured, name: str, more: list[str], code: int, message: str
) -> None:
    given = words(place, name, tmp_path / "out", *more)
    given = [word for word in given if not (word.startswith("corpus.path=") and word not in more and len(more) > 1)]
    assert cli.main(given) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_into_the_folder_that_is_read(place: Path, capsys: Captured) -> None:
    before = content_of(place)
    for inside in (find_folder(place / "two") / "x", find_folder(place / "two") / "x" / "y"):
        assert cli.main(words(place, "two", inside)) == 2
        assert "to: expected a folder outside of" in capsys.readouterr().err
    assert content_of(place) == before


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_nothing_is_overwritten(place: Path, tmp_path: Path, capsys: Captured, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "full":
        shutil.copytree(place / "two", out)
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "elsewhere")
    before = content_of(tmp_path)
    assert cli.main(words(place, "two", out, "single_table=true")) == 2
    assert f"to: expected a new or empty folder, got {out}, which is there" in capsys.readouterr().err
    assert content_of(tmp_path) == before
    assert cli.main(words(place, "two", Path("a\0b"))) == 2


def test_other_weights_are_refused(place: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = Path(shutil.copytree(place / "two", tmp_path / "two"))
    shutil.copy(toys.write_checkpoint(tmp_path / "other", seed=1) / "model.safetensors", folder)
    for more in ([], ["single_table=true"]):
        given = [word.replace(str(place / "two"), str(folder)) for word in words(place, "two", tmp_path / "out", *more)]
        assert cli.main(given) == 1
        assert "expected weights with the digest sha256:" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_evaluate_measures_each_length_under_the_regime_that_serves_it(
    place: Path, tmp_path: Path, capsys: Captured
) -> None:
    given: list[Any] = [f"corpus.path={place / 'texts'}", *(f"corpus.{key}={value}" for key, value in COUNTS.items())]
    given = ["evaluate", str(place / "two"), f"run={tmp_path / 'run'}", "cache=null", "lengths=[64,256]", *given]
    assert cli.main(given) == 0
    assert "searched: short up to 64 tokens, long up to 256 tokens" in capsys.readouterr().out
    rows = json.loads((tmp_path / "run" / "evaluation.json").read_text())["evaluation"]
    cells = {(row["method"], row["length"]): perplexity(row["nats"], row["tokens"]) for row in rows}
    assert cells["searched", 64] == pytest.approx(perplexity_under(place, examples.SHORT), rel=1e-6)
    assert cells["searched", 64] == cells["unscaled", 64] != cells["linear", 64]
    (row,) = (row for row in rows if row["method"] == "searched" and row["length"] == 256)
    under_long = perplexity(row["block_nats"][0] + row["block_nats"][1], sum(row["block_tokens"][:2]))
    assert under_long == pytest.approx(perplexity_under(place, examples.LONG), rel=1e-6)  # positions 0 to 63 of 256
