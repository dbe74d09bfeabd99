import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.data import splits
from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.data.splits import (
    EvaluationTexts,
    beginning_digest,
    content_digest,
    evaluation_texts,
    split_documents,
)
from ropesearch.data.tokens import TokenReader, first_tokens
from ropesearch.errors import InputError
from tests.data.conftest import prose

NUM_TOKENS = 40


def corpus(path: Path, count: int = 2, **values: Any) -> CorpusConfig:
    return CorpusConfig(
        path=str(path),
        num_search_windows=count,
        num_selection_windows=count,
        num_held_out_windows=count,
        **values,
    )


def split(config: CorpusConfig, tokenizer: Any, seed: int = 0, num_tokens: int = NUM_TOKENS) -> dict[str, list[str]]:
    result = split_documents(config, TokenReader(tokenizer, None), num_tokens, seed)
    return {name: [beginning.name for beginning in beginnings] for name, beginnings in result.items()}


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@settings(deadline=None)
@given(
    st.lists(st.text(), max_size=5), st.lists(st.sampled_from([" ", "\n", "\t\r\n", "\u2003 "]), min_size=6, max_size=6)
)
def test_content_digest_is_of_the_words(words: list[str], spaces: list[str]) -> None:
    text = spaces[-1] + "".join(word + space for word, space in zip(words, spaces, strict=False))
    original = splits._NORMALISED_CHARACTERS
    try:
        digests = set()
        for splits._NORMALISED_CHARACTERS in (1, 2, 3, original):
            digests |= {content_digest(text), content_digest(" ".join(text.split()))}
    finally:
        splits._NORMALISED_CHARACTERS = original
    assert len(digests) == 1
    assert content_digest(text + "x") not in digests
    assert content_digest(text + " x") not in digests


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), counts=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
def test_every_split_gets_its_number_and_no_document_twice(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, counts: tuple[int, int, int]
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"long{i}.txt").write_text(prose(i, 60))
        (folder / f"short{i}.txt").write_text(prose(i, 5))
    config = CorpusConfig(
        path=str(folder), num_search_windows=counts[0], num_selection_windows=counts[1], num_held_out_windows=counts[2]
    )
    result = split(config, tokenizer, seed)
    assert tuple(len(result[name]) for name in SPLITS) == counts
    names = [name for names in result.values() for name in names]
    assert len(set(names)) == len(names) and all(name.startswith("long") for name in names)
    assert split(config, tokenizer, seed) == result


def test_seeds_deal_differently(tokenizer: Any, tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(prose(i, 60))
    dealt = [split(corpus(tmp_path), tokenizer, seed) for seed in range(5)]
    assert len({str(result) for result in dealt}) == 5
    assert (
        len({name for result in dealt for names in result.values() for name in names}) > 15
    )  # not only the first files


def test_seeds_deal_the_records_of_a_file_differently(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [prose(i, 60) for i in range(12)])
    dealt = [split(corpus(path), tokenizer, seed) for seed in range(8)]
    assert len({str(result) for result in dealt}) == 8
    used = {name for result in dealt for names in result.values() for name in names}
    assert used == {f"a.jsonl:{i}" for i in range(1, 8)}  # the first six long enough ones and a quarter more


def test_duplicates_count_once(tokenizer: Any, tmp_path: Path) -> None:
    texts = [prose(i, 60) for i in range(6)]
    copies = [text.replace(" ", "\n ") for text in texts] + [text + " and more at the end" for text in texts]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *copies])
    result = split(corpus(path), tokenizer)
    assert {name for names in result.values() for name in names} == {f"a.jsonl:{i}" for i in range(1, 7)}


def test_split_folder_keeps_its_splits(tokenizer: Any, tmp_path: Path) -> None:
    for i, name in enumerate([*SPLITS, "test"]):
        (tmp_path / name).mkdir()
        for j in range(4):
            (tmp_path / name / f"{j}.txt").write_text(prose(10 * i + j, 60 if j else 3))
    (tmp_path / "test" / "0.txt").write_text(prose(1, 60))  # also in search, but nobody reads this folder
    expected = {name: [f"{name}/1.txt", f"{name}/2.txt"] for name in SPLITS}
    assert split(corpus(tmp_path), tokenizer, seed=0) == split(corpus(tmp_path), tokenizer, seed=1) == expected


