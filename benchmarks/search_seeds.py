"""The demo's search for seeds 0, 1 and 2: held-out perplexity against the usual methods, with paired intervals.

    python benchmarks/search_seeds.py [OUT]

About four minutes a seed on two cores. Stopped and started again it goes on where it was. OUT (by default
runs/search_seeds)
gets the demo, a run folder for each seed, and search_seeds.json and search_seeds.md with the figures of the README.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from ropesearch.config import SearchJob
from ropesearch.data.config import CorpusConfig
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.evaluate.interval import paired_interval
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.pipeline import search
from ropesearch.run_folder import versions

SEEDS = (0, 1, 2)
TARGET_LENGTH = 2048


def measured(out: Path, seed: int) -> dict[str, Any]:
    """One seed's figures; the search is begun, gone on with, or read."""
    outcome = search(
        SearchJob(
            model=ModelConfig(path=str(out / "demo" / "model")),
            corpus=CorpusConfig(path=str(out / "demo" / "texts")),
            target_length=TARGET_LENGTH,
            seed=seed,
            run=str(out / f"seed-{seed}"),
        )
    )
    rows = {row.method: row for row in outcome.rows if row.length == TARGET_LENGTH}
    best = rows[outcome.result.method]
    against_yarn = paired_interval(best, rows["yarn"])
    return {
        "seed": seed,
        "chosen": outcome.result.method,
        "attention_factor": outcome.result.regime.attention_factor,
        "perplexity": {method: row.perplexity for method, row in rows.items()},
        "nats_per_token_minus_yarn": against_yarn.difference,
        "interval_95": [against_yarn.low, against_yarn.high],
    }


def table(results: list[dict[str, Any]]) -> str:
    """The figures as a markdown table."""
    methods = list(results[0]["perplexity"])
    lines = [
        f"| seed | {' | '.join(methods)} | below YaRN | 95 % interval |",
        "|---|" + "---:|" * (len(methods) + 2),
    ]
    for result in results:
        figures = " | ".join(f"{result['perplexity'][method]:.2f}" for method in methods)
        low, high = (-100 * math.expm1(nats) for nats in reversed(result["interval_95"]))
        below = -100 * math.expm1(result["nats_per_token_minus_yarn"])
        lines.append(f"| {result['seed']} | {figures} | {below:.2f} % | {low:.2f} to {high:.2f} % |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="The demo's search for three seeds.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/search_seeds"), metavar="OUT")
    options = parser.parse_args()
    try:
        write_demo(options.out / "demo")
        results = [measured(options.out, seed) for seed in SEEDS]
    except RopesearchError as error:
        print(f"search_seeds: {error}", file=sys.stderr)
        return error.exit_code
    write_json(options.out / "search_seeds.json", {"versions": versions(), "results": results})
    write_bytes(options.out / "search_seeds.md", table(results).encode())
    print(table(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
