"""`python -m ropesearch.demo.train OUT_DIR [--seed 0]`: train the demo model on one CPU core, in about 20 minutes.

The same seed on the same kind of machine gives the same bytes, also when the run was stopped and started again: a
step's rows depend on the seed and the step only, and the rest of the state is in OUT_DIR/state.safetensors.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropesearch.demo.corpus import Corpus, load_addresses, load_plays, split
from ropesearch.demo.rows import ANSWER_WEIGHT, MIXTURE, ROW_TOKENS, RowMaker
from ropesearch.demo.tokenizer import NUM_SPECIAL, VOCABULARY_TOKENS, train_tokenizer
from ropesearch.errors import InputError, RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.seeding import stream

NUM_STEPS = 1200
NUM_WARMUP_STEPS = 100
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
NUM_THREADS = 1  # sums depend on it
LOG_STEPS = 50
SAVE_STEPS = 250


def model_config() -> LlamaConfig:
    """1.3 million parameters, 32 pairs."""
    return LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=128,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=ROW_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to zero at num_steps."""
    warm = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    return LEARNING_RATE * warm * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def train(
    corpus: Corpus, out: Path, seed: int, num_steps: int = NUM_STEPS
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train, or go on from what OUT/state.safetensors holds.

    Raises:
        InputError: OUT holds the state of a run with another seed or number of steps.
    """
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer(document.text for document in corpus.training)
    encoded = tokenizer([document.text for document in corpus.training], add_special_tokens=False)["input_ids"]
    documents = [np.array(ids, dtype=np.int64) for ids in encoded if len(ids) > ROW_TOKENS]
    maker = RowMaker(tokenizer, documents, tokenizer.bos_token_id, NUM_SPECIAL)

    torch.manual_seed(int(stream(seed, "demo.weights").integers(2**63)))
    model = LlamaForCausalLM(model_config()).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    run = {"seed": str(seed), "num_steps": str(num_steps)}
    state = out / "state.safetensors"
    first = _load_state(state, run, model, optimizer) if state.exists() else 0
    print(f"{sum(len(ids) for ids in documents)} training tokens, {model.num_parameters()} parameters, step {first}")
    started = time.monotonic()
    for step in range(first, num_steps):
        rows = maker.batch(MIXTURE, stream(seed, "demo.rows", step))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        input_ids, weights = torch.from_numpy(rows.input_ids), torch.from_numpy(rows.weights)[:, 1:]
        nats = _nats(model, input_ids)
        loss = (nats * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if (step + 1) % LOG_STEPS == 0:
            answers = weights == ANSWER_WEIGHT
            print(
                f"step {step + 1} seconds {time.monotonic() - started:.0f} loss {loss.item():.3f} "
                f"prose {nats[weights == 1.0].mean().item():.3f} answers {nats[answers].mean().item():.3f} "
                f"gradient {norm.item():.2f}",
                flush=True,
            )
        if (step + 1) % SAVE_STEPS == 0 or step + 1 == num_steps:
            _save_state(state, run, step + 1, model, optimizer)
    return model.eval(), tokenizer


def _nats(model: LlamaForCausalLM, input_ids: Tensor) -> Tensor:
    """float32 (rows, tokens - 1): of every token but the first."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    targets = input_ids[:, 1:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )


def _save_state(
    path: Path, run: dict[str, str], step: int, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        tensors |= {f"{name}/{kind}": moments[kind] for kind in ("step", "exp_avg", "exp_avg_sq")}
        tensors[name] = parameter.detach()
    write_bytes(path, save(tensors, metadata={**run, "step": str(step)}))


def _load_state(path: Path, run: dict[str, str], model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        found = {key: metadata.get(key) for key in run}
        if found != run:
            raise InputError(f"{path} belongs to the run {found}, not {run}: train into another folder")
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(name))
            optimizer.state[parameter] = {
                kind: file.get_tensor(f"{name}/{kind}") for kind in ("step", "exp_avg", "exp_avg_sq")
            }
    return int(metadata["step"])


def write_model(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write OUT/model, an ordinary checkpoint folder in float32."""
    folder = out / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The name that transformers 4 knows as well; 5 takes both for the same class.
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def write_texts(out: Path, corpus: Corpus) -> None:
    """Write OUT/texts/SPLIT/NAME.txt for the evaluation splits."""
    for name, documents in corpus.evaluation.items():
        for document in documents:
            write_bytes(out / "texts" / name / f"{document.name}.txt", document.text.encode())


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ropesearch.demo.train", description="Train the demo model.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets model/, texts/ and the state to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights and rows (default 0)")
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS, help=f"optimizer steps (default {NUM_STEPS})")
    options = parser.parse_args(arguments)
    try:
        if options.seed < 0 or options.num_steps < 1:
            raise InputError(f"expected --seed >= 0 and --num-steps >= 1, got {options.seed} and {options.num_steps}")
        corpus = split(load_addresses(), load_plays(), options.seed)
        write_texts(options.out, corpus)
        write_model(options.out, *train(corpus, options.out, options.seed, options.num_steps))
    except RopesearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
