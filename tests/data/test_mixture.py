"""Rows of a mixture against what the words of its documentation give, over passes and at any step."""

import dataclasses
import itertools
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.data.config import MixtureConfig
from ropesearch.data.mixture import MicroBatch, Mixture
from ropesearch.data.row_schedule import RowSchedule
from ropesearch.data.training_tokens import Bucket, BucketCounts, TrainingTokens
from ropesearch.errors import InputError
from ropesearch.seeding import stream
from tests.data.test_needles import CharacterTokenizer, decode

ORIGINAL_LENGTH = 8
ROW_TOKENS = 20  # two sequences of a short row, and 4 tokens that it does not have
PADDING = 1

Documents = list[list[int]]  # of one bucket


def training_tokens(mixture: MixtureConfig, lengths: list[list[int]], fingerprint: str = "f") -> TrainingTokens:
    """Documents of these lengths by bucket, in which no token comes twice; none is PADDING or a character's."""
    fresh = itertools.count(1000)
    buckets = []
    for (above, up_to), each in zip(mixture.bucket_bounds(ORIGINAL_LENGTH), lengths, strict=True):
        assert all(above < length and (up_to is None or length <= up_to) for length in each)
        buckets.append(
            Bucket(
                BucketCounts(above, up_to, 0, len(each), sum(each)),
                np.array([next(fresh) for _ in range(sum(each))], dtype=np.int32),
                np.cumsum([0, *each]),
            )
        )
    return TrainingTokens(tuple(buckets), Any, PADDING, next(fresh), {}, fingerprint)  # type: ignore[arg-type]


def documents_of(bucket: Bucket) -> Documents:
    return [bucket.token_ids[start:end].tolist() for start, end in itertools.pairwise(bucket.offsets.tolist())]


def lengths_between(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=1, max_size=12)


CONFIG = MixtureConfig(long_bounds=[15], shares=[0.3, 0.3, 0.4], needle_share=0.0)
TOKENIZER = CharacterTokenizer(None)
LENGTHS = st.tuples(
    lengths_between(2, ORIGINAL_LENGTH), lengths_between(ORIGINAL_LENGTH + 1, 15), lengths_between(16, 70)
).map(list)
EXAMPLE = [[8, 3, 3, 2, 5, 6], [9, 15, 12], [16, 50, 31, 22]]


def mixture_of(lengths: list[list[int]], seed: int = 0, config: MixtureConfig = CONFIG) -> Mixture:
    return Mixture(training_tokens(config, lengths), config, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, seed)


def rows_of(mixture: Mixture, num_steps: int, num_rows: int) -> list[list[MicroBatch]]:
    """The rows of each bucket over some steps."""
    rows: list[list[MicroBatch]] = [[], [], []]
    for step in range(num_steps):
        for row in mixture.batch(step, num_rows):
            rows[row.bucket].append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_long_rows_are_the_documents_of_pass_after_pass_cut_and_nothing_else(
    lengths: list[list[int]], seed: int
) -> None:
    """Nothing dropped at the end of a pass, no position reset and no token but the first unscored within a row."""
    mixture = mixture_of(lengths, seed)
    rows = rows_of(mixture, num_steps=12, num_rows=5)
    for index, bucket in enumerate(training_tokens(CONFIG, lengths).buckets):
        if index == 0:
            continue
        documents = documents_of(bucket)
        expected: list[int] = []
        for number in itertools.count():
            if len(expected) >= ROW_TOKENS * len(rows[index]):
                break
            order = stream(seed, f"mixture/{index}", number).permutation(len(documents))
            expected += [token for document in order for token in documents[document]]
        assert len(rows[index]) in (18, 24)
        for number, row in enumerate(rows[index]):
            assert row.regime == "long"
            assert row.token_ids.tolist() == [expected[number * ROW_TOKENS : (number + 1) * ROW_TOKENS]]
            assert row.position_ids.tolist() == [list(range(ROW_TOKENS))]
            assert row.is_scored.tolist() == [[False] + [True] * (ROW_TOKENS - 1)]
            assert row.num_scored == ROW_TOKENS - 1


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32), share=st.sampled_from([0.25, 0.3, 1.0]))
def test_needles_stand_between_documents_that_go_on_behind_them(
    lengths: list[list[int]], seed: int, share: float
) -> None:
    """All that is a needle's has another id than any document's: without it, rows are as they were, only shorter."""
    config = dataclasses.replace(CONFIG, needle_share=share)
    row_tokens, num_steps = 330, 8
    tokens = training_tokens(config, lengths)
    mixture = Mixture(tokens, config, TOKENIZER, ORIGINAL_LENGTH, row_tokens, seed)
    prose_rows = Mixture(tokens, CONFIG, TOKENIZER, ORIGINAL_LENGTH, row_tokens, seed)
    found, prose = (rows_of(each, num_steps, 5) for each in (mixture, prose_rows))
    for index in (1, 2):
        read: list[int] = []
        with_needle = 0
        for number, row in enumerate(found[index]):
            ids = row.token_ids[0]
            assert ids.shape == (row_tokens,) and row.position_ids[0].tolist() == list(range(row_tokens))
            is_needle = ids < 1000
            read += ids[~is_needle].tolist()
            unscored = np.zeros(row_tokens, dtype=bool)
            unscored[0] = True
            if is_needle.any():
                with_needle += 1
                text = decode(ids[is_needle])
                match = re.fullmatch(
                    r"( The secret phrase is (\w+)( \w+ \w+ \w+)\.)(\nQuestion: The secret phrase is \2)\3", text
                )
                assert match is not None
                start, fact, question, answer = int(is_needle.argmax()), *(len(match[group]) for group in (1, 4, 3))
                assert is_needle[start : start + fact].all() and is_needle[-question - answer :].all()
                unscored[start : start + fact] = unscored[-question - answer : -answer] = True
            assert row.is_scored[0].tolist() == (~unscored).tolist()
            assert abs(with_needle - share * (number + 1)) <= 0.5
        assert read == np.concatenate([row.token_ids[0] for row in prose[index]])[: len(read)].tolist()
        usage = mixture.usage(num_steps, 5)[index]
        assert (usage.num_tokens, usage.num_needle_tokens) == (len(read), row_tokens * len(found[index]) - len(read))
    for row, same in zip(found[0], prose[0], strict=True):
        assert row.token_ids.tolist() == same.token_ids.tolist()


