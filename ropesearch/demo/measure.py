"""`python -m ropesearch.demo.measure [DIR] [--json]`: what the demo model does inside and beyond its length.

Everything goes through transformers' own rotary tables, so the figures do not lean on the rest of the package.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from ropesearch.data.needles import make_needle
from ropesearch.errors import InputError, RopesearchError
from ropesearch.seeding import stream

IntArray = npt.NDArray[np.int64]

LENGTH_TOKENS = 2048
NUM_BLOCKS = 8
METHODS = ("unscaled", "linear", "ntk", "yarn")
NEEDLE_LENGTHS = (256, 512, 1024, 2048)
NUM_TRIALS = 200
FORWARD_TOKENS = 8192  # in one forward pass


@dataclass(frozen=True, slots=True)
class Measured:
    """perplexity: by method, over held-out windows, in each eighth of the position; `all` is over the whole window.
    short_context_perplexity: of the tokens of the last eighth, each with at most original_length tokens before it.
    needle_accuracy: by method and length, the share of NUM_TRIALS answers that greedy decoding gets exactly right.
    """

    num_parameters: int
    original_length: int
    num_documents: int
    perplexity: dict[str, list[float]]
    all_perplexity: dict[str, float]
    short_context_perplexity: float
    original_length_perplexity: float
    needle_accuracy: dict[str, dict[int, float]]


def load(folder: Path, method: str, ratio: float) -> LlamaForCausalLM:
    """The model with one of METHODS for `ratio`, in evaluation mode.

    ntk is the fixed change of base theta * ratio ** (d / (d - 2)) (bloc97, "NTK-aware scaled RoPE", 2023); transformers
    has only the dynamic form. yarn has the attention factor 0.1 ln(ratio) + 1 of the paper (Peng et al., 2023, eq. 22).
    """
    config = AutoConfig.from_pretrained(folder)
    plain = dict(config.rope_parameters)
    theta, original_length = plain["rope_theta"], config.max_position_embeddings
    if method == "linear":
        config.rope_parameters = {**plain, "rope_type": "linear", "factor": ratio}
    elif method == "ntk":
        config.rope_parameters = {**plain, "rope_theta": theta * ratio ** (config.head_dim / (config.head_dim - 2))}
    elif method == "yarn":
        yarn = {"rope_type": "yarn", "factor": ratio, "original_max_position_embeddings": original_length}
        config.rope_parameters = {**plain, **yarn}
        config.max_position_embeddings = round(ratio * original_length)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    expected = 0.1 * math.log(ratio) + 1.0 if method == "yarn" else 1.0
    if not math.isclose(model.model.rotary_emb.attention_scaling, expected):
        raise RuntimeError(f"{method} runs with the attention factor {model.model.rotary_emb.attention_scaling}")
    return model


@torch.inference_mode()
def token_nats(model: LlamaForCausalLM, input_ids: IntArray) -> npt.NDArray[np.float64]:
    """float64 (rows, tokens - 1): nats of each token but the first. input_ids: int64 (rows, tokens)."""
    num_rows = max(1, FORWARD_TOKENS // input_ids.shape[1])
    blocks = []
    for start in range(0, len(input_ids), num_rows):
        ids = torch.from_numpy(input_ids[start : start + num_rows])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        blocks.append(nats.double().numpy())
    return np.concatenate(blocks)


@torch.inference_mode()
def num_exact(model: LlamaForCausalLM, input_ids: IntArray, num_answer_tokens: int) -> int:
    """How many rows end in what greedy decoding gives.

    The answer is decoded in one pass: greedy decoding goes wrong exactly if some token of the answer is not the most
    likely one after the true tokens before it.
    """
    num_rows = max(1, FORWARD_TOKENS // input_ids.shape[1])
    right = 0
    for start in range(0, len(input_ids), num_rows):
        ids = torch.from_numpy(input_ids[start : start + num_rows])
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=num_answer_tokens).logits
        right += int((logits.argmax(-1) == ids[:, -num_answer_tokens:]).all(-1).sum())
    return right


def needle_prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[IntArray], length_tokens: int, num_trials: int
) -> tuple[IntArray, int]:
    """int64 (num_trials, length_tokens) and the number of answer tokens: uniform depths and places in the documents."""
    needles = []
    for trial in range(num_trials):
        rng = stream(0, "demo.measure.needles", trial)
        depth = float(rng.random())
        document = documents[trial % len(documents)]
        start = int(rng.integers(len(document) - length_tokens + 1))
        needles.append(make_needle(tokenizer, document[start : start + length_tokens], length_tokens, depth, rng))
    return np.stack([needle.input_ids for needle in needles]), needles[0].answer_length


def measure(model_folder: Path, held_out: Sequence[str], haystacks: Sequence[str]) -> Measured:
    """All figures of the model card.

    Raises:
        InputError: a text is shorter than LENGTH_TOKENS.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    encoded = [np.array(ids, dtype=np.int64) for ids in tokenizer(list(held_out))["input_ids"]]
    plain_ids = tokenizer(list(haystacks), add_special_tokens=False)["input_ids"]
    hay_ids = [np.array(ids, dtype=np.int64) for ids in plain_ids]
    if not encoded or not hay_ids or min(map(len, [*encoded, *hay_ids])) < LENGTH_TOKENS:
        raise InputError(f"measuring needs texts of at least {LENGTH_TOKENS} tokens in both splits: use longer ones")
    windows = np.stack([ids[:LENGTH_TOKENS] for ids in encoded])
    prompts = {length: needle_prompts(tokenizer, hay_ids, length, NUM_TRIALS) for length in NEEDLE_LENGTHS}

    perplexity: dict[str, list[float]] = {}
    total: dict[str, float] = {}
    accuracy: dict[str, dict[int, float]] = {}
    for method in METHODS:
        plain = load(model_folder, "unscaled", 1.0)
        original_length = plain.config.max_position_embeddings
        model = plain if method == "unscaled" else load(model_folder, method, LENGTH_TOKENS / original_length)
        nats = token_nats(model, windows)
        positions = np.arange(1, LENGTH_TOKENS) * NUM_BLOCKS // LENGTH_TOKENS
        perplexity[method] = [float(np.exp(nats[:, positions == block].mean())) for block in range(NUM_BLOCKS)]
        total[method] = float(np.exp(nats.mean()))
        accuracy[method] = {length: num_exact(model, *prompts[length]) / NUM_TRIALS for length in NEEDLE_LENGTHS}
        if method == "unscaled":
            inside = float(np.exp(nats[:, : original_length - 1].mean()))
            short = _short_context_nats(model, windows, original_length)
    return Measured(
        num_parameters=plain.num_parameters(),
        original_length=original_length,
        num_documents=len(windows),
        perplexity=perplexity,
        all_perplexity=total,
        short_context_perplexity=float(np.exp(short)),
        original_length_perplexity=inside,
        needle_accuracy=accuracy,
    )


