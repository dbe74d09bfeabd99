"""From a corpus to the tokens that a fine-tuning reads."""

import contextlib
import dataclasses
import errno
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropesearch.data.config import SPLITS, TRAINING, CorpusConfig, MixtureConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.data.packing import IntArray
from ropesearch.data.splits import EvaluationTexts, content_digest
from ropesearch.data.tokens import TokenIds, all_tokens_of_each, first_tokens, tokenizer_digest
from ropesearch.data.training_tokens import (
    BucketCounts,
    BucketWriter,
    ReadCounts,
    TrainingTokens,
    bucket_name,
    describe,
    open_training_tokens,
)
from ropesearch.errors import InputError
from ropesearch.files import folder_beside
from ropesearch.seeding import stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_LEAST_TOKENS = 2  # of a document: in a shorter one nothing is predicted
_CHARACTERS_AT_ONCE = 1 << 22  # read and tokenised together
_LOG_DOCUMENTS = 10_000


def prepare_training_tokens(
    corpus: CorpusConfig,
    tokenizer: "PreTrainedTokenizerBase",
    mixture: MixtureConfig,
    *,
    original_length: int,
    row_tokens: int,
    num_tokens: int,
    exclude: Sequence[EvaluationTexts],
    folder: Path,
    seed: int,
) -> TrainingTokens:
    """Tokenise the documents that a training of `num_tokens` tokens in rows of `row_tokens` reads, into FOLDER.

    A document is [BOS] text [EOS], each if the tokenizer has it, and belongs to the bucket of its length in tokens with
    these. Of a corpus already split the documents in its subfolder `training` are read, of another all; without the
    texts of `exclude` (`windows.evaluation_texts`) and copies of them, and of texts that differ in white space only the
    first alone. The files of a folder are read in an order drawn from the seed, a dataset in its own, and no further
    than until each bucket has what its share needs or, where documents of some length are rare, until
    `corpus.max_documents` in a row were of no use. In memory are some millions of characters, or one document that is
    longer, and a digest of each.

    Where short documents do not suffice, longer ones are cut into pieces of original_length tokens (BOS and the text
    that follows) that fill the short bucket: first those for which their own bucket had no room, then the others.

    A folder that holds what was prepared from the same arguments is opened, and nothing is read.

    Raises:
        InputError: the mixture does not fit the lengths; a corpus already split without `training`; a bucket with a
            share and without documents; a folder with something else in it, damaged, or that cannot be written; what
            `read_documents` raises.
    """
    mixture.check(original_length, row_tokens)
    if num_tokens < 1:
        raise InputError(f"num_tokens: expected at least 1 token to train on, got {num_tokens}")
    split = None
    if corpus.is_split():
        split = TRAINING
        if not (Path(corpus.path).expanduser() / split).is_dir():
            raise InputError(
                f"{corpus.path}: expected the documents to train on in its subfolder {split}, since it has the "
                f"subfolders {', '.join(SPLITS)}, got no such folder; add it, or give another corpus.path"
            )
    read_from = ("path", "text_field", "dataset_config", "dataset_split", "max_documents")
    identity = {
        "corpus": {name: getattr(corpus, name) for name in read_from},
        "tokenizer": [tokenizer_digest(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id],
        "mixture": dataclasses.asdict(mixture),
        "original_length": original_length,
        "row_tokens": row_tokens,
        "num_tokens": num_tokens,
        "exclude": sorted(texts.fingerprint for texts in exclude),
        "seed": seed,
    }
    try:
        if not folder.is_dir() or not any(folder.iterdir()):
            documents = read_documents(corpus, split, order=stream(seed, "training/documents"))
            with folder_beside(folder) as beside:
                _Preparation(corpus, tokenizer, mixture, exclude, beside, identity).run(documents)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not folder.is_dir():  # else another was faster
            raise InputError(
                f"{folder}: expected a folder that training tokens can be written to and read from "
                f"({error.strerror or error}); make room, or name another"
            ) from error
    tokens = open_training_tokens(folder)
    differing = [name for name, value in identity.items() if tokens.identity.get(name) != value]
    if differing:
        name = differing[0]
        raise InputError(
            f"{folder}: expected training tokens prepared with {name} = {identity[name]}, got some with "
            f"{tokens.identity.get(name)}; remove the folder, so that they are prepared anew, or name another"
        )
    return tokens


class _Preparation:
    """Sorts documents into buckets, and writes them to a folder."""

    def __init__(
        self,
        corpus: CorpusConfig,
        tokenizer: "PreTrainedTokenizerBase",
        mixture: MixtureConfig,
        exclude: Sequence[EvaluationTexts],
        folder: Path,
        identity: Mapping[str, Any],
    ) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._exclude = exclude
        self._folder = folder
        self._identity = identity
        bos, eos = (
            np.array([] if token is None else [token], dtype=np.int32)
            for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        self._bos: TokenIds = bos
        self._eos: TokenIds = eos
        self._bounds = mixture.bucket_bounds(identity["original_length"])
        self._needed: list[int] = [math.ceil(share * identity["num_tokens"]) for share in mixture.shares]
        # The rows of a bucket may be one more than its share.
        self._wanted: list[int] = [needed and needed + identity["row_tokens"] for needed in self._needed]
        self._writers = [BucketWriter(folder, bucket_name(index)) for index in range(len(self._bounds))]
        self._spare = BucketWriter(folder, "spare")  # documents for pieces, if it comes to that
        self._seen: set[bytes] = set()
        self._num_met = [0] * len(self._bounds)  # where a document was only looked at in part, in one of those above
        self._longest_tokens = 0
        self._read = ReadCounts()

    def run(self, documents: Iterator[Document]) -> None:
        """Read as many documents as it takes, and leave the folder complete."""
        with contextlib.ExitStack() as stack:
            for writer in (*self._writers, self._spare):
                stack.callback(writer.close)
            self._sort(documents)
            kept = [writer.close() for writer in (self._spare, *self._writers[1:])]
            num_pieces, num_piece_tokens = self._fill(kept)
        self._spare.remove()
        counts = [
            BucketCounts(
                above_tokens=above,
                up_to_tokens=up_to,
                num_needed_tokens=needed,
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
                num_pieces=0 if above else num_pieces,
                num_piece_tokens=0 if above else num_piece_tokens,
            )
            for (above, up_to), needed, writer in zip(self._bounds, self._needed, self._writers, strict=True)
        ]
        self._check(counts)
        padding_token_id = next((int(token[0]) for token in (self._eos, self._bos) if len(token)), 0)
        greatest = max(padding_token_id, *(writer.greatest_token_id for writer in self._writers))
        describe(self._folder, counts, self._read, padding_token_id, greatest, self._identity)

    def _sort(self, documents: Iterator[Document]) -> None:
        num_useless = 0
        for text, token_ids in self._tokenised(documents):
            self._count("num_documents")
            num_useless = 0 if self._keep(text, token_ids) else num_useless + 1
            if self._read.num_documents % _LOG_DOCUMENTS == 0:
                held = " + ".join(f"{writer.num_tokens:,}" for writer in self._writers)
                _log.info("%d documents read, %s training tokens by length", self._read.num_documents, held)
            if not self._missing():
                return
            if num_useless == self._corpus.max_documents:
                self._read = dataclasses.replace(self._read, stopped=True)
                return

    def _tokenised(self, documents: Iterator[Document]) -> Iterator[tuple[str, TokenIds]]:
        """The texts and their tokens: all, or as many as show that a document is too long. Some texts at once, so that
        all cores work."""
        num_special = len(self._bos) + len(self._eos)
        while texts := self._next_texts(documents):
            greatest = self._bounds[self._missing()[-1]][1]
            if greatest is None or self._lacks_spare():
                yield from zip(texts, all_tokens_of_each(self._tokenizer, texts), strict=True)
            else:
                for text in texts:
                    yield text, first_tokens(self._tokenizer, text, max(1, greatest - num_special + 1))

    @staticmethod
    def _next_texts(documents: Iterator[Document]) -> list[str]:
        texts: list[str] = []
        num_characters = 0
        while num_characters < _CHARACTERS_AT_ONCE and (document := next(documents, None)) is not None:
            texts.append(document.text)
            num_characters += len(document.text)
        return texts

    def _missing(self) -> list[int]:
        """The buckets that need more."""
        return [
            index
            for index, (writer, wanted) in enumerate(zip(self._writers, self._wanted, strict=True))
            if writer.num_tokens < wanted
        ]

    def _lacks_spare(self) -> bool:
        """Whether longer documents are wanted for pieces, should no more short ones come."""
        return self._writers[0].num_tokens + self._spare.num_tokens < self._wanted[0]

    def _keep(self, text: str, token_ids: TokenIds) -> bool:
        """Put a text where it belongs; false if it is of no use."""
        missing = self._missing()
        length = len(token_ids) + len(self._bos) + len(self._eos)
        if not len(token_ids) or length < _LEAST_TOKENS:
            return self._count("num_empty")
        bucket = next(index for index, (_, up_to) in enumerate(self._bounds) if up_to is None or length <= up_to)
        self._num_met[bucket] += 1
        self._longest_tokens = max(self._longest_tokens, length)
        writer = self._writers[bucket] if bucket in missing else self._spare
        if writer is self._spare and not (bucket and self._lacks_spare()):
            return self._count("num_without_room")
        if any(texts.holds(text, token_ids) for texts in self._exclude):
            return self._count("num_excluded")
        digest = content_digest(text)
        if digest in self._seen:
            return self._count("num_duplicates")
        self._seen.add(digest)
        writer.append(np.concatenate([self._bos, token_ids, self._eos]))
        return True

    def _count(self, name: str) -> bool:
        self._read = dataclasses.replace(self._read, **{name: getattr(self._read, name) + 1})
        return False

    def _fill(self, sources: Sequence[tuple[TokenIds, IntArray]]) -> tuple[int, int]:
        """Fill what is missing in the short bucket with pieces of longer documents: their number and tokens."""
        short, wanted = self._writers[0], self._wanted[0]
        num_documents, num_tokens = short.num_documents, short.num_tokens
        for token_ids, offsets in sources:
            for start, end in itertools.pairwise(offsets.tolist()):
                for piece in self._pieces(token_ids[start:end]):
                    if short.num_tokens >= wanted:
                        return short.num_documents - num_documents, short.num_tokens - num_tokens
                    short.append(piece)
        return short.num_documents - num_documents, short.num_tokens - num_tokens

    def _pieces(self, document: TokenIds) -> Iterator[TokenIds]:
        """A document as pieces of original_length tokens; a last one that would be EOS alone is left out."""
        body = document[len(self._bos) :]
        piece_tokens = self._identity["original_length"] - len(self._bos)
        for start in range(0, len(body), piece_tokens):
            piece = np.concatenate([self._bos, body[start : start + piece_tokens]])
            if len(piece) >= _LEAST_TOKENS and len(body) - start > len(self._eos):
                yield piece

    def _check(self, buckets: Sequence[BucketCounts]) -> None:
        """Raises InputError for a bucket with a share and without documents."""
        read = self._read
        if read.num_documents and read.num_excluded == read.num_documents:
            raise InputError(
                f"{self._corpus.path}: expected documents to train on beside the evaluation texts, got none: all "
                f"{read.num_documents} are texts of the three splits or copies of such; give a corpus with more"
            )
        for index, counts in enumerate(buckets):
            if counts.num_documents or not counts.num_needed_tokens:
                continue
            shorter, left_out, longer = (
                sum(self._num_met[part]) for part in (slice(index), slice(index, index + 1), slice(index + 1, None))
            )
            longest = (
                f"the longest of {self._longest_tokens:,} tokens" if index + 1 == len(buckets) else f"{longer} longer"
            )
            limit = " (as many in a row as max_documents lets be read)" if read.stopped else ""
            raise InputError(
                f"{self._corpus.path}: expected documents of {counts.lengths} to train on, which have a share in "
                f"mixture.shares, got none among {read.num_documents} documents{limit}: {shorter} shorter, {longest}, "
                f"and {left_out} of that length that are evaluation texts or copies; give a corpus with such ones, "
                "other mixture.long_bounds, or that length the share 0"
            )
