"""ropesearch/evaluate/perplexity.py: which regime is scored where, on which windows, and what the rows hold."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ropesearch.data.windows import Windows
from ropesearch.errors import InputError, ScoringError
from ropesearch.evaluate.perplexity import Evaluation, comparison_regimes, perplexity_table
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score
from ropesearch.score.scorer import score_windows
from tests import toys

TARGET = 128  # the toy's original_length is 64
SCORING = ScoringConfig(num_blocks=4)


def scorer(loaded: LoadedModel) -> Callable[[Regime, Windows], Score]:
    def score(regime: Regime, windows: Windows) -> Score:
        with installed(loaded, regime):
            return score_windows(loaded, windows, SCORING)

    return score


@pytest.fixture
def windows() -> Windows:
    token_ids = np.random.default_rng(7).integers(2, toys.VOCABULARY_TOKENS, (3, TARGET)).astype(np.int32)
    return Windows("held_out", TARGET, token_ids, ("a", "b", "c"), False)


def searched_regimes() -> tuple[Regime, Regime]:
    short = Regime(name="short", max_length=64, factors=(1.0,) * 8, attention_factor=1.1)
    long = Regime(name="long", max_length=TARGET, factors=tuple(np.linspace(1, 2.2, 8)), retained_tokens=4)
    return short, long


def test_every_row_is_its_regimes_loss(toy_loaded: LoadedModel, windows: Windows) -> None:
    """The rows against transformers' own loss under each method's regime, written out here by length."""
    geometry = toy_loaded.geometry
    short, long = searched_regimes()
    seen: list[Evaluation] = []
    rows = perplexity_table(
        scorer(toy_loaded),
        windows,
        comparison_regimes(geometry, TARGET, [long, short]),
        [64, 80, TARGET],
        SCORING,
        on_row=seen.append,
    )
    assert seen == rows
    names = ["unscaled", "linear", "ntk", "dynamic_ntk", "yarn", "searched"]
    assert [(row.method, row.length) for row in rows] == [(name, length) for length in (64, 80, 128) for name in names]
    expected = {
        "unscaled": lambda length: methods.identity(geometry, TARGET),
        "linear": lambda length: methods.linear(geometry, TARGET),
        "ntk": lambda length: methods.ntk(geometry, TARGET),
        "dynamic_ntk": lambda length: methods.dynamic_ntk(geometry, TARGET, length),
        "yarn": lambda length: methods.yarn(geometry, TARGET),
        "searched": lambda length: short if length == 64 else long,
    }
    for row in rows:
        with installed(toy_loaded, expected[row.method](row.length)), torch.no_grad():
            for window in range(3):
                input_ids = torch.from_numpy(windows.token_ids[window : window + 1, : row.length].astype(np.int64))
                loss = float(toy_loaded.model(input_ids=input_ids, labels=input_ids).loss)
                assert row.window_nats[window] / (row.length - 1) == pytest.approx(loss, abs=1e-5)
    # No two methods agree where they differ, so a row cannot stand for another.
    at_80 = [round(row.nats, 3) for row in rows if row.length == 80]
    assert len(set(at_80)) == len(at_80)


def test_a_row_sums_windows_and_blocks(toy_loaded: LoadedModel, windows: Windows) -> None:
    regime = methods.linear(toy_loaded.geometry, TARGET)
    (row,) = perplexity_table(scorer(toy_loaded), windows, {"pi": lambda length: regime}, [100], SCORING)
    with installed(toy_loaded, regime):
        score = score_windows(toy_loaded, windows.cut(100), SCORING)
    assert (row.method, row.measure, row.split, row.length) == ("pi", "perplexity", "held_out", 100)
    assert (row.nats, row.tokens) == (score.total_nats, 3 * 99)
    assert row.block_edges == (0, 25, 50, 75, 100)
    assert row.block_tokens == (3 * 24, 75, 75, 75)
    assert row.window_tokens == (99, 99, 99)
    assert row.block_nats == pytest.approx(score.nats[0] + score.nats[1] + score.nats[2], rel=1e-12)
    assert math.fsum(row.block_nats) == pytest.approx(row.nats, rel=1e-12)
    assert math.fsum(row.window_nats) == pytest.approx(row.nats, rel=1e-12)
    assert row.perplexity == pytest.approx(math.exp(row.nats / 297), rel=1e-12)


def test_json_of_a_row_is_strict_and_complete(toy_loaded: LoadedModel, windows: Windows) -> None:
    (row,) = perplexity_table(
        scorer(toy_loaded), windows, {"x": lambda length: methods.identity(toy_loaded.geometry, TARGET)}, [64], SCORING
    )
    read = json.loads(json.dumps(row.to_json(), allow_nan=False))
    assert list(read)[:6] == ["method", "measure", "split", "length", "nats", "tokens"]
    assert read == {
        "method": "x",
        "measure": "perplexity",
        "split": "held_out",
        "length": 64,
        "nats": row.nats,
        "tokens": row.tokens,
        "block_edges": list(row.block_edges),
        "block_nats": list(row.block_nats),
        "block_tokens": list(row.block_tokens),
        "window_nats": list(row.window_nats),
        "window_tokens": list(row.window_tokens),
    }


def test_a_failure_is_no_row(toy_loaded: LoadedModel, windows: Windows) -> None:
    def failing(regime: Regime, cut: Windows) -> Score:
        if cut.length_tokens == 96:
            raise ScoringError("out of memory with chunks of 96 tokens: x")
        return scorer(toy_loaded)(regime, cut)

    regimes = {"unscaled": lambda length: methods.identity(toy_loaded.geometry, TARGET)}
    failures: list[tuple[str, int, str]] = []
    rows = perplexity_table(
        failing,
        windows,
        regimes,
        [64, 96, 128],
        SCORING,
        on_failure=lambda method, length, error: failures.append((method, length, str(error))),
    )
    assert [row.length for row in rows] == [64, 128]
    assert failures == [("unscaled", 96, "unscaled at 96 tokens: out of memory with chunks of 96 tokens: x")]
    with pytest.raises(ScoringError, match=r"^unscaled at 96 tokens: out of memory"):
        perplexity_table(failing, windows, regimes, [96], SCORING)


@pytest.mark.parametrize(
    ("lengths", "scoring", "message"),
    [
        ([], SCORING, "at least one length"),
        ([64, 64], SCORING, "each once"),
        ([64, 129], SCORING, "from 2 to 128 tokens"),
        ([1], SCORING, "from 2 to 128 tokens"),
        ([100, 64], ScoringConfig(last_tokens=64), "last_tokens"),
        ([64, 128], SCORING, "long: expected a regime that serves 128 tokens, got one for 100"),
    ],
)
def test_all_is_checked_before_anything_is_scored(
    toy_loaded: LoadedModel,
    windows: Windows,
    lengths: list[int],
    scoring: ScoringConfig,
    message: str,
) -> None:
    with pytest.raises(InputError, match=message):
        perplexity_table(
            lambda regime, cut: pytest.fail("scored"),
            windows,
            {"long": lambda length: methods.linear(toy_loaded.geometry, 100)},
            lengths,
            scoring,
        )


def test_searched_regimes_serve_up_to_their_longest(toy_loaded: LoadedModel) -> None:
    short, long = searched_regimes()
    searched = comparison_regimes(toy_loaded.geometry, TARGET, [short, long])["searched"]
    assert [searched(length).name for length in (2, 64, 65, 128)] == ["short", "short", "long", "long"]
    with pytest.raises(InputError, match="at most the 128 tokens that the result serves, got 129"):
        searched(129)
