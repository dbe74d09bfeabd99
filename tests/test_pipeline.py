"""The jobs from end to end: what a search leaves behind, going on after a kill, others reading the result."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from optuna.trial import TrialState

import ropesearch
from ropesearch import cli
from ropesearch.artifact.schema import RopeConfig
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import build_windows, needle_windows
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import BindingError, ScoringError
from ropesearch.evaluate.table import perplexity_text
from ropesearch.search.config import OPTIMIZERS
from tests import runs, tiny_models, toys


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def finished(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished search on the toy."""
    run = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, run)) == 0
    return run


def test_what_limits_layers_is_said_once_and_logged(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of windowed layers, neighbouring pairs and scaled logits goes through the whole job."""
    model = tiny_models.write_tiny_model(
        tmp_path / "model", "cohere2", sliding_window=40, max_position_embeddings=toys.ORIGINAL_LENGTH
    )
    assert cli.main(runs.search_words(model, corpus, tmp_path / "run", num_trials=6)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: cohere2: ")]
    assert said == [
        "note: cohere2: 3 of 4 layers (0, 1, 2) attend to the last 40 tokens only: they never see further, "
        "whatever the factors",
        "note: cohere2: 1 of 4 layers (3) have no rotary embeddings: the factors do not reach them, and what they do "
        "beyond the trained length stays as it is",
        "note: cohere2: no layer both rotates and sees the whole sequence, so factors can change little",
    ]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("WARNING ropesearch.pipeline: cohere2: 3 of 4 layers (0, 1, 2) attend to the last 40 tokens") == 1


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt2", "gpt2 has learned absolute positions; there is nothing to rescale"),
        ("bloom", "bloom has ALiBi, a bias that grows with distance; there is nothing to rescale"),
        ("recurrent_gemma", "transformers cannot serve a searched table for this family"),
    ],
)
def test_models_that_cannot_be_searched_are_refused_before_their_weights_load(
    model_type: str, message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.tiny_config(model_type).save_pretrained(tmp_path / "model")
    words = runs.search_words(tmp_path / "model", corpus, tmp_path / "run")
    assert cli.main([*words, "model.original_length=64"]) == 2
    assert message in capsys.readouterr().err


def perplexity(model: Any, token_ids: Any) -> float:
    """exp of transformers' own mean loss over windows of equal length."""
    with torch.no_grad():
        losses = [
            float(model(input_ids=ids[None], labels=ids[None]).loss)
            for ids in torch.from_numpy(token_ids.astype(np.int64))
        ]
    return float(np.exp(np.mean(losses)))


def test_a_run_holds_what_it_promises(finished: Path, toy_folder: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "rope_config.json", "checkpoint", "factors.png", "course.png",
        "study.journal", "config.json", "versions.json", "log.txt",
    }  # fmt: skip
    rope_config = RopeConfig.read(finished)
    assert rope_config == RopeConfig.read(finished / "checkpoint")
    assert (rope_config.target_length, rope_config.geometry.original_length) == (
        runs.TARGET_LENGTH,
        toys.ORIGINAL_LENGTH,
    )
    trials = runs.trials_of(finished)
    assert [trial[4] for trial in trials] == ["unscaled", "linear", "ntk", "yarn"] + ["searched"] * 12
    searched = min(trial[2][0] for trial in trials if trial[4] == "searched")
    recorded = rope_config.search["search_scores"]["searched"]
    assert recorded["nats"] / recorded["tokens"] == pytest.approx(searched, rel=1e-12)
    assert {row["method"] for row in rope_config.evaluation} >= {"unscaled", "linear", "ntk", "yarn"}
    assert json.loads((finished / "versions.json").read_text())["transformers"] == transformers.__version__


def test_held_out_scores_are_those_of_the_shipped_folder(finished: Path, corpus: Path) -> None:
    """The result's held-out row against transformers' own loss, on the folder as anyone would load it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "checkpoint", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished / "checkpoint")
    config = CorpusConfig(path=str(corpus), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3)
    windows = build_windows(config, tokenizer, runs.TARGET_LENGTH, 0, None)["held_out"]
    rope_config = RopeConfig.read(finished)
    (row,) = [
        row
        for row in rope_config.evaluation
        if row["method"] == rope_config.search["method"] and row["length"] == runs.TARGET_LENGTH
    ]
    assert perplexity(model, windows.token_ids) == pytest.approx(np.exp(row["nats"] / row["tokens"]), rel=1e-5)


def test_the_same_again_shows_the_result_and_scores_nothing(
    finished: Path, toy_folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (finished / "rope_config.json", finished / "study.journal")}
    monkeypatch.setattr("ropesearch.pipeline.load_model", lambda config: pytest.fail("loaded the weights"))
    monkeypatch.setattr("ropesearch.pipeline.versions", lambda: {"ropesearch": "another"})
    assert cli.main([*runs.search_words(toy_folder, corpus, finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rope_config"] == json.loads(before[finished / "rope_config.json"])
    assert {path: path.read_bytes() for path in before} == before


def test_the_same_seed_gives_the_same_bytes(finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    assert cli.main(runs.search_words(toy_folder, corpus, tmp_path / "again")) == 0
    assert (tmp_path / "again" / "rope_config.json").read_bytes() == (finished / "rope_config.json").read_bytes()
    assert runs.trials_of(tmp_path / "again") == runs.trials_of(finished)


def test_a_larger_budget_goes_on_and_a_smaller_one_is_noted(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, run, num_trials=5)) == 0
    first = runs.trials_of(run)
    assert cli.main(runs.search_words(toy_folder, corpus, run, num_trials=12)) == 0
    assert runs.trials_of(run)[:9] == first
    assert RopeConfig.read(run).search["num_trials"] == 16
    assert RopeConfig.read(run) == RopeConfig.read(run / "checkpoint")
    assert "note: the run folder" not in capsys.readouterr().err
    assert cli.main(runs.search_words(toy_folder, corpus, run, num_trials=4)) == 0
    assert (
        "note: the run folder holds 12 candidates, more than the 4 of budget.num_trials: all of them count"
        in capsys.readouterr().err
    )


def test_racing_changes_no_score_and_says_what_it_saved(
    toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = runs.write_corpus(tmp_path / "texts", num_documents=14)

    def words_of(mark: str) -> list[str]:
        changes = {"selection.num_finalists=2": "selection.num_finalists=1"}
        changes["corpus.num_search_windows=3"] = "corpus.num_search_windows=8"
        words = runs.search_words(toy_folder, corpus, tmp_path / mark, num_trials=20)
        return [changes.get(word, word) for word in words]

    found = {}
    for mark in ("finalists", "none"):
        assert cli.main([*words_of(mark), f"racing.mark={mark}"]) == 0
        found[mark] = capsys.readouterr()
    search = RopeConfig.read(tmp_path / "finalists").search
    raced, whole = runs.trials_of(tmp_path / "finalists"), runs.trials_of(tmp_path / "none")
    stopped = [trial for trial in raced if trial[1] == TrialState.PRUNED]
    assert 0 < len(stopped) == search["num_stopped"] < 20
    assert f"racing: {len(stopped)} candidate" in found["finalists"].out and "racing: " not in found["none"].out
    spent, saved = search["num_forward_equivalent_tokens"], search["num_saved_tokens"]
    assert spent + saved == len({str(trial[5]) for trial in raced}) * 8 * runs.TARGET_LENGTH  # a twin is not scored
    values = {str(trial[5]): trial[2] for trial in whole}
    both = [trial for trial in raced if trial[2] and str(trial[5]) in values]
    assert len(both) > 8 and all(values[str(trial[5])] == trial[2] for trial in both)  # window by window or at once
    assert cli.main(words_of("none")) == 2
    assert "racing.rank: (nothing) there, 1 asked" in capsys.readouterr().err


def test_another_question_in_the_same_folder_is_refused(
    finished: Path, toy_folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*runs.search_words(toy_folder, corpus, finished), "seed=1"]) == 2
    assert "seed: 0 there, 1 asked" in capsys.readouterr().err


def test_evaluate_and_verify_a_run(
    finished: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"corpus.path={corpus}", f"run={tmp_path / 'evaluation'}", "cache=null", "objective.num_blocks=4"]
    words += [f"corpus.num_{split}_windows=3" for split in ("search", "selection", "held_out")]
    assert cli.main(["evaluate", str(finished), *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["evaluation"]
    chosen = RopeConfig.read(finished).search["method"]
    methods = list(dict.fromkeys(["unscaled", "linear", "ntk", "dynamic_ntk", "yarn", chosen]))
    assert [(row["method"], row["length"]) for row in rows] == [
        (name, length) for length in (64, 128) for name in methods
    ]
    rope_config = RopeConfig.read(finished)
    recorded = {(row["method"], row["length"]): row["nats"] for row in rope_config.evaluation}
    for row in rows:
        if (row["method"], row["length"]) in recorded:
            assert row["nats"] == pytest.approx(recorded[row["method"], row["length"]], rel=1e-9)
    written = (tmp_path / "evaluation" / "evaluation.json").read_bytes()
    assert cli.main(["evaluate", str(finished), *words, "lengths=[128]"]) == 2
    error = capsys.readouterr().err
    assert "expected the evaluation that" in error and "lengths: [] there, [128] asked" in error
    assert cli.main(["evaluate", str(finished), *words]) == 0 and capsys.readouterr()
    assert (tmp_path / "evaluation" / "evaluation.json").read_bytes() == written
    last = ["objective.last_tokens=16", "lengths=[64]", f"run={tmp_path / 'last'}", *words[:1], *words[2:]]
    assert cli.main(["evaluate", str(finished), *last]) == 0
    assert capsys.readouterr().out.startswith("perplexity by length in tokens, of the last 16 of each window (held_out")
    assert cli.main(["verify", str(finished)]) == 0
    assert capsys.readouterr().out.endswith("verified\n")


def test_verify_says_no(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit of the weights: exit 1, naming the file; and ropesearch.load refuses it."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in (finished / "checkpoint").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(content))
    assert cli.main(["verify", str(folder), "levels=[digest]"]) == 1
    output = capsys.readouterr().out
    assert "the difference is in model.safetensors" in output and output.endswith("NOT verified\n")
    with pytest.raises(BindingError, match="sha256:"):
        ropesearch.load(folder)


def test_retained_tokens_are_served_by_load_and_named(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that no loader's config can express: config.json stays the unscaled model's, and the report says so."""
    run = tmp_path / "run"
    words = [*runs.search_words(toy_folder, corpus, run, num_trials=30), "space.retained_tokens=[4]"]
    assert cli.main([*words, "space.attention_factor=1.0"]) == 0
    assert "other loaders see the unscaled model, ropesearch.load the regime" in capsys.readouterr().out
    rope_config = RopeConfig.read(run)
    assert rope_config.regimes[0].retained_tokens == 4 and rope_config.to_json()["portable"] == ["retained_tokens"]
    shipped = json.loads((run / "checkpoint" / "config.json").read_text())
    assert shipped["max_position_embeddings"] == toys.ORIGINAL_LENGTH
    assert cli.main(["verify", str(run)]) == 0


def test_a_search_with_lengths_and_a_guard_says_what_it_was(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights: a table costs about nothing anywhere, so a guard of 0.001 % keeps some candidates and not all."""
    words = [
        *runs.search_words(toy_folder, corpus, tmp_path / "run"),
        "objective.lengths=[32,128]",
        "objective.length_weights=[1,3]",
        "objective.max_short_perplexity_increase=0.00001",
        "optimizer=cmaes",
        "space=piecewise",
        "optimizer.num_population=4",
    ]
    evolution = ("optimizer=evolution", "optimizer.num_parents=4", "optimizer.num_population=6")
    words = [word for word in words if word not in evolution]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "objective: nats per token, weighted 0.25 at 32 tokens, 0.75 at 128 tokens; guard: perplexity on" in out
    search = RopeConfig.read(tmp_path / "run").search
    assert search["optimizer"]["name"] == "cmaes"
    assert search["space"]["num_pairs_at_one"] == "search"
    assert search["objective"]["parts"] == [
        {"start": 0, "length": 32, "weight": 1.0},
        {"start": 0, "length": 128, "weight": 3.0},
    ]
    assert search["objective"]["guarded_tokens"] == toys.ORIGINAL_LENGTH
    trials = runs.trials_of(tmp_path / "run")
    unscaled = None
    num_kept = 0
    for number, _, values, _, method, _, kept in trials:
        edges = kept["block_edges"]
        nats, tokens = np.array(kept["nats"]), np.array(kept["tokens"])

        def mean(stop: int, edges: list[int] = edges, nats: Any = nats, tokens: Any = tokens) -> float:
            return float(nats[:, : edges.index(stop)].sum() / tokens[:, : edges.index(stop)].sum())

        assert values[0] == pytest.approx((mean(32) + 3 * mean(128)) / 4, rel=1e-12)
        unscaled = mean(toys.ORIGINAL_LENGTH) if number == 0 else unscaled
        num_kept += method == "searched" and mean(toys.ORIGINAL_LENGTH) - unscaled <= math.log1p(1e-5)
    assert search["num_candidates_in_guard"] == num_kept
    best = [entry for entry in search["selection_scores"] if entry["short_excess_nats"] <= 0]
    assert search["selection_scores"][: len(best)] == best and best
    num_scored = sum(trial[4] == "searched" for trial in trials)
    kept = f"all {num_scored}" if num_kept == num_scored else f"{num_kept or 'none'} of {num_scored}"
    assert f"guard: {kept} scored candidates keep" in out
    lengths = {row["length"] for row in RopeConfig.read(tmp_path / "run").evaluation}
    assert lengths == {32, toys.ORIGINAL_LENGTH, 128}


def test_a_search_with_two_objectives_leaves_their_front(
    toy_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both values and the front are computed anew from the scores that the trials hold."""
    run = tmp_path / "run"
    words = [*runs.search_words(toy_folder, corpus, run, num_trials=20), "objective=two_objectives"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    scored = {}
    for number, _, values, _, method, regime, kept in runs.trials_of(run):
        nats, tokens = np.array(kept["nats"]), np.array(kept["tokens"])
        until = kept["block_edges"].index(toys.ORIGINAL_LENGTH)
        short = nats[:, :until].sum() / tokens[:, :until].sum()
        assert values == [pytest.approx(nats.sum() / tokens.sum()), pytest.approx(short)]
        scored[number] = (*values, method, regime)
    kept_front = {
        number
        for number, (long, short, *_) in scored.items()
        if not any(a <= long and b <= short and (a, b) != (long, short) for a, b, *_ in scored.values())
    }
    found = json.loads((run / "front.json").read_text())
    shown = [
        (each["trial_number"], each["long_nats_per_token"], each["short_nats_per_token"], each["method"])
        for each in found["front"]
    ]
    assert {each[0] for each in shown} <= kept_front and [each[1] for each in shown] == sorted(
        each[1] for each in shown
    )
    assert {each[1:3] for each in shown} == {scored[number][:2] for number in kept_front}
    for (number, *rest), each in zip(shown, found["front"], strict=True):
        assert tuple(rest) == scored[number][:3]
        assert {name: each[name] for name in scored[number][3]} == scored[number][3]
    rope_config = RopeConfig.read(run)
    assert found["chosen"] == rope_config.search["trial_number"] and found["num_scored"] == 24
    assert [each["trial_number"] for each in rope_config.search["front"]] == [each[0] for each in shown]
    assert (run / "front.png").is_file()
    assert f"front of both objectives: {len(shown)} of 24 scored trials on the search windows (front.json" in out
    assert "second objective: nats per token of the first 64 tokens" in out


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"evolution"}))
def test_an_optimizer_for_one_objective_is_refused_before_weights(
    name: str,
    toy_folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ropesearch.pipeline.load_model", lambda config: pytest.fail("loaded the weights"))
    words = [
        word for word in runs.search_words(toy_folder, corpus, tmp_path / "run") if not word.startswith("optimizer")
    ]
    assert cli.main([*words, "objective=two_objectives", f"optimizer={name}"]) == 2
    assert (
        f"expected evolution, which can spread along the front of two objectives, got {name}" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_search_by_gradients_gives_the_same_bytes_again(toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    """Gradient steps on the model itself, with retained tokens, then moves."""
    found = []
    for name in ("one", "two"):
        words = runs.search_words(toy_folder, corpus, tmp_path / name, num_trials=5)
        words = [word for word in words if not word.startswith("optimizer")]
        assert cli.main([*words, "optimizer=gradient", "space.retained_tokens=[4]", "racing.mark=none"]) == 0
        found.append(((tmp_path / name / "rope_config.json").read_bytes(), runs.trials_of(tmp_path / name)))
    assert found[0] == found[1]
    trials = found[0][1]
    assert [trial[4] for trial in trials] == ["unscaled", "linear", "ntk", "yarn"] + ["searched"] * 5
    assert {trial[1].name for trial in trials} == {"COMPLETE"}
    assert {trial[5]["retained_tokens"] for trial in trials[4:]} == {4}
    search = RopeConfig.read(tmp_path / "one").search
    assert search["optimizer"]["name"] == "gradient"
    # A leg is 8 steps, of four forward passes each, and a score of 3 windows.
    score_tokens, step_tokens = 3 * runs.TARGET_LENGTH, 4 * runs.TARGET_LENGTH
    assert search["num_forward_equivalent_tokens"] == 9 * score_tokens + 8 * step_tokens


NEEDLE_LENGTH = 256  # of the toy's tokens, bytes: room for needle, question and answer, and some haystack


def needle_words(toy_folder: Path, corpus: Path, run: Path, *more: str) -> list[str]:
    words = [*runs.search_words(toy_folder, corpus, run, num_trials=6), "objective.num_needle_windows=4", *more]
    words[words.index(f"target_length={runs.TARGET_LENGTH}")] = f"target_length={NEEDLE_LENGTH}"
    return words


def test_a_search_for_needles_scores_answers_alone(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped folder in plain transformers has the held-out needles' loss that the row says."""
    run = tmp_path / "run"
    words = needle_words(toy_folder, corpus, run, "objective=needle")
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    rope_config = RopeConfig.read(run)
    search = rope_config.search
    trials = runs.trials_of(run)
    assert len(trials) == 10
    for _, _, (value,), _, _, _, kept in trials:
        assert np.array(kept["nats"]).shape == (4, 8) and len(kept["answered"]) == 4  # no plain text is scored
        assert value == pytest.approx(np.sum(kept["nats"]) / np.sum(kept["tokens"]), rel=1e-12)
    assert search["num_forward_equivalent_tokens"] == 4 * NEEDLE_LENGTH * len({str(trial[5]) for trial in trials})
    assert all("with needle" in name for split in ("search", "selection") for name in search["documents"][split])
    assert search["objective"]["needle_weight"] == 1.0
    assert "objective: nats per token of the needles' answers (" in out

    checkpoint = run / "checkpoint"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    config = CorpusConfig(path=str(corpus), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3)
    texts = build_windows(config, tokenizer, NEEDLE_LENGTH, 0, None)
    assert search["documents"]["held_out"] == list(texts["held_out"].documents)
    needles = needle_windows(texts["held_out"], tokenizer, [0.0, 0.025, 0.05, 0.075, 0.1], 4, 0)
    rows = {row["method"]: row for row in rope_config.evaluation if row["measure"] == "needle"}
    assert set(rows) >= {"unscaled", "linear", "ntk", "yarn", search["method"]}
    row = rows[search["method"]]
    assert (row["length"], row["split"], row["tokens"]) == (NEEDLE_LENGTH, "held_out", sum(row["window_tokens"]))
    for window, start in enumerate(needles.answer_starts):
        ids = torch.from_numpy(needles.token_ids[window].astype(np.int64))
        with torch.no_grad():
            loss = model(input_ids=ids[None], labels=torch.where(torch.arange(len(ids)) < start, -100, ids)[None]).loss
            made = model.generate(ids[None, :start], max_new_tokens=len(ids) - start, do_sample=False, pad_token_id=1)
        assert row["window_tokens"][window] == len(ids) - start
        assert row["window_nats"][window] / row["window_tokens"][window] == pytest.approx(float(loss), abs=1e-5)
        assert row["window_right"][window] is bool(torch.equal(made[0], ids))
    assert row["num_right"] == sum(row["window_right"])
    (line,) = [
        line
        for line in out.partition("answers to 4 held-out needles")[2].splitlines()
        if line.startswith(row["method"])
    ][:1]
    assert line.split() == [row["method"], perplexity_text(row["nats"], row["tokens"]), str(row["num_right"])]

    monkeypatch.setattr("ropesearch.pipeline.load_model", lambda config: pytest.fail("loaded the weights"))
    assert cli.main(words) == 0
    assert RopeConfig.read(run) == rope_config and capsys.readouterr().out == out


def test_needles_beside_text_and_a_guard(toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    words = ["objective.needle_weight=0.25", "objective.lengths=[128,256]", "objective.needle_depths=[0.5]"]
    words.append("objective.max_short_perplexity_increase=0.001")
    assert cli.main(needle_words(toy_folder, corpus, tmp_path / "run", *words)) == 0
    for _, _, (value,), _, _, _, kept in runs.trials_of(tmp_path / "run"):
        edges, answered = kept["block_edges"], np.array([each is not None for each in kept["answered"]])
        nats, tokens = np.array(kept["nats"]), np.array(kept["tokens"])
        assert answered.sum() == 4 and len(answered) == 7

        def mean(stop: int, rows: Any, edges: Any = edges, nats: Any = nats, tokens: Any = tokens) -> float:
            return float(nats[rows, : edges.index(stop)].sum() / tokens[rows, : edges.index(stop)].sum())

        text = (mean(128, ~answered) + mean(256, ~answered)) / 2
        assert value == pytest.approx(0.25 * mean(256, answered) + 0.75 * text, rel=1e-12)
    search = RopeConfig.read(tmp_path / "run").search
    assert search["objective"]["guarded_tokens"] == toys.ORIGINAL_LENGTH
    assert all("at depth 0.5" in name for name in search["documents"]["search"] if "with needle" in name)


def test_needles_longer_than_the_target_are_refused_before_weights(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ropesearch.pipeline.load_model", lambda config: pytest.fail("loaded the weights"))
    words = [*runs.search_words(toy_folder, corpus, tmp_path / "run"), "objective=needle"]
    words[words.index(f"target_length={runs.TARGET_LENGTH}")] = "target_length=100"
    assert cli.main(words) == 2
    assert "a needle prompt needs at least" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_objective_longer_than_short_inputs(toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    """The last 100 tokens guide; short inputs of 64 tokens are reported whole, not refused at the end."""
    words = [*runs.search_words(toy_folder, corpus, tmp_path / "run", num_trials=2), "objective.last_tokens=100"]
    assert cli.main(words) == 0
    tokens = {row["length"]: row["tokens"] for row in RopeConfig.read(tmp_path / "run").evaluation}
    assert tokens == {runs.TARGET_LENGTH: 3 * 100, toys.ORIGINAL_LENGTH: 3 * (toys.ORIGINAL_LENGTH - 1)}


def test_a_corpus_that_is_too_short_is_refused_before_weights(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ropesearch.pipeline.load_model", lambda config: pytest.fail("loaded the weights"))
    words = [word for word in runs.search_words(toy_folder, corpus, tmp_path / "run") if "target_length" not in word]
    assert cli.main([*words, "target_length=4096"]) == 2
    assert "long enough" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_verify_of_a_run_holds_its_own_copy_to_the_checkpoint_s(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert cli.main(["verify", str(run), "levels=[digest]"]) == 0
    (run / "rope_config.json").write_text((run / "rope_config.json").read_text().replace('"seed": 0', '"seed": 1'))
    assert cli.main(["verify", str(run / "checkpoint"), "levels=[digest]"]) == 0
    capsys.readouterr()
    assert cli.main(["verify", str(run), "levels=[digest]"]) == 1
    assert "rope_config.json: another file than in checkpoint/" in capsys.readouterr().out
    (run / "checkpoint" / "config.json").unlink()
    assert cli.main(["verify", str(run)]) == 2
    assert "expected config.json beside rope_config.json, got none" in capsys.readouterr().err


def test_no_candidate_can_be_scored(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every trial fails with its reason, and the search says so."""

    def failing(*arguments: Any, **keywords: Any) -> Any:
        raise ScoringError("the nats of window 0 are not finite")

    monkeypatch.setattr("ropesearch.scoring.score_windows", failing)
    assert cli.main(runs.search_words(toy_folder, corpus, tmp_path / "run")) == 3
    assert "none of 16 trials could be scored: the nats of window 0 are not finite" in capsys.readouterr().err
    assert {trial[1].name for trial in runs.trials_of(tmp_path / "run")} == {"FAIL"}


def finish(words: list[str], timeout: float | None = None) -> bool:
    """Run the command to its end, or kill it with SIGKILL after `timeout` seconds; says whether it came to its end."""
    with runs.started(words) as process:
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return False
        assert process.returncode == 0, errors
        return True


def check_killed(words: list[str], tmp_path: Path, num_kills: int) -> None:
    """Kill the search at random moments, go on each time, and compare all that it left with an uninterrupted run's."""
    moments = random.Random(0)
    started = time.monotonic()
    finish(words)
    whole_seconds = time.monotonic() - started
    run, whole = tmp_path / "run", tmp_path / "whole"
    run.rename(whole)
    while num_kills:
        if not finish(words, timeout=moments.uniform(0.4, 1.0) * whole_seconds):
            num_kills -= 1
        elif num_kills:  # it was finished before the kill: the next kills hit another run
            assert runs.trials_of(run) == runs.trials_of(whole)
            shutil.rmtree(run)
    finish(words)
    assert runs.trials_of(run) == runs.trials_of(whole)
    for name in ("rope_config.json", "checkpoint/rope_config.json", "checkpoint/config.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_a_killed_search_goes_on(toy_folder: Path, corpus: Path, tmp_path: Path) -> None:
    check_killed(runs.search_words(toy_folder, corpus, tmp_path / "run", num_trials=20), tmp_path, num_kills=2)


@pytest.mark.slow
def test_twenty_kills_of_a_search_on_the_demo(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo")
    words = [
        *runs.search_words(tmp_path / "demo" / "model", tmp_path / "demo" / "texts", tmp_path / "run", num_trials=60),
    ]
    words[words.index(f"target_length={runs.TARGET_LENGTH}")] = "target_length=512"
    check_killed(words, tmp_path, num_kills=20)


IN_ANOTHER_TRANSFORMERS = """
import sys
import numpy as np, torch, transformers
version, folder, tokens = sys.argv[1:]
assert transformers.__version__ == version, transformers.__version__
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
losses = []
for ids in torch.from_numpy(np.load(tokens)).long():
    with torch.no_grad():
        losses.append(float(model(input_ids=ids[None], labels=ids[None]).loss))
print(repr(float(np.mean(losses))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.57.6", "5.16.1", transformers.__version__])
def test_the_demo_result_in_plain_transformers(version: str, tmp_path: Path) -> None:
    """The searched held-out perplexity at 2,048 tokens, by a plain load of the folder in each version."""
    other = runs.other_transformers(version)
    if other is None and version != transformers.__version__:
        pytest.skip(f"{runs.OTHER_TRANSFORMERS} names no folder with transformers {version}; make test-slow does")
    write_demo(tmp_path / "demo")
    words = runs.search_words(tmp_path / "demo" / "model", tmp_path / "demo" / "texts", tmp_path / "run", num_trials=4)
    words[words.index(f"target_length={runs.TARGET_LENGTH}")] = "target_length=2048"
    assert cli.main(words) == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    config = CorpusConfig(
        path=str(tmp_path / "demo" / "texts"), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    windows = build_windows(config, tokenizer, 2048, 0, None)["held_out"]
    np.save(tmp_path / "tokens.npy", windows.token_ids)
    environment = {**os.environ, **({"PYTHONPATH": str(other)} if other else {})}
    printed = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_TRANSFORMERS, version, str(checkpoint), str(tmp_path / "tokens.npy")],
        env=environment, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    rope_config = RopeConfig.read(checkpoint)
    (row,) = [
        row for row in rope_config.evaluation if row["method"] == rope_config.search["method"] and row["length"] == 2048
    ]
    assert float(printed.stdout) == pytest.approx(row["nats"] / row["tokens"], abs=1e-5)
