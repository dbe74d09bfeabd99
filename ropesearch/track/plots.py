"""Pictures of a search: the factors against the baselines, the loss by position, the course of the scores, the front of
two objectives."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ropesearch.files import write_bytes
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from ropesearch.score.score import perplexity


class ByObjective(Protocol):
    """A scored trial of a search with two objectives."""

    @property
    def trial_number(self) -> int: ...

    @property
    def method(self) -> str: ...

    @property
    def long_nats_per_token(self) -> float: ...

    @property
    def short_nats_per_token(self) -> float: ...

    @property
    def on_front(self) -> bool: ...


def plot_factors(path: Path, geometry: Geometry, target_length: int, regimes: Mapping[str, Regime]) -> None:
    """Write `factors_figure` as a PNG."""
    _write(path, factors_figure(geometry, target_length, regimes))


def plot_course(path: Path, scores: Sequence[tuple[int, float]], baselines: Mapping[str, float]) -> None:
    """Write `course_figure` as a PNG."""
    _write(path, course_figure(scores, baselines))


def plot_front(path: Path, short_tokens: int, points: Sequence[ByObjective], chosen: int) -> None:
    """Write `front_figure` as a PNG."""
    _write(path, front_figure(short_tokens, points, chosen))


def factors_figure(geometry: Geometry, target_length: int, regimes: Mapping[str, Regime]) -> Figure:
    """Each regime's factor over the pair index, with the ratio and the two pairs LongRoPE2 names."""
    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
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
    ratio = geometry.ratio(target_length)
    axes.axhline(ratio, color="gray", linestyle=":", linewidth=1, label=f"ratio {ratio:g}")
    above_frame = axes.get_xaxis_transform()  # pairs across, the frame's height upwards
    for pair, meaning in ((geometry.ten_turn_pair(), "ten turns"), (geometry.critical_pair(), "one turn")):
        axes.axvline(pair, color="gray", linestyle="--", linewidth=0.8)
        axes.text(pair, 1.01, meaning, transform=above_frame, fontsize="small", color="gray", ha="center")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("pair (0 turns fastest; dashed: turns within the trained length)")
    axes.set_ylabel("factor (divides the inverse frequency)")
    axes.set_title(f"{geometry.original_length} to {target_length} tokens", pad=18)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def positions_figure(blocks: Mapping[str, Sequence[tuple[int, int, float]]]) -> Figure:
    """Each method's nats per token over the position; `blocks` holds (first position, end, nats per token)."""
    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, steps in blocks.items():
        searched = name == "searched"
        positions: list[float] = []
        nats_per_token: list[float] = []
        for start, end, nats in steps:
            if positions and positions[-1] != start:  # nothing was scored between
                positions.append(math.nan)
                nats_per_token.append(math.nan)
            positions += [start, end]
            nats_per_token += [nats, nats]
        axes.plot(
            positions,
            nats_per_token,
            label=name,
            linewidth=2.2 if searched else 1.2,
            color="black" if searched else None,
        )
    axes.set_xlabel("position in the window")
    axes.set_ylabel("nats per token")
    axes.set_title("loss by position on the search windows")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def course_figure(scores: Sequence[tuple[int, float]], baselines: Mapping[str, float]) -> Figure:
    """The perplexity of each candidate in order, the best so far, and the baselines' levels.

    `scores` holds (trial number, nats per token) of the finished candidates; `baselines` nats per token by method.
    Baselines far above the candidates are left out of the picture's range but stay in its legend.
    """
    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [number for number, _ in scores]
    perplexities = [perplexity(nats, 1) for _, nats in scores]
    levels = {name: perplexity(nats, 1) for name, nats in baselines.items()}
    best = [min(perplexities[: index + 1]) for index in range(len(perplexities))]
    axes.plot(numbers, perplexities, ".", markersize=4, color="tab:blue", label="candidates")
    axes.step(numbers, best, where="post", color="black", label="best candidate so far")
    for index, (name, level) in enumerate(levels.items()):
        axes.axhline(level, color=f"C{index + 1}", linestyle="--", linewidth=1, label=f"{name} {level:.4g}")
    finite = sorted(filter(math.isfinite, perplexities))
    if finite:
        lowest = min([*finite, *levels.values()])
        highest = finite[int(0.9 * (len(finite) - 1))]
        margin = 0.1 * (highest - lowest) + 0.002 * lowest
        axes.set_ylim(lowest - margin, highest + 4 * margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("perplexity on the search windows")
    axes.set_title("course of the search")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def front_figure(short_tokens: int, points: Sequence[ByObjective], chosen: int) -> Figure:
    """Both perplexities of every candidate and baseline, the front, and the trial `chosen`.

    Points far worse than the candidates are left out of the picture's range; baselines stay in its legend.
    """
    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()

    def drawn(some: Sequence[ByObjective]) -> tuple[list[float], list[float]]:
        short = [perplexity(point.short_nats_per_token, 1) for point in some]
        return short, [perplexity(point.long_nats_per_token, 1) for point in some]

    candidates = [point for point in points if point.method == "searched"]
    front = sorted((point for point in points if point.on_front), key=lambda point: point.short_nats_per_token)
    choice = [point for point in points if point.trial_number == chosen]
    axes.plot(*drawn(candidates), ".", markersize=4, color="tab:blue", label="candidates")
    axes.step(*drawn(front), ".-", where="post", color="black", linewidth=1.2, label="front")
    for index, point in enumerate(point for point in points if point.method != "searched"):
        (short,), (long,) = drawn([point])
        label = f"{point.method} {short:.4g}, {long:.4g}"
        axes.plot([short], [long], "x", color=f"C{index + 1}", label=label)
    axes.plot(*drawn(choice), "o", markersize=9, markerfacecolor="none", color="tab:red", label="chosen")
    near = drawn([*candidates, *choice])
    axes.set_xlim(*_range(near[0], drawn([*front, *choice])[0]))
    axes.set_ylim(*_range(near[1], drawn(choice)[1]))
    axes.set_xlabel(f"perplexity of the first {short_tokens} tokens")
    axes.set_ylabel("exponential of the first objective")
    axes.set_title("both objectives on the search windows")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _range(values: Sequence[float], shown: Sequence[float]) -> tuple[float | None, float | None]:
    """Limits that hold `shown` and all but the highest tenth of `values`; none where nothing is finite."""
    finite, shown = sorted(filter(math.isfinite, values)), list(filter(math.isfinite, shown))
    if not finite:
        return None, None
    lowest, highest = min([finite[0], *shown]), max([finite[int(0.9 * (len(finite) - 1))], *shown])
    margin = 0.1 * (highest - lowest) + 0.002 * lowest
    return lowest - margin, highest + margin


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _write(path: Path, figure: Figure) -> None:
    write_bytes(path, png(figure))