def test_rows_too_short_for_needles_are_refused() -> None:
    config = MixtureConfig(needle_share=0.5)
    tokens = training_tokens(config, [[8], [16]])
    with pytest.raises(
        InputError, match=r"rows of at least 314 tokens for facts .*, got target_length 313; give mixture"
    ):
        Mixture(tokens, config, TOKENIZER, ORIGINAL_LENGTH, 313, 0)
    Mixture(tokens, config, TOKENIZER, ORIGINAL_LENGTH, 314, 0)
    Mixture(tokens, MixtureConfig(shares=[1.0, 0.0]), TOKENIZER, ORIGINAL_LENGTH, 20, 0)


def parts_of(row: MicroBatch) -> list[list[list[int]]]:
    """The documents of each sequence of a row, cut where positions begin again."""
    result = []
    for tokens, positions in zip(row.token_ids.tolist(), row.position_ids.tolist(), strict=True):
        starts = [index for index, position in enumerate(positions) if position == 0]
        parts = [tokens[start:end] for start, end in itertools.pairwise([*starts, len(tokens)])]
        assert positions == [position for part in parts for position in range(len(part))]
        result.append(parts)
    return result


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_every_short_document_stands_whole_and_once_in_every_pass(lengths: list[list[int]], seed: int) -> None:
    rows = rows_of(mixture_of(lengths, seed), num_steps=12, num_rows=5)[0]
    assert len(rows) == 18
    sequences = [parts for row in rows for parts in parts_of(row)]
    documents = documents_of(training_tokens(CONFIG, lengths).buckets[0])
    for row in rows:
        assert row.regime == "short" and row.token_ids.shape == (2, ORIGINAL_LENGTH)
        scored = (row.position_ids > 0) & (row.token_ids != PADDING)
        assert row.is_scored.tolist() == scored.tolist() and row.num_scored == scored.sum()
    for parts in sequences:
        assert all(part in documents or (set(part) == {PADDING} and part is parts[-1]) for part in parts)
    sequences_of_a_pass = sum(documents[0] in parts for parts in sequences)
    met = [part for parts in sequences for part in parts if PADDING not in part]
    counts = Counter(map(tuple, met))
    assert max(counts.values()) - min(counts[tuple(document)] for document in documents) <= 1
    assert sequences_of_a_pass == counts[tuple(documents[0])]
    # The first pass has each once: as many sequences as it takes until all were there hold none twice.
    first_pass: list[list[int]] = []
    for parts in sequences:
        if len(first_pass) >= len(documents):
            break
        first_pass += [part for part in parts if PADDING not in part]
    assert sorted(first_pass) == sorted(documents)


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    num_rows=st.integers(1, 7),
    step=st.integers(0, 10**6),
)
def test_rows_of_a_step_follow_the_shares_short_ones_first(shares: list[int], num_rows: int, step: int) -> None:
    parts = [share / sum(shares) for share in shares]
    config = MixtureConfig(long_bounds=[15], shares=parts, needle_share=0.0)
    batch = mixture_of(EXAMPLE, 0, config).batch(step, num_rows)
    assert len(batch) == num_rows
    buckets = [row.bucket for row in batch]
    assert buckets == sorted(buckets)
    schedule = RowSchedule(parts)
    before, after = schedule.counts(step * num_rows), schedule.counts((step + 1) * num_rows)
    assert [buckets.count(index) for index in range(3)] == [b - a for a, b in zip(before, after, strict=True)]
    for row in batch:
        assert row.regime == ("short" if row.bucket == 0 else "long")
        # What LongRoPE2's released training takes the regime from, max(position_ids) + 1 > original length, agrees.
        assert (row.position_ids.max() + 1 > ORIGINAL_LENGTH) == (row.regime == "long")


