"""What the demo model is trained on: rows of prose, and rows in which something earlier has to be recalled."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropesearch.data.needles import WORDS, Tokenizer, draw_words, fact_ids, make_needle

IntArray = npt.NDArray[np.int64]

ROW_TOKENS = 256  # the model's original_length
ANSWER_WEIGHT = 10.0  # of an answer's tokens in the loss; prose has 1, what nobody can know 0


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the rows of a batch are. one_needle, several_needles and repetition are fractions of the
    rows, the rest is prose; words is the fraction of the repetition rows that repeat words.
    """

    num_rows: int
    row_tokens: int
    one_needle: float
    several_needles: float
    repetition: float
    words: float


COPYING = Mixture(num_rows=16, row_tokens=128, one_needle=0.3, several_needles=0.0, repetition=0.5, words=1.0)
MIXTURE = Mixture(num_rows=32, row_tokens=ROW_TOKENS, one_needle=0.15, several_needles=0.12, repetition=0.1, words=0.3)


@dataclass(frozen=True, slots=True)
class Rows:
    """input_ids int64 (rows, tokens) and weights float32 of the same shape: of predicting that token."""

    input_ids: IntArray
    weights: npt.NDArray[np.float32]


class RowMaker:
    """Makes batches of rows from tokenized documents. Holds no state: a batch depends on its arguments only."""

    def __init__(
        self, tokenizer: Tokenizer, documents: Sequence[IntArray], bos_token_id: int, num_special: int
    ) -> None:
        """documents: token ids without special tokens, each longer than a row. Ids below num_special are special."""
        self._tokenizer = tokenizer
        self._documents = documents
        self._places = np.cumsum([len(document) - ROW_TOKENS for document in documents])
        self._bos = bos_token_id
        self._words = np.array([tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in WORDS])
        self._plain_ids = np.arange(num_special, 1 + max(int(document.max()) for document in documents))

    def batch(self, mixture: Mixture, rng: np.random.Generator) -> Rows:
        """One batch of a mixture."""
        bounds = np.cumsum([mixture.one_needle, mixture.several_needles, mixture.repetition])
        makers = (self._one_needle, self._several_needles, self._repetition, self._plain)
        kinds = [int(np.searchsorted(bounds, rng.random(), side="right")) for _ in range(mixture.num_rows)]
        rows = [makers[kind](mixture, rng) for kind in kinds]
        return Rows(np.stack([row for row, _ in rows]), np.stack([weights for _, weights in rows]).astype(np.float32))

    def _prose(self, rng: np.random.Generator) -> IntArray:
        """ROW_TOKENS tokens from a uniformly drawn place of the training documents."""
        place = int(rng.integers(self._places[-1]))
        index = int(np.searchsorted(self._places, place, side="right"))
        start = place - (int(self._places[index - 1]) if index else 0)
        return self._documents[index][start : start + ROW_TOKENS]

    def _plain(self, mixture: Mixture, rng: np.random.Generator) -> tuple[IntArray, npt.NDArray[np.float64]]:
        return np.concatenate([[self._bos], self._prose(rng)[: mixture.row_tokens - 1]]), np.ones(mixture.row_tokens)

    def _one_needle(self, mixture: Mixture, rng: np.random.Generator) -> tuple[IntArray, npt.NDArray[np.float64]]:
        needle = make_needle(self._tokenizer, self._prose(rng), mixture.row_tokens, float(rng.random()), rng)
        weights = np.ones(mixture.row_tokens)
        weights[needle.answer_start :] = ANSWER_WEIGHT
        stated = needle.needle_start + needle.needle_length - 1 - needle.answer_length
        weights[stated : stated + needle.answer_length] = 0.0
        return needle.input_ids, weights

    def _several_needles(self, mixture: Mixture, rng: np.random.Generator) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Up to six facts in prose, then questions for some of them in any order, to the end of the row."""
        phrases = dict(draw_words(rng) for _ in range(int(rng.integers(2, 7))))  # the keys are all different
        facts = [fact_ids(self._tokenizer, key, answer) for key, answer in phrases.items()]
        room = mixture.row_tokens - 1 - sum(len(sentence) for sentence, _, _ in facts)
        asked: list[tuple[list[int], list[int]]] = []
        for index in rng.permutation(len(facts)):
            _, question, answer = facts[index]
            if len(question) + len(answer) > room - 20:
                break
            asked.append((question, answer))
            room -= len(question) + len(answer)
        haystack = self._prose(rng)[:room]
        ids: list[int] = [self._bos]
        weights: list[float] = [1.0]
        cuts = [0, *sorted(int(cut) for cut in rng.integers(0, room + 1, size=len(facts))), room]
        for fact, (start, end) in zip([*facts, None], itertools.pairwise(cuts), strict=True):
            ids += haystack[start:end].tolist()
            weights += [1.0] * (end - start)
            if fact is not None:
                sentence, _, answer = fact
                ids += sentence
                weights += [1.0] * (len(sentence) - len(answer) - 1) + [0.0] * len(answer) + [1.0]
        for question, answer in asked:
            ids += question + answer
            weights += [0.0] * len(question) + [ANSWER_WEIGHT] * len(answer)
        return np.array(ids, dtype=np.int64), np.array(weights)

    def _repetition(self, mixture: Mixture, rng: np.random.Generator) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Words in any order, or random tokens, over and over; or prose that comes again after other prose."""
        kind = rng.random()
        if kind < (1.0 + mixture.words) / 2:  # of what is not words, half
            period = int(rng.integers(4, mixture.row_tokens // 2))
            segment = rng.permutation(self._words) if kind < mixture.words else rng.choice(self._plain_ids, size=period)
            ids = np.resize(segment[:period], mixture.row_tokens - 1)
            weights = np.ones(mixture.row_tokens)
            weights[: period + 2] = 0.0  # the second round's first token cannot be known either
        else:
            length = int(rng.integers(16, mixture.row_tokens // 2))
            ids = np.concatenate([self._prose(rng)[:length], self._prose(rng)[: mixture.row_tokens - 1 - 2 * length]])
            ids = np.concatenate([ids, ids[:length]])
            weights = np.ones(mixture.row_tokens)
        return np.concatenate([[self._bos], ids]), weights
