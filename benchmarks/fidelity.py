"""How well cheaper scores keep the order of candidates: fewer windows, the last tokens only, shorter prefixes.

    python -m benchmarks.fidelity JOURNAL ... [--out DIR]

JOURNAL is the study.journal of a search: it holds the nats of every window and position block of every candidate, so
what a cheaper score would have been is a sum over parts of what is there, and nothing is scored. For each: its cost in
tokens through the model against the full score's; the rank correlation (Spearman) with the full score, over all
candidates that were scored and over the best quarter alone; how many of the true best 8 are among its own best 8, and
how many candidates it has to let through so that all of the true best 8 are among them. Of random choices of windows
the mean over 50. DIR, by default runs/fidelity, gets fidelity.json and fidelity.md.

The last k tokens cost a whole forward pass, as all that precedes them goes through the model: only the output head is
saved. A prefix costs its own tokens, and with full attention less than that part of the time.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.racing import candidates_of
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.run_folder import versions

NUM_BEST = 8
NUM_CHOICES = 50


def cheaper(
    nats: NDArray[np.float64], tokens: NDArray[np.int64]
) -> Iterator[tuple[str, float, list[NDArray[np.float64]]]]:
    """Name, part of the full cost, and values, float64 (num_candidates,), of each way to score, by choice of windows.

    `nats` is float64 (num_candidates, num_windows, num_blocks), `tokens` int64 (num_windows, num_blocks).
    """
    _, num_windows, num_blocks = nats.shape
    rng = np.random.default_rng(0)

    def value(windows: Sequence[int], blocks: slice) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = nats[:, windows][:, :, blocks].sum(axis=(1, 2))
        return summed / int(tokens[windows][:, blocks].sum())

    whole = slice(0, num_blocks)
    for num in (num for num in (1, 2, 4, 6, 8, 12) if num < num_windows):
        choices = [rng.permutation(num_windows)[:num].tolist() for _ in range(NUM_CHOICES)]
        yield f"{num} of {num_windows} windows", num / num_windows, [value(choice, whole) for choice in choices]
    every = list(range(num_windows))
    for num in (num for num in (1, 2, 4) if num < num_blocks):
        yield f"last {num}/{num_blocks} of each window", 1.0, [value(every, slice(num_blocks - num, num_blocks))]
    for num in (num for num in (1, 2, 4, 6) if num < num_blocks):
        yield f"first {num}/{num_blocks} of each window", num / num_blocks, [value(every, slice(0, num))]


def row_of(name: str, cost: float, found: Sequence[NDArray[np.float64]], full: NDArray[np.float64]) -> dict[str, Any]:
    """The figures of one way to score, means over the choices of windows; what has to be let through is the worst."""
    best = np.argsort(full, kind="stable")[:NUM_BEST]
    quarter = np.argsort(full, kind="stable")[: len(full) // 4]
    orders = [np.argsort(values, kind="stable") for values in found]
    return {
        "score": name,
        "cost": cost,
        "spearman": float(np.mean([stats.spearmanr(values, full)[0] for values in found])),
        "spearman_best_quarter": float(
            np.mean([stats.spearmanr(values[quarter], full[quarter])[0] for values in found])
        ),
        "recall": float(np.mean([len(set(order[:NUM_BEST]) & set(best)) / NUM_BEST for order in orders])),
        "let_through": float(np.mean([np.flatnonzero(np.isin(order, best)).max() + 1 for order in orders])) / len(full),
    }


def rows_of(journal: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many candidates of a journal were scored, and the figures of every way to score."""
    scores = [score for _, score in candidates_of(journal)]
    nats, tokens = np.array([score.nats for score in scores]), scores[0].tokens
    full = nats.sum(axis=(1, 2)) / tokens.sum()
    return len(scores), [row_of(name, cost, found, full) for name, cost, found in cheaper(nats, tokens)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, each a mean over journals, as a markdown table."""
    lines = [
        f"| score | tokens | Spearman | of the best quarter | best {NUM_BEST} found | to let through for all |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = [f"{100 * row['cost']:.0f} %", f"{row['spearman']:.3f}", f"{row['spearman_best_quarter']:.3f}"]
        figures += [f"{100 * row['recall']:.0f} %", f"{100 * row['let_through']:.0f} %"]
        lines.append(f"| {row['score']} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="How well cheaper scores keep the order of candidates.")
    parser.add_argument("journals", type=Path, nargs="+", metavar="JOURNAL")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"), metavar="DIR")
    options = parser.parse_args()
    try:
        found = [rows_of(journal) for journal in options.journals]
    except (RopesearchError, OSError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    means = [
        {key: each[0][key] if key == "score" else float(np.mean([row[key] for row in each])) for key in each[0]}
        for each in zip(*(rows for _, rows in found), strict=True)
    ]
    counts = ", ".join(str(num) for num, _ in found)
    text = f"Means over {len(found)} searches with {counts} candidates.\n\n{table(means)}"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "fidelity.json", {"versions": versions(), "means": means, "searches": found})
    write_bytes(options.out / "fidelity.md", text.encode())
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
