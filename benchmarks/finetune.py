"""What the mixed fine-tuning is worth on the demo, against its controls and with its parts left out.

    python -m benchmarks.finetune [OUT] [--seeds 0 1 2] [--variants NAME ...] [--only-write]

The demo is searched at ratio 8 for each seed, then fine-tuned with `training=small` in each of the variants below, all
on the same number of tokens. Measured are held-out perplexity at 256 and 2,048 tokens, each under the regime for that
length, and 200 needles at uniform depths at both lengths (the share of answers that are right). About ten minutes for
each variant and seed on one core; stopped and started again it goes on where it was. OUT is by default runs/finetune;
benchmarks/results/finetune.{json,md} are written with what is there.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropesearch import finetuning
from ropesearch.artifact.config import WeightsMode
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.load import load_unscaled
from ropesearch.artifact.schema import RopeConfig
from ropesearch.config import FinetuneJob, SearchJob, compose
from ropesearch.data.config import CorpusConfig
from ropesearch.data.mixture import SHORT, MicroBatch, Mixture
from ropesearch.data.windows import build_windows, needle_windows
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.model.install import installed
from ropesearch.pipeline import search
from ropesearch.report import AFTER, BEFORE
from ropesearch.rope.methods import linear, yarn
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.scorer import score_windows

RESULTS = Path(__file__).parent / "results"
TARGET_LENGTH = 2048
NUM_NEEDLES = 200
SEEDS = (0, 1, 2)
# The table that is fine-tuned, further words of the job, and what it is.
VARIANTS: dict[str, tuple[str, Sequence[str], str]] = {
    "default": ("searched", (), "the searched table, short rows and long ones, some of these with a needle"),
    "yarn": ("yarn", (), "YaRN's table, the same rows"),
    "linear": ("linear", (), "linear interpolation, the same rows"),
    "no needles": ("searched", ("mixture.needle_share=0",), "as default, but prose alone"),
    "long rows alone": ("searched", ("mixture.shares=[0,1]",), "the searched table, no short rows"),
    "control": (
        "searched",
        ("mixture.shares=[1,0]",),
        "the base trained on as many tokens in short rows alone, then extended by the searched table",
    ),
    "no document masks": (
        "searched",
        (),
        "as default, but the short documents of a row see each other, at positions that run on, under the plain table",
    ),
}


class Unmasked(Mixture):
    """Short rows as one sequence, as trainers have them that pack without masks."""

    def batch(self, step: int, num_rows: int) -> tuple[MicroBatch, ...]:
        """As the mixture's, but for the short rows."""
        return tuple(map(_in_one, super().batch(step, num_rows)))


def _in_one(micro: MicroBatch) -> MicroBatch:
    if micro.regime != SHORT:
        return micro
    token_ids = micro.token_ids.reshape(1, -1)
    is_scored = np.ones(token_ids.shape, dtype=np.bool_)
    is_scored[0, 0] = False
    return dataclasses.replace(
        micro,
        token_ids=token_ids,
        position_ids=np.arange(token_ids.shape[1], dtype=np.int64)[None],
        is_scored=is_scored,
        num_scored=int(is_scored.sum()),
    )


def searched_folder(out: Path, seed: int) -> Path:
    """The checkpoint folder of the search; it is begun, gone on with, or read."""
    outcome = search(
        SearchJob(
            model=ModelConfig(path=str(out / "demo" / "model")),
            corpus=CorpusConfig(path=str(out / "demo" / "texts")),
            target_length=TARGET_LENGTH,
            seed=seed,
            run=str(out / f"search-{seed}"),
        )
    )
    return outcome.checkpoint_folder


def with_table(out: Path, table: str, seed: int) -> Path:
    """A folder like the searched one, with another table."""
    searched = searched_folder(out, seed)
    if table == "searched":
        return searched
    rope_config = RopeConfig.read(searched)
    make = {"linear": linear, "yarn": yarn}[table]
    regime = make(rope_config.geometry, TARGET_LENGTH)
    folder = out / f"{table}-{seed}"
    changed = dataclasses.replace(rope_config, regimes=(regime,))
    write_checkpoint_folder(out / "demo" / "model", folder, changed, WeightsMode.copy)
    return folder


