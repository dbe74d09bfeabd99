"""What each step of a fine-tuning reads: rows of short documents and rows of long ones, in the shares asked for."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ropesearch.data.config import MixtureConfig
from ropesearch.data.needles import Needle, Tokenizer, draw_num_fact_tokens, make_needle, most_fact_tokens
from ropesearch.data.packing import IntArray, Packing, pack
from ropesearch.data.row_schedule import RowSchedule
from ropesearch.data.training_tokens import Bucket, TrainingTokens
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.seeding import stream

SHORT, LONG = "short", "long"
_KEPT_ORDERS = 2  # passes of a bucket whose order is remembered


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One row: what goes through the model at once, under one regime.

    regime: "short" or "long"; bucket: index of the bucket that it comes from.
    token_ids, position_ids: int64 (num_sequences, num_tokens). Documents of a sequence do not see each other where
        positions begin again at 0.
    is_scored: bool, the same shape: whether the token counts as what the one before it predicts.
    num_scored: how many are.

    Raises InputError when the parts do not fit together.
    """

    regime: str
    bucket: int
    token_ids: IntArray
    position_ids: IntArray
    is_scored: npt.NDArray[np.bool_]
    num_scored: int

    def __post_init__(self) -> None:
        found = [(each.dtype.name, each.shape) for each in (self.token_ids, self.position_ids, self.is_scored)]
        shape = self.token_ids.shape
        if found != [("int64", shape), ("int64", shape), ("bool", shape)] or len(shape) != 2:
            raise InputError(f"micro-batch: expected int64, int64 and bool of one shape with two axes, got {found}")
        num_scored = int(self.is_scored.sum())
        if self.num_scored != num_scored or self.is_scored[:, 0].any():
            raise InputError(
                f"micro-batch: expected {num_scored} scored tokens, none of them the first of a sequence, got "
                f"{self.num_scored}"
            )


@dataclass(frozen=True, slots=True)
class BucketUsage:
    """What a training has read of a bucket after some steps.

    num_rows, num_tokens: read, of documents; num_padding_tokens, num_needle_tokens: read beside them; num_passes: how
    often the bucket was gone through; num_unused_documents, num_unused_tokens: what no row has reached yet, in part or
    at all.
    """

    lengths: str
    num_rows: int
    num_tokens: int
    num_padding_tokens: int
    num_needle_tokens: int
    num_passes: float
    num_unused_documents: int
    num_unused_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Mixture:
    """The rows of a training. Holds no state: a batch depends on the arguments here and its own only.

    A row has row_tokens tokens of one bucket. Which buckets the rows come from in turn is `RowSchedule`'s; each bucket
    is gone through in a fresh order, drawn from the stream "mixture/<bucket>" of the seed, in every pass, and what is
    left at the end of a pass begins the next pass's first row.

    A long row is one sequence: the documents of its bucket one after the other, cut every row_tokens, with positions
    from 0 to row_tokens - 1 and full attention over all of it (LongRoPE2, figure 5); the first token
    alone is not scored. In `needle_share` of a bucket's long rows, evenly spread, a fact stands at a uniformly drawn
    place, and the question for it with its answer at the end (`needles.make_needle`, drawn from the stream
    "mixture/<bucket>/needles" and the row's number). What they take the documents go on with in the next row. The fact
    and the question, which nothing before them tells, are not scored.

    A short row is row_tokens // original_length sequences of original_length tokens in which
    documents stand whole (`packing.pack`), each with positions of its own from 0 on and its first token not scored;
    what is left at the end of a sequence is padding, a document of its own of which nothing is scored.
    """

    def __init__(
        self,
        tokens: TrainingTokens,
        mixture: MixtureConfig,
        tokenizer: Tokenizer,
        original_length: int,
        row_tokens: int,
        seed: int,
    ) -> None:
        """Raises:
        InputError: the mixture does not fit the lengths, or the tokens were not prepared for it.
        """
        mixture.check(original_length, row_tokens)
        bounds = mixture.bucket_bounds(original_length)
        counts = [bucket.counts for bucket in tokens.buckets]
        prepared = [(each.above_tokens, each.up_to_tokens) for each in counts]
        if prepared != bounds or any(
            share and not each.num_tokens for share, each in zip(mixture.shares, counts, strict=True)
        ):
            held = ", ".join(f"{each.num_tokens} of {each.lengths}" for each in counts)
            raise InputError(
                f"mixture: expected training tokens in the buckets {bounds} with the shares {mixture.shares}, got "
                f"{held}; prepare them with this mixture"
            )
        check_needle_rows(mixture, tokenizer, row_tokens)
        self._schedule = RowSchedule(mixture.shares)
        short, *longer = tokens.buckets
        self._rows: list[_ShortRows | _LongRows] = [
            _ShortRows(short, original_length, row_tokens, tokens.padding_token_id, seed),
            *(
                _LongRows(bucket, index, row_tokens, seed, _Needles(tokenizer, mixture.needle_share, index, seed))
                for index, bucket in enumerate(longer, start=1)
            ),
        ]
        identity = [tokens.fingerprint, asdict(mixture), original_length, row_tokens, seed]
        self.fingerprint = sha256_of_json(identity)

    def batch(self, step: int, num_rows: int) -> tuple[MicroBatch, ...]:
        """The rows of a step in a training of `num_rows` rows a step; short ones first.

        Raises:
            InputError: step is below 0, or num_rows below 1.
        """
        if step < 0 or num_rows < 1:
            raise InputError(f"step: expected at least 0, and at least 1 row a step, got {step} and {num_rows}")
        before, after = (self._schedule.counts(each * num_rows) for each in (step, step + 1))
        places = [
            (bucket, row)
            for bucket, (first, end) in enumerate(zip(before, after, strict=True))
            for row in range(first, end)
        ]
        return tuple(self._rows[bucket].row(row) for bucket, row in places)

    def usage(self, num_steps: int, num_rows: int) -> tuple[BucketUsage, ...]:
        """What the first `num_steps` steps of `num_rows` rows read, by bucket."""
        counts = self._schedule.counts(num_steps * num_rows)
        return tuple(rows.usage(count) for rows, count in zip(self._rows, counts, strict=True))


