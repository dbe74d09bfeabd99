"""Needle perplexity against plain perplexity as the objective of a search: what each is worth by both measures.

    python -m benchmarks.needle_objective [OUT]

The demo is searched at ratios 2, 4 and 8, two seeds each, with either objective and the default search. Each result and
YaRN then get 200 needles at uniform depths in held-out documents (accuracy with its 95 % interval, by Wilson) and the
held-out documents themselves (perplexity, with a paired bootstrap interval against the search by plain perplexity).
About twenty minutes on one core; stopped and started again it goes on where it was. OUT is by default
runs/needle_objective; benchmarks/results/needle_objective.{json,md} are written.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from ropesearch.config import SearchJob
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import build_windows, needle_windows
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.evaluate.interval import paired_interval
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.pipeline import search
from ropesearch.rope.methods import yarn
from ropesearch.rope.regime import Regime
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score
from ropesearch.score.scorer import score_windows

RESULTS = Path(__file__).parent / "results"
LENGTHS = (512, 1024, 2048)
SEEDS = (0, 1)
OBJECTIVES = {"perplexity": ScoringConfig(), "needle": ScoringConfig(needle_weight=1.0)}
NUM_NEEDLES = 200


def searched(out: Path, length: int, objective: str, seed: int) -> Regime:
    """The best searched regime, whatever was chosen; the search is begun, gone on with, or read."""
    outcome = search(
        SearchJob(
            model=ModelConfig(path=str(out / "demo" / "model")),
            corpus=CorpusConfig(path=str(out / "demo" / "texts")),
            target_length=length,
            seed=seed,
            objective=OBJECTIVES[objective],
            run=str(out / f"{objective}-{length}-{seed}"),
        )
    )
    return next(finalist.regime for finalist in outcome.result.finalists if finalist.method == "searched")


def measured(out: Path, loaded: LoadedModel, length: int) -> list[dict[str, Any]]:
    """The rows of one length: YaRN, then each objective's result of each seed."""
    corpus = CorpusConfig(path=str(out / "demo" / "texts"))
    texts = build_windows(corpus, loaded.tokenizer, length, 0, None)["held_out"]
    depths = np.linspace(0, 1, NUM_NEEDLES).tolist()
    needles = needle_windows(texts, loaded.tokenizer, depths, NUM_NEEDLES, seed=1)

    def scores(regime: Regime) -> tuple[Score, Score]:
        with installed(loaded, regime):
            return (score_windows(loaded, texts, ScoringConfig()), score_windows(loaded, needles, ScoringConfig()))

    def row(method: str, seed: int | None, of: tuple[Score, Score], plain: Score | None) -> dict[str, Any]:
        text, needle = of
        num_right = sum(bool(right) for right in needle.answered)
        interval = binomtest(num_right, NUM_NEEDLES).proportion_ci(method="wilson")
        against = None if plain is None else paired_interval(text, plain)
        return {
            "length": length,
            "method": method,
            "seed": seed,
            "perplexity": text.perplexity,
            "nats_above_plain": None if against is None else [against.difference, against.low, against.high],
            "needle_perplexity": needle.perplexity,
            "num_right": num_right,
            "accuracy_interval": [interval.low, interval.high],
        }

    rows = [row("yarn", None, scores(yarn(loaded.geometry, length)), None)]
    for seed in SEEDS:
        plain = scores(searched(out, length, "perplexity", seed))
        rows.append(row("perplexity", seed, plain, None))
        rows.append(row("needle", seed, scores(searched(out, length, "needle", seed)), plain[0]))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as markdown."""
    lines = [
        "| length | searched by | seed | perplexity | above plain, 95 % interval | needle perplexity | right | 95 % |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        above = row["nats_above_plain"]
        shown = "" if above is None else "{:+.2f} % ({:+.2f} to {:+.2f})".format(*(100 * math.expm1(x) for x in above))
        low, high = row["accuracy_interval"]
        cells = (
            f"{row['length']:,}",
            row["method"],
            "" if row["seed"] is None else row["seed"],
            f"{row['perplexity']:.2f}",
            shown,
            f"{row['needle_perplexity']:.3f}",
            f"{100 * row['num_right'] / NUM_NEEDLES:.1f} %",
            f"{100 * low:.1f} to {100 * high:.1f} %",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Needle perplexity against plain perplexity as an objective.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/needle_objective"), metavar="OUT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        write_demo(options.out / "demo")
        loaded = load_model(ModelConfig(path=str(options.out / "demo" / "model")))
        rows = [row for length in LENGTHS for row in measured(options.out, loaded, length)]
    except RopesearchError as error:
        print(f"needle_objective: {error}", file=sys.stderr)
        return error.exit_code
    write_json(RESULTS / "needle_objective.json", {"versions": versions(), "rows": rows})
    write_bytes(RESULTS / "needle_objective.md", table(rows).encode())
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
