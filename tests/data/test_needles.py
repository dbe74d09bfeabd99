"""Needle prompts are exactly what they say, for any length, depth and tokenizer."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.data.needles import NUM_ANSWER_WORDS, WORDS, Needle, fact_ids, make_needle
from ropesearch.errors import InputError

HAYSTACK = np.arange(1000, 5000)  # ids that no text of these tokenizers has
QUESTION = "\nQuestion: The secret phrase is {key}"


class CharacterTokenizer:
    """A token a character; `bos` before every text that asks for special tokens, if there is one."""

    def __init__(self, bos: int | None) -> None:
        self.bos = bos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        first = [] if self.bos is None or not add_special_tokens else [self.bos]
        return first + [ord(character) for character in text]


def decode(ids: np.ndarray) -> str:
    return "".join(chr(token) for token in ids)


@given(
    length_tokens=st.integers(250, 4000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    bos=st.sampled_from([None, 900]),
)
def test_prompt_is_bos_haystack_around_the_fact_question_and_answer(length_tokens, depth, seed, bos):
    needle = make_needle(CharacterTokenizer(bos), HAYSTACK, length_tokens, depth, np.random.default_rng(seed))
    ids, num_bos = needle.input_ids, 0 if bos is None else 1
    assert ids.dtype == np.int64
    assert ids.shape == (length_tokens,)
    assert list(ids[:num_bos]) == [900] * num_bos
    answer = decode(ids[needle.answer_start :])
    assert needle.answer_start + needle.answer_length == length_tokens
    words = [needle.key, *answer.split()]
    assert answer == "".join(f" {word}" for word in words[1:])
    assert len(set(words)) == len(words) == 1 + NUM_ANSWER_WORDS
    assert set(words) <= set(WORDS)
    fact = slice(needle.needle_start, needle.needle_start + needle.needle_length)
    assert decode(ids[fact]) == f" The secret phrase is {needle.key}{answer}."
    question = QUESTION.format(key=needle.key)
    question_start = needle.answer_start - len(question)
    assert decode(ids[question_start : needle.answer_start]) == question
    rest = np.delete(ids[num_bos:question_start], np.arange(fact.start - num_bos, fact.stop - num_bos))
    np.testing.assert_array_equal(rest, HAYSTACK[: len(rest)])
    assert needle.needle_start - num_bos == round(depth * len(rest))


@given(seed=st.integers(0, 2**32), depth=st.floats(0, 1))
def test_same_arguments_give_the_same_prompt_and_leave_rng_in_the_same_state_at_any_length(seed, depth):
    first, second, longer = (np.random.default_rng(seed) for _ in range(3))
    a = make_needle(CharacterTokenizer(900), HAYSTACK, 256, depth, first)
    b = make_needle(CharacterTokenizer(900), HAYSTACK, 256, depth, second)
    c = make_needle(CharacterTokenizer(900), HAYSTACK, 512, depth, longer)
    np.testing.assert_array_equal(a.input_ids, b.input_ids)
    np.testing.assert_array_equal(a.answer_ids, c.answer_ids)
    assert a.key == c.key
    assert first.bit_generator.state == longer.bit_generator.state


def test_prompts_are_pinned():
    needle = make_needle(CharacterTokenizer(None), HAYSTACK, 256, 0.5, np.random.default_rng(7))
    assert (needle.key, decode(needle.answer_ids)) == ("land", " water thing mind")


def test_words_are_distinct_and_answers_cannot_be_guessed():
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and word.isascii() and word.islower() for word in WORDS)
    assert math.perm(len(WORDS) - 1, NUM_ANSWER_WORDS) > 1_000_000


def test_answer_ids_are_the_same_in_sentence_and_answer():
    sentence, _, answer = fact_ids(CharacterTokenizer(None), "water", ["gold", "house"])
    assert sentence[-1 - len(answer) : -1] == answer


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan"), float("inf")])
def test_bad_depth_is_refused(depth):
    with pytest.raises(InputError, match=r"depth must be in \[0, 1\]"):
        make_needle(CharacterTokenizer(None), HAYSTACK, 256, depth, np.random.default_rng(0))


def test_shortest_prompt_is_named_and_possible():
    rng = np.random.default_rng(1)
    with pytest.raises(InputError, match=r"at least (\d+) tokens") as error:
        make_needle(CharacterTokenizer(900), HAYSTACK, 20, 0.5, rng)
    shortest = int(str(error.value).split("at least ")[1].split()[0])
    needle = make_needle(CharacterTokenizer(900), HAYSTACK, shortest, 1.0, np.random.default_rng(1))
    assert len(needle.input_ids) == shortest
    with pytest.raises(InputError, match=f"at least {shortest} tokens"):
        make_needle(CharacterTokenizer(900), HAYSTACK, shortest - 1, 0.5, np.random.default_rng(1))


def test_short_haystack_is_refused():
    with pytest.raises(InputError, match="needs a haystack of"):
        make_needle(CharacterTokenizer(900), HAYSTACK[:50], 256, 0.5, np.random.default_rng(0))


@pytest.mark.parametrize(
    "change", [{"answer_start": 10}, {"answer_length": 0}, {"needle_start": 255}, {"needle_length": 0}, {"depth": 2.0}]
)
def test_inconsistent_needles_are_refused(change):
    needle = make_needle(CharacterTokenizer(900), HAYSTACK, 256, 0.5, np.random.default_rng(0))
    with pytest.raises(InputError):
        dataclasses.replace(needle, **change)
    assert isinstance(dataclasses.replace(needle), Needle)
