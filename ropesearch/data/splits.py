"""Long enough documents for the three splits, no text in two of them."""

import hashlib
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

from ropesearch.data.config import SPLITS, TEXT_SUFFIXES, CorpusConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.data.tokens import TokenIds, TokenReader
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.seeding import stream

_SURPLUS_FRACTION = 4  # a quarter more documents than needed are drawn from
_NORMALISED_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The first tokens of a document, int32 (num_tokens,)."""

    name: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class EvaluationTexts:
    """What must not be trained on: the texts that windows are made of, and copies of them as the splits reckon copies.

    num_tokens: of a window, BOS not counted; this many first characters or tokens in common make a copy.
    """

    num_tokens: int
    digests: frozenset[bytes]

    def holds(self, text: str, token_ids: TokenIds) -> bool:
        """Whether a text, of these tokens (int32, no special ones added; the first num_tokens will do), is one."""
        contents = [content_digest(text), beginning_digest(text, self.num_tokens)]
        if len(token_ids) >= self.num_tokens:
            contents.append(token_ids[: self.num_tokens].tobytes())
        return any(hashlib.sha256(content).digest() in self.digests for content in contents if content is not None)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of all of it."""
        return sha256_of_json([self.num_tokens, sorted(digest.hex() for digest in self.digests)])


@dataclass(slots=True)
class _Found:
    """What was met while looking for long enough documents."""

    beginnings: list[Beginning] = field(default_factory=list)
    num_documents: int = 0
    num_duplicates: int = 0
    longest_short_tokens: int = 0
    longest_skipped: str = ""
    stopped_at_limit: bool = False


def split_documents(
    corpus: CorpusConfig, tokens: TokenReader, num_tokens: int, seed: int
) -> dict[str, tuple[Beginning, ...]]:
    """The beginnings, `num_tokens` long, of as many documents as the corpus config asks for, by split.

    A corpus already split keeps its splits; the first long enough documents of each are taken, by name. Otherwise the
    documents are dealt, a pure function of corpus, config and seed: the files of a folder are read in an order drawn
    from the seed, a dataset in its own, until a quarter more than needed are long enough; from these the splits are
    drawn.

    Copies count once, so that no two windows hold the same: texts that differ in white space only, that begin with the
    same `num_tokens` characters when white space is left out (a quarter of the window, in prose), or with the same
    `num_tokens` tokens. Line ends, a byte order mark, another ending or indentation make no other text; another
    spelling of the same characters (Unicode composed and decomposed) does.

    Raises:
        InputError: too few long enough documents; in a corpus already split, a text that stands in two splits; what
            `read_documents` raises.
    """
    return _split(_Search(tokens, num_tokens, corpus.max_documents), corpus, seed)


def evaluation_texts(corpus: CorpusConfig, tokens: TokenReader, num_tokens: int, seed: int) -> EvaluationTexts:
    """The texts of the documents that `split_documents` gives for the same arguments; of a corpus already split, all
    texts of its three splits.

    Raises what `split_documents` raises.
    """
    search = _Search(tokens, num_tokens, corpus.max_documents)
    names = {each.name for beginnings in _split(search, corpus, seed).values() for each in beginnings}
    return EvaluationTexts(num_tokens, search.digests(None if corpus.is_split() else names))


def _split(search: "_Search", corpus: CorpusConfig, seed: int) -> dict[str, tuple[Beginning, ...]]:
    num_windows = corpus.num_windows()
    if corpus.is_split():
        result = {}
        for split in SPLITS:
            found = search.run(read_documents(corpus, split), num_windows[split], split)
            search.check(found, num_windows[split], f"{Path(corpus.path) / split}", f"the split {split}")
            result[split] = tuple(found.beginnings)
        return result
    num_needed = sum(num_windows.values())
    num_drawn_from = num_needed + num_needed // _SURPLUS_FRACTION
    found = search.run(read_documents(corpus, order=stream(seed, "documents")), num_drawn_from, None)
    wanted = ", ".join(f"{count} {split}" for split, count in num_windows.items())
    search.check(found, num_needed, corpus.path, f"the three splits ({wanted})")
    order = stream(seed, "splits").permutation(len(found.beginnings)).tolist()
    drawn = iter([found.beginnings[index] for index in order])
    return {split: tuple(next(drawn) for _ in range(num_windows[split])) for split in SPLITS}


def content_digest(text: str) -> bytes:
    """SHA-256 of a text without regard to white space: each run of it counts as one space, none at the ends."""
    digest = hashlib.sha256()
    started = space = False
    for start in range(0, len(text), _NORMALISED_CHARACTERS):  # in pieces: a text may be one line of 100 MB
        piece = text[start : start + _NORMALISED_CHARACTERS]
        words = " ".join(piece.split())
        if words:
            digest.update((" " if started and (space or piece[0].isspace()) else "").encode() + words.encode())
            started, space = True, piece[-1].isspace()
        else:
            space = True
    return digest.digest()


