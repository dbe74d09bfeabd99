"""What racing saves, and what it costs: tests and marks replayed on recorded scores, and searches with and without.

    python -m benchmarks.racing [OUT] [--num-trials 400] [--journal FILE ...] [--replay-only]

Journals of finished searches hold the nats of every window of every candidate, so a race can be replayed on them: which
candidates each test stops, after how many windows, and how many of these wrongly, that would have ended above the mark.
Each journal is replayed with its windows in 5 orders. Then the demo is searched with seeds 0, 1 and 2, for every mark
(`none` is the search without racing; its journals are replayed too). Stopped and started again it goes on where it was;
--replay-only needs nothing but the journals given. OUT, by default runs/racing, gets racing.json and racing.md.

A replay is exact until a candidate is stopped that would have become a parent: of racing against the last parent only
false stops are such, while racing against the last finalist stops future parents on purpose. Their share is shown.
"""

import argparse
import bisect
import functools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ropesearch.config import SearchJob
from ropesearch.data.config import CorpusConfig
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.pipeline import search
from ropesearch.run_folder import versions
from ropesearch.score.score import Score
from ropesearch.search.config import BudgetConfig, EvolutionConfig, RacingConfig, RacingMark
from ropesearch.search.racing import CHANCE, LEAST_WINDOWS

SEEDS = (0, 1, 2)
TARGET_LENGTH = 2048
NUM_ORDERS = 5
RANKS = {"the last parent": 32, "the last finalist": 8}
TESTS = ("finite t", "t", "Wilcoxon")
CHANCES = (0.2, 0.1, 0.05, 0.02)

Candidates = list[tuple[int, Score]]


def candidates_of(journal: Path) -> Candidates:
    """Number and score of every candidate of a journal that was scored on all windows, in order.

    The file is read as it is, line by line, so that journals of other versions of the fingerprints do, and of searches
    that are still running.
    """
    held: list[dict[str, Any]] = []
    for line in journal.read_bytes().split(b"\n")[:-1]:
        operation = json.loads(line)
        if operation["op_code"] == 4:
            held.append({})
        elif operation["op_code"] == 8:
            held[operation["trial_id"]].update(operation["user_attr"])
    return [
        (number, Score.from_json(trial["score"]))
        for number, trial in enumerate(held)
        if trial.get("method") == "searched" and "score" in trial
    ]