def fine_tuned(out: Path, variant: str, seed: int) -> RopeConfig:
    """The result of one fine-tuning; it is begun, gone on with, or read."""
    table, more, _ = VARIANTS[variant]
    words = [f"corpus.path={out / 'demo' / 'texts'}", "training=small", f"seed={seed}", *more]
    job: FinetuneJob = compose(
        "finetune", str(with_table(out, table, seed)), [*words, f"run={run_of(out, variant, seed)}"]
    )
    finetuning.Mixture = Unmasked if variant == "no document masks" else Mixture  # type: ignore[misc]
    return finetuning.finetune(job).rope_config


def run_of(out: Path, variant: str, seed: int) -> Path:
    return out / f"{variant.replace(' ', '-')}-tuned-{seed}"


def needles_right(folder: Path, out: Path) -> dict[int, float]:
    """The share of needles that the model's most likely answer is right about, by length, under its regime."""
    rope_config = RopeConfig.read(folder)
    loaded = load_unscaled(folder, rope_config, device="cpu")
    corpus = CorpusConfig(path=str(out / "demo" / "texts"))
    held_out = build_windows(corpus, loaded.tokenizer, TARGET_LENGTH, 0, None)["held_out"]
    depths = [(index + 0.5) / NUM_NEEDLES for index in np.random.default_rng(0).permutation(NUM_NEEDLES)]
    right = {}
    for length in (rope_config.geometry.original_length, TARGET_LENGTH):
        needles = needle_windows(held_out.cut(length), loaded.tokenizer, depths, NUM_NEEDLES, 0)
        with installed(loaded, rope_config.regime_for(length)):
            answered = score_windows(loaded, needles, ScoringConfig()).answered
        right[length] = sum(map(bool, answered)) / NUM_NEEDLES
    return right


def measured(out: Path, variant: str, seed: int) -> dict[str, Any]:
    """The figures of one variant and seed, kept in OUT."""
    path = out / f"{run_of(out, variant, seed).name}.json"
    if not path.exists():
        rope_config = fine_tuned(out, variant, seed)
        rows = {(row["method"], row["length"]): row["nats"] / row["tokens"] for row in rope_config.evaluation}
        original_length = rope_config.geometry.original_length
        folder = run_of(out, variant, seed) / "checkpoint"
        right = needles_right(folder, out)
        training = rope_config.training or {}
        write_json(
            path,
            {
                "num_training_tokens": training["num_training_tokens"],
                "nats_per_token": {
                    name: {"before": rows[BEFORE, length], "after": rows[AFTER, length]}
                    for name, length in (("short", original_length), ("long", TARGET_LENGTH))
                },
                "needles_right": {"short": right[original_length], "long": right[TARGET_LENGTH]},
            },
        )
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def table_of(results: dict[str, dict[str, Any]]) -> str:
    """The figures as a table: medians over seeds and their range."""
    lines = [
        "| variant | seeds | perplexity at 256 before, after | at 2,048 before, after | needles right at 256, 2,048 |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, by_seed in results.items():
        cells = [variant, str(len(by_seed))]
        for length in ("short", "long"):
            values = [
                [float(np.exp(each["nats_per_token"][length][when])) for each in by_seed.values()]
                for when in ("before", "after")
            ]
            cells.append(", ".join(_with_range(each, ".2f") for each in values))
        shares = [[each["needles_right"][length] for each in by_seed.values()] for length in ("short", "long")]
        cells.append(", ".join(_with_range(each, ".1%") for each in shares))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_range(values: Sequence[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    ends = [format(value, form) for value in (min(values), max(values))]
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="What the mixed fine-tuning is worth on the demo.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/finetune"), metavar="OUT")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--only-write", action="store_true", help="write the results with what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        write_demo(options.out / "demo")
        if not options.only_write:
            for seed in options.seeds:
                for variant in options.variants:
                    found = measured(options.out, variant, seed)
                    print(f"{variant}, seed {seed}: {json.dumps(found)}", flush=True)
    except RopesearchError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return error.exit_code
    results: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        for seed in SEEDS:
            path = options.out / f"{run_of(options.out, variant, seed).name}.json"
            if path.exists():
                results.setdefault(variant, {})[str(seed)] = json.loads(path.read_bytes())
    write_json(RESULTS / "finetune.json", {"results": results, "versions": versions()})
    text = table_of(results) + "\n" + "".join(f"- {name}: {what}\n" for name, (_, _, what) in VARIANTS.items())
    write_bytes(RESULTS / "finetune.md", text.encode())
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