@pytest.mark.parametrize("copied", [lambda text: text.replace(" ", "  "), lambda text: text + " with another end"])
def test_text_in_two_splits_is_refused(tokenizer: Any, tmp_path: Path, copied: Any) -> None:
    for i, name in enumerate(SPLITS):
        (tmp_path / name).mkdir()
        for j in range(2):
            (tmp_path / name / f"{j}.txt").write_text(prose(10 * i + j, 60))
    (tmp_path / "held_out" / "1.txt").write_text(copied(prose(0, 60)))
    with pytest.raises(InputError, match=r"no text in two splits.* in search/0\.txt and held_out/1\.txt"):
        split(corpus(tmp_path), tokenizer)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "bc", " ", "\n\t", "\u2003", "\u00e9"]), max_size=20).map("".join), st.integers(1, 9)
)
def test_beginning_digest_is_of_the_first_characters(text: str, num_characters: int) -> None:
    words = "".join(text.split())
    digest = beginning_digest(text, num_characters)
    if len(words) < num_characters:
        assert digest is None
    else:
        assert digest == hashlib.sha256(words[:num_characters].encode()).digest()


def test_a_copy_with_another_beginning_and_another_end_is_a_copy(tokenizer: Any, tmp_path: Path) -> None:
    texts = [prose(i, 60) for i in range(6)]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *("\n " + text + " and more" for text in texts)])
    result = split(corpus(path), tokenizer)
    assert {name for names in result.values() for name in names} == {f"a.jsonl:{i}" for i in range(1, 7)}


def test_copy_in_two_splits_is_refused_beyond_what_is_needed(tokenizer: Any, tmp_path: Path) -> None:
    for i, name in enumerate(SPLITS):
        (tmp_path / name).mkdir()
        for j in range(5):
            (tmp_path / name / f"{j}.txt").write_text(prose(10 * i + j, 60))
    (tmp_path / "selection" / "4.txt").write_text(prose(4, 60))
    with pytest.raises(InputError, match=r"the same text in search/4\.txt and selection/4\.txt"):
        split(corpus(tmp_path), tokenizer)