def _short_context_nats(model: LlamaForCausalLM, windows: IntArray, original_length: int) -> float:
    """Mean nats of the last eighth's tokens, each after the first token of the window and the original_length - 1
    tokens before it.
    """
    first = LENGTH_TOKENS - LENGTH_TOKENS // NUM_BLOCKS
    sums = []
    for window in windows:
        contexts = np.lib.stride_tricks.sliding_window_view(window, original_length)[first - original_length + 1 :]
        rows = np.concatenate([np.full((len(contexts), 1), window[0]), contexts], axis=1)
        sums.append(token_nats(model, rows)[:, -1].mean())
    return float(np.mean(sums))


def table(measured: Measured) -> str:
    """The figures as two markdown tables."""
    lines = [
        f"Perplexity on {measured.num_documents} held-out windows of {LENGTH_TOKENS} tokens, by eighths of position",
        "",
        "| method | " + " | ".join(str(block + 1) for block in range(NUM_BLOCKS)) + " | all |",
        "|---|" + "---|" * (NUM_BLOCKS + 1),
        *(
            f"| {method} | " + " | ".join(f"{value:.1f}" for value in [*blocks, measured.all_perplexity[method]]) + " |"
            for method, blocks in measured.perplexity.items()
        ),
        "",
        f"The last eighth with {measured.original_length} tokens of context: {measured.short_context_perplexity:.1f}. "
        f"The first {measured.original_length} tokens: {measured.original_length_perplexity:.1f}.",
        "",
        f"Needle answers exactly right, of {NUM_TRIALS}, by prompt length in tokens",
        "",
        "| method | " + " | ".join(map(str, NEEDLE_LENGTHS)) + " |",
        "|---|" + "---|" * len(NEEDLE_LENGTHS),
        *(
            f"| {method} | " + " | ".join(f"{share:.1%}" for share in shares.values()) + " |"
            for method, shares in measured.needle_accuracy.items()
        ),
    ]
    return "\n".join(lines)


def read_texts(folder: Path) -> list[str]:
    """The .txt files of a folder, by name. Raises InputError where there is none."""
    paths: Iterable[Path] = sorted(folder.glob("*.txt"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    if not texts:
        raise InputError(f"expected text files in {folder}, found none: give the folder that holds model/ and texts/")
    return texts


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ropesearch.demo.measure", description="Measure the demo model.")
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="holds model/ and texts/ (default: the demo's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    try:
        with resources.as_file(resources.files("ropesearch.demo")) as packaged:
            folder = options.folder or packaged
            texts = folder / "texts"
            measured = measure(folder / "model", read_texts(texts / "held_out"), read_texts(texts / "test"))
    except RopesearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(measured), indent=2) if options.json else table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
