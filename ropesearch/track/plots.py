"""Pictures of a search: the factors against the baselines, and the course of the scores."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ropesearch.files import write_bytes
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime


def plot_factors(path: Path, geometry: Geometry, target_length: int, regimes: Mapping[str, Regime]) -> None:
    """Write a PNG of each regime's factor over the pair index, with the ratio and the two pairs LongRoPE2 names."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, regime in regimes.items():
        searched = name == "searched"
        axes.plot(
            range(geometry.num_pairs),
            regime.factors,
            label=f"{name} (attention factor {regime.attention_factor:.3f})",
            linewidth=2.2 if searched else 1.2,
            color="black" if searched else None,
            drawstyle="steps-mid" if searched else "default",
        )
    axes.axhline(geometry.ratio(target_length), color="gray", linestyle=":", linewidth=1)
    for pair, meaning in ((geometry.ten_turn_pair(), "ten turns"), (geometry.critical_pair(), "one turn")):
        axes.axvline(pair, color="gray", linestyle="--", linewidth=0.8)
        axes.annotate(meaning, (pair, 1.02), fontsize="small", color="gray", rotation=90, va="bottom", ha="right")
    axes.set_yscale("log")
    axes.set_xlabel("pair (0 turns fastest)")
    axes.set_ylabel("factor (divides the inverse frequency)")
    axes.set_title(f"{geometry.original_length} to {target_length} tokens")
    axes.legend(fontsize="small")
    _write(path, figure)


def plot_course(path: Path, scores: Sequence[tuple[int, float]], baselines: Mapping[str, float]) -> None:
    """Write a PNG of the perplexity of each candidate in order, the best so far, and the baselines' levels.

    `scores` holds (trial number, nats per token) of the finished candidates; `baselines` nats per token by method.
    Baselines far above the candidates are left out of the picture's range but stay in its legend.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [number for number, _ in scores]
    perplexities = [math.exp(nats) for _, nats in scores]
    best = [min(perplexities[: index + 1]) for index in range(len(perplexities))]
    axes.plot(numbers, perplexities, ".", markersize=4, color="tab:blue", label="candidates")
    axes.step(numbers, best, where="post", color="black", label="best so far")
    for index, (name, nats) in enumerate(baselines.items()):
        axes.axhline(math.exp(nats), color=f"C{index + 1}", linestyle="--", linewidth=1, label=f"{name} {math.exp(nats):.2f}")
    if perplexities:
        lowest, highest = min(perplexities), sorted(perplexities)[int(0.9 * (len(perplexities) - 1))]
        margin = 0.1 * (highest - lowest) + 0.002 * lowest
        axes.set_ylim(lowest - margin, highest + 4 * margin)
    axes.set_xlabel("trial")
    axes.set_ylabel("perplexity on the search windows")
    axes.legend(fontsize="small")
    _write(path, figure)


def _write(path: Path, figure: Figure) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_bytes(path, picture.getvalue())
