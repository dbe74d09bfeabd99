"""The README: its links lead somewhere, its commands run, its figures are those of the files they come from."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ropesearch import cli
from ropesearch.artifact.schema import RopeConfig
from ropesearch.config import JOBS, keys_of
from tests import runs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SMALL = [
    "budget.num_trials=6", "selection.num_finalists=2",
    "cache=null",
    "training.num_steps=2", "training.num_step_rows=3", "training.num_warmup_steps=1", "mixture.needle_share=0",
    *(f"corpus.num_{split}_windows=3" for split in ("search", "selection", "held_out")),
]  # fmt: skip


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", README)
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_every_key_and_target_it_names_exists() -> None:
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    for job in JOBS:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{job} ")]
        known = {key.name for key in keys_of(JOBS[job].schema)}
        named = set(re.findall(r"`([a-z_.]+)`", row.split("|")[3]))
        assert named and named <= known
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_five_lines_run(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the two that fine-tune and export what they have made."""
    corpus = runs.write_corpus(tmp_path / "texts", num_documents=20)
    monkeypatch.chdir(tmp_path)
    commands = []
    for name, num_commands in (("evaluate", 3), ("finetune", 2)):
        (block,) = [text for _, text in BLOCKS if f"ropesearch {name} runs/mine" in text]
        commands += [line.partition("   #")[0] for line in block.splitlines() if line.startswith("ropesearch ")]
        assert len(commands) == num_commands + 3 * (name == "finetune")
    for command in commands:
        words = [word.replace("MODEL", str(toy_folder)).replace("TEXTS", str(corpus)) for word in shlex.split(command)]
        words = [re.sub(r"^target_length=.*", f"target_length={runs.TARGET_LENGTH}", word) for word in words]
        job = words[1]
        small = [word for word in SMALL if word.partition("=")[0] in {key.name for key in keys_of(JOBS[job].schema)}]
        assert cli.main([*words[1:], *small]) == 0


def test_the_python_lines_run(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = runs.write_corpus(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    ((_, code),) = [block for block in BLOCKS if block[0] == "python"]
    code = code.replace("32768", str(runs.TARGET_LENGTH)).replace('"MODEL"', repr(str(toy_folder)))
    code = code.replace(
        'path="TEXTS"', f"path={str(corpus)!r}, num_search_windows=3, num_selection_windows=3, num_held_out_windows=3"
    )
    code = code.replace("job = SearchJob(", "job = SearchJob(cache=None, budget=BudgetConfig(num_trials=3), ")
    code = "from ropesearch.search.config import BudgetConfig\n" + code
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["tokenizer"] is not None


@pytest.mark.slow
def test_make_demo_does_what_the_first_screen_says(tmp_path: Path) -> None:
    """The main job as a newcomer runs it: searched below linear, NTK and YaRN on held-out documents at 2,048 tokens."""
    environment = Path(sys.prefix)
    if not (environment / ".installed").exists():
        pytest.skip("these tests do not run in the environment that make sets up")
    command = ["make", "demo", f"VENV={environment}", f"DATA={tmp_path / 'data'}", f"RUN={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "searched" in done.stdout and "price on short inputs" in done.stdout
    rope_config = RopeConfig.read(tmp_path / "run")
    assert rope_config.search["method"] == "searched"
    nats = {row["method"]: row["nats"] for row in rope_config.evaluation if row["length"] == 2048}
    assert nats["searched"] < min(nats["linear"], nats["ntk"], nats["yarn"])


def test_the_figures_are_those_of_the_benchmark() -> None:
    """Each row of the table of seeds stands in the README as the benchmark wrote it."""
    results = json.loads((ROOT / "benchmarks" / "results" / "search_seeds.json").read_text())["results"]
    for result in results:
        row = next(line for line in README.splitlines() if re.match(rf"\| {result['seed']} \|", line))
        for perplexity in result["perplexity"].values():
            assert f"{perplexity:.2f}" in row
