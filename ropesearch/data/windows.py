"""Windows: what models are scored on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropesearch.data import splits
from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.data.needles import make_needle
from ropesearch.data.splits import EvaluationTexts, split_documents
from ropesearch.data.tokens import TokenIds, TokenReader
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.seeding import stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows of one split, one a document: the tokenizer's BOS token, if it has one, then the document's first tokens.

    token_ids: int32 (num_windows, length_tokens), copied and read-only. Position 0 (BOS, or the document's first token)
        is never scored: nothing predicts it.
    documents: the name of each window's document, all different.
    has_bos: whether position 0 is the BOS token.
    answer_starts: for each window that ends in an answer the position of its first token, 0 for one that does not; of
        a window with an answer, only that is scored. Empty where no window has one.
    fingerprint: hexadecimal SHA-256 of all of the above.

    Raises InputError when the parts do not fit together.
    """

    split: str
    length_tokens: int
    token_ids: TokenIds
    documents: tuple[str, ...]
    has_bos: bool
    answer_starts: tuple[int, ...] = ()
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        expected = (len(self.documents), self.length_tokens)
        if self.token_ids.dtype != np.int32 or self.token_ids.shape != expected:
            raise InputError(
                f"token_ids: expected int32 of shape (documents, length_tokens) = {expected}, got "
                f"{self.token_ids.dtype} of shape {self.token_ids.shape}"
            )
        if not self.documents or self.length_tokens < 2:
            raise InputError(
                f"windows: expected at least 1 of at least 2 tokens, got {len(self.documents)} of {self.length_tokens}"
            )
        if len(set(self.documents)) < len(self.documents):
            raise InputError("windows: expected every window from another document, got a document twice")
        starts = self.answer_starts
        if starts and (len(starts) != len(self.documents) or not all(0 <= at < self.length_tokens for at in starts)):
            raise InputError(
                f"answer_starts: expected none, or for each of {len(self.documents)} windows a position below "
                f"{self.length_tokens}, got {list(starts)}"
            )
        token_ids = np.array(self.token_ids, order="C")
        if token_ids.min() < 0:
            raise InputError(f"token_ids: expected none below 0, got {token_ids.min()}")
        token_ids.flags.writeable = False
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "fingerprint", self._fingerprint())

    def _fingerprint(self) -> str:
        tokens = hashlib.sha256(self.token_ids.astype("<i4", copy=False).tobytes()).hexdigest()
        answers = [list(self.answer_starts)] if self.answer_starts else []
        return sha256_of_json([self.split, self.length_tokens, list(self.documents), self.has_bos, tokens, *answers])

    @property
    def num_windows(self) -> int:
        return len(self.documents)

    def answer_start(self, index: int) -> int:
        """Where the answer begins that ends window `index`; 0 where it has none."""
        return self.answer_starts[index] if self.answer_starts else 0

    def cut(self, length_tokens: int) -> "Windows":
        """The first `length_tokens` of each window: what `build_windows` would make of the same documents.

        Raises:
            InputError: length_tokens is below 2 or above this length, or a window's answer would be cut off.
        """
        if any(self.answer_starts):
            raise InputError(f"windows: those of the {self.split} split end in answers and cannot be cut; make others")
        if not 2 <= length_tokens <= self.length_tokens:
            raise InputError(
                f"length_tokens: expected 2 to {self.length_tokens} (the windows' length), got {length_tokens}"
            )
        return Windows(self.split, length_tokens, self.token_ids[:, :length_tokens], self.documents, self.has_bos)

    def joined(self, others: "Windows") -> "Windows":
        """These windows and `others`, spread evenly among each other, so that the first ones hold some of both.

        Raises:
            InputError: the two differ in split, length or BOS, or share the name of a document.
        """
        mine, theirs = ((each.split, each.length_tokens, each.has_bos) for each in (self, others))
        if mine != theirs:
            raise InputError(f"windows: expected others of the same split, length and BOS, {mine}, got {theirs}")
        both = [(each, index) for each in (self, others) for index in range(each.num_windows)]
        order = sorted(both, key=lambda one: (one[1] + 0.5) / one[0].num_windows)
        return Windows(
            split=self.split,
            length_tokens=self.length_tokens,
            token_ids=np.stack([each.token_ids[index] for each, index in order]),
            documents=tuple(each.documents[index] for each, index in order),
            has_bos=self.has_bos,
            answer_starts=tuple(each.answer_start(index) for each, index in order),
        )