def check_needle_rows(mixture: MixtureConfig, tokenizer: Tokenizer, row_tokens: int) -> None:
    """Raise InputError where rows of so many tokens are too short for the facts that the mixture puts into some."""
    num_fact_tokens = most_fact_tokens(tokenizer)
    if mixture.needle_share and any(mixture.shares[1:]) and num_fact_tokens > row_tokens // 2:
        raise InputError(
            f"mixture.needle_share: expected rows of at least {2 * num_fact_tokens} tokens for facts and their "
            f"questions with this tokenizer, got target_length {row_tokens}; give mixture.needle_share=0"
        )


class _Needles:
    """Which rows of a bucket have a fact and its question, and which."""

    def __init__(self, tokenizer: Tokenizer, share: float, index: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._schedule = RowSchedule([1.0 - share, share])
        self._index = index
        self._seed = seed

    def num_tokens(self, number: int) -> int:
        """What fact, question and answer of row `number` take; 0 where it has none."""
        return draw_num_fact_tokens(self._tokenizer, self._depth_and_rng(number)[1]) if self._has(number) else 0

    def of(self, number: int, haystack_ids: npt.NDArray[np.integer], row_tokens: int) -> Needle | None:
        """Row `number` with its fact, of these tokens of documents; None where it has none."""
        if not self._has(number):
            return None
        depth, rng = self._depth_and_rng(number)
        return make_needle(self._tokenizer, haystack_ids, row_tokens, depth, rng, prefix_ids=())

    def _has(self, number: int) -> bool:
        before, after = (self._schedule.counts(each)[1] for each in (number, number + 1))
        return after > before

    def _depth_and_rng(self, number: int) -> tuple[float, np.random.Generator]:
        rng = stream(self._seed, f"mixture/{self._index}/needles", number)
        return float(rng.random()), rng


class _LongRows:
    """Rows of documents one after the other."""

    def __init__(self, bucket: Bucket, index: int, row_tokens: int, seed: int, needles: _Needles) -> None:
        self._bucket = bucket
        self._index = index
        self._row_tokens = row_tokens
        self._seed = seed
        self._needles = needles
        self._starts = [0]  # of the rows in the tokens of the passes, as far as anybody asked
        self._order = functools.lru_cache(_KEPT_ORDERS)(self._draw_order)

    def _draw_order(self, number: int) -> tuple[IntArray, IntArray]:
        """The documents of a pass in their order, and where each ends in the pass, int64 both."""
        lengths = np.diff(self._bucket.offsets)
        order = stream(self._seed, f"mixture/{self._index}", number).permutation(len(lengths))
        return order, np.cumsum(lengths[order])

    def _start(self, number: int) -> int:
        """Where row `number` begins in the tokens of the passes."""
        while len(self._starts) <= number:
            num_tokens = self._row_tokens - self._needles.num_tokens(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + num_tokens)
        return self._starts[number]

    def row(self, number: int) -> MicroBatch:
        parts: list[npt.NDArray[np.int32]] = []
        at = self._start(number)
        missing = self._start(number + 1) - at
        while missing:
            number_of_pass, place = divmod(at, self._bucket.counts.num_tokens)
            order, ends = self._order(number_of_pass)
            turn = int(np.searchsorted(ends, place, side="right"))
            end = int(self._bucket.offsets[order[turn] + 1])
            start = end - (int(ends[turn]) - place)
            parts.append(self._bucket.token_ids[start : min(end, start + missing)])
            at, missing = at + len(parts[-1]), missing - len(parts[-1])
        token_ids: npt.NDArray[np.integer] = np.concatenate(parts)
        is_scored = np.ones((1, self._row_tokens), dtype=np.bool_)
        is_scored[0, 0] = False
        if (needle := self._needles.of(number, token_ids, self._row_tokens)) is not None:
            token_ids = needle.input_ids
            is_scored[0, needle.needle_start : needle.needle_start + needle.needle_length] = False
            is_scored[0, needle.answer_start - needle.question_length : needle.answer_start] = False
        return MicroBatch(
            regime=LONG,
            bucket=self._index,
            token_ids=token_ids.astype(np.int64)[np.newaxis],
            position_ids=np.arange(self._row_tokens, dtype=np.int64)[np.newaxis],
            is_scored=is_scored,
            num_scored=int(is_scored.sum()),
        )

    def usage(self, num_rows: int) -> BucketUsage:
        counts = self._bucket.counts
        num_tokens = self._start(num_rows)
        num_unused_documents = 0
        if num_tokens < counts.num_tokens:
            num_unused_documents = int((self._order(0)[1] > num_tokens).sum())
        return BucketUsage(
            lengths=counts.lengths,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_padding_tokens=0,
            num_needle_tokens=num_rows * self._row_tokens - num_tokens,
            num_passes=num_tokens / max(1, counts.num_tokens),
            num_unused_documents=num_unused_documents,
            num_unused_tokens=max(0, counts.num_tokens - num_tokens),
        )


class _ShortRows:
    """Rows of sequences in which documents stand whole. The packing is the same in every pass, the order is not: what
    stands together does not matter where documents do not see each other."""

    def __init__(self, bucket: Bucket, original_length: int, row_tokens: int, padding_token_id: int, seed: int) -> None:
        self._bucket = bucket
        self._sequence_tokens = original_length
        self._row_sequences = row_tokens // original_length
        self._padding_token_id = padding_token_id
        self._seed = seed
        lengths = np.diff(bucket.offsets)
        self._packing: Packing = pack(lengths, original_length)
        filled = np.add.reduceat(lengths[self._packing.documents], self._packing.starts[:-1])
        self._padding_tokens: IntArray = original_length - filled  # of each sequence
        self._order = functools.lru_cache(_KEPT_ORDERS)(self._draw_order)

    def _draw_order(self, number: int) -> IntArray:
        """The sequences of a pass in their order."""
        return stream(self._seed, "mixture/0", number).permutation(self._packing.num_sequences)

    def row(self, number: int) -> MicroBatch:
        shape = (self._row_sequences, self._sequence_tokens)
        token_ids = np.full(shape, self._padding_token_id, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        is_scored = np.zeros(shape, dtype=np.bool_)
        for turn in range(self._row_sequences):
            number_of_pass, place = divmod(number * self._row_sequences + turn, self._packing.num_sequences)
            at = 0
            for document in self._packing.sequence(int(self._order(number_of_pass)[place])):
                start, end = self._bucket.offsets[document], self._bucket.offsets[document + 1]
                length = int(end - start)
                token_ids[turn, at : at + length] = self._bucket.token_ids[start:end]
                position_ids[turn, at : at + length] = np.arange(length)
                is_scored[turn, at + 1 : at + length] = True
                at += length
            position_ids[turn, at:] = np.arange(self._sequence_tokens - at)
        return MicroBatch(
            regime=SHORT,
            bucket=0,
            token_ids=token_ids,
            position_ids=position_ids,
            is_scored=is_scored,
            num_scored=int(is_scored.sum()),
        )

    def usage(self, num_rows: int) -> BucketUsage:
        counts = self._bucket.counts
        num_sequences = num_rows * self._row_sequences
        num_passes, rest = divmod(num_sequences, max(1, self._packing.num_sequences))
        begun = self._order(num_passes)[:rest] if rest else np.empty(0, dtype=np.int64)
        num_padding_tokens = num_passes * int(self._padding_tokens.sum()) + int(self._padding_tokens[begun].sum())
        num_tokens = num_sequences * self._sequence_tokens - num_padding_tokens
        num_used_documents = int(np.diff(self._packing.starts)[begun].sum())
        return BucketUsage(
            lengths=counts.lengths,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_padding_tokens=num_padding_tokens,
            num_needle_tokens=0,
            num_passes=num_sequences / max(1, self._packing.num_sequences),
            num_unused_documents=0 if num_passes else counts.num_documents - num_used_documents,
            num_unused_tokens=0 if num_passes else counts.num_tokens - num_tokens,
        )
