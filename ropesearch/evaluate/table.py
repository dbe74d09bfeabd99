"""Evaluation rows as plain text for a terminal."""

from collections.abc import Sequence
from itertools import pairwise

from ropesearch.evaluate.perplexity import Evaluation
from ropesearch.score.score import perplexity


def render_table(rows: Sequence[Evaluation], last_tokens: int | None = None) -> str:
    """Perplexity of each method by length, then of each by position at the longest length; "-" where there is none.

    `rows` are one split's, scored on the `last_tokens` of each window where that is given; methods and lengths are in
    the order of their first row. No trailing newline.
    """
    if not rows:
        return "no method could be scored"
    methods = list(dict.fromkeys(row.method for row in rows))
    lengths = sorted({row.length for row in rows})
    cells = {(row.method, row.length): row for row in rows}
    by_length = [[method, *(_number(cells.get((method, length))) for length in lengths)] for method in methods]
    first = rows[0]
    title = f"perplexity by length in tokens{of_last(last_tokens)} ({first.split}, {len(first.window_nats)} documents)"
    parts = [title, aligned([["method", *map(str, lengths)], *by_length])]
    longest = [row for row in rows if row.length == lengths[-1]]
    edges = longest[0].block_edges
    if len(edges) > 2:
        header = ["method", *(f"{start}-{stop - 1}" for start, stop in pairwise(edges))]
        by_position = [[row.method, *map(perplexity_text, row.block_nats, row.block_tokens)] for row in longest]
        parts += ["", f"perplexity by position at {lengths[-1]} tokens", aligned([header, *by_position])]
    return "\n".join(parts)


def of_last(last_tokens: int | None) -> str:
    """What a heading adds where only so many last tokens of each window were scored."""
    return "" if last_tokens is None else f", of the last {last_tokens} of each window"


def _number(row: Evaluation | None) -> str:
    return "-" if row is None else perplexity_text(row.nats, row.tokens)


def perplexity_text(nats: float, tokens: int) -> str:
    """A perplexity with three decimals, or four digits from 1,000 on; "-" where nothing was scored."""
    if not tokens:
        return "-"
    value = perplexity(nats, tokens)
    if value < 1000:
        return f"{value:.3f}"
    return f"{value:.0f}" if value < 1e6 else f"{value:.2e}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
