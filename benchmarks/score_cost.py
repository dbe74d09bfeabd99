"""Time and peak memory of ropesearch's scoring against transformers' own `model(input_ids, labels=input_ids).loss`.

    python -m benchmarks.score_cost [OUT] [--vocabularies N,...] [--lengths N,...] [--repeats N] [--limit-gib N]

One window of random tokens, a random Llama in float32, one core. Every measurement is a process of its own, so that its
peak is its own; the two methods take turns, and whose turn is first alternates. A process that grows past the limit is
ended, and what it held then is reported. Ratios are of neighbouring runs, ropesearch's over transformers'. Last, a
window of 131,072 tokens in chunks. OUT (by default benchmarks/results) gets score_cost.json and score_cost.md.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ropesearch.data.windows import Windows
from ropesearch.files import write_bytes, write_json
from ropesearch.model.load import LoadedModel
from ropesearch.model.own import OwnTable
from ropesearch.rope.geometry import Geometry
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.scorer import score_windows

METHODS = ("transformers", "ropesearch")
LONG_TOKENS, LONG_CHUNK_TOKENS, LONG_VOCABULARY = 131_072, 1024, 2048
_GIB = 1 << 30
_HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a random model."""

    vocabulary_tokens: int
    num_layers: int = 2
    num_heads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process. `peak_bytes` is of the process, `own_bytes` what the scoring added to what was there before it.

    Where it was ended at the limit, there are no seconds, and the bytes are those it had reached.
    """

    method: str
    seconds: float | None
    processor_seconds: float | None
    peak_bytes: int
    own_bytes: int
    nats_per_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All runs on one vocabulary and length, in the order in which they ran."""

    vocabulary_tokens: int
    length_tokens: int
    chunk_tokens: int | None
    num_layers: int
    num_heads: int
    runs: list[Run]

    def of(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.method == method]

    def ratios(self, value: Callable[[Run], float | None]) -> list[float]:
        """ropesearch's value over transformers', by pairs of neighbours; empty where either was ended."""
        pairs = zip(self.of("ropesearch"), self.of("transformers"), strict=False)
        both = [(value(own), value(plain)) for own, plain in pairs if own.seconds and plain.seconds]
        return [own / plain for own, plain in both if own is not None and plain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--vocabularies", type=_numbers, default=[2048, 32_768, 128_256])
    parser.add_argument("--lengths", type=_numbers, default=[2048, 8192, 32_768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=12.0)
    parser.add_argument("--no-long", action="store_true", help="leave the window of 131,072 tokens out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    for vocabulary in arguments.vocabularies:
        for length in arguments.lengths:
            shape = Shape(vocabulary_tokens=vocabulary)
            cells.append(measured(shape, length, None, arguments.repeats, METHODS, arguments.limit_gib))
            _write(arguments.out, cells, arguments.limit_gib)
    if not arguments.no_long:
        shape = Shape(vocabulary_tokens=LONG_VOCABULARY, num_layers=1, num_heads=1)
        cells.append(measured(shape, LONG_TOKENS, LONG_CHUNK_TOKENS, 1, METHODS[1:], arguments.limit_gib))
        _write(arguments.out, cells, arguments.limit_gib)


def _write(out: Path, cells: Sequence[Cell], limit_gib: float) -> None:
    """All that is measured so far."""
    print(_row(cells[-1]), flush=True)
    values = {"limit_gib": limit_gib, "versions": versions(), "cells": [asdict(cell) for cell in cells]}
    write_json(out / "score_cost.json", values)
    write_bytes(out / "score_cost.md", ("\n".join([*_HEADER, *map(_row, cells)]) + "\n").encode())


def measured(
    shape: Shape,
    length_tokens: int,
    chunk_tokens: int | None,
    num_repeats: int,
    methods: Sequence[str],
    limit_gib: float,
) -> Cell:
    """Run every method num_repeats times in turns; one that was ended at the limit is not tried again."""
    runs: list[Run] = []
    for repeat in range(num_repeats):
        for method in methods if repeat % 2 == 0 else methods[::-1]:
            if any(run.method == method and run.seconds is None for run in runs):
                continue
            runs.append(_run(method, shape, length_tokens, chunk_tokens, int(limit_gib * _GIB)))
    known = [run.nats_per_token for run in runs if run.nats_per_token is not None]
    if known and max(known) - min(known) > 1e-5 * max(known):
        raise RuntimeError(f"{shape} x {length_tokens}: expected the same nats per token of both, got {known}")
    return Cell(
        length_tokens=length_tokens,
        chunk_tokens=chunk_tokens,
        runs=runs,
        **asdict(shape),
    )


def nats_per_token(method: str, loaded: LoadedModel, windows: Windows, scoring: ScoringConfig) -> float:
    """The mean over the window's tokens, by either method."""
    if method == "ropesearch":
        return score_windows(loaded, windows, scoring).nats_per_token
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    with torch.inference_mode():
        return float(loaded.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)


def random_model(shape: Shape) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary_tokens,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=LONG_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    geometry = Geometry(
        model_type="llama", head_dim=_HEAD_DIM, rotary_dim=_HEAD_DIM, original_length=LONG_TOKENS, rope_theta=10000.0
    )
    return LoadedModel(
        model=LlamaForCausalLM(config).eval().requires_grad_(False),
        tokenizer=None,
        geometry=geometry,
        own=OwnTable(geometry, config),
        folder=Path(),
        dtype="float32",
        attention="sdpa",
        device="cpu",
    )


def random_windows(length_tokens: int, vocabulary_tokens: int) -> Windows:
    token_ids = np.random.default_rng(0).integers(vocabulary_tokens, size=(1, length_tokens), dtype=np.int32)
    return Windows("search", length_tokens, token_ids, ("random",), has_bos=False)


def _run(method: str, shape: Shape, length_tokens: int, chunk_tokens: int | None, limit_bytes: int) -> Run:
    """Score in a process of its own, and watch how it grows."""
    context = multiprocessing.get_context("spawn")  # a forked process may wait for ever for torch's threads
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_scored, args=(method, shape, length_tokens, chunk_tokens, writing))
    child.start()
    writing.close()
    before = peak = 0
    answer: dict[str, Any] = {}
    while child.is_alive() or reading.poll():
        if child.pid is not None:
            peak = max(peak, _resident_bytes(child.pid))
        if peak > limit_bytes:
            child.kill()
            break
        try:
            if reading.poll(0.01):
                message = reading.recv()
                before, answer = (message, answer) if isinstance(message, int) else (before, message)
        except EOFError:
            break
    child.join()
    if not answer and peak <= limit_bytes:
        raise RuntimeError(f"{method}: the process ended by itself, at {peak} bytes")
    stopped = {
        "seconds": None, "processor_seconds": None, "peak_bytes": peak, "own_bytes": peak - before,
        "nats_per_token": None,
    }  # fmt: skip
    return Run(method=method, **(answer or stopped))


def _scored(method: str, shape: Shape, length_tokens: int, chunk_tokens: int | None, writing: Connection) -> None:
    """The process: sends what it holds before it scores, in bytes, and then the fields of a Run."""
    torch.set_num_threads(1)
    loaded = random_model(shape)
    windows = random_windows(length_tokens, shape.vocabulary_tokens)
    nats_per_token(method, loaded, windows.cut(64), ScoringConfig())  # warms up
    before = _resident_bytes(os.getpid())
    writing.send(before)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    begin = time.perf_counter(), time.process_time()
    nats = nats_per_token(method, loaded, windows, ScoringConfig(chunk_tokens=chunk_tokens))
    end = time.perf_counter(), time.process_time()
    peak = _status_bytes(os.getpid(), "VmHWM")
    writing.send(
        {
            "seconds": end[0] - begin[0],
            "processor_seconds": end[1] - begin[1],
            "peak_bytes": peak,
            "own_bytes": peak - before,
            "nats_per_token": nats,
        }
    )


def _resident_bytes(process: int) -> int:
    return _status_bytes(process, "VmRSS")


def _status_bytes(process: int, name: str) -> int:
    """A figure of /proc/PROCESS/status, 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_HEADER = (
    "| vocabulary | length | microseconds a token: transformers | ropesearch | ratio (range) | ratio of processor time "
    "(range) | peak GiB: transformers | ropesearch | added by scoring, GiB: transformers | ropesearch |",
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def _row(cell: Cell) -> str:
    plain, own = cell.of("transformers"), cell.of("ropesearch")
    length = f"{cell.length_tokens}" + (f" (chunks of {cell.chunk_tokens})" if cell.chunk_tokens else "")
    columns = [
        str(cell.vocabulary_tokens),
        length,
        *(_microseconds(runs, cell.length_tokens) for runs in (plain, own)),
        _ratio(cell.ratios(lambda run: run.seconds)),
        _ratio(cell.ratios(lambda run: run.processor_seconds)),
        *(_gib(runs, lambda run: run.peak_bytes) for runs in (plain, own)),
        *(_gib(runs, lambda run: run.own_bytes) for runs in (plain, own)),
    ]
    return f"| {' | '.join(columns)} |"


def _microseconds(runs: Sequence[Run], length_tokens: int) -> str:
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return f"{1e6 * statistics.median(seconds) / length_tokens:.0f}" if seconds else "-"


def _ratio(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def _gib(runs: Sequence[Run], value: Callable[[Run], int]) -> str:
    if not runs:
        return "-"
    stopped = any(run.seconds is None for run in runs)
    return ("ended at " if stopped else "") + f"{max(value(run) for run in runs) / _GIB:.2f}"


if __name__ == "__main__":
    main()
