"""Checkpoints that are already scaled, and tables that a user brings, through the jobs from end to end."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ropesearch
from ropesearch import cli, scoring
from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.load import load_unscaled, own_table, read_bound
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import verify
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import build_windows
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import load_model, read_geometry, read_length_note, read_own
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.scorer import score_windows
from tests import runs, toys
from tests.artifact import examples
from tests.model.test_own import CASES, LONG, ORIGINAL_LENGTH, SCALED, TARGET_LENGTH, logits, write

REGIME = Regime(
    name="searched",
    max_length=4 * ORIGINAL_LENGTH,
    factors=(1.0, 1.01, 1.37, 2.0, 2.93, 3.6, 4.4, 4.81),
    attention_factor=1.137,
)
SPLITS = ("search", "selection")
LENGTHS = (20, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, TARGET_LENGTH)


def extended(source: Path, destination: Path, regime: Regime) -> Path:
    """The folder that a search on a scaled checkpoint writes."""
    geometry = read_geometry(source, ORIGINAL_LENGTH)
    rope_config = examples.rope_config(
        geometry=geometry,
        target_length=regime.max_length,
        regimes=(regime,),
        checkpoint=checkpoint_binding(source),
    )
    assert RopeConfig.from_json(json.loads(json.dumps(rope_config.to_json())), "again") == rope_config
    write_checkpoint_folder(source, destination, rope_config, allow_unportable=True)
    return destination


@pytest.mark.parametrize("retained_tokens", [0, 5])
@pytest.mark.parametrize(("architecture", "rope_type"), [case for case in CASES if case[0] != "qwen2"])
def test_a_written_folder_gives_the_own_table_back_and_verifies(
    tmp_path: Path, architecture: str, rope_type: str, retained_tokens: int
) -> None:
    source = write(tmp_path / "source", architecture, rope_type)
    regime = dataclasses.replace(REGIME, retained_tokens=retained_tokens)
    folder = extended(source, tmp_path / "extended", regime)
    rope_config = read_bound(folder)
    loaded = load_unscaled(folder, rope_config, device="cpu", dtype=DType.float32)
    for length in LENGTHS:
        # A dynamic module remembers what it has read, so each length gets a fresh pair.
        fresh = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa").eval()
        again = load_unscaled(folder, rope_config, device="cpu", dtype=DType.float32).model
        assert torch.equal(logits(again, length), logits(fresh, length))
        expected = read_own(source, loaded.geometry).regime_at(length)
        assert own_table(folder, rope_config).regime_at(length) == loaded.own.regime_at(length) == expected
    assert [finding.message for finding in verify(folder, device="cpu") if not finding.ok] == []
    model, _ = ropesearch.load(folder, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not retained_tokens:
        assert (logits(model, TARGET_LENGTH) - logits(plain, TARGET_LENGTH)).abs().max() < 1e-5


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "dynamic", "longrope"])
def test_an_own_table_that_is_shipped_verifies(tmp_path: Path, rope_type: str) -> None:
    """Where no candidate beats the checkpoint: its table as factors, the same bit for bit in every loader."""
    source = write(tmp_path / "source", "llama", rope_type)
    own = read_own(source, read_geometry(source, ORIGINAL_LENGTH)).regime_at(REGIME.max_length)
    folder = extended(source, tmp_path / "extended", own)
    assert [finding.message for finding in verify(folder, device="cpu") if not finding.ok] == []


def test_verify_notices_another_own_table(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "llama", "llama3")
    folder = extended(source, tmp_path / "extended", dataclasses.replace(REGIME, retained_tokens=5))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["factor"] = 7.0
    (folder / "config.json").write_text(json.dumps(config))
    wrong = [finding.message for finding in verify(folder, [VerifyLevel.table]) if not finding.ok]
    assert any("inverse frequencies at 128 tokens: pair 1: expected" in message for message in wrong)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def rows_of(run: Path) -> dict[tuple[str, int], float]:
    return {(row["method"], row["length"]): row["nats"] / row["tokens"] for row in RopeConfig.read(run).evaluation}


@pytest.mark.parametrize("rope_type", ["llama3", "dynamic", "longrope"])
def test_search_evaluate_and_verify_a_scaled_checkpoint(
    rope_type: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = write(tmp_path / "model", "llama", rope_type), tmp_path / "run"
    words = runs.search_words(model, corpus, run)
    assert cli.main(words) == 2
    assert "model.original_length: expected the length in tokens" in capsys.readouterr().err
    words.append(f"model.original_length={ORIGINAL_LENGTH}")
    assert cli.main(words) == 0
    capsys.readouterr()

    loaded = load_model(
        ModelConfig(path=str(model), device="cpu", dtype=DType.float32, original_length=ORIGINAL_LENGTH)
    )
    own = loaded.own.regime_at(runs.TARGET_LENGTH)
    trials = runs.trials_of(run)
    assert [trial[4] for trial in trials[:4]] == ["unscaled", "linear", "ntk", "yarn"]
    assert trials[0][5]["factors"] == list(own.factors)
    assert trials[0][5]["attention_factor"] == own.attention_factor
    # Among the seeds, projected onto the grid of 0.01, which ends at 1.25 times the ratio of 4.
    projected = [min(factor, 5.0) for factor in own.factors]
    assert any(
        trial[4] == "searched" and trial[5]["factors"] == pytest.approx(projected, abs=0.0051) for trial in trials
    )
    rope_config = RopeConfig.read(run)
    assert own_table(run / "checkpoint", rope_config).to_json() == loaded.own.to_json()
    rows = rows_of(run)
    assert ("unscaled", ORIGINAL_LENGTH) in rows and ("unscaled", runs.TARGET_LENGTH) in rows

    words = [
        f"corpus.path={corpus}",
        f"run={tmp_path / 'evaluation'}",
        "cache=null",
        f"lengths=[32,{runs.TARGET_LENGTH}]",
    ]
    words += [f"corpus.num_{split}_windows=3" for split in ("search", "selection", "held_out")]
    assert cli.main(["evaluate", str(run), *words, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["evaluation"]
    methods = {row["method"] for row in evaluated}
    assert methods >= {"unscaled", "linear", "ntk", "dynamic_ntk", "yarn"}
    for row in evaluated:
        if (row["method"], row["length"]) in rows:
            expected = rows[row["method"], row["length"]]
            assert row["nats"] / row["tokens"] == pytest.approx(expected, rel=1e-9)
    assert cli.main(["verify", str(run)]) == 0


def test_unscaled_is_the_checkpoint_on_its_own(corpus: Path, tmp_path: Path) -> None:
    """Rows of a dynamic checkpoint against transformers' own loss with whatever table it puts in force itself."""
    model, run = write(tmp_path / "model", "llama", "longrope"), tmp_path / "run"
    words = [*runs.search_words(model, corpus, run, num_trials=1), f"model.original_length={ORIGINAL_LENGTH}"]
    assert cli.main(words) == 0
    config = CorpusConfig(path=str(corpus), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3)
    windows = build_windows(config, AutoTokenizer.from_pretrained(model), runs.TARGET_LENGTH, 0, None)["held_out"]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for length in (ORIGINAL_LENGTH, runs.TARGET_LENGTH):
        losses = []
        for ids in torch.from_numpy(windows.token_ids[:, :length].astype(np.int64)):
            with torch.no_grad():
                losses.append(float(plain(input_ids=ids[None], labels=ids[None]).loss))
        assert rows_of(run)["unscaled", length] == pytest.approx(float(np.mean(losses)), rel=1e-5)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "yarn"])