def as_lists(batch: tuple[MicroBatch, ...]) -> list[Any]:
    names = [field.name for field in dataclasses.fields(MicroBatch)]
    return [
        [
            getattr(row, name) if isinstance(getattr(row, name), (str, int)) else getattr(row, name).tolist()
            for name in names
        ]
        for row in batch
    ]


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, steps=st.lists(st.integers(0, 40), min_size=1, max_size=12), num_rows=st.integers(1, 6))
def test_a_batch_depends_on_its_step_only(lengths: list[list[int]], steps: list[int], num_rows: int) -> None:
    """Whatever was asked before, in whatever order, and also after the start of a new process (resumption)."""
    mixture = mixture_of(lengths)
    for step in steps:
        assert as_lists(mixture.batch(step, num_rows)) == as_lists(mixture_of(lengths).batch(step, num_rows))


def test_a_batch_is_ones_own() -> None:
    mixture = mixture_of(EXAMPLE)
    expected = as_lists(mixture.batch(3, 4))
    for row in mixture.batch(3, 4):
        row.token_ids[:] = 0
        row.position_ids[:] = 0
        row.is_scored[:] = False
    assert as_lists(mixture.batch(3, 4)) == expected


def test_passes_differ_in_order_and_seeds_too() -> None:
    lengths = [[8] * 12, [10] * 12, [20] * 12]
    config = MixtureConfig(long_bounds=[15], shares=[0.4, 0.2, 0.4], needle_share=0.0)

    def starts(mixture: Mixture, bucket: int) -> list[int]:
        rows = [row for row in mixture.batch(0, 120) if row.bucket == bucket]
        return [int(tokens[0]) for row in rows for tokens in row.token_ids]

    for bucket, per_pass in ((0, 12), (2, 12)):
        found = [starts(mixture_of(lengths, seed, config), bucket) for seed in (0, 1)]
        passes = [tuple(each[at : at + per_pass]) for each in found for at in (0, per_pass, 2 * per_pass)]
        assert len(set(passes)) == 6 and len({tuple(sorted(each)) for each in passes}) == 1


def test_a_document_longer_than_many_rows_and_a_bucket_shorter_than_one() -> None:
    config = MixtureConfig(shares=[0.5, 0.5], needle_share=0.0)
    long_one = mixture_of([[3], [90]], 0, config)
    tokens = training_tokens(config, [[3], [90]])
    (document,) = documents_of(tokens.buckets[1])
    rows = [row for step in range(9) for row in long_one.batch(step, 2) if row.regime == "long"]
    assert [token for row in rows for token in row.token_ids[0].tolist()] == (document * 2)[: 9 * ROW_TOKENS]
    short = next(row for row in long_one.batch(0, 2) if row.regime == "short")
    assert [len(part) for parts in parts_of(short) for part in parts] == [3, 5, 3, 5]  # the document and padding
    assert short.num_scored == 4
    small = mixture_of([[3], [9]], 0, config)
    (document,) = documents_of(training_tokens(config, [[3], [9]]).buckets[1])
    assert small.batch(0, 2)[1].token_ids.tolist() == [(document * 3)[:ROW_TOKENS]]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, num_steps=st.integers(0, 12), num_rows=st.integers(1, 5))
