"""Windows: what models are scored on."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.data.splits import split_documents
from ropesearch.data.tokens import TokenIds, TokenReader
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows of one split, one a document: the tokenizer's BOS token, if it has one, then the document's first tokens.

    token_ids: int32 (num_windows, length_tokens), copied and read-only. Position 0 (BOS, or the document's first token)
        is never scored: nothing predicts it.
    documents: the name of each window's document, all different.
    has_bos: whether position 0 is the BOS token.
    fingerprint: hexadecimal SHA-256 of all of the above.

    Raises InputError when the parts do not fit together.
    """

    split: str
    length_tokens: int
    token_ids: TokenIds
    documents: tuple[str, ...]
    has_bos: bool
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
        token_ids = np.array(self.token_ids, order="C")
        if token_ids.min() < 0:
            raise InputError(f"token_ids: expected none below 0, got {token_ids.min()}")
        token_ids.flags.writeable = False
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "fingerprint", self._fingerprint())

    def _fingerprint(self) -> str:
        tokens = hashlib.sha256(self.token_ids.astype("<i4", copy=False).tobytes()).hexdigest()
        return sha256_of_json([self.split, self.length_tokens, list(self.documents), self.has_bos, tokens])

    @property
    def num_windows(self) -> int:
        return len(self.documents)

    def cut(self, length_tokens: int) -> "Windows":
        """The first `length_tokens` of each window: what `build_windows` would make of the same documents.

        Raises:
            InputError: length_tokens is below 2 or above this length.
        """
        if not 2 <= length_tokens <= self.length_tokens:
            raise InputError(
                f"length_tokens: expected 2 to {self.length_tokens} (the windows' length), got {length_tokens}"
            )
        return Windows(self.split, length_tokens, self.token_ids[:, :length_tokens], self.documents, self.has_bos)


def build_windows(
    corpus: CorpusConfig, tokenizer: "PreTrainedTokenizerBase", length_tokens: int, seed: int, cache_folder: Path | None
) -> dict[str, Windows]:
    """Windows of the splits search, selection and held_out, each of other documents (`splits.split_documents`).

    The tokenizer adds nothing itself: where it has a BOS token, that comes first and length_tokens - 1 tokens of the
    document follow, whatever the tokenizer would do by default. Tokens are kept in `cache_folder`, if given.

    Raises:
        InputError: length_tokens below 2; a corpus that cannot be read or has too few long enough documents.
    """
    if length_tokens < 2:
        raise InputError(f"length_tokens: expected at least 2, got {length_tokens}")
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


def check_vocabulary(windows: Windows, vocabulary_size: int) -> None:
    """Raises InputError when a token id is outside the model's vocabulary (rows of its input embedding)."""
    greatest = int(windows.token_ids.max())
    if greatest >= vocabulary_size:
        raise InputError(
            f"expected token ids below {vocabulary_size}, the rows of the model's embedding, got {greatest} in the "
            f"{windows.split} windows; the tokenizer belongs to another model"
        )
