"""Time of ropesearch's scoring against transformers' own `model(input_ids, labels=input_ids)`, side by side.

`python -m benchmarks.score_speed [--repetitions N] [--windows N] [--length TOKENS] [--chunk TOKENS]` prints the seconds
of both, in turns, and the ratio of the medians (below 1: scoring is faster), by the clock and by processor time, which
a shared machine disturbs less.
The model is a randomly initialised Llama of 1.3 million parameters (at the default vocabulary), float32, on the CPU.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ropesearch.data.windows import Windows
from ropesearch.model.load import LoadedModel
from ropesearch.model.own import OwnTable
from ropesearch.rope.geometry import Geometry
from ropesearch.score.config import ScoringConfig
from ropesearch.score.scorer import score_windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=None)
    arguments = parser.parse_args()
    loaded = random_model(arguments.vocabulary)
    windows = random_windows(arguments.windows, arguments.length, arguments.vocabulary)
    config = ScoringConfig(chunk_tokens=arguments.chunk)
    seconds: dict[str, list[float]] = {"plain": [], "score": [], "plain cpu": [], "score cpu": []}
    for _ in range(arguments.repetitions + 1):
        begin = (time.perf_counter(), time.process_time())
        plain_nats = plain_loss(loaded, windows)
        middle = (time.perf_counter(), time.process_time())
        score = score_windows(loaded, windows, config)
        end = (time.perf_counter(), time.process_time())
        for index, suffix in enumerate(("", " cpu")):
            seconds["plain" + suffix].append(middle[index] - begin[index])
            seconds["score" + suffix].append(end[index] - middle[index])
    for name, values in seconds.items():
        print(f"{name + ':':10} " + " ".join(f"{value:.3f}" for value in values[1:]) + " s")  # the first round warms up
    print(f"nats per token: plain {plain_nats:.7f}, score {score.nats_per_token:.7f}")
    for suffix, what in (("", "wall"), (" cpu", "processor")):
        plain, own = (statistics.median(seconds[name + suffix][1:]) for name in ("plain", "score"))
        print(f"{what} time, {torch.get_num_threads()} threads: ratio score / plain {own / plain:.3f}")


def plain_loss(loaded: LoadedModel, windows: Windows) -> float:
    """Mean nats per token of the windows by the model's own loss, one window a forward."""
    losses = []
    with torch.inference_mode():
        for row in windows.token_ids:
            input_ids = torch.from_numpy(row.astype(np.int64))[None]
            losses.append(float(loaded.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss))
    return statistics.fmean(losses)


def random_model(vocabulary_tokens: int) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_tokens,
        hidden_size=128,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    geometry = Geometry(model_type="llama", head_dim=64, rotary_dim=64, original_length=256, rope_theta=10000.0)
    return LoadedModel(
        model=model,
        tokenizer=None,
        geometry=geometry,
        own=OwnTable(geometry, config),
        folder=Path(),
        dtype="float32",
        attention="sdpa",
        device="cpu",
    )


def random_windows(num_windows: int, length_tokens: int, vocabulary_tokens: int) -> Windows:
    token_ids = np.random.default_rng(0).integers(vocabulary_tokens, size=(num_windows, length_tokens), dtype=np.int32)
    return Windows(
        split="search",
        length_tokens=length_tokens,
        token_ids=token_ids,
        documents=tuple(f"random {index}" for index in range(num_windows)),
        has_bos=False,
    )


if __name__ == "__main__":
    main()