def test_usage_is_what_was_read(lengths: list[list[int]], num_steps: int, num_rows: int) -> None:
    mixture = mixture_of(lengths)
    rows = rows_of(mixture, num_steps, num_rows)
    for bucket, usage, read in zip(
        training_tokens(CONFIG, lengths).buckets, mixture.usage(num_steps, num_rows), rows, strict=True
    ):
        tokens = [token for row in read for token in row.token_ids.flatten().tolist()]
        met = set(tokens) - {PADDING}
        assert usage.num_rows == len(read)
        assert usage.num_padding_tokens == tokens.count(PADDING)
        assert usage.num_tokens == len(tokens) - tokens.count(PADDING)
        assert usage.num_unused_tokens == bucket.counts.num_tokens - len(met)
        assert usage.num_unused_documents == sum(not set(each) <= met for each in documents_of(bucket))
        if usage.num_unused_tokens:
            assert usage.num_passes < 1
        elif bucket.counts.above_tokens:
            assert usage.num_passes == pytest.approx(len(tokens) / bucket.counts.num_tokens)
        assert usage.to_json()["num_rows"] == len(read)


def test_passes_of_short_documents_are_counted_in_sequences() -> None:
    config = MixtureConfig(shares=[1.0, 0.0], needle_share=0.0)
    mixture = mixture_of([[8, 7, 8], [9]], 0, config)  # three sequences a pass, two a row
    assert [mixture.usage(1, num_rows)[0].num_passes for num_rows in (1, 3, 6)] == [pytest.approx(2 / 3), 2, 4]
    assert [mixture.usage(1, num_rows)[0].num_padding_tokens for num_rows in (3, 6)] == [2, 4]


def test_a_bucket_without_a_share_needs_no_documents() -> None:
    mixture = mixture_of([[], [10]], 0, MixtureConfig(shares=[0.0, 1.0], needle_share=0.0))
    assert [row.regime for row in mixture.batch(0, 4)] == ["long"] * 4
    assert mixture.usage(1, 4)[0].num_passes == 0
    mixture = mixture_of([[4], []], 0, MixtureConfig(shares=[1.0, 0.0]))
    assert [row.regime for row in mixture.batch(0, 4)] == ["short"] * 4


def test_the_fingerprint_changes_with_all_that_a_batch_depends_on() -> None:
    tokens = training_tokens(CONFIG, EXAMPLE)
    other_shares = dataclasses.replace(CONFIG, shares=[0.2, 0.4, 0.4])
    fingerprints = [
        Mixture(tokens, CONFIG, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 0).fingerprint,
        Mixture(tokens, CONFIG, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 1).fingerprint,
        Mixture(tokens, CONFIG, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS + 1, 0).fingerprint,
        Mixture(tokens, other_shares, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 0).fingerprint,
        Mixture(training_tokens(CONFIG, EXAMPLE, "g"), CONFIG, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 0).fingerprint,
    ]
    assert len(set(fingerprints)) == 5
    assert Mixture(tokens, CONFIG, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 0).fingerprint == fingerprints[0]


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (MixtureConfig(long_bounds=[16], shares=[0.3, 0.3, 0.4]), EXAMPLE),
        (MixtureConfig(shares=[0.3, 0.7]), EXAMPLE),
        (CONFIG, [[8], [], [16]]),
    ],
)
def test_tokens_prepared_for_something_else_are_refused(config: MixtureConfig, lengths: list[list[int]]) -> None:
    with pytest.raises(InputError, match=r"expected training tokens in the buckets .*; prepare them with this"):
        Mixture(training_tokens(CONFIG, lengths), config, TOKENIZER, ORIGINAL_LENGTH, ROW_TOKENS, 0)


@pytest.mark.parametrize(("step", "num_rows"), [(-1, 1), (0, 0)])
def test_impossible_steps_are_refused(step: int, num_rows: int) -> None:
    with pytest.raises(InputError, match=f"at least 0, and at least 1 row a step, got {step} and {num_rows}"):
        mixture_of(EXAMPLE).batch(step, num_rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.zeros((1, 3), np.int32)}, "expected int64, int64 and bool of one shape with two axes"),
        ({"position_ids": np.zeros((1, 4), np.int64)}, "of one shape"),
        ({"is_scored": np.zeros(3, np.bool_)}, "of one shape"),
        ({"num_scored": 2}, "expected 1 scored tokens, none of them the first of a sequence, got 2"),
        ({"is_scored": np.array([[True, False, False]])}, "none of them the first of a sequence"),
    ],
)
def test_parts_of_a_micro_batch_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {
        "regime": "long",
        "bucket": 1,
        "token_ids": np.zeros((1, 3), np.int64),
        "position_ids": np.array([[0, 1, 2]]),
        "is_scored": np.array([[False, True, False]]),
        "num_scored": 1,
    }
    assert MicroBatch(**parts).num_scored == 1
    with pytest.raises(InputError, match=message):
        MicroBatch(**(parts | changes))
