"""The tokens of a text, or its first ones: as few characters tokenised as give exactly these, each text once."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ropesearch.errors import InputError
from ropesearch.files import remove_leftovers, sha256_of_json, write_bytes, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = npt.NDArray[np.int32]

_CHARACTERS_PER_TOKEN = 5  # of prose; a text with longer tokens costs another round
_APART_CHARACTERS = 4099  # between two cuts; prime, so that groups counted from the end (digits by threes) show
_SLACK_TOKENS = 64  # between the last token taken and the nearer cut


def all_tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> TokenIds:
    """All tokens of `text`, int32, without special tokens added.

    What spells a special token in the text, such as "<s>", is text and is split like it: a document must not be able to
    end or begin a sequence in its middle. Other added tokens are found as usual.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return np.array(ids, dtype=np.int32)


def all_tokens_of_each(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[TokenIds]:
    """As `all_tokens` of each text, on all cores where the tokenizer can."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    each: list[list[int]] = tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in each]


def first_tokens(tokenizer: "PreTrainedTokenizerBase", text: str, num_tokens: int) -> TokenIds:
    """The first `num_tokens` tokens of `text` (all where there are fewer), as `all_tokens` gives them.

    Equal to the beginning of the whole text's tokens: tokens are taken from a prefix only where they end well before
    its cut and a second cut further on gives the same ones; else from ever longer prefixes, in the end from the text.
    """

    cut = num_tokens * _CHARACTERS_PER_TOKEN + _APART_CHARACTERS
    while cut + _APART_CHARACTERS < len(text):
        near = all_tokens(tokenizer, text[:cut])
        if len(near) >= num_tokens + _SLACK_TOKENS:
            far = all_tokens(tokenizer, text[: cut + _APART_CHARACTERS])
            if np.array_equal(far[:num_tokens], near[:num_tokens]):
                return near[:num_tokens].copy()
        cut *= 2
    return all_tokens(tokenizer, text)[:num_tokens].copy()


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Hexadecimal SHA-256 of all that decides how text becomes tokens; None for a tokenizer that is Python code."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return None
    special = {"split_special_tokens": True}  # as `all_tokens` does
    pipeline = json.loads(backend.to_str())
    pipeline |= {"truncation": None, "padding": None}  # set by each call
    return sha256_of_json([type(tokenizer).__name__, special, pipeline])


class TokenReader:
    """First tokens of texts, kept in a cache folder by tokenizer and text.

    An entry is an .npy file of the tokens and a .json file with their digest. One that is damaged, or holds fewer
    tokens than asked for, is made anew. Without a folder, or for a tokenizer without digest, nothing is kept.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", cache_folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._digest = tokenizer_digest(tokenizer)
        self._folder = None if cache_folder is None or self._digest is None else cache_folder / self._digest[:16]
        if self._folder is not None:
            remove_leftovers(self._folder)

    def first_tokens(self, text: str, num_tokens: int) -> TokenIds:
        """As the function `first_tokens`. Raises InputError when the cache folder cannot be used."""
        if self._folder is None:
            return first_tokens(self._tokenizer, text, num_tokens)
        key = sha256_of_json([self._digest, hashlib.sha256(text.encode()).hexdigest()])
        try:
            cached = self._read(self._folder / key, key, num_tokens)
            if cached is not None:
                return cached
            tokens = first_tokens(self._tokenizer, text, num_tokens)
            self._write(self._folder / key, key, tokens, complete=len(tokens) < num_tokens)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"{self._folder}: expected a cache folder that can be read and written ({reason}); name another"
            ) from error
        return tokens

    @staticmethod
    def _read(path: Path, key: str, num_tokens: int) -> TokenIds | None:
        try:
            content = path.with_suffix(".npy").read_bytes()
            entry = json.loads(path.with_suffix(".json").read_bytes())
            complete = entry["complete"]
            if entry["sha256"] != _digest(content, key, complete):
                return None
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None
        tokens: TokenIds = np.load(io.BytesIO(content), allow_pickle=False)
        return tokens[:num_tokens] if complete or len(tokens) >= num_tokens else None

    @staticmethod
    def _write(path: Path, key: str, tokens: TokenIds, complete: bool) -> None:
        buffer = io.BytesIO()
        np.save(buffer, tokens.astype("<i4"), allow_pickle=False)
        content = buffer.getvalue()
        write_bytes(path.with_suffix(".npy"), content)
        write_json(path.with_suffix(".json"), {"complete": complete, "sha256": _digest(content, key, complete)})


def _digest(content: bytes, key: str, complete: bool) -> str:
    return hashlib.sha256(content + f"{key} {complete}".encode()).hexdigest()
