"""ropesearch/evaluate/table.py: the text, character by character."""

import math
from dataclasses import replace

from ropesearch.evaluate.perplexity import Evaluation
from ropesearch.evaluate.table import render_table


def row(method: str, length: int, perplexities: tuple[float, ...]) -> Evaluation:
    """A row of 2 windows whose blocks (of 10 tokens each and window) have these perplexities."""
    nats = tuple(20 * math.log(value) for value in perplexities)
    return Evaluation(
        method=method,
        split="held_out",
        length=length,
        nats=sum(nats),
        tokens=20 * len(nats),
        block_edges=tuple(range(0, length + 1, length // len(nats))),
        block_nats=nats,
        block_tokens=(20,) * len(nats),
        window_nats=(sum(nats) / 2,) * 2,
        window_tokens=(10 * len(nats),) * 2,
    )


def test_both_tables() -> None:
    rows = [
        row("unscaled", 512, (4.0, 4.0)),
        row("searched", 512, (3.0, 3.0)),
        row("unscaled", 2048, (4.0, 360000.0)),
        row("searched", 2048, (2.0, 8.0)),
        row("yarn", 2048, (2.5, 10.0)),
    ]
    assert render_table(rows) == "\n".join(
        [
            "perplexity by length in tokens (held_out, 2 documents)",
            "method      512   2048",
            "unscaled  4.000   1200",
            "searched  3.000  4.000",
            "yarn          -  5.000",
            "",
            "perplexity by position at 2048 tokens",
            "method    0-1023  1024-2047",
            "unscaled   4.000     360000",
            "searched   2.000      8.000",
            "yarn       2.500     10.000",
        ]
    )


def test_one_block_needs_one_table() -> None:
    text = render_table([row("ntk", 64, (2.0,))])
    assert text == "perplexity by length in tokens (held_out, 2 documents)\nmethod     64\nntk     2.000"


def test_blocks_without_tokens_show_nothing() -> None:
    whole = row("ntk", 64, (2.0, 4.0))
    nats = whole.block_nats[1]
    partial = replace(whole, nats=nats, tokens=20, block_nats=(0.0, nats), block_tokens=(0, 20))
    assert render_table([partial]).splitlines()[-1] == "ntk        -  4.000"


def test_no_rows() -> None:
    assert render_table([]) == "no method could be scored"
