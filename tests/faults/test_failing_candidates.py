"""Candidates that cannot be scored: a state with its reason, while the search and its result go on."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ropesearch import cli, scoring
from ropesearch.artifact.schema import RopeConfig
from ropesearch.score import scorer
from tests import runs

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def broken_for(patch: pytest.MonkeyPatch, methods: set[str], break_nats: Callable[[Any], Any], tokens: int = 0) -> None:
    """What the model gives under the regimes of these methods goes through `break_nats` (from that length on)."""
    now = [""]
    installed = scoring.installed

    def noted(loaded: Any, regime: Any) -> Any:
        now[0] = regime.name
        return installed(loaded, regime)

    window_outcome = scorer._window_outcome

    def broken(model: Any, token_ids: Any, *arguments: Any) -> Any:
        outcome = window_outcome(model, token_ids, *arguments)
        breaks = now[0] in methods and len(token_ids) >= tokens
        return outcome._replace(nats=break_nats(outcome.nats)) if breaks else outcome

    patch.setattr(scoring, "installed", noted)
    patch.setattr(scorer, "_window_outcome", broken)


def not_a_number(nats: Any) -> Any:
    return np.where(np.arange(len(nats)) == len(nats) - 1, math.nan, nats)


def no_memory(nats: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def no_host_memory(nats: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(
    ("break_nats", "reason"),
    [
        (not_a_number, "the nats are not finite from position block"),
        (no_memory, " tokens: CUDA out of memory. Tried to allocate 2.00 GiB"),
        (no_host_memory, " tokens: MemoryError"),
    ],
)
def test_baselines_that_fail_cost_neither_search_nor_result(
    break_nats: Callable[[Any], Any], reason: str, toy_folder: Path, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Captured,
) -> None:  # fmt: skip
    broken_for(monkeypatch, {"unscaled", "ntk"}, break_nats)
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 3)
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    trials = runs.trials_of(tmp_path / "run")
    assert [trial[1].name for trial in trials] == ["FAIL", "COMPLETE", "FAIL", *["COMPLETE"] * 4]
    (line,) = (line for line in out.splitlines() if line.startswith("not scored: ntk at 128 tokens: "))
    assert reason in line
    assert "price on short inputs: not known" in out
    rope_config = RopeConfig.read(tmp_path / "run")
    assert (rope_config.search["num_failed"], rope_config.search["num_trials"]) == (2, 7)
    assert {row["method"] for row in rope_config.evaluation}.isdisjoint({"unscaled", "ntk"})
    assert cli.main([*words, "--json"]) == 0
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert len(failures) == 3 and all(reason in failure for failure in failures)


def test_memory_that_suffices_for_smaller_chunks_scores_the_candidate(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values as with the chunks that were asked for, as far as chunks leave them."""
    whole = runs.search_words(toy_folder, corpus, tmp_path / "whole", 2)
    assert cli.main(whole) == 0
    window_outcome = scorer._window_outcome

    def limited(model: Any, token_ids: Any, first_scored: int, chunk_tokens: int, *rest: Any) -> Any:
        if chunk_tokens > 32:
            raise torch.OutOfMemoryError("out of memory")
        return window_outcome(model, token_ids, first_scored, chunk_tokens, *rest)

    monkeypatch.setattr(scorer, "_window_outcome", limited)
    monkeypatch.setattr(scorer, "_SMALLEST_CHUNK_TOKENS", 32)
    assert cli.main(runs.search_words(toy_folder, corpus, tmp_path / "run", 2)) == 0
    found, expected = runs.trials_of(tmp_path / "run"), runs.trials_of(tmp_path / "whole")
    assert [trial[1] for trial in found] == [trial[1] for trial in expected]
    assert [trial[2][0] for trial in found] == pytest.approx([trial[2][0] for trial in expected], rel=1e-6)


def test_all_candidates_that_fail_end_with_3_and_every_reason(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with monkeypatch.context() as patch:
        broken_for(patch, {"unscaled", "linear", "ntk", "yarn", "searched"}, no_memory)
        words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
        assert cli.main(words) == 3
    err = capsys.readouterr().err
    assert "none of 6 trials could be scored: out of memory with chunks of 128 tokens" in err
    assert not (tmp_path / "run" / "rope_config.json").exists() and not (tmp_path / "run" / "checkpoint").exists()
    assert cli.main(words) == 3  # what was found stays found


def test_a_result_that_fails_on_the_held_out_windows_is_no_result(
    toy_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = runs.search_words(toy_folder, corpus, tmp_path / "run", 2)
    with monkeypatch.context() as patch:
        kept = scoring.JobScorer.kept

        def failing(self: Any, *arguments: Any) -> Any:
            patch.setattr(scorer, "_window_outcome", lambda *_: scorer._Outcome(np.array([math.nan]), None))
            return kept(self, *arguments)

        patch.setattr(scoring.JobScorer, "kept", failing)
        assert cli.main(words) == 3
    err = capsys.readouterr().err
    assert "the result could not be scored on the held-out windows: " in err and "are not finite" in err
    assert not (tmp_path / "run" / "rope_config.json").exists()
    assert cli.main(words) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_before_anything_is_scored(
    value: float, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in toy_folder.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(runs.search_words(model, corpus, tmp_path / "run", 2)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"ropesearch: {model}: expected finite weights, got NaN or infinity in model.layers.1.mlp.up_proj.weight"
    )
    assert not (tmp_path / "run").exists()
