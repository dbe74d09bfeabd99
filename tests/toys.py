"""Tiny random models with a byte tokenizer, written as ordinary checkpoint folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ORIGINAL_LENGTH = 64
BOS, EOS = "<s>", "</s>"  # ids 0 and 1; the 256 bytes follow
VOCABULARY_TOKENS = 258


def toy_config(architecture: str = "llama", **overrides: Any) -> Any:
    """The transformers config of a toy: 2 layers, 2 heads of 16 channels (8 pairs), theta 10,000, 64 tokens."""
    import transformers

    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "phi3": transformers.Phi3Config,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[architecture]
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": ORIGINAL_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        values["sliding_window"] = None
    return config_class(**(values | overrides))


def toy_model(architecture: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A randomly initialised toy in float32; the same seed gives the same weights whatever the rope parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(toy_config(architecture, **overrides)).eval()


def toy_tokenizer() -> Any:
    """One token per byte, and BOS before every text when special tokens are asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {BOS: 0, EOS: 1} | {
        letter: 2 + index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def write_checkpoint(
    folder: Path, architecture: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a toy as config.json, model.safetensors and tokenizer files; `overrides` go to its config.

    Example: `write_checkpoint(tmp_path / "toy", "qwen3", max_position_embeddings=32, tie_word_embeddings=True)`.
    """
    import torch

    toy_model(architecture, seed, **overrides).to(getattr(torch, dtype)).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of the folder's config.json by hand, as users do."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
