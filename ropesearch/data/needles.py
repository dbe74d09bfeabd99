"""Retrieval prompts: a fact hidden in prose, asked for at the end.

The form follows the passkey task (Mohtashami and Jaggi, "Landmark Attention", 2023), with a phrase of common words for
the number. The phrase's first word is the key that the question names, so that several facts can stand in one text.
Training, evaluation and objectives make their prompts here and nowhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ropesearch.errors import InputError

NUM_ANSWER_WORDS = 3  # three of the words below: one guess in more than a million is right
_WORDS = (
    "action amount answer attention authority bill blood brother budget business character child children "
    "citizens commerce commission conditions control cost course court danger death debt defense desire "
    "development duties duty economy effect efforts energy expenditures eyes face faith father fear fellow "
    "field force forces freedom friend fund future gold grace hands head health heart heaven home honour hour "
    "house human interest interests justice king labor lady land lands laws legislation life light master "
    "matter measures military million mind money month name nation nature night noble number object officers "
    "opportunity peace period person plan play policy port program progress prosperity protection purpose "
    "question reason relations resources respect result revenue rights school security service session ship "
    "sign soul spirit state strength subject system thing trade treaty value vessel water word"
)
WORDS = tuple(_WORDS.split())


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Needle:
    """One prompt with its answer.

    input_ids: int64 (length_tokens,): special tokens that the tokenizer puts first, haystack with the needle in it,
        question, answer. The answer is always the end; a prompt for generation is input_ids[:answer_start].
    answer_start, answer_length: where the answer's tokens are, counted in tokens.
    question_length: tokens of the question, which the answer follows.
    needle_start, needle_length: where the whole needle sentence is.
    depth: 0 for a needle before the haystack's first token, 1 for one after its last.
    key: the word that the question names.
    """

    input_ids: npt.NDArray[np.int64]
    answer_start: int
    answer_length: int
    question_length: int
    needle_start: int
    needle_length: int
    depth: float
    key: str

    def __post_init__(self) -> None:
        num_tokens = len(self.input_ids)
        if self.answer_length < 1 or self.answer_start + self.answer_length != num_tokens:
            raise InputError(
                f"a needle's answer must end its {num_tokens} tokens, got {self.answer_length} tokens from "
                f"{self.answer_start}: make needles with make_needle"
            )
        if not 0 <= self.needle_start < self.needle_start + self.needle_length <= self.answer_start:
            raise InputError(
                f"a needle must stand before its answer at {self.answer_start}, got {self.needle_length} tokens from "
                f"{self.needle_start}: make needles with make_needle"
            )
        _check_depth(self.depth)

    @property
    def answer_ids(self) -> npt.NDArray[np.int64]:
        """int64 (answer_length,)."""
        return self.input_ids[self.answer_start :]


def draw_words(rng: np.random.Generator) -> tuple[str, tuple[str, ...]]:
    """A key and the NUM_ANSWER_WORDS words of its answer, all different: one draw from rng."""
    key, *answer = (WORDS[i] for i in rng.permutation(len(WORDS))[: 1 + NUM_ANSWER_WORDS])
    return key, tuple(answer)


def fact_ids(tokenizer: Tokenizer, key: str, answer: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
    """Token ids of (the whole sentence that states a fact, the question for it, its answer), without special tokens.

    The answer's ids inside the sentence are the same as after the question, whatever the tokenizer merges.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    answer_ids = encode("".join(f" {word}" for word in answer))
    sentence = [*encode(f" The secret phrase is {key}"), *answer_ids, *encode(".")]
    return sentence, encode(f"\nQuestion: The secret phrase is {key}"), answer_ids


def draw_num_fact_tokens(tokenizer: Tokenizer, rng: np.random.Generator) -> int:
    """How many tokens of a prompt that `make_needle` makes with this rng are not haystack; takes the same one draw."""
    return sum(map(len, fact_ids(tokenizer, *draw_words(rng))))


def most_fact_tokens(tokenizer: Tokenizer) -> int:
    """What `draw_num_fact_tokens` gives at most, or a little more."""
    longest = max(WORDS, key=lambda word: len(tokenizer.encode(f" {word}", add_special_tokens=False)))
    return sum(map(len, fact_ids(tokenizer, longest, [longest] * NUM_ANSWER_WORDS)))


def make_needle(
    tokenizer: Tokenizer,
    haystack_ids: Sequence[int] | npt.NDArray[np.integer],
    length_tokens: int,
    depth: float,
    rng: np.random.Generator,
    prefix_ids: Sequence[int] | None = None,
) -> Needle:
    """One needle prompt of exactly length_tokens tokens. A pure function of its arguments and the state of rng.

    The haystack is shortened at its end to what fits; needle, question and answer are never shortened. Key and answer
    are drawn from rng, one draw whatever the lengths, so trials can be compared between lengths.

    Args:
        haystack_ids: (n,) token ids of prose without special tokens, at least as many as fit.
        depth: in [0, 1]; the needle stands before haystack token round(depth * number of haystack tokens used).
        prefix_ids: what comes first; by default the special tokens that the tokenizer puts before every text.

    Raises:
        InputError: length_tokens leaves no room for the haystack, the haystack is too short, or depth is not in [0, 1].
    """
    _check_depth(depth)
    key, words = draw_words(rng)
    prefix = tokenizer.encode("", add_special_tokens=True) if prefix_ids is None else list(prefix_ids)
    needle, question, answer = fact_ids(tokenizer, key, words)
    num_haystack_tokens = length_tokens - len(prefix) - len(needle) - len(question) - len(answer)
    if num_haystack_tokens < 1:
        raise InputError(
            f"a needle prompt needs at least {length_tokens - num_haystack_tokens + 1} tokens with this tokenizer, got "
            f"length_tokens={length_tokens}: ask for longer prompts"
        )
    if len(haystack_ids) < num_haystack_tokens:
        raise InputError(
            f"a needle prompt of {length_tokens} tokens needs a haystack of {num_haystack_tokens}, got "
            f"{len(haystack_ids)}: give longer documents or ask for shorter prompts"
        )
    haystack = [int(token) for token in haystack_ids[:num_haystack_tokens]]
    at = round(depth * num_haystack_tokens)
    input_ids = np.array([*prefix, *haystack[:at], *needle, *haystack[at:], *question, *answer], dtype=np.int64)
    return Needle(
        input_ids=input_ids,
        answer_start=length_tokens - len(answer),
        answer_length=len(answer),
        question_length=len(question),
        needle_start=len(prefix) + at,
        needle_length=len(needle),
        depth=depth,
        key=key,
    )


def _check_depth(depth: float) -> None:
    if not (math.isfinite(depth) and 0.0 <= depth <= 1.0):
        raise InputError(f"a needle's depth must be in [0, 1], got {depth}: 0 is the haystack's beginning, 1 its end")