def build_windows(
    corpus: CorpusConfig, tokenizer: "PreTrainedTokenizerBase", length_tokens: int, seed: int, cache_folder: Path | None
) -> dict[str, Windows]:
    """Windows of the splits search, selection and held_out, each of other documents (`splits.split_documents`).

    The tokenizer adds nothing itself: where it has a BOS token, that comes first and length_tokens - 1 tokens of the
    document follow, whatever the tokenizer would do by default. Tokens are kept in `cache_folder`, if given.

    Raises:
        InputError: length_tokens below 2; a corpus that cannot be read or has too few long enough documents.
    """
    _check_length(length_tokens)
    bos: Any = tokenizer.bos_token_id
    prefix = np.array([] if bos is None else [bos], dtype=np.int32)
    tokens = TokenReader(tokenizer, cache_folder)
    beginnings = split_documents(corpus, tokens, length_tokens - len(prefix), seed)
    return {
        split: Windows(
            split=split,
            length_tokens=length_tokens,
            token_ids=np.stack([np.concatenate([prefix, document.token_ids]) for document in beginnings[split]]),
            documents=tuple(document.name for document in beginnings[split]),
            has_bos=bos is not None,
        )
        for split in SPLITS
    }


def evaluation_texts(
    corpus: CorpusConfig, tokenizer: "PreTrainedTokenizerBase", length_tokens: int, seed: int, cache_folder: Path | None
) -> EvaluationTexts:
    """What training must not read: the texts of the windows that `build_windows` makes of the same arguments; of a
    corpus already split, all texts of its three splits. Raises what `build_windows` raises.
    """
    _check_length(length_tokens)
    num_tokens = length_tokens - int(tokenizer.bos_token_id is not None)
    return splits.evaluation_texts(corpus, TokenReader(tokenizer, cache_folder), num_tokens, seed)


def needle_windows(
    windows: Windows, tokenizer: "PreTrainedTokenizerBase", depths: Sequence[float], num_windows: int, seed: int
) -> Windows:
    """`num_windows` windows of the same length that each hide a needle in one of these and end in its answer.

    Haystacks are the documents of `windows` in turn, depths those of `depths` in turn, shifted by one each time that
    the documents begin again; key and answer are drawn from the stream "needles/<split>" of the seed, one of its own
    for each window. BOS is as in `windows`. Needle, question and answer are whole in every window (`make_needle`).

    Raises:
        InputError: the windows are too short for needle, question and answer, or a depth is not in [0, 1].
    """
    prefix = windows.token_ids[0, : int(windows.has_bos)].tolist()
    needles, names = [], []
    for index in range(num_windows):
        turn, row = divmod(index, windows.num_windows)
        depth = depths[(index + turn) % len(depths)]
        rng = stream(seed, f"needles/{windows.split}", index)
        haystack = windows.token_ids[row, len(prefix) :]
        needles.append(make_needle(tokenizer, haystack, windows.length_tokens, depth, rng, prefix))
        names.append(f"{windows.documents[row]} with needle {index} ({needles[-1].key}) at depth {depth:g}")
    return Windows(
        split=windows.split,
        length_tokens=windows.length_tokens,
        token_ids=np.stack([needle.input_ids for needle in needles]).astype(np.int32),
        documents=tuple(names),
        has_bos=windows.has_bos,
        answer_starts=tuple(needle.answer_start for needle in needles),
    )


def check_vocabulary(windows: Windows, vocabulary_size: int) -> None:
    """Raises InputError when a token id is outside the model's vocabulary (rows of its input embedding)."""
    greatest = int(windows.token_ids.max())
    if greatest >= vocabulary_size:
        raise InputError(
            f"expected token ids below {vocabulary_size}, the rows of the model's embedding, got {greatest} in the "
            f"{windows.split} windows; the tokenizer belongs to another model"
        )


def _check_length(length_tokens: int) -> None:
    if length_tokens < 2:
        raise InputError(f"length_tokens: expected at least 2, got {length_tokens}")
