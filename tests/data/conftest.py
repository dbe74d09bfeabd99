"""A small byte-level BPE tokenizer, trained on the spot, and texts for it."""

from typing import Any

import pytest

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "old"),
    *("wizards", "box", "with", "1234", "and", "987654", "jugs"),
)


def prose(seed: int, num_words: int) -> str:
    """Text that differs from the first words on for every seed."""
    return " ".join([f"Story {seed}:", *(WORDS[(seed * 31 + i * i + i // 7) % len(WORDS)] for i in range(num_words))])


def train_tokenizer(bos: str | None) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(seed, 200) for seed in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Vocabulary 400; BOS is id 0."""
    return train_tokenizer("<s>")


@pytest.fixture(scope="session")
def tokenizer_without_bos() -> Any:
    """The same without a BOS token."""
    return train_tokenizer(None)
