"""ropesearch/track/plots.py: what is drawn is what was given, and the files are pictures."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from ropesearch.track.plots import (
    course_figure,
    factors_figure,
    front_figure,
    plot_course,
    plot_factors,
    plot_front,
    positions_figure,
)

GEOMETRY = Geometry(model_type="llama", head_dim=16, rotary_dim=16, original_length=64, rope_theta=100.0)
LINEAR = Regime(name="linear", max_length=256, factors=(4.0,) * 8)
SEARCHED = Regime(
    name="searched", max_length=256, factors=(1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 4.5), attention_factor=1.125
)
SCORES = [(4, 2.0), (6, 1.5), (7, 1.75), (9, 1.25)]


def lines_of(figure: Figure) -> dict[str, Line2D]:
    (axes,) = figure.axes
    return {str(line.get_label()): line for line in axes.get_lines()}


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_factors_are_drawn_by_pair() -> None:
    figure = factors_figure(GEOMETRY, 256, {"linear": LINEAR, "searched": SEARCHED})
    lines = lines_of(figure)
    for label, regime in (("linear (attention factor 1.000)", LINEAR), ("searched (attention factor 1.125)", SEARCHED)):
        assert np.array_equal(lines[label].get_xydata(), np.column_stack([range(8), regime.factors]))
    assert np.asarray(lines["ratio 4"].get_ydata()).tolist() == [4.0, 4.0]
    assert legend_of(figure) == ["linear (attention factor 1.000)", "searched (attention factor 1.125)", "ratio 4"]
    axes: Axes = figure.axes[0]
    assert axes.get_title() == "64 to 256 tokens" and axes.get_yscale() == "log"
    marked = {text.get_text(): text.get_position()[0] for text in axes.texts}
    # The first pairs that need more than 6.4, and more than 64, of the 64 tokens for a turn.
    assert marked == {"ten turns": 1, "one turn": 5}
    assert {np.asarray(line.get_xdata())[0] for line in axes.get_lines() if line.get_linestyle() == "--"} == {1, 5}


def test_the_course_and_the_best_so_far() -> None:
    figure = course_figure(SCORES, {"yarn": math.log(5.0), "unscaled": 800.0})
    lines = lines_of(figure)
    perplexities = [math.exp(nats) for _, nats in SCORES]
    assert np.array_equal(lines["candidates"].get_xydata(), np.column_stack([[4, 6, 7, 9], perplexities]))
    best = [perplexities[0], perplexities[1], perplexities[1], perplexities[3]]
    assert np.array_equal(lines["best candidate so far"].get_xydata(), np.column_stack([[4, 6, 7, 9], best]))
    assert np.asarray(lines["yarn 5"].get_ydata()).tolist() == [pytest.approx(5.0)] * 2
    assert legend_of(figure) == ["candidates", "best candidate so far", "yarn 5", "unscaled inf"]


@pytest.mark.parametrize("baseline_nats", [0.5, 1.0, 2.0])
def test_the_range_holds_the_best_of_all(baseline_nats: float) -> None:
    """A baseline that no candidate beats is in the picture; one far above does not flatten it."""
    low, high = course_figure(SCORES, {"yarn": baseline_nats, "unscaled": 9.0}).axes[0].get_ylim()
    assert low < min(math.exp(1.25), math.exp(baseline_nats))
    assert math.exp(1.75) < high < math.exp(9.0)


class Point(NamedTuple):
    trial_number: int
    method: str
    long_nats_per_token: float
    short_nats_per_token: float
    on_front: bool


POINTS = [
    Point(0, "unscaled", 9.0, 1.0, True),
    Point(1, "yarn", 2.5, 1.75, False),
    Point(4, "searched", 2.0, 1.25, True),
    Point(5, "searched", 2.25, 1.5, False),
    Point(6, "searched", 1.5, 2.0, True),
]


def test_the_front_of_two_objectives() -> None:
    figure = front_figure(64, POINTS, chosen=6)
    lines = lines_of(figure)

    def drawn(*points: Point) -> list[list[float]]:
        return [[math.exp(point.short_nats_per_token), math.exp(point.long_nats_per_token)] for point in points]

    assert np.asarray(lines["candidates"].get_xydata()).tolist() == drawn(POINTS[2], POINTS[3], POINTS[4])
    assert np.asarray(lines["front"].get_xydata()).tolist() == drawn(POINTS[0], POINTS[2], POINTS[4])
    assert np.asarray(lines["chosen"].get_xydata()).tolist() == drawn(POINTS[4])
    assert legend_of(figure) == ["candidates", "front", "unscaled 2.718, 8103", "yarn 5.755, 12.18", "chosen"]
    axes = figure.axes[0]
    assert axes.get_xlabel() == "perplexity of the first 64 tokens"
    low, high = axes.get_ylim()  # unscaled's is far above
    assert low < math.exp(1.5) and math.exp(2.0) < high < math.exp(9.0)
    assert axes.get_xlim()[0] < math.exp(1.0) < math.exp(2.0) < axes.get_xlim()[1]


@pytest.mark.parametrize("points", [POINTS, POINTS[:1], [POINTS[0]._replace(long_nats_per_token=900.0)]])
def test_a_front_is_a_picture_whatever_there_is(points: list[Point], tmp_path: Path) -> None:
    plot_front(tmp_path / "front.png", 64, points, 0)
    assert imread(tmp_path / "front.png").shape == (540, 1140, 4)


@pytest.mark.parametrize("scores", [[], [(4, 1.5)], [(4, 1.5), (5, 1.5)], [(4, 800.0)]])
def test_files_are_pictures(scores: list[tuple[int, float]], tmp_path: Path) -> None:
    plot_factors(tmp_path / "factors.png", GEOMETRY, 256, {"searched": SEARCHED})
    plot_course(tmp_path / "course.png", scores, {"yarn": 1.5, "unscaled": 800.0})
    for path in tmp_path.iterdir():
        picture = imread(path)
        assert picture.shape == (540, 1140, 4)
        assert 0 < (picture[..., :3] < 0.5).mean() < 0.5  # ink on paper


def test_loss_is_drawn_by_position_with_gaps_where_nothing_was_scored() -> None:
    blocks = {"linear": [(0, 8, 2.0), (8, 16, 2.5)], "searched": [(0, 8, 1.5), (24, 32, 3.0)]}
    figure = positions_figure(blocks)
    lines = lines_of(figure)
    assert lines["linear"].get_xydata().tolist() == [[0, 2.0], [8, 2.0], [8, 2.5], [16, 2.5]]
    searched = np.asarray(lines["searched"].get_xydata())
    assert searched[[0, 1, 3, 4]].tolist() == [[0, 1.5], [8, 1.5], [24, 3.0], [32, 3.0]]
    assert np.isnan(searched[2]).all()
    assert legend_of(figure) == ["linear", "searched"]
