"""`python -m ropesearch.demo.train OUT_DIR [--seed 0]`: train the demo model on one CPU core, in about 40 minutes.

The same seed on the same kind of machine gives the same bytes, also when the run was stopped and started again: a
step's rows depend on the seed and the step only, and the rest of the state is in OUT_DIR/state.safetensors.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropesearch.demo.copying import with_copying_heads
from ropesearch.demo.corpus import (
    Corpus,
    Document,
    load_addresses,
    load_plays,
    parquet_of,
    split,
    training_addresses,
)
from ropesearch.demo.rows import ANSWER_WEIGHT, COPYING, MIXTURE, ROW_TOKENS, Mixture, RowMaker
from ropesearch.demo.tokenizer import NUM_SPECIAL, VOCABULARY_TOKENS, train_tokenizer
from ropesearch.errors import InputError, RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.seeding import stream

WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
ROPE_THETA = 1000.0  # the slowest pair turns 0.3 rad in 256 tokens, as with 10,000 in about 3,000
NUM_THREADS = 1  # sums depend on it
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
LOG_STEPS = 50
SAVE_STEPS = 250


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the training with an optimizer of its own. The learning rate rises to `peak`, and falls to zero in a
    cosine or stays. copying_heads: whether the model gets them before.
    """

    num_steps: int
    mixture: Mixture
    peak: float
    num_warmup_steps: int
    falls: bool
    copying_heads: bool

    def learning_rate(self, step: int) -> float:
        """Of the phase's step, counted from 0."""
        warm = min(1.0, (step + 1) / self.num_warmup_steps)
        return self.peak * warm * (0.5 * (1.0 + math.cos(math.pi * step / self.num_steps)) if self.falls else 1.0)


# First prose, at a rate at which the model comes to depend on its length; then copying, which forms in hundreds of
# steps on short rows of few different tokens and in many thousands on full rows of prose; then both.
PHASES = (
    Phase(1200, MIXTURE, peak=3e-3, num_warmup_steps=100, falls=True, copying_heads=False),
    Phase(1500, COPYING, peak=1e-3, num_warmup_steps=50, falls=False, copying_heads=True),
    Phase(1200, MIXTURE, peak=2e-3, num_warmup_steps=50, falls=True, copying_heads=False),
)


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
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )


def train(
    corpus: Corpus, out: Path, seed: int, phases: Sequence[Phase] = PHASES, config: LlamaConfig | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train, or go on from what OUT/state.safetensors holds; `config` is `model_config()` unless another is given.

    Raises:
        InputError: OUT holds the state of a run with another seed or other phases.
    """
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer(document.text for document in corpus.training)
    encoded = tokenizer([document.text for document in corpus.training], add_special_tokens=False)["input_ids"]
    documents = [np.array(ids, dtype=np.int64) for ids in encoded if len(ids) > ROW_TOKENS]
    maker = RowMaker(tokenizer, documents, tokenizer.bos_token_id, NUM_SPECIAL)

    torch.manual_seed(int(stream(seed, "demo.weights").integers(2**63)))
    model = LlamaForCausalLM(config or model_config()).train()
    state = State(out / "state.safetensors", seed, phases)
    print(f"{sum(len(ids) for ids in documents)} training tokens")
    num_steps = 0  # of the phases before
    for index, phase in enumerate(phases):
        if phase.copying_heads:
            model = with_copying_heads(model, stream(seed, "demo.copying_heads", index))
        optimizer = _optimizer(model)
        first = state.load(index, model, optimizer)
        started = time.monotonic()
        for step in range(first, phase.num_steps):
            rows = maker.batch(phase.mixture, stream(seed, "demo.rows", num_steps + step))
            for group in optimizer.param_groups:
                group["lr"] = phase.learning_rate(step)
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
                    f"phase {index + 1} step {step + 1} seconds {time.monotonic() - started:.0f} "
                    f"loss {loss.item():.3f} prose {nats[weights == 1.0].mean().item():.3f} "
                    f"answers {nats[answers].mean().item():.3f} gradient {norm.item():.2f}",
                    flush=True,
                )
            if (step + 1) % SAVE_STEPS == 0 or step + 1 == phase.num_steps:
                state.save(index, step + 1, model, optimizer)
        num_steps += phase.num_steps
    return model.eval(), tokenizer


def _optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )


def _nats(model: LlamaForCausalLM, input_ids: Tensor) -> Tensor:
    """float32 (rows, tokens - 1): of every token but the first."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    targets = input_ids[:, 1:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )


class State:
    """The file that a stopped training goes on from: weights and moments after a step of a phase."""

    def __init__(self, path: Path, seed: int, phases: Sequence[Phase]) -> None:
        """Phases that come after the file's may differ from those that it was written with.

        Raises:
            InputError: the file was written with another seed, or other phases up to its own.
        """
        self._path = path
        self._seed = seed
        self._phases = phases
        self._metadata: dict[str, str] = {}
        if path.exists():
            with safe_open(path, framework="pt") as file:
                self._metadata = file.metadata()
            run = self._run(int(self._metadata["phase"]))
            found = {key: self._metadata.get(key) for key in run}
            if found != run:
                raise InputError(f"{path} belongs to the run {found}, not {run}: train into another folder")

    def _run(self, phase: int) -> dict[str, str]:
        return {"seed": str(self._seed), "phases": str(tuple(self._phases[: phase + 1]))}

    def save(self, phase: int, step: int, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> None:
        """Replace the file by what holds after `step` steps of a phase."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            moments = optimizer.state[parameter]
            tensors |= {f"{name}/{kind}": moments[kind] for kind in MOMENTS}
            tensors[name] = parameter.detach()
        write_bytes(self._path, save(tensors, metadata={**self._run(phase), "phase": str(phase), "step": str(step)}))

    def load(self, phase: int, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
        """How many steps of the phase were done when the training began; fills in weights and moments if some were.

        All steps of a phase that the file is beyond count as done.
        """
        if not self._metadata or int(self._metadata["phase"]) < phase:
            return 0
        if int(self._metadata["phase"]) > phase:
            return self._phases[phase].num_steps
        with safe_open(self._path, framework="pt") as file:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(file.get_tensor(name))
                optimizer.state[parameter] = {kind: file.get_tensor(f"{name}/{kind}") for kind in MOMENTS}
        return int(self._metadata["step"])


def write_model(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write OUT/model, an ordinary checkpoint folder in float32."""
    folder = out / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The name that transformers 4 knows as well; 5 takes both for the same class.
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def write_texts(out: Path, corpus: Corpus, addresses: Sequence[Document]) -> None:
    """Write OUT/texts/SPLIT/NAME.txt for the evaluation splits, and the other addresses to OUT/texts/training."""
    shipped = training_addresses(corpus, addresses)
    write_bytes(out / "texts" / "training" / "addresses.parquet", parquet_of(shipped))
    for name, documents in corpus.evaluation.items():
        for document in documents:
            write_bytes(out / "texts" / name / f"{document.name}.txt", document.text.encode())


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ropesearch.demo.train", description="Train the demo model.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="gets model/, texts/ and the state to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights and rows (default 0)")
    options = parser.parse_args(arguments)
    try:
        if options.seed < 0:
            raise InputError(f"expected --seed >= 0, got {options.seed}: give a whole number from 0 on")
        addresses = load_addresses()
        corpus = split(addresses, load_plays(), options.seed)
        write_texts(options.out, corpus, addresses)
        write_model(options.out, *train(corpus, options.out, options.seed))
    except RopesearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
