"""Which causal language models of the installed transformers ropesearch serves: every one of them, as a tiny model.

    python -m benchmarks.architectures [OUT]

About ten minutes on two cores. OUT (by default benchmarks/results) gets architectures.json and architectures.md. For
each model type a tiny random model is built, saved, loaded and proven; its logits under a regime are compared with
those of transformers' own longrope model of the same weights; and a written checkpoint folder is loaded by transformers
alone and compared again (tests/walk.py).
"""

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

import transformers

from ropesearch.files import write_bytes, write_json
from tests import walk


def table(rows: list[walk.Row], version: str) -> str:
    """The rows as a markdown page."""
    counts = walk.counts(rows)
    lines = [
        f"Causal language models of transformers {version}: "
        + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)),
        "",
        "| model type | state | layout of cos and sin | tables | compared with, or reason |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.state != walk.WORKS, row.state, row.model_type)):
        types = f" ({', '.join(row.layer_types)} rescaled)" if row.layer_types else ""
        tables = f"{row.num_tables}{types}" if row.num_tables else ""
        text = (row.reason or row.reference).replace("|", "/")
        lines.append(f"| {row.model_type} | {row.state} | {row.layout} | {tables} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Walk, show each row as it comes, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", default="benchmarks/results", help="folder for the results")
    out = Path(parser.parse_args().out)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = walk.walk_all(Path(folder), lambda row: print(row.state, row.model_type, row.reason, file=sys.stderr))
    version = transformers.__version__
    write_json(out / "architectures.json", {"transformers": version, "rows": [walk.to_json(row) for row in rows]})
    write_bytes(out / "architectures.md", table(rows, version).encode())
    print(walk.counts(rows))


if __name__ == "__main__":
    main()
