"""`ropesearch status`: what it says of a run, to people and to programs, and how little it needs for it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ropesearch.cli import main
from ropesearch.search.status import ScoredTrial, SearchStatus, UnfinishedTrial, WorkerSign
from ropesearch.status import StatusOutcome
from tests import runs
from tests.search.test_status import add_complete, new_study, write_sign

Captured = pytest.CaptureFixture[str]

SIGN = {
    "because": None, "phase": "search windows", "fraction": 0.254,
    "slurm_job": "12_3", "device": "cuda:0", "began": None,
}  # fmt: skip
UNFINISHED = {"method": "searched", "num_windows": 0, "num_steps": 0, "num_planned_steps": 0}
STATUS = SearchStatus(
    has_study=True,
    num_complete=41,
    num_stopped=12,
    failures={"nats are not\n a number": 2, **{f"reason {number}": 1 for number in range(6)}},
    unfinished=[
        UnfinishedTrial(number=61, worker="a" * 32, waits=False, **UNFINISHED | {"num_windows": 3}),
        UnfinishedTrial(number=62, worker="b" * 32, waits=True, **UNFINISHED),
        UnfinishedTrial(
            number=63,
            worker="c" * 32,
            waits=False,
            **UNFINISHED | {"num_windows": 1, "num_steps": 8, "num_planned_steps": 8},
        ),
        UnfinishedTrial(number=64, worker="c" * 32, waits=False, **UNFINISHED),
    ],
    best=ScoredTrial(number=37, method="searched", nats_per_token=1.0, excess_nats=0.0),
    best_baseline=ScoredTrial(number=3, method="yarn", nats_per_token=1.5, excess_nats=0.125),
    num_search_windows=16,
    num_tokens=1_234_567,
    scoring_seconds=3600.0,
    tokens_per_second=12_345.6,
    seconds_left=600.0,
    workers=[
        WorkerSign(worker="a" * 32, state="working", trial_number=61, silent_seconds=3.4, **SIGN),
        WorkerSign(worker="c" * 32, state="working", trial_number=None, silent_seconds=9.0, **SIGN | {"phase": None}),
        WorkerSign(worker="b" * 32, state="silent", trial_number=62, silent_seconds=7300.0, **SIGN),
        *(
            WorkerSign(worker=each, state="ended", trial_number=None, silent_seconds=1.0, **SIGN | {"because": because})
            for each, because in (("d", "SIGUSR2"), ("e", "SIGUSR2"), ("f", "done"))
        ),
    ],
    result=Path("runs/a/rope_config.json"),
)
TEXT = """\
run       runs/a  (running)
trials    41 complete, 12 stopped by racing, 8 failed, 3 running, 1 waiting for a worker
          2 failed: nats are not a number
          1 failed: reason 0
          1 failed: reason 1
          1 failed: reason 2
          1 failed: reason 3
          2 failed: other reasons
best      1.0000 nats per token, perplexity 2.718 (searched, trial 37)
baseline  1.5000 nats per token, perplexity 4.482 (yarn, trial 3), breaks the guard by 0.1250 nats per token
spent     1,234,567 forward-equivalent tokens in 60 min of scoring; now about 12,346 tokens a second (2 workers)
left      about 10 min on the search windows
result    runs/a/rope_config.json

trial    worker                                    done
61     aaaaaaaa                         3 of 16 windows
63     cccccccc  8 of 8 gradient steps, 1 of 16 windows
64     cccccccc                                   begun

worker      state                  at  Slurm job  device  last seen
aaaaaaaa  working  search windows 25%       12_3  cuda:0    3 s ago
cccccccc  working                   -       12_3  cuda:0    9 s ago
bbbbbbbb   silent  search windows 25%       12_3  cuda:0  2.0 h ago