def test_a_guard_is_measured_against_the_checkpoint_on_short_inputs(
    rope_type: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both splits against transformers' own loss on the first original_length tokens, whatever table it puts in
    force for them; one short pass a split where that is another than the table for target_length, else none.
    """
    real, short_passes = scoring.score_windows, []

    def watched(loaded: Any, windows: Any, config: Any, spans: Any = None, only: Any = None) -> Any:
        if windows.split != "held_out" and windows.length_tokens < runs.TARGET_LENGTH:
            short_passes.append((windows.split, windows.length_tokens))
        return real(loaded, windows, config, spans=spans, only=only)

    monkeypatch.setattr(scoring, "score_windows", watched)
    model, run = write(tmp_path / "model", "llama", rope_type), tmp_path / "run"
    words = [*runs.search_words(model, corpus, run, num_trials=3), f"model.original_length={ORIGINAL_LENGTH}"]
    # The guard does not depend on what is scored for the objective, nor on it that it scores less than short inputs.
    words += ["objective.max_short_perplexity_increase=0.25", "objective.last_tokens=100"]
    assert cli.main(words) == 0
    assert short_passes == ([] if rope_type == "yarn" else [(split, ORIGINAL_LENGTH) for split in SPLITS])
    assert cli.main(words) == 0 and len(short_passes) in (0, 2)

    config = CorpusConfig(path=str(corpus), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3)
    windows = build_windows(config, AutoTokenizer.from_pretrained(model), runs.TARGET_LENGTH, 0, None)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    shipped = dict.fromkeys(SPLITS, 0.0)
    for split in SPLITS:
        for ids in torch.from_numpy(windows[split].token_ids[:, :ORIGINAL_LENGTH].astype(np.int64)):
            with torch.no_grad():
                shipped[split] += float(plain(input_ids=ids[None], labels=ids[None]).loss) / 3
    excesses = []
    for trial in runs.study_of(run).get_trials():
        kept = trial.user_attrs["score"]
        of_short = slice(0, kept["block_edges"].index(ORIGINAL_LENGTH))
        short = np.array(kept["nats"])[:, of_short].sum() / np.array(kept["tokens"])[:, of_short].sum()
        excesses.append(short - shipped["search"] - math.log(1.25))
        assert trial.constraints["short_excess_nats"] == pytest.approx(excesses[-1], abs=2e-5)
    assert (excesses[0] == pytest.approx(-math.log(1.25), abs=2e-5)) == (rope_type == "yarn")
    loaded = load_model(
        ModelConfig(path=str(model), device="cpu", dtype=DType.float32, original_length=ORIGINAL_LENGTH)
    )
    chosen = RopeConfig.read(run).search["selection_scores"]
    own = next(entry for entry in chosen if entry["trial_number"] == 0)
    whole = dataclasses.replace(ScoringConfig(), num_blocks=1)
    with installed(loaded, loaded.own.regime_at(runs.TARGET_LENGTH)):
        held = score_windows(loaded, windows["selection"].cut(ORIGINAL_LENGTH), whole)
    expected = held.nats_per_token - shipped["selection"] - math.log(1.25)
    assert own["short_excess_nats"] == pytest.approx(expected, abs=2e-5)


def test_an_own_table_that_varies_and_wins_is_held(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table for target_length is shipped for all lengths, under a name and with a price of its own."""
    real = scoring.score_windows

    def favouring(loaded: Any, windows: Any, config: Any, spans: Any = None, only: Any = None) -> Any:
        score = real(loaded, windows, config, spans=spans, only=only)
        table = loaded.model.model.rotary_emb.inv_freq
        wins = torch.equal(table, loaded.own.table_at(runs.TARGET_LENGTH)[0])
        return score if not wins else dataclasses.replace(score, nats=score.nats / 100)

    monkeypatch.setattr(scoring, "score_windows", favouring)
    model, run = write(tmp_path / "model", "llama", "longrope"), tmp_path / "run"
    words = [*runs.search_words(model, corpus, run, num_trials=1), f"model.original_length={ORIGINAL_LENGTH}"]
    assert cli.main(words) == 0
    rope_config, rows = RopeConfig.read(run), rows_of(run)
    assert rope_config.search["method"] == rope_config.regimes[0].name == "unscaled_long"
    assert rope_config.regimes[0].factors == tuple(LONG)
    assert rows["unscaled", runs.TARGET_LENGTH] == rows["unscaled_long", runs.TARGET_LENGTH]
    assert rows["unscaled", ORIGINAL_LENGTH] != rows["unscaled_long", ORIGINAL_LENGTH]
    assert cli.main(["verify", str(run)]) == 0


@pytest.mark.parametrize("rope_type", ["default", *SCALED])
def test_an_original_length_that_contradicts_config_json_is_noted(rope_type: str, tmp_path: Path) -> None:
    """Unscaled, config.json says it with max_position_embeddings; linear and dynamic scaling leave it open."""
    if rope_type == "default":
        model = toys.write_checkpoint(tmp_path / "model", max_position_embeddings=ORIGINAL_LENGTH)
    else:
        model = write(tmp_path / "model", "llama", rope_type)
    key = "max_position_embeddings" if rope_type == "default" else "original_max_position_embeddings"
    expected = f"model.original_length = 16 is used, where config.json says {key} = {ORIGINAL_LENGTH}; "
    found = read_length_note(model, 16)
    assert [note.startswith(expected) for note in found] == [True] * (rope_type not in ("linear", "dynamic"))
    assert read_length_note(model, ORIGINAL_LENGTH) == ()
    assert rope_type != "default" or read_length_note(model, None) == ()


def test_a_search_says_that_an_original_length_contradicts_config_json(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*runs.search_words(toy_folder, corpus, tmp_path / "run", num_trials=1), "model.original_length=32"]
    assert cli.main(words) == 0
    said = "model.original_length = 32 is used, where config.json says max_position_embeddings = 64; the ratio, the "
    assert [line[: len(said) + 6] for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")] == [
        f"note: {said}"
    ]
    assert f"WARNING ropesearch.pipeline: {said}" in (tmp_path / "run" / "log.txt").read_text()
    assert RopeConfig.read(tmp_path / "run").geometry.original_length == 32


FACTORS = [1.0, 1.2, 1.41, 1.6, 1.83, 1.9, 1.97, 2.0]


def test_tables_are_baselines_and_seeds(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "mine.csv"
    csv.write_text("\n".join(map(str, FACTORS)))
    (tmp_path / "other.json").write_text(json.dumps(examples.rope_config().to_json()))
    run = tmp_path / "run"
    (tmp_path / "again.csv").write_text(csv.read_text())
    files = f"tables=[{csv}, {tmp_path / 'other.json'}, {tmp_path / 'again.csv'}]"
    words = [*runs.search_words(toy_folder, corpus, run), files]
    assert cli.main(words) == 0
    shown, said = capsys.readouterr()
    assert f"note: tables: {tmp_path / 'again.csv'} holds the same table as {csv}: one row, mine\n" in said
    assert "again" not in shown
    trials = runs.trials_of(run)
    assert [trial[4] for trial in trials[:6]] == ["unscaled", "linear", "ntk", "yarn", "mine", "other"]
    assert trials[4][5]["factors"] == FACTORS and trials[4][3] == {}
    assert trials[5][5]["factors"] == list(examples.REGIME.factors)
    searched = [trial for trial in trials if trial[4] == "searched"]
    assert searched[0][5]["factors"] == FACTORS  # on the grid already
    # The grid ends at 1.25 times the ratio of 2.
    assert searched[1][5]["factors"] == [min(factor, 2.5) for factor in examples.REGIME.factors]
    assert {row[0] for row in rows_of(run)} >= {"mine", "other"}
    assert "\nmine " in shown and "\nother " in shown

    # The same again, and what the file holds is part of the question.
    assert cli.main(words) == 0
    capsys.readouterr()
    csv.write_text("\n".join(map(str, [*FACTORS[:-1], 2.1])))
    assert cli.main(words) == 2
    assert (
        "holds a search of something else" in (message := capsys.readouterr().err)
        and "tables.mine.factors: " in message
    )


def test_bad_tables_are_refused_before_anything_is_read(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ropesearch.pipeline.build_windows", lambda *arguments: pytest.fail("read the corpus"))
    (tmp_path / "short.csv").write_text("1.0\n2.0\n")
    words = [*runs.search_words(toy_folder, corpus, tmp_path / "run"), f"tables=[{tmp_path / 'short.csv'}]"]
    assert cli.main(words) == 2
    assert "short.csv: expected 8 factors" in capsys.readouterr().err