def test_too_few_and_too_short_says_what_there_is(tokenizer: Any, tmp_path: Path) -> None:
    texts = [prose(i, 60) for i in range(3)] + [prose(7, 12), prose(0, 60), "tiny"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    longest = len(tokenizer.encode(prose(7, 12), add_special_tokens=False))
    with pytest.raises(InputError) as caught:
        split(corpus(path), tokenizer)
    assert str(caught.value) == (
        f"{path}: expected 6 different documents of at least 40 tokens for the three splits (2 search, 2 selection, 2 "
        f"held_out), got 3 long enough among 6 documents, 1 of them duplicates, the longest of the others {longest} "
        "tokens long; ask for fewer windows or a shorter target length, or give a corpus with more long documents"
    )


def test_a_text_file_is_one_document(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(prose(0, 500))
    with pytest.raises(InputError, match=r"got 1 long enough among 1 documents.* \(a text file is one document\); ask"):
        split(corpus(path), tokenizer)


def test_of_no_text_at_all_not_fewer_windows_are_asked(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [" ", "\n"])
    with pytest.raises(InputError, match="got no text at all; give a corpus with text in it"):
        split(corpus(path), tokenizer)


def test_longest_is_known_even_if_nothing_had_to_be_tokenised(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["tiny", prose(7, 12), "small one"])
    longest = len(tokenizer.encode(prose(7, 12), add_special_tokens=False))
    with pytest.raises(
        InputError, match=f"got 0 long enough among 3 documents.*the longest of the others {longest} tok"
    ):
        split(corpus(path), tokenizer, num_tokens=1000)


def test_short_split_is_named(tokenizer: Any, tmp_path: Path) -> None:
    for i, name in enumerate(SPLITS):
        (tmp_path / name).mkdir()
        for j in range(2 - (name == "selection")):
            (tmp_path / name / f"{j}.txt").write_text(prose(10 * i + j, 60))
    with pytest.raises(
        InputError, match=r"selection: expected 2 different .* for the split selection, got 1 long enough"
    ):
        split(corpus(tmp_path), tokenizer)


def endless(monkeypatch: pytest.MonkeyPatch, num_words: int) -> list[int]:
    """Puts a stream without end in the place of the corpus; returns the list of what was read of it."""
    read: list[int] = []

    def documents(*_: Any, **__: Any) -> Iterator[Document]:
        while True:
            read.append(len(read))
            yield Document(f"train:{len(read)}", prose(len(read), num_words if len(read) % 2 else 5))

    monkeypatch.setattr(splits, "read_documents", documents)
    return read


def test_stream_is_read_no_further_than_needed(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = endless(monkeypatch, num_words=60)
    split(corpus(tmp_path, count=8), tokenizer)
    assert len(read) <= 2 * (24 + 6) + 1  # every second is long enough; a quarter more than needed


def test_stream_without_long_documents_ends(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = endless(monkeypatch, num_words=8)
    with pytest.raises(
        InputError, match=r"among 50 documents \(as many as max_documents lets be read\).*larger max_doc"
    ):
        split(corpus(tmp_path, max_documents=50), tokenizer)
    assert len(read) <= 51


def names_held(config: CorpusConfig, tokenizer: Any, texts: EvaluationTexts) -> set[str]:
    """Of the documents of a corpus, all its splits, those that are evaluation texts."""
    documents = [
        *itertools.chain(*(read_documents(config, split) for split in (SPLITS if config.is_split() else [None])))
    ]
    return {
        document.name
        for document in documents
        if texts.holds(document.text, first_tokens(tokenizer, document.text, NUM_TOKENS))
    }


@pytest.mark.parametrize("seed", range(3))
def test_evaluation_texts_are_those_of_the_splits(tokenizer: Any, tmp_path: Path, seed: int) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(prose(i, 60 if i else 5))
    config = corpus(tmp_path, count=1)
    texts = evaluation_texts(config, TokenReader(tokenizer, None), NUM_TOKENS, seed)
    dealt = {name for names in split(config, tokenizer, seed).values() for name in names}
    assert names_held(config, tokenizer, texts) == dealt and len(dealt) == 3


def test_evaluation_texts_of_a_split_corpus_are_all_of_its_three_splits(tokenizer: Any, tmp_path: Path) -> None:
    for i, name in enumerate([*SPLITS, "training"]):
        (tmp_path / name).mkdir()
        for j in range(4):
            (tmp_path / name / f"{j}.txt").write_text(prose(10 * i + j, 60 if j else 5))
    config = corpus(tmp_path, count=1)
    texts = evaluation_texts(config, TokenReader(tokenizer, None), NUM_TOKENS, 0)
    assert names_held(config, tokenizer, texts) == {f"{name}/{j}.txt" for name in SPLITS for j in range(4)}
    for document in read_documents(config, "training"):
        assert not texts.holds(document.text, first_tokens(tokenizer, document.text, NUM_TOKENS))


def test_copies_of_evaluation_texts_are_evaluation_texts(tokenizer: Any, tmp_path: Path) -> None:
    """Each of the three ways alone: the same words, the same first characters, the same first tokens."""
    text = prose(0, 60)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(prose(i, 60))
    texts = evaluation_texts(corpus(tmp_path, count=1), TokenReader(tokenizer, None), NUM_TOKENS, 0)
    tokens = first_tokens(tokenizer, text, NUM_TOKENS)
    other_tokens = first_tokens(tokenizer, prose(9, 60), NUM_TOKENS)
    assert texts.holds(text.replace(" ", "\n\n"), other_tokens)
    assert texts.holds(text + " and more", other_tokens)
    assert texts.holds(prose(9, 60), tokens)
    assert texts.holds(prose(9, 60), np.append(tokens, tokens))
    assert not texts.holds(prose(9, 60), other_tokens)
    assert not texts.holds(text[:NUM_TOKENS], tokens[:-1])
    assert not texts.holds(text[1:], tokens[1:])


def test_the_fingerprint_of_evaluation_texts_is_of_all_of_them() -> None:
    one, two = b"1" * 32, b"2" * 32
    made = [
        EvaluationTexts(num_tokens, frozenset(digests))
        for num_tokens, digests in ((40, [one]), (40, [one, two]), (41, [one]), (40, []))
    ]
    assert len({texts.fingerprint for texts in made}) == 4
    assert EvaluationTexts(40, frozenset([two, one])).fingerprint == made[1].fingerprint
