"""Time and peak memory of ropesearch's scoring against transformers' own `model(input_ids, labels=input_ids).loss`.

    python -m benchmarks.score_cost [OUT] [--vocabularies N,...] [--lengths N,...] [--repeats N] [--limit-gib N]

One window of random tokens, a random Llama in float32, one core. Every measurement is a process of its own, forked when
the libraries and the model are there, so that its peak is its own; the two methods take turns, and whose turn is first
alternates. A process that grows past the limit is ended, and what it held then is reported. Ratios are of neighbouring
runs, ropesearch's over transformers'. Last, a window of 131,072 tokens in chunks. OUT (by default benchmarks/results)
gets score_cost.json and score_cost.md.
"""

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
        loaded = random_model(vocabulary)
        for length in arguments.lengths:
            cells.append(measured(loaded, length, None, arguments.repeats, METHODS, arguments.limit_gib))
            _write(arguments.out, cells, arguments.limit_gib)
    if not arguments.no_long:
        loaded = random_model(LONG_VOCABULARY, num_layers=1, num_heads=1)
        cells.append(measured(loaded, LONG_TOKENS, LONG_CHUNK_TOKENS, 1, METHODS[1:], arguments.limit_gib))
        _write(arguments.out, cells, arguments.limit_gib)


def _write(out: Path, cells: Sequence[Cell], limit_gib: float) -> None:
    """All that is measured so far."""
    print(_row(cells[-1]), flush=True)
    values = {"limit_gib": limit_gib, "versions": versions(), "cells": [asdict(cell) for cell in cells]}
    write_json(out / "score_cost.json", values)
    write_bytes(out / "score_cost.md", ("\n".join([*_HEADER, *map(_row, cells)]) + "\n").encode())


def measured(
    loaded: LoadedModel,
    length_tokens: int,
    chunk_tokens: int | None,
    num_repeats: int,
    methods: Sequence[str],
    limit_gib: float,
) -> Cell:
    """Run every method num_repeats times in turns; one that was ended at the limit is not tried again."""
    vocabulary = int(loaded.model.config.vocab_size)
    windows = random_windows(length_tokens, vocabulary)
    scoring = ScoringConfig(chunk_tokens=chunk_tokens)
    runs: list[Run] = []
    for repeat in range(num_repeats):
        for method in methods if repeat % 2 == 0 else methods[::-1]:
            if any(run.method == method and run.seconds is None for run in runs):
                continue
            runs.append(_run(method, loaded, windows, scoring, int(limit_gib * _GIB)))
    known = [run.nats_per_token for run in runs if run.nats_per_token is not None]
    if known and max(known) - min(known) > 1e-5 * max(known):
        raise RuntimeError(f"{vocabulary} x {length_tokens}: expected the same nats per token of both, got {known}")
    return Cell(
        vocabulary_tokens=vocabulary,
        length_tokens=length_tokens,
        chunk_tokens=chunk_tokens,
        num_layers=loaded.model.config.num_hidden_layers,
        num_heads=loaded.model.config.num_attention_heads,
        runs=runs,
    )


def nats_per_token(method: str, loaded: LoadedModel, windows: Windows, scoring: ScoringConfig) -> float:
    """The mean over the window's tokens, by either method."""
    if method == "ropesearch":
        return score_windows(loaded, windows, scoring).nats_per_token
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    with torch.inference_mode():
        return float(loaded.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)


def random_model(vocabulary_tokens: int, num_layers: int = 2, num_heads: int = 2) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_tokens,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
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


def _run(method: str, loaded: LoadedModel, windows: Windows, scoring: ScoringConfig, limit_bytes: int) -> Run:
    """Fork, score in the child, and watch how it grows."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(_scored(method, loaded, windows, scoring)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    before = peak = _resident_bytes(child)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        peak = max(peak, _resident_bytes(child))
        if peak > limit_bytes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with os.fdopen(reading, "rb") as pipe:
        answer: dict[str, Any] = json.loads(pipe.read() or b"{}")
    if not answer and peak <= limit_bytes:
        raise RuntimeError(f"{method}: the process ended by itself, at {peak} bytes")
    stopped = {
        "seconds": None, "processor_seconds": None, "peak_bytes": peak, "own_bytes": peak - before,
        "nats_per_token": None,
    }  # fmt: skip
    return Run(method=method, **(answer or stopped))


def _scored(method: str, loaded: LoadedModel, windows: Windows, scoring: ScoringConfig) -> dict[str, Any]:
    nats_per_token(method, loaded, windows.cut(64), ScoringConfig())  # warms up
    before = _resident_bytes(os.getpid())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    begin = time.perf_counter(), time.process_time()
    nats = nats_per_token(method, loaded, windows, scoring)
    end = time.perf_counter(), time.process_time()
    peak = _status_bytes(os.getpid(), "VmHWM")
    return {
        "seconds": end[0] - begin[0],
        "processor_seconds": end[1] - begin[1],
        "peak_bytes": peak,
        "own_bytes": peak - before,
        "nats_per_token": nats,
    }


def _resident_bytes(process: int) -> int:
    return _status_bytes(process, "VmRSS")


def _status_bytes(process: int, name: str) -> int:
    """A figure of /proc/PROCESS/status, 0 once the process has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
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