def beginning_digest(text: str, num_characters: int) -> bytes | None:
    """SHA-256 of the first `num_characters` of a text, white space left out; None where there are fewer."""
    parts: list[str] = []
    num_missing = num_characters
    for start in range(0, len(text), num_characters):
        part = "".join(text[start : start + num_characters].split())[:num_missing]
        parts.append(part)
        num_missing -= len(part)
        if not num_missing:
            return hashlib.sha256("".join(parts).encode()).digest()
    return None


class _Search:
    """Looks for documents of at least `num_tokens` tokens; remembers every text over all splits."""

    def __init__(self, tokens: TokenReader, num_tokens: int, max_documents: int) -> None:
        self._tokens = tokens
        self._num_tokens = num_tokens
        self._max_documents = max_documents
        self._seen: dict[bytes, tuple[str, str | None]] = {}

    def run(self, documents: Iterator[Document], num_wanted: int, split: str | None) -> _Found:
        """The first `num_wanted` different, long enough documents. A given split is read to its end all the same, so
        that no text of it stands in another one."""
        found = _Found()
        for document in documents:
            if split is None and len(found.beginnings) == num_wanted:
                break
            if found.num_documents == self._max_documents:
                found.stopped_at_limit = True
                break
            found.num_documents += 1
            if not self._is_new_text(document, split):
                found.num_duplicates += 1
            elif len(found.beginnings) < num_wanted:
                self._try(document, found, split)
        return found

    def _try(self, document: Document, found: _Found, split: str | None) -> None:
        if len(document.text) < self._num_tokens and len(document.text.encode()) < self._num_tokens:
            # No token is less than a byte, so there is no need to look; most documents of the web are met here.
            found.longest_skipped = max(found.longest_skipped, document.text, key=len)
            return
        token_ids = self._tokens.first_tokens(document.text, self._num_tokens)
        if len(token_ids) < self._num_tokens:
            found.longest_short_tokens = max(found.longest_short_tokens, len(token_ids))
        elif self._is_new(token_ids.tobytes(), document.name, split, f"the same first {self._num_tokens} tokens"):
            found.beginnings.append(Beginning(document.name, token_ids))
        else:
            found.num_duplicates += 1

    def _is_new_text(self, document: Document, split: str | None) -> bool:
        if not self._is_new(content_digest(document.text), document.name, split, "the same text"):
            return False
        beginning = beginning_digest(document.text, self._num_tokens)
        what = f"the same first {self._num_tokens} characters without white space"
        return beginning is None or self._is_new(beginning, document.name, split, what)

    def _is_new(self, content: bytes, name: str, split: str | None, what: str) -> bool:
        digest = hashlib.sha256(content).digest()
        other, other_split = self._seen.setdefault(digest, (name, split))
        if other_split != split:
            raise InputError(
                f"expected no text in two splits, got {what} in {other} and {name}; take one of them out of the corpus"
            )
        return other == name

    def digests(self, names: Set[str] | None) -> frozenset[bytes]:
        """Of the texts with these names, or of all that were met."""
        return frozenset(digest for digest, (name, _) in self._seen.items() if names is None or name in names)

    @staticmethod
    def _one_document(place: str) -> str:
        path = Path(place).expanduser()
        return " (a text file is one document)" if path.suffix.lower() in TEXT_SUFFIXES and path.is_file() else ""

    def check(self, found: _Found, num_needed: int, place: str, purpose: str) -> None:
        """Raises InputError when fewer than `num_needed` documents were found."""
        num_long = len(found.beginnings)
        if num_long >= num_needed:
            return
        longest = found.longest_short_tokens
        if found.longest_skipped:
            longest = max(longest, len(self._tokens.first_tokens(found.longest_skipped, self._num_tokens)))
        num_different = found.num_documents - found.num_duplicates
        if not found.num_documents:
            raise InputError(
                f"{place}: expected {num_needed} different documents of at least {self._num_tokens} tokens for "
                f"{purpose}, got no text at all; give a corpus with text in it"
            )
        limit = " (as many as max_documents lets be read)" if found.stopped_at_limit else ""
        others = "" if num_different == num_long else f", the longest of the others {longest} tokens long"
        raise InputError(
            f"{place}: expected {num_needed} different documents of at least {self._num_tokens} tokens for {purpose}, "
            f"got {num_long} long enough among {found.num_documents} documents{limit}, {found.num_duplicates} of them "
            f"duplicates{others}{self._one_document(place)}; ask for fewer windows or a shorter target length, or "
            f"give a corpus with more long documents{' or a larger max_documents' if found.stopped_at_limit else ''}"
        )