@functools.cache
def critical(test: str, seen: int, level: float) -> float:
    """What a test's statistic has to exceed after so many windows: Student's t, or the sum of the positive ranks."""
    if test != "Wilcoxon":
        return float(stats.t.isf(level, seen - 1))
    ways = np.ones(1)  # by sum: how many of the 2 ** seen sets of ranks have it
    for rank in range(1, seen + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    tails = np.cumsum(ways[::-1])[::-1] / 2**seen
    return float(np.sum(tails >= level)) - 0.5


def stops(differences: NDArray[np.float64], num_windows: int, test: str, level: float) -> bool:
    """Whether a test at a level stops a candidate after windows on which it is worse by `differences`."""
    mean, deviation, seen = differences.mean(), differences.std(ddof=1), len(differences)
    if mean <= 0 or deviation == 0:
        return bool(mean > 0)
    if test == "Wilcoxon":
        ranks = np.argsort(np.argsort(np.abs(differences))) + 1
        statistic = float(ranks[differences > 0].sum())
    else:
        statistic = mean / deviation * math.sqrt(seen)
    if test == "finite t":
        statistic *= math.sqrt(num_windows / (num_windows - seen))
    return bool(statistic > critical(test, seen, level))


def replayed(values: NDArray[np.float64], rank: int, test: str, chance: float, num_parents: int) -> dict[str, int]:
    """A race on the values, float64 (num_candidates, num_windows), of candidates in the order of their trials."""
    num_windows = values.shape[1]
    level = chance / (num_windows - LEAST_WINDOWS)
    means = values.mean(axis=1)
    finished: list[tuple[float, int]] = []
    found = {"windows": 0, "stopped": 0, "false": 0, "would_be_parents": 0, "above": 0, "within": 0}
    for number, own in enumerate(values):
        mean = float(means[number])
        seen = num_windows
        if len(finished) >= rank:
            mark = values[finished[rank - 1][1]]
            is_above = bool(mean > finished[rank - 1][0])
            found["above" if is_above else "within"] += 1
            looks = range(LEAST_WINDOWS, num_windows)
            seen = next((k for k in looks if stops(own[:k] - mark[:k], num_windows, test, level)), num_windows)
            if seen < num_windows:
                found["stopped"] += 1
                found["false"] += not is_above
                found["would_be_parents"] += int(np.sum(means[:number] < mean)) < num_parents
        found["windows"] += seen
        if seen == num_windows:
            bisect.insort(finished, (mean, number))
    return found


def replay_rows(journals: Sequence[Path]) -> list[dict[str, Any]]:
    """What every test, chance and mark saves on all journals together."""
    orders = [np.random.default_rng(order) for order in range(1, NUM_ORDERS)]
    tables = []
    for journal in journals:
        values = np.array([score.window_nats / score.window_tokens for _, score in candidates_of(journal)])
        tables += [values, *(values[:, rng.permutation(values.shape[1])] for rng in orders)]
    num_parents = RANKS["the last parent"]
    rows = []
    for mark, rank in RANKS.items():
        for test in TESTS:
            for chance in CHANCES:
                found = [replayed(values, rank, test, chance, num_parents) for values in tables]
                total = {key: sum(each[key] for each in found) for key in found[0]}
                rows.append(
                    {
                        "mark": mark,
                        "test": test,
                        "chance": chance,
                        "saved": 1 - total["windows"] / sum(values.size for values in tables),
                        "above": total["above"] / (total["above"] + total["within"]),
                        "stopped": total["stopped"] / (total["above"] + total["within"]),
                        "false_stops": total["false"] / total["within"],
                        "would_be_parents": total["would_be_parents"] / max(1, total["stopped"]),
                    }
                )
    return rows


def replay_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a replay as a markdown table."""
    lines = [
        "| raced against | test | chance | tokens saved | above the mark | stopped | false stops | would-be parents |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        chosen = row["test"] == TESTS[0] and row["chance"] == CHANCE
        figures = (row[key] for key in ("saved", "above", "stopped", "false_stops", "would_be_parents"))
        cells = [row["mark"], row["test"], f"{row['chance']:g}", *(f"{100 * figure:.1f} %" for figure in figures)]
        lines.append(f"| {' | '.join(f'**{cell}**' if chosen else cell for cell in cells)} |")
    return "\n".join(lines) + "\n"


def searched(out: Path, seed: int, mark: RacingMark, num_trials: int) -> dict[str, Any]:
    """One search's figures; it is begun, gone on with, or read."""
    outcome = search(
        SearchJob(
            model=ModelConfig(path=str(out / "demo" / "model")),
            corpus=CorpusConfig(path=str(out / "demo" / "texts")),
            target_length=TARGET_LENGTH,
            seed=seed,
            optimizer=EvolutionConfig(),
            racing=RacingConfig(mark=mark),
            budget=BudgetConfig(num_trials=num_trials),
            run=str(out / f"{mark.name}-{seed}"),
        )
    )
    result = outcome.result
    row = next(row for row in outcome.rows if (row.method, row.length) == (result.method, TARGET_LENGTH))
    return {
        "mark": mark.name,
        "seed": seed,
        "num_stopped": result.num_stopped,
        "tokens": result.num_forward_equivalent_tokens,
        "saved": result.num_saved_tokens / (result.num_saved_tokens + result.num_forward_equivalent_tokens),
        "search_nats_per_token": min(value for _, value in result.course),
        "held_out_nats_per_token": row.nats / row.tokens,
    }


def search_table(results: Sequence[dict[str, Any]]) -> str:
    """The searches as a markdown table, one line a mark, with the mean and the range over seeds."""
    lines = [
        "| raced against | tokens saved | search nats per token | held-out nats per token |",
        "|---|---:|---:|---:|",
    ]
    for mark in RacingMark:
        rows = [result for result in results if result["mark"] == mark.name]
        saved = statistics.mean(row["saved"] for row in rows)
        cells = [mark.name, f"{100 * saved:.1f} %"]
        for key in ("search_nats_per_token", "held_out_nats_per_token"):
            values = [row[key] for row in rows]
            cells.append(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="What racing saves and costs.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/racing"), metavar="OUT")
    parser.add_argument("--num-trials", type=int, default=400, help="candidates of each search (default 400)")
    parser.add_argument("--journal", type=Path, action="append", default=[], help="another study.journal to replay")
    parser.add_argument("--replay-only", action="store_true", help="no searches: only the journals given")
    options = parser.parse_args()
    journals, results = list(options.journal), []
    try:
        if not options.replay_only:
            write_demo(options.out / "demo")
            results = [searched(options.out, seed, mark, options.num_trials) for seed in SEEDS for mark in RacingMark]
            journals += [options.out / f"{RacingMark.none.name}-{seed}" / "study.journal" for seed in SEEDS]
        rows = replay_rows(journals)
    except (RopesearchError, OSError) as error:
        print(f"racing: {error}", file=sys.stderr)
        return 2
    text = replay_table(rows) + ("\n" + search_table(results) if results else "")
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "racing.json", {"versions": versions(), "replay": rows, "searches": results})
    write_bytes(options.out / "racing.md", text.encode())
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