workers that ended: 2 SIGUSR2, 1 done"""


def test_the_text() -> None:
    assert StatusOutcome(run_folder=Path("runs/a"), status=STATUS).to_text() == TEXT


def test_the_json_is_strict_and_holds_all() -> None:
    value = json.loads(json.dumps(StatusOutcome(run_folder=Path("runs/a"), status=STATUS).to_json(), allow_nan=False))
    assert value["state"] == "running" and value["run"] == "runs/a" and value["result"] == "runs/a/rope_config.json"
    assert value["trials"]["num_failed"] == 8 and value["trials"]["failures"]["nats are not\n a number"] == 2
    assert [trial["number"] for trial in value["trials"]["running"]] == [61, 63, 64]
    assert value["trials"]["waiting"] == [62]
    assert value["best"]["perplexity"] == pytest.approx(2.718281828)
    assert value["best_baseline"]["excess_nats"] == 0.125
    assert (value["tokens_per_second"], value["seconds_left"]) == (12_345.6, 600.0)
    assert [sign["state"] for sign in value["workers"]] == ["working", "working", "silent", *["ended"] * 3]


def test_a_search_that_has_just_begun(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.txt").touch()
    assert main(["status", str(tmp_path)]) == 0
    expected = f"run       {tmp_path}  (new)\ntrials    none yet: the study has not begun\n"
    assert capsys.readouterr().out == expected


def test_wrong_folders_are_one_line_and_exit_2(tmp_path: Path, capsys: Captured) -> None:
    assert main(["status", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ropesearch: path: expected the run folder of a search, got ")
    assert err.count("\n") == 1


def test_a_fine_tuning(tmp_path: Path, capsys: Captured) -> None:
    """Of files that are missing or cut off, what is there."""

    def shown() -> list[str]:
        assert main(["status", str(tmp_path)]) == 0
        return capsys.readouterr().out.splitlines()

    (tmp_path / "config.json").write_text('{"job": "finetune"}')
    run, more = f"run       {tmp_path}  (fine-tuning)", "more      log.txt, metrics.jsonl"
    assert shown() == [run, "step      0", more]
    (tmp_path / "config.json").write_text('{"job": "finetune", "training": {"num_steps": 3}}')
    held_out = {"short": {"window_nats": [2.0, 4.0], "num_window_tokens": 3}}
    events = [{"step": step, "tokens_per_second": 1234.5 * step, **({"held_out": held_out} if step == 1 else {})}
              for step in range(3)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events) + '{"st')
    held_out_line = f"held out  perplexity at step 1: short {math.e:.2f}"
    assert shown() == [run, "step      2 of 3", "speed     2,469 tokens/s", held_out_line, more]
    (tmp_path / "rope_config.json").write_text("{}")
    assert shown()[0] == f"run       {tmp_path}  (fine-tuning, finished)"
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(tmp_path),
        "state": "finished",
        "step": 2,
        "num_steps": 3,
        "tokens_per_second": 2469.0,
        "measured_step": 1,
        "held_out_perplexity": {"short": pytest.approx(math.e)},
    }


def test_it_needs_no_heavy_library(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    add_complete(study, 1.5, "unscaled")
    write_sign(tmp_path, "a")
    code = "import sys; from ropesearch.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "status", str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "1 complete" in out
    assert not {"torch", "transformers", "datasets", "matplotlib", "scipy.stats"} & set(out.splitlines()[-1].split())


def test_a_real_search(toy_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    words = runs.search_words(toy_folder, runs.write_corpus(tmp_path / "texts"), tmp_path / "run", 3)
    assert main(words) == 0
    capsys.readouterr()
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    record = json.loads((tmp_path / "run" / "rope_config.json").read_text())["search"]
    assert value["state"] == "finished" and value["result"] == str(tmp_path / "run" / "rope_config.json")
    assert value["chosen"] == {"method": record["method"], "trial_number": record["trial_number"]}
    assert value["trials"]["num_complete"] + value["trials"]["num_failed"] == record["num_trials"]
    assert value["num_forward_equivalent_tokens"] == record["num_forward_equivalent_tokens"]
    scores = {name: score["objective"] for name, score in record["search_scores"].items() if name != "searched"}
    baseline = value["best_baseline"]
    assert baseline["nats_per_token"] == pytest.approx(min(scores.values()))
    assert scores[baseline["method"]] == min(scores.values())
