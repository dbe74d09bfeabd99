"""What scoring, gradient steps and fine-tuning cost on an accelerator: a random 1B-shaped Llama, 32k and 128k tokens.

    python -m benchmarks.accelerator [OUT] [--small]

Meant for under eight minutes on one GPU of 80 GiB or more. For each length: seconds of one scored window, of one
gradient step and of one fine-tuning step on one row (medians of three, after one to warm up), tokens a second, the
share of the device's measured matrix product rate that the model's products and attention come to (for fine-tuning
without the recomputation: model FLOPs utilisation), and peak memory; of fine-tuning the loss at each step too, which
has to fall, as the row stays the same. Products are in bfloat16; weights of fine-tuning are float32. --small is
a tiny model on whatever device there is, to try the script. OUT gets accelerator.json and accelerator.md.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropesearch.data.windows import Windows
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.rope.methods import yarn
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import recomputed, window_gradient
from ropesearch.score.scorer import score_windows
from ropesearch.train.loop import BETAS
from ropesearch.train.loss import RowLoss

NUM_TIMES = 3
ORIGINAL_LENGTH = 8192


def model_config(small: bool) -> LlamaConfig:
    """The shape of Llama 3.2 1B, or a tiny one."""
    hidden, layers, heads, vocabulary = (64, 2, 2, 512) if small else (2048, 16, 32, 128256)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=hidden // heads,
        max_position_embeddings=ORIGINAL_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )


def random_model(folder: Path, small: bool) -> LoadedModel:
    """A checkpoint of random weights, written and loaded as any other."""
    torch.manual_seed(0)
    config = model_config(small)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1").save_pretrained(folder)
    return load_model(ModelConfig(path=str(folder), dtype=DType.bfloat16))


def forward_flops(config: LlamaConfig, num_tokens: int) -> float:
    """Floating-point operations of one forward pass: 2 for each weight and token, and causal attention."""
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    weights = config.num_hidden_layers * (
        2 * hidden * heads + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    )
    head = hidden * config.vocab_size
    attention = config.num_hidden_layers * 2 * heads * num_tokens  # q k and p v over half of the square, times 2
    return float(num_tokens) * (2 * (weights + head) + attention)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """The median of NUM_TIMES, after one to warm up."""
    times = []
    for _ in range(1 + NUM_TIMES):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def product_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large bfloat16 matrix product."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


def measured(loaded: LoadedModel, length: int, rate: float) -> dict[str, Any]:
    """Seconds, tokens a second, share of the product rate and peak memory of a score and of a gradient step."""
    device = torch.device(loaded.device)
    vocabulary = loaded.model.config.vocab_size
    token_ids = np.random.default_rng(0).integers(vocabulary, size=(1, length), dtype=np.int32)
    windows = Windows(split="search", length_tokens=length, token_ids=token_ids, documents=("random",), has_bos=False)
    weights = np.full(length, 1 / (length - 1))
    flops = forward_flops(loaded.model.config, length)
    row: dict[str, Any] = {"length": length}
    with installed(loaded, yarn(loaded.geometry, length)):
        for name, passes, work in (
            ("score", 1, lambda: score_windows(loaded, windows, ScoringConfig())),
            # Forward, recomputation, and the derivatives by activations alone: weights are frozen.
            ("gradient", 3, lambda: window_gradient(loaded, token_ids[0], weights, 0)),
        ):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            seconds = seconds_of(work, device)
            row[name] = {
                "seconds": seconds,
                "tokens_per_second": length / seconds,
                "share_of_product_rate": passes * flops / seconds / rate,
                "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            }
    return row


def fine_tuned(loaded: LoadedModel, length: int, rate: float) -> dict[str, Any]:
    """The figures of steps on one long row, and the loss in nats per token at each."""
    device = torch.device(loaded.device)
    model: Any = loaded.model
    model.requires_grad_(True)
    token_ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    positions = torch.arange(length, device=device)[None]
    is_scored = positions > 0
    loss = RowLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=BETAS, weight_decay=0.0)
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16), recomputed(model):
            nats, _ = loss(token_ids, positions, is_scored)
            (nats / (length - 1)).backward()
        optimizer.step()
        losses.append(float(nats.detach()) / (length - 1))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with installed(loaded, yarn(loaded.geometry, length)):
        seconds = seconds_of(step, device)
    return {
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "share_of_product_rate": 3 * forward_flops(model.config, length) / seconds / rate,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "losses": losses,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as markdown."""
    lines = [
        "| tokens | work | seconds | tokens a second | of the product rate | peak GiB |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        for name in ("score", "gradient", "fine-tuning"):
            of = row[name]
            peak = "" if of["peak_bytes"] is None else f"{of['peak_bytes'] / 2**30:.1f}"
            lines.append(
                f"| {row['length']:,} | {name} | {of['seconds']:.2f} | {of['tokens_per_second']:,.0f} | "
                f"{of['share_of_product_rate']:.2f} | {peak} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Scores and gradient steps on an accelerator.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/accelerator"), metavar="OUT")
    parser.add_argument("--small", action="store_true", help="a tiny model and short windows, to try the script")
    options = parser.parse_args()
    lengths = (16384, 32768) if options.small else (32768, 131072)
    try:
        with tempfile.TemporaryDirectory() as folder:
            loaded = random_model(Path(folder), options.small)
            rate = product_rate(torch.device(loaded.device))
            rows = [measured(loaded, length, rate) for length in lengths]
            del loaded
            loaded = load_model(ModelConfig(path=folder, dtype=DType.float32))
            for row in rows:
                row["fine-tuning"] = fine_tuned(loaded, row["length"], rate)
    except RopesearchError as error:
        print(f"accelerator: {error}", file=sys.stderr)
        return error.exit_code
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"device": device, "product_flops_per_second": rate, "versions": versions()}
    write_json(options.out / "accelerator.json", {**about, "rows": rows})
    write_bytes(options.out / "accelerator.md", table(rows).encode())
    print(table(rows), end="")
    for row in rows:
        losses = ", ".join(f"{loss:.3f}" for loss in row["fine-tuning"]["losses"])
        print(f"fine-tuning at {row['length']:,} tokens: nats per token {losses}")
    return 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
