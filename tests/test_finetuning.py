"""ropesearch/finetuning.py from end to end on the toys: what is written, going on, errors, and several processes."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import ropesearch
from ropesearch import cli, finetuning
from ropesearch.artifact import weights as weights_module
from ropesearch.artifact.schema import RopeConfig
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import build_windows
from ropesearch.model.install import installed
from ropesearch.report import AFTER, BEFORE
from ropesearch.rope.regime import Regime
from ropesearch.train.loop import FineTuning
from tests import toys
from tests.artifact.examples import REGIME, TARGET_LENGTH, write_example
from tests.track import reading
from tests.train.examples import CORPUS_WORDS, NUM_HELD_OUT, write_texts

NUM_STEPS = 6
SETTINGS = {
    "training": "small",
    "training.num_steps": str(NUM_STEPS),
    "training.num_step_rows": "5",
    "training.num_warmup_steps": "2",
    "training.peak_learning_rate": "2e-3",
    "training.save_every_steps": "2",
    "training.measure_every_steps": "3",
    "mixture.needle_share": "0",  # by bytes, a fact and its question take more than half of a row
    "cache": "null",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as a search writes it."""
    return write_example(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def finished(searched: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished fine-tuning."""
    run = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(words(searched, texts, run)) == 0
    return run


def words(folder: Path, texts: Path, run: Path, **settings: Any) -> list[str]:
    """The command line; keys with dots as `training__num_steps`."""
    given = {**SETTINGS, **{name.replace("__", "."): str(value) for name, value in settings.items()}}
    pairs = [f"{name}={value}" for name, value in given.items()]
    return ["finetune", str(folder), f"corpus.path={texts}", f"run={run}", *CORPUS_WORDS, *pairs]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, dict[str, float]]:
    """Nats by bucket and gradient norm of each step."""
    return {event["step"]: {**event["nats"], "gradient_norm": event["gradient_norm"]} for event in metrics(run)}


def digest(run: Path) -> str:
    return RopeConfig.read(run).checkpoint.digest


def held_out_nats(folder: Path, texts: Path, length: int, regime: Any = None) -> list[float]:
    """Of each held-out window, by the logits of the loaded folder; with `regime`, of its unscaled model under that."""
    from ropesearch.artifact.load import load_unscaled

    if regime is None:
        model, tokenizer = ropesearch.load(folder, device="cpu", dtype="float32", length_tokens=length)
    else:
        loaded = load_unscaled(folder, RopeConfig.read(folder), device="cpu")
        model, tokenizer = loaded.model, loaded.tokenizer
    corpus = CorpusConfig(
        path=str(texts), num_search_windows=4, num_selection_windows=4, num_held_out_windows=NUM_HELD_OUT
    )
    windows = build_windows(corpus, tokenizer, TARGET_LENGTH, 0, None)["held_out"].cut(length)

    def nats() -> list[float]:
        result = []
        for row in windows.token_ids.astype(np.int64):
            ids = torch.from_numpy(row)[None]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            result.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")))
        return result

    if regime is None:
        return nats()
    with installed(loaded, regime):
        return nats()


def test_the_new_folder_is_bound_to_new_weights_and_names_the_old_ones(searched: Path, finished: Path) -> None:
    base, result = RopeConfig.read(searched), RopeConfig.read(finished)
    assert result.base_checkpoint == base.checkpoint
    assert result.checkpoint.digest != base.checkpoint.digest
    assert result.checkpoint.tokenizer_digest == base.checkpoint.tokenizer_digest
    assert result.checkpoint.config == base.checkpoint.config
    assert result.search == base.search
    short, long = result.regimes
    assert (short.name, short.max_length, short.factors, short.attention_factor) == ("short", 64, (1.0,) * 8, 1.0)
    assert long == REGIME
    assert result.training is not None and result.training["num_training_tokens"] == NUM_STEPS * 5 * TARGET_LENGTH
    before, after = (load_file(folder / "model.safetensors") for folder in (searched, finished / "checkpoint"))
    assert {name: (each.dtype, each.shape) for name, each in before.items()} == {
        name: (each.dtype, each.shape) for name, each in after.items()
    }
    assert all(not torch.equal(each, after[name]) for name, each in before.items())
    assert cli.main(["verify", str(finished)]) == 0


def test_a_lost_copy_of_rope_config_is_written_again_from_the_other(
    searched: Path, finished: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trained again; `verify` says which file goes where."""
    run = shutil.copytree(finished, tmp_path / "run")
    copies = [run / "rope_config.json", run / "checkpoint" / "rope_config.json"]
    whole = copies[0].read_bytes()
    for missing in copies:
        missing.unlink()
        if missing is copies[1]:
            assert cli.main(["verify", str(run)]) == 2
            expected = f"{run / 'checkpoint'}: expected rope_config.json, got none; copy {copies[0]} there"
            assert expected in capsys.readouterr().err
        before = (run / "metrics.jsonl").read_bytes()
        assert cli.main(words(searched, texts, run)) == 0
        assert missing.read_bytes() == whole and "as its rope_config.json says" in capsys.readouterr().out
        assert (run / "metrics.jsonl").read_bytes() == before


def test_the_rows_are_what_the_folders_give(searched: Path, finished: Path, texts: Path) -> None:
    """Before: the searched folder's weights, under the plain table and under the searched one. After: the folder that
    was written, loaded for that length."""
    rows = {(row["method"], row["length"]): row for row in RopeConfig.read(finished).evaluation}
    assert set(rows) == {(method, length) for method in (BEFORE, AFTER) for length in (64, TARGET_LENGTH)}
    short = RopeConfig.read(finished).regimes[0]
    for length, regime in ((64, short), (TARGET_LENGTH, REGIME)):
        for method, found in (
            (BEFORE, held_out_nats(searched, texts, length, regime)),
            (AFTER, held_out_nats(finished / "checkpoint", texts, length)),
        ):
            row = rows[method, length]
            assert row["window_nats"] == pytest.approx(found, rel=2e-6)
            assert row["tokens"] == NUM_HELD_OUT * (length - 1)
            assert row["nats"] == pytest.approx(sum(found), rel=2e-6)
    assert rows[AFTER, TARGET_LENGTH]["nats"] < 0.95 * rows[BEFORE, TARGET_LENGTH]["nats"]


def test_each_step_is_recorded(finished: Path) -> None:
    events = metrics(finished)
    assert [event["step"] for event in events] == list(range(NUM_STEPS + 1))
    assert [event["step"] for event in events if "held_out" in event] == [0, 3, 6]
    assert events[1]["regimes"] == {"0": "short", "1": "long"}
    num_long_tokens = 21 * (TARGET_LENGTH - 1)  # 70 % of 30 rows
    assert sum(event["tokens"]["1"] for event in events[1:]) == num_long_tokens
    assert all(event["gradient_norm"] > 0 for event in events[1:])
    log = (finished / "log.txt").read_text()
    assert "step 3: nats per token short" in log and "held out short" in log


def test_what_only_a_training_under_way_needs_is_gone(finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == [
        "asked.json", "checkpoint", "config.json", "log.txt", "metrics.jsonl", "rope_config.json", "versions.json",
    ]  # fmt: skip


def test_asked_again_it_shows_the_result(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FineTuning, "run", lambda self: pytest.fail("it trained again"))
    assert cli.main(words(searched, texts, finished, training__save_every_steps=5)) == 0
    shown = capsys.readouterr().out
    rows = {(row["method"], row["length"]): row for row in RopeConfig.read(finished).evaluation}
    before, after = (rows[method, TARGET_LENGTH] for method in (BEFORE, AFTER))
    change = np.expm1((after["nats"] - before["nats"]) / after["tokens"])
    assert re.search(rf"^256 +searched +\d+.* {change:.1%} \(-", shown, flags=re.MULTILINE), shown
    assert "note: plain transformers has one attention factor: up to 64 tokens" in shown
    elsewhere = shutil.copytree(texts, tmp_path / "elsewhere")
    assert cli.main(words(searched, elsewhere, finished)) == 2
    assert f"\n  corpus.path: {texts} there, {elsewhere} asked\n" in capsys.readouterr().err
    assert cli.main(words(searched, texts, finished, training__clip_norm=2)) == 2
    assert "\n  training.clip_norm: 1.0 there, 2.0 asked\n" in capsys.readouterr().err


def test_killed_just_before_its_end_it_leaves_nothing(
    searched: Path, texts: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*args: Any) -> None:
        raise Killed

    run = tmp_path / "run"
    monkeypatch.setattr(finetuning, "_tidied", kill)
    with pytest.raises(Killed):
        cli.main(words(searched, texts, run))
    assert {"states", "training-tokens", "new-weights"} < {path.name for path in run.iterdir()}
    monkeypatch.undo()
    assert cli.main(words(searched, texts, run)) == 0
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in finished.iterdir())


class Killed(BaseException):
    """Ends a step as a kill would."""


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_killed_in_a_step_it_goes_on_to_the_same_bytes(
    searched: Path, texts: Path, finished: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = FineTuning._backward

    def killing(self: Any, micro: Any, counts: bool, num_scored: int, place: tuple[int, int]) -> Any:
        if place == (step, 2):
            raise Killed
        return backward(self, micro, counts, num_scored, place)

    monkeypatch.setattr(FineTuning, "_backward", killing)
    with pytest.raises(Killed):
        cli.main(words(searched, texts, tmp_path / "run"))
    monkeypatch.undo()
    assert cli.main(words(searched, texts, tmp_path / "run")) == 0
    assert losses(tmp_path / "run") == losses(finished)
    assert digest(tmp_path / "run") == digest(finished)


def test_a_damaged_state_is_named_and_the_one_before_gone_on_from(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = FineTuning._step

    def killing(self: FineTuning, number: int) -> Any:
        if number == 5:
            raise Killed
        return step(self, number)

    run = tmp_path / "run"
    monkeypatch.setattr(FineTuning, "_step", killing)
    with pytest.raises(Killed):
        cli.main(words(searched, texts, run))
    monkeypatch.undo()
    for asked in (["verify"], ["evaluate", f"corpus.path={texts}"], ["export", f"to={tmp_path / 'out'}"]):
        assert cli.main([*asked, str(run)]) == 2
        said = capsys.readouterr().err
        assert "or the run folder of a finished search or fine-tuning, got that of a fine-tuning that is not" in said
        assert said.endswith("finished; the same `ropesearch finetune` command as before goes on with it\n")
    assert cli.main(["status", str(run)]) == 0
    assert f"step      5 of {NUM_STEPS}\n" in capsys.readouterr().out
    damaged = run / "states" / "step-00000004" / "state.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    capsys.readouterr()
    assert cli.main(words(searched, texts, run)) == 0
    said, log = capsys.readouterr().err, (run / "log.txt").read_text()
    for sentence in (
        f"{damaged.parent}: expected a whole state, got a damaged one, which is passed over",
        "going on from step 2 of 6",
    ):
        assert f"note: {sentence}\n" in said and sentence in log
    assert losses(run) == losses(finished)
    assert digest(run) == digest(finished)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_schedulers_signal_saves_the_last_whole_step(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the second micro-batch of the fourth step, between two saves."""
    backward = FineTuning._backward

    def signalled(self: Any, micro: Any, counts: bool, num_scored: int, place: tuple[int, int]) -> Any:
        if place == (3, 1):
            os.kill(os.getpid(), signal.Signals[name])
        assert place < (3, 2), "the step went on"
        return backward(self, micro, counts, num_scored, place)

    monkeypatch.setattr(FineTuning, "_backward", signalled)
    run = tmp_path / "run"
    assert cli.main(words(searched, texts, run)) == 75
    assert f"stopped by {name}; go on with: ropesearch finetune" in capsys.readouterr().err
    assert sorted(path.name for path in (run / "states").iterdir()) == ["step-00000002", "step-00000003"]
    assert re.search(rf"state after step 3 saved\n.*: stopped by {name}\n$", (run / "log.txt").read_text())
    monkeypatch.undo()
    assert cli.main(words(searched, texts, run)) == 0
    assert "note: going on from step 3 of 6\n" in capsys.readouterr().err
    assert losses(run) == losses(finished)
    assert digest(run) == digest(finished)


def test_a_loss_that_is_not_finite_ends_it_and_says_what_to_change(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = FineTuning._backward

    def not_a_number(self: Any, micro: Any, counts: bool, num_scored: int, place: tuple[int, int]) -> Any:
        nats, divergence = backward(self, micro, counts, num_scored, place)
        return (float("nan") if place == (3, 1) else nats), divergence

    monkeypatch.setattr(FineTuning, "_backward", not_a_number)
    assert cli.main(words(searched, texts, tmp_path / "run")) == 3
    assert [path.name for path in (tmp_path / "run" / "states").iterdir()] == ["step-00000002"]
    said = capsys.readouterr().err
    assert "expected a finite loss and gradient, got a loss of nan" in said
    assert "give a lower training.peak_learning_rate" in said and "Traceback" not in said
    assert not (tmp_path / "run" / "rope_config.json").exists()


def test_held_out_windows_that_are_not_finite_end_it_too(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = FineTuning._step

    def ruining(self: Any, number: int) -> Any:
        event = step(self, number)
        if number == NUM_STEPS - 1:
            next(iter(self._parameters.values())).data.fill_(float("inf"))
        return event

    monkeypatch.setattr(FineTuning, "_step", ruining)
    assert cli.main(words(searched, texts, tmp_path / "run")) == 3
    said = capsys.readouterr().err
    assert "after step 6: expected at most 100 nats per token on the held-out windows (short), got " in said
    assert "the weights are ruined: give a lower training.peak_learning_rate" in said
    assert not (tmp_path / "run" / "rope_config.json").exists()


def test_a_rate_that_ruins_the_weights_ends_it_before_they_are_written(
    searched: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and gradients stay finite."""
    ruinous = {"training__peak_learning_rate": 10, "training__clip_norm": 1e6, "training__num_warmup_steps": 0}
    for _ in range(2):  # asked again too
        assert cli.main(words(searched, texts, tmp_path / "run", **ruinous)) == 3
        said = capsys.readouterr().err
        assert re.search(
            r"after step \d: expected at most 100 nats per token on the held-out windows \(\w+\), got", said
        )
        assert "the weights are ruined: give a lower training.peak_learning_rate" in said and "internal" not in said
        assert not (tmp_path / "run" / "checkpoint").exists()


def test_weights_that_are_ruined_to_begin_with_are_no_matter_of_the_rate(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = finetuning._prepared

    def ruined(job: Any, loaded: Any, *rest: Any) -> Any:
        loaded.model.lm_head.weight.data *= 1e4
        return prepared(job, loaded, *rest)

    monkeypatch.setattr(finetuning, "_prepared", ruined)
    assert cli.main(words(searched, texts, tmp_path / "run")) == 3
    said = capsys.readouterr().err
    assert "after step 0: expected at most 100 nats per token" in said
    assert said.endswith("; the weights to begin with are ruined already: give others\n")


def test_a_folder_with_other_things_in_it_is_refused(
    searched: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(texts.iterdir())
    assert cli.main(words(searched, texts, texts)) == 2
    said = capsys.readouterr().err
    assert f"run: expected a new folder or that of a fine-tuning, got {texts}, which holds 000.txt and 119 more" in said
    assert sorted(texts.iterdir()) == before


def test_too_little_memory_is_said(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(FineTuning, "_backward", out_of_memory)
    assert cli.main(words(searched, texts, tmp_path / "run")) == 3
    said = capsys.readouterr().err
    assert "step 1: expected memory for a row of 256 tokens" in said
    assert "training.checkpoint_activations=true, training.adapter=lora" in said


def test_a_jump_of_the_loss_is_said_in_a_run_of_few_steps(
    searched: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    high = {"training__peak_learning_rate": 1, "training__num_warmup_steps": 0, "training__clip_norm": 1e6}
    cli.main(words(searched, texts, tmp_path / "run", **high))
    said = capsys.readouterr().err
    assert re.search(
        r"note: step \d: a loss of \d+\.\d+ nats per token, far above the \d\.\d+ of the steps before", said
    )
    assert re.search(r"step 3: nats per token .* held out short \d\.\d\de\+\d+", (tmp_path / "run/log.txt").read_text())


def full_disk(tensors: Any, path: Path, metadata: Any) -> None:
    """What safetensors does on a full disk."""
    path.write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def expect_refused_disk(asked: Sequence[str], place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with the file, the reason and the command that goes on."""
    assert cli.main(asked) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"ropesearch: \S*{place}\S*: the system refused to write or read \(No space left on device", last)
    assert last.endswith(f"go on with: {shlex.join(['ropesearch', *asked])}") and "weights=link" not in last


def test_a_full_disk_while_a_state_is_saved_is_said_as_everywhere(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = words(searched, texts, tmp_path / "run")
    monkeypatch.setattr(weights_module, "save_file", full_disk)
    expect_refused_disk(asked, "step-00000002", capsys)
    monkeypatch.undo()
    assert cli.main(asked) == 0
    assert digest(tmp_path / "run") == digest(finished)


def test_room_for_all_that_is_written_is_looked_for_before_the_first_step(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Three saves, the last two kept: three states of 35,104 float32 parameters with two moments.
    state_bytes = 3 * 4 * sum(each.numel() for each in load_file(searched / "model.safetensors").values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * state_bytes - 1))
    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "run", lambda self: pytest.fail("it trained"))
        assert cli.main(words(searched, texts, run)) == 2
    said = capsys.readouterr().err
    assert f"run: expected {3 * state_bytes:,} bytes of free disk space at {run}, for the states to go on from" in said
    assert "make room, give another place with run=, or keep fewer states (training.num_kept_states=1)" in said
    assert not run.exists()
    # Kept one at a time, there are two while the second is written; the checkpoint has more than enough in their place.
    assert cli.main(words(searched, texts, run, training__num_kept_states=1)) == 0


def test_no_room_for_the_last_copy_names_no_key_of_another_job(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = words(searched, texts, tmp_path / "run")
    train = FineTuning.run
    usage = shutil.disk_usage(tmp_path)

    def trained_and_full(self: FineTuning) -> Any:
        measured = train(self)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        return measured

    monkeypatch.setattr(FineTuning, "run", trained_and_full)
    expect_refused_disk(asked, "run", capsys)
    monkeypatch.undo()
    assert cli.main(asked) == 0
    assert digest(tmp_path / "run") == digest(finished)


def test_a_full_disk_at_the_end_costs_no_step(
    searched: Path,
    texts: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = FineTuning.run

    def trained_and_full(self: FineTuning) -> Any:
        measured = train(self)
        monkeypatch.setattr(weights_module, "save_file", full_disk)
        return measured

    monkeypatch.setattr(FineTuning, "run", trained_and_full)
    asked = words(searched, texts, tmp_path / "run")
    expect_refused_disk(asked, "model.safetensors", capsys)
    monkeypatch.undo()
    monkeypatch.setattr(FineTuning, "_step", lambda self, step: pytest.fail("a step was done again"))
    assert cli.main(asked) == 0
    assert digest(tmp_path / "run") == digest(finished)


def test_low_rank_additions_are_merged_as_peft_merges_them(searched: Path, texts: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    from ropesearch.train.adapter import add_adapter, merged_tensors
    from ropesearch.train.config import TrainingConfig

    model, theirs = toys.toy_model(), toys.toy_model()
    add_adapter(model, TrainingConfig(lora_rank=3, lora_alpha=12), seed=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    before = {name: tensor() for name, tensor in merged_tensors(model).items()}
    assert before.keys() == theirs.state_dict().keys()
    assert all(torch.equal(before[name], each) for name, each in theirs.state_dict().items())
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=12, target_modules="all-linear"), theirs)
    generator = torch.Generator().manual_seed(1)
    for (name, mine), (other, its) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        if "lora_" in name:
            values = torch.randn(mine.shape, generator=generator)
            mine.data.copy_(values)
            its.data.copy_(values)
    for module in theirs.modules():
        if hasattr(module, "lora_A"):
            module.merge()
    expected = {name.replace(".base_layer.", "."): each for name, each in theirs.state_dict().items()}
    for name, tensor in merged_tensors(model).items():
        torch.testing.assert_close(tensor(), expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_with_adapters_only_the_linear_layers_change(searched: Path, texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"training__adapter": "lora", "training__lora_rank": 4, "training__peak_learning_rate": 1e-2}
    assert cli.main(words(searched, texts, run, **settings)) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (searched, run / "checkpoint"))
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert changed == linear and linear
    assert cli.main(["verify", str(run)]) == 0
    rows = {(row["method"], row["length"]): row["nats"] for row in RopeConfig.read(run).evaluation}
    assert rows[AFTER, TARGET_LENGTH] < rows[BEFORE, TARGET_LENGTH]


def test_self_distillation_keeps_short_predictions_nearer_to_the_base(
    searched: Path, texts: Path, tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    assert cli.main(words(searched, texts, run, training__distill_weight=20)) == 0
    assert re.search(r"short \d\.\d+ \(divergence from the base \d\.\d{4}\)", (run / "log.txt").read_text())
    divergences = [event["divergence_nats"] for event in metrics(run)]
    assert divergences[1] == pytest.approx(0, abs=1e-3) and divergences[-1] > 0
    assert all(event["divergence_nats"] == 0 for event in metrics(finished))

    def short_change(folder: Path) -> float:
        rows = {(row["method"], row["length"]): row["nats"] for row in RopeConfig.read(folder).evaluation}
        return abs(float(rows[AFTER, 64] - rows[BEFORE, 64]))

    assert short_change(run) < 0.8 * short_change(finished)


def test_layers_computed_again_give_the_same_weights(
    searched: Path, texts: Path, finished: Path, tmp_path: Path
) -> None:
    assert cli.main(words(searched, texts, tmp_path / "run", training__checkpoint_activations="true")) == 0
    assert losses(tmp_path / "run")[NUM_STEPS] == pytest.approx(losses(finished)[NUM_STEPS], rel=1e-5)


def test_weights_stored_in_bfloat16_stay_so_and_are_trained_in_float32(texts: Path, tmp_path: Path) -> None:
    searched = write_example(tmp_path / "searched", dtype="bfloat16")
    run = tmp_path / "run"
    assert cli.main(words(searched, texts, run)) == 0
    after = load_file(run / "checkpoint" / "model.safetensors")
    assert {each.dtype for each in after.values()} == {torch.bfloat16}
    rows = {(row["method"], row["length"]): row for row in RopeConfig.read(run).evaluation}
    for length in (64, TARGET_LENGTH):  # products in bfloat16 here, in float32 there; of the same weights
        found = held_out_nats(run / "checkpoint", texts, length)
        assert rows[AFTER, length]["window_nats"] == pytest.approx(found, rel=2e-3)
    assert cli.main(["verify", str(run), "levels=[digest,table]"]) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture__shares": "[0.5,0.5,0.5]"}, "shares"),
        ({"mixture__long_bounds": "[32]", "mixture__shares": "[0.2,0.4,0.4]"}, "long_bounds"),
        ({"training__num_steps": 0}, "num_steps: expected at least 1, got 0"),
        (
            {"training__num_warmup_steps": 7},
            "training.num_warmup_steps: expected at most training.num_steps = 6, got 7",
        ),
        ({"corpus__path": "/nowhere/texts"}, "/nowhere/texts"),
        ({"device": "cuda:9"}, "cuda:9"),
        ({"mixture__needle_share": 0.3}, "mixture.needle_share: expected rows of at least 314 tokens"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    settings: Mapping[str, Any],
    message: str,
    searched: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = words(searched, texts, tmp_path / "run", **settings)
    if "corpus__path" in settings:
        asked = [word for word in asked if word != f"corpus.path={texts}"]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and said.strip().count("\n") == 0


def test_a_base_whose_search_chose_its_own_table_has_no_crossing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unscaled = Regime(name="unscaled", max_length=TARGET_LENGTH, factors=(1.0,) * 8)
    base, run = write_example(tmp_path / "base", regimes=(unscaled,)), tmp_path / "run"
    assert cli.main(words(base, texts, run, training__num_steps=2)) == 0
    done = capsys.readouterr()
    assert "note: the base's searched table (unscaled) is its own: there is no second table to learn" in done.err
    assert cli.main(["verify", str(run)]) == 0
    for shown in (done.out, capsys.readouterr().out):
        assert "grows across" not in shown and "single_table" not in shown


@pytest.mark.parametrize(("shares", "untrained"), [("[1,0]", "long"), ("[0,1]", "short")])
def test_a_regime_without_rows_is_named_before_training(
    shares: str,
    untrained: str,
    searched: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(FineTuning, "run", lambda self: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        cli.main(words(searched, texts, tmp_path / "run", mixture__shares=shares))
    said = capsys.readouterr().err
    assert f"note: mixture.shares gives no {untrained} rows: what the {untrained} table costs is measured, not" in said
    assert said.count("mixture.shares gives") == 1


def test_a_folder_without_a_search_is_refused(
    toy_folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(toy_folder, texts, tmp_path / "run")) == 2
    expected = (
        "expected a checkpoint folder with rope_config.json, or the run folder of a finished search or fine-tuning"
    )
    assert f"{expected}, got a folder without; `ropesearch search` writes such a folder" in capsys.readouterr().err
    assert cli.main(words(texts / "000.txt", texts, tmp_path / "run")) == 2
    assert f"{expected}, got a file; `ropesearch search`" in capsys.readouterr().err
    assert cli.main(words(tmp_path / "nowhere", texts, tmp_path / "run")) == 2
    assert f"{expected}, got nothing at this path; `ropesearch search`" in capsys.readouterr().err


def test_changed_weights_are_refused(
    searched: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(searched, tmp_path / "folder")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(content))
    assert cli.main(words(folder, texts, tmp_path / "run")) == 1
    assert "expected weights with the digest sha256:" in capsys.readouterr().err


def test_one_run_folder_is_for_one_training(
    searched: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []

    def run_once_more(self: Any) -> Any:
        answers.append(cli.main(words(searched, texts, tmp_path / "run")))
        raise Killed

    monkeypatch.setattr(FineTuning, "run", run_once_more)
    with pytest.raises(Killed):
        cli.main(words(searched, texts, tmp_path / "run"))
    assert answers == [2]
    assert "where a fine-tuning is under way; wait for it" in capsys.readouterr().err


def command(asked: Sequence[str], num_processes: int = 1) -> list[str]:
    if num_processes == 1:
        return [sys.executable, "-m", "ropesearch.cli", *asked]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *start, "-m", "ropesearch.cli", *asked]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"track": "wandb", "track__mode": "offline"},
        {
            "training__checkpoint_activations": "true",
            "training__distill_weight": 1,
            "training__adapter": "lora",
            "training__peak_learning_rate": 1e-2,
        },
    ],
    ids=["plain and tracked", "adapters, again and distilled"],
)
def test_two_processes_give_the_losses_of_one(
    settings: dict[str, Any], searched: Path, texts: Path, tmp_path: Path
) -> None:
    """Sharded (FSDP2) over gloo, 20 steps of 5 rows, which two processes cannot deal evenly."""
    runs = {}
    for num_processes in (1, 2):
        run = tmp_path / f"run-{num_processes}"
        asked = words(searched, texts, run, training__num_steps=20, **settings)
        done = subprocess.run(command(asked, num_processes), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("perplexity (") == 1  # the first process alone speaks
        runs[num_processes] = run
    one, two = (metrics(runs[number]) for number in (1, 2))
    assert len(one) == len(two) == 21
    for mine, theirs in zip(one, two, strict=True):
        for bucket, nats in mine["nats"].items():
            tokens = mine["tokens"][bucket]
            assert theirs["tokens"][bucket] == tokens
            assert theirs["nats"][bucket] / tokens == pytest.approx(nats / tokens, abs=1e-4)
        assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=1e-3)
    rows = [[row["nats"] / row["tokens"] for row in RopeConfig.read(runs[number]).evaluation] for number in (1, 2)]
    assert rows[1] == pytest.approx(rows[0], abs=1e-4)
    for run in runs.values() if "track" in settings else ():  # by the first process alone
        assert [found.steps for found in reading.finetune_runs(run)] == [list(range(21))]
    assert cli.main(["verify", str(runs[2])]) == 0


@pytest.mark.slow
def test_two_processes_that_are_stopped_say_once_how_to_go_on(searched: Path, texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = words(searched, texts, run, training__num_steps=10_000)
    process = subprocess.Popen(command(asked, 2), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 4:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert said.count("go on with") == 1
    assert f"ropesearch: stopped by SIGTERM; go on with: torchrun ... -m ropesearch.cli {shlex.join(asked)}\n" in said
    assert any((run / "states").iterdir())


@pytest.mark.slow
def test_killed_at_ten_moments_it_ends_with_the_same_bytes(
    searched: Path, texts: Path, tmp_path: Path, finished: Path
) -> None:
    """SIGKILL after random times, from the loading of libraries to the writing of the result."""
    rng = random.Random(0)
    run = tmp_path / "run"
    num_killed = 0
    whole_seconds = 0.0
    started = time.monotonic()
    timed = subprocess.run(command(words(searched, texts, tmp_path / "timed")), capture_output=True, timeout=600)
    assert timed.returncode == 0, timed.stderr.decode()
    whole_seconds = time.monotonic() - started
    while num_killed < 10:
        process = subprocess.Popen(
            command(words(searched, texts, run)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(whole_seconds * rng.uniform(0.4, 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            num_killed += 1
            continue
        assert process.returncode == 0
        if (run / "rope_config.json").exists():
            assert digest(run) == digest(finished)
            shutil.rmtree(run)  # it came to its end: from the beginning, for the kills that are left
    assert cli.main(words(searched, texts, run)) == 0
    assert losses(run) == losses(finished)
    assert digest(run) == digest(finished)
