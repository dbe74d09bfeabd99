"""What racing saves: tests and marks replayed on the scores of recorded searches without it.

    python -m benchmarks.racing JOURNAL ... [--num-trials 400]

Journals of searches hold the nats of every window of every candidate, so a race can be replayed on them: which
candidates each test stops, after how many windows, and how many of these wrongly, that would have ended above the mark.
Each journal is replayed with its windows in 5 orders. benchmarks/search_cost.py makes such journals (evolution), and
says what whole searches save with racing, and where they end. Results go to benchmarks/results/racing.{json,md}.

A replay is exact until a candidate is stopped that would have become a parent; the share of these is shown.
"""

import argparse
import bisect
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ropesearch.files import write_bytes, write_json
from ropesearch.run_folder import versions
from ropesearch.score.score import Score
from ropesearch.search.racing import CHANCE, LEAST_WINDOWS

RESULTS = Path(__file__).parent / "results"
NUM_ORDERS = 5
RANKS = {"the last parent": 32, "the last finalist": 8}
TESTS = ("finite t", "t", "Wilcoxon")
CHANCES = (0.2, 0.1, 0.05, 0.02, 0.01)

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


def replayed(values: NDArray[np.float64], rank: int, test: str, level: float, num_parents: int) -> dict[str, int]:
    """A race on the values, float64 (num_candidates, num_windows), of candidates in the order of their trials."""
    num_windows = values.shape[1]
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


def replay_rows(journals: Sequence[Path], num_trials: int) -> list[dict[str, Any]]:
    """What every test, chance and mark saves on all journals together."""
    orders = [np.random.default_rng(order) for order in range(1, NUM_ORDERS)]
    tables = []
    for journal in journals:
        values = np.array([score.window_nats / score.window_tokens for _, score in candidates_of(journal)[:num_trials]])
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


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="What racing saves, replayed on recorded searches.")
    parser.add_argument("journals", type=Path, nargs="+", metavar="JOURNAL", help="a study.journal")
    parser.add_argument("--num-trials", type=int, default=400, help="candidates of each that count (default 400)")
    options = parser.parse_args()
    try:
        rows = replay_rows(options.journals, options.num_trials)
    except OSError as error:
        print(f"racing: {error}", file=sys.stderr)
        return 2
    write_json(RESULTS / "racing.json", {"versions": versions(), "replay": rows})
    write_bytes(RESULTS / "racing.md", replay_table(rows).encode())
    print(replay_table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
