"""What becomes of a corpus's documents, against a reckoning of every one of them."""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.data import preparation
from ropesearch.data.config import SPLITS, CorpusConfig, MixtureConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.data.preparation import prepare_training_tokens
from ropesearch.data.training_tokens import Bucket, TrainingTokens, open_training_tokens
from ropesearch.data.windows import build_windows, evaluation_texts
from ropesearch.errors import InputError
from tests.data.conftest import prose
from tests.toys import toy_tokenizer

ORIGINAL_LENGTH = 16
ROW_TOKENS = 64
BOS, EOS = 0, 1  # of the toys' tokenizer, which has a token for each byte
TWO = MixtureConfig(shares=[0.5, 0.5])
THREE = MixtureConfig(long_bounds=[40], shares=[0.3, 0.3, 0.4])
LONG_ONLY = MixtureConfig(shares=[0.0, 1.0])


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Any:
    return toy_tokenizer()


def write_corpus(path: Path, texts: list[str]) -> CorpusConfig:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return CorpusConfig(path=str(path))


def text_of(index: int, num_bytes: int) -> str:
    """A text of so many bytes, without white space, that begins like no other."""
    return (chr(ord("A") + index // 26) + chr(ord("a") + index % 26) + "." * num_bytes)[:num_bytes]


def prepare(
    corpus: CorpusConfig, tokenizer: Any, folder: Path, mixture: MixtureConfig = TWO, **changes: Any
) -> TrainingTokens:
    arguments: dict[str, Any] = {
        "original_length": ORIGINAL_LENGTH,
        "row_tokens": ROW_TOKENS,
        "num_tokens": 10**6,
        "exclude": [],
        "folder": folder,
        "seed": 0,
    }
    return prepare_training_tokens(corpus, tokenizer, mixture, **(arguments | changes))


def documents_of(bucket: Bucket) -> list[list[int]]:
    return [bucket.token_ids[start:end].tolist() for start, end in itertools.pairwise(bucket.offsets.tolist())]


def whole(tokenizer: Any, text: str) -> list[int]:
    """[BOS] text [EOS], by the tokenizer's own words."""
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return [*([tokenizer.bos_token_id] if tokenizer.bos_token else []), *ids, tokenizer.eos_token_id]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_every_document_goes_into_the_bucket_of_its_length(
    bytes_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [text_of(index, length) for index, length in enumerate([*lengths, 20, 60])]
    tokens = prepare(write_corpus(folder / "a.jsonl", texts), bytes_tokenizer, folder / "tokens", THREE)
    different = list(dict.fromkeys(texts))  # one letter alone may come twice
    for bucket, (above, up_to) in zip(tokens.buckets, [(0, 16), (16, 40), (40, 10**9)], strict=True):
        expected = [whole(bytes_tokenizer, text) for text in different if above < len(text) + 2 <= up_to]
        found = documents_of(bucket)
        if not above:
            assert bucket.counts.num_documents - bucket.counts.num_pieces == len(expected)
            found = found[: len(expected)]
        assert found == expected
        assert bucket.counts.num_documents == len(bucket.offsets) - 1
        assert bucket.counts.num_tokens == len(bucket.token_ids) == bucket.offsets[-1]
    assert tokens.read.num_documents == len(texts)
    assert tokens.read.num_duplicates == len(texts) - len(different)
    assert not tokens.read.stopped
    assert tokens.greatest_token_id == max(token for bucket in tokens.buckets for token in bucket.token_ids.tolist())


@pytest.mark.parametrize("with_bos", [True, False])
def test_length_counts_bos_and_eos_and_special_spellings_are_text(
    request: pytest.FixtureRequest, tmp_path: Path, with_bos: bool
) -> None:
    tokenizer = request.getfixturevalue("tokenizer" if with_bos else "tokenizer_without_bos")
    texts = ["</s> the <s> quick", *(prose(seed, num_words) for seed in range(4) for num_words in (3, 60))]
    lengths = [len(whole(tokenizer, text)) for text in texts]
    original_length = lengths[0]
    tokens = prepare(
        write_corpus(tmp_path / "a.jsonl", texts), tokenizer, tmp_path / "tokens", original_length=original_length
    )
    for bucket, belongs in ((tokens.buckets[0], True), (tokens.buckets[1], False)):
        expected = [
            whole(tokenizer, text)
            for text, length in zip(texts, lengths, strict=True)
            if (length <= original_length) is belongs
        ]
        assert documents_of(bucket)[: len(expected)] == expected
    first = documents_of(tokens.buckets[0])[0]
    assert first.count(tokenizer.eos_token_id) == 1 and first[-1] == tokenizer.eos_token_id
    assert len(first) == original_length
    assert tokens.padding_token_id == tokenizer.eos_token_id
    shorter = prepare(
        write_corpus(tmp_path / "b.jsonl", texts), tokenizer, tmp_path / "others", original_length=original_length - 1
    )
    assert documents_of(shorter.buckets[1])[0] == first


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=12))
def test_any_text_comes_out_as_its_own_tokens(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    corpus = write_corpus(folder / "a.jsonl", [*texts, "a <s> b", text_of(0, 200)])
    tokens = prepare(corpus, tokenizer, folder / "tokens", LONG_ONLY, original_length=2)
    different = {" ".join(document.text.split()): document.text for document in [*read_documents(corpus)][::-1]}
    expected = [whole(tokenizer, text) for text in different.values()]
    assert sorted(documents_of(tokens.buckets[1])) == sorted(each for each in expected if len(each) > 2)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is read before the one before it is in its bucket."""
    monkeypatch.setattr(preparation, "_CHARACTERS_AT_ONCE", 1)


def test_reading_stops_when_every_bucket_has_what_it_needs(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_at_a_time: None
) -> None:
    read: list[int] = []

    def endless(*_: Any, **__: Any) -> Iterator[Document]:
        for index in itertools.count():
            read.append(index)
            yield Document(str(index), f"{index:06} " + "x" * (3 if index % 10 else 41))  # 12 and 50 tokens

    monkeypatch.setattr(preparation, "read_documents", endless)
    corpus = CorpusConfig(path=str(write_corpus(tmp_path / "a.jsonl", ["x"]).path), max_documents=30)
    tokens = prepare(corpus, bytes_tokenizer, tmp_path / "tokens", num_tokens=2000)
    short, long = (bucket.counts for bucket in tokens.buckets)
    wanted = 1000 + ROW_TOKENS
    assert wanted <= short.num_tokens < wanted + 12 and wanted <= long.num_tokens < wanted + 50
    assert (short.num_needed_tokens, long.num_needed_tokens) == (1000, 1000)
    assert len(read) == tokens.read.num_documents == 10 * (long.num_documents - 1) + 1
    assert tokens.read.num_without_room == len(read) - short.num_documents - long.num_documents
    assert not tokens.read.stopped and tokens.notes() == ()
    monkeypatch.setattr(corpus, "max_documents", 5)  # fewer than stand between two long ones, when short ones suffice
    stopped = prepare(corpus, bytes_tokenizer, tmp_path / "stopped", num_tokens=2000)
    assert stopped.read.stopped
    short, long = (bucket.counts for bucket in stopped.buckets)
    assert wanted <= short.num_tokens < wanted + 12 and long.num_tokens < 1000
    assert stopped.notes() == (
        f"the documents of more than 16 tokens are gone through {1000 / long.num_tokens:.1f} times: {long.num_tokens} "
        "tokens for 1,000",
        f"reading stopped after {stopped.read.num_documents} documents, as the last 5 (corpus.max_documents) were of "
        "no use",
    )


@pytest.mark.parametrize("num_characters", [1, 100, 1000, 1 << 22])
def test_how_many_are_read_at_once_changes_nothing(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_characters: int
) -> None:
    texts = [text_of(index, 3 + 7 * index % 90) for index in range(200)]
    corpus = dataclasses.replace(write_corpus(tmp_path / "a.jsonl", texts), max_documents=9)
    for num_tokens in (100, 1000, 4000):
        monkeypatch.setattr(preparation, "_CHARACTERS_AT_ONCE", 50)
        first = prepare(corpus, bytes_tokenizer, tmp_path / f"{num_tokens}", THREE, num_tokens=num_tokens)
        monkeypatch.setattr(preparation, "_CHARACTERS_AT_ONCE", num_characters)
        second = prepare(corpus, bytes_tokenizer, tmp_path / f"{num_tokens}again", THREE, num_tokens=num_tokens)
        assert second.to_json() == first.to_json()


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(15, 80), min_size=1, max_size=6), num_tokens=st.integers(1, 300))
def test_short_documents_that_lack_are_pieces_of_longer_ones(
    bytes_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_tokens: int
) -> None:
    """BOS and the text that follows, 16 tokens each, to the end of the document; nothing left out in between."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [text_of(0, 5), *(text_of(1 + index, length) for index, length in enumerate(lengths))]
    corpus = write_corpus(folder / "a.jsonl", texts)
    tokens = prepare(corpus, bytes_tokenizer, folder / "tokens", num_tokens=num_tokens)
    wanted = (num_tokens + 1) // 2 + ROW_TOKENS
    kept = len(tokens.buckets[1].offsets) - 1
    long = [whole(bytes_tokenizer, text) for text in texts[1:]]
    assert documents_of(tokens.buckets[1]) == long[:kept]
    pieces = [
        [BOS, *body[start : start + 15]]
        for body in (each[1:] for each in [*long[kept:], *long[:kept]])
        for start in range(0, len(body), 15)
        if body[start : start + 15] != [EOS]
    ]
    expected = [whole(bytes_tokenizer, texts[0])]
    while pieces and sum(map(len, expected)) < wanted:
        expected.append(pieces.pop(0))
    assert documents_of(tokens.buckets[0]) == expected
    counts = tokens.buckets[0].counts
    assert counts.num_pieces == len(expected) - 1
    assert counts.num_piece_tokens == sum(map(len, expected[1:]))
    assert sorted(path.name for path in (folder / "tokens").iterdir()) == [
        *("bucket0.offsets", "bucket0.tokens", "bucket1.offsets", "bucket1.tokens", "training_tokens.json")
    ]
    if counts.num_pieces:
        assert (
            f"of the {counts.num_tokens} training tokens in documents of 1 to 16 tokens, {counts.num_piece_tokens} are "
            f"{counts.num_pieces} pieces of longer documents: the corpus has too few short ones"
        ) in tokens.notes()


def test_documents_for_pieces_are_those_without_room_first(bytes_tokenizer: Any, tmp_path: Path) -> None:
    texts = [text_of(index, 98) for index in range(20)]
    corpus = write_corpus(tmp_path / "a.jsonl", texts)
    tokens = prepare(corpus, bytes_tokenizer, tmp_path / "tokens", num_tokens=400)
    assert tokens.buckets[1].counts.num_documents == 3  # 200 and a row of 64 tokens, 100 each
    marks = [whole(bytes_tokenizer, text)[1:3] for text in texts]
    begun = [
        number for number, mark in enumerate(marks) if mark in [each[1:3] for each in documents_of(tokens.buckets[0])]
    ]
    assert begun == [3, 4, 5]
    assert tokens.read.num_documents == 20 and tokens.read.num_without_room == 14


def test_copies_count_once_and_evaluation_texts_not_at_all(tokenizer: Any, tmp_path: Path) -> None:
    """Copies as the splits reckon them: other white space, another end after a window's length."""
    texts = [prose(seed, 60) for seed in range(12)]
    corpus = write_corpus(tmp_path / "a.jsonl", texts)
    corpus = dataclasses.replace(corpus, num_search_windows=2, num_selection_windows=1, num_held_out_windows=1)
    windows = build_windows(corpus, tokenizer, 41, 3, None)
    evaluated = {int(name.partition(":")[2]) - 1 for split in SPLITS for name in windows[split].documents}
    assert len(evaluated) == 4
    exclude = evaluation_texts(corpus, tokenizer, 41, 3, None)
    copies = [texts[index] for index in sorted(evaluated)]
    training = [
        *(text.replace(" ", "\n  ") for text in copies),
        *(text + " and another end" for text in copies),
        texts[min(set(range(12)) - evaluated)].replace(" ", "  "),
        *texts,
        *texts,
    ]
    corpus = write_corpus(tmp_path / "b.jsonl", training)
    tokens = prepare(corpus, tokenizer, tmp_path / "tokens", LONG_ONLY, exclude=[exclude])
    kept = [index for index in range(12) if index not in evaluated]
    expected = [whole(tokenizer, training[8]), *(whole(tokenizer, texts[index]) for index in kept[1:])]
    assert documents_of(tokens.buckets[1]) == expected
    assert (tokens.read.num_excluded, tokens.read.num_duplicates) == (8 + 4 + 4, 1 + 8)
    other = prepare(corpus, tokenizer, tmp_path / "other", LONG_ONLY)
    assert other.buckets[1].counts.num_documents == 12 + 4  # those with another end are other documents then
    assert other.fingerprint != tokens.fingerprint


def test_evaluation_texts_of_two_dealings_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for index in range(12):
        (tmp_path / "texts" / f"{index}.txt").write_text(prose(index, 60))
    corpus = CorpusConfig(
        path=str(tmp_path / "texts"), num_search_windows=1, num_selection_windows=1, num_held_out_windows=1
    )
    dealt = [build_windows(corpus, tokenizer, length, seed, None) for length, seed in ((41, 0), (30, 5))]
    evaluated = {name for windows in dealt for split in SPLITS for name in windows[split].documents}
    exclude = [evaluation_texts(corpus, tokenizer, length, seed, None) for length, seed in ((41, 0), (30, 5))]
    tokens = prepare(corpus, tokenizer, tmp_path / "tokens", LONG_ONLY, exclude=exclude)
    assert tokens.read.num_excluded == len(evaluated) > 3
    assert tokens.buckets[1].counts.num_documents == 12 - len(evaluated)


@pytest.fixture
def already_split(tmp_path: Path) -> Path:
    for number, name in enumerate([*SPLITS, "test", "training"]):
        (tmp_path / name).mkdir()
        for index in range(3):
            (tmp_path / name / f"{index}.txt").write_text(prose(10 * number + index, 60))
    return tmp_path


def test_a_corpus_already_split_is_trained_on_by_its_folder(tokenizer: Any, already_split: Path) -> None:
    corpus = CorpusConfig(
        path=str(already_split), num_search_windows=1, num_selection_windows=1, num_held_out_windows=1
    )
    (already_split / "training" / "copy.txt").write_text(prose(12, 60).replace(" ", "\n"))  # selection/2.txt, no window
    exclude = evaluation_texts(corpus, tokenizer, 41, 0, None)
    tokens = prepare(corpus, tokenizer, already_split / "tokens", LONG_ONLY, exclude=[exclude])
    expected = [whole(tokenizer, prose(40 + index, 60)) for index in range(3)]
    assert sorted(documents_of(tokens.buckets[1])) == sorted(expected)
    assert (tokens.read.num_documents, tokens.read.num_excluded) == (4, 1)


def test_a_corpus_already_split_without_training_is_refused(tokenizer: Any, already_split: Path) -> None:
    (already_split / "training").rename(already_split / "train")
    with pytest.raises(
        InputError, match=r"expected the documents to train on in its subfolder training, .*; add it, or"
    ):
        prepare(CorpusConfig(path=str(already_split)), tokenizer, already_split / "tokens")
    assert not (already_split / "tokens").exists()


def test_seeds_read_the_files_of_a_folder_in_other_orders(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for index in range(8):
        (tmp_path / "texts" / f"{index}.txt").write_text(prose(index, 60))
    corpus = CorpusConfig(path=str(tmp_path / "texts"))
    orders = {
        str(documents_of(prepare(corpus, tokenizer, tmp_path / f"tokens{seed}", LONG_ONLY, seed=seed).buckets[1]))
        for seed in range(4)
    }
    assert len(orders) == 4


def test_a_bucket_without_documents_is_named(bytes_tokenizer: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(0, 5), text_of(1, 60), text_of(2, 70)])
    with pytest.raises(InputError) as caught:
        prepare(corpus, bytes_tokenizer, tmp_path / "tokens", THREE)
    assert str(caught.value) == (
        f"{corpus.path}: expected documents of 17 to 40 tokens to train on, which have a share in mixture.shares, got "
        "none among 3 documents: 1 shorter, 2 longer, and 0 of that length that are evaluation texts or copies; give a "
        "corpus with such ones, other mixture.long_bounds, or that length the share 0"
    )
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(index, 6 + index) for index in range(9)])
    corpus = dataclasses.replace(corpus, max_documents=7)
    with pytest.raises(InputError) as caught:
        prepare(corpus, bytes_tokenizer, tmp_path / "tokens", num_tokens=1)
    assert str(caught.value).startswith(
        f"{corpus.path}: expected documents of more than 16 tokens to train on, which have a share in mixture.shares, "
        "got none among 9 documents: 9 shorter, the longest of 16 tokens, and 0 of"
    )
    assert not (tmp_path / "tokens").exists() and not list(tmp_path.glob(".*"))


def test_no_document_at_all_is_refused(bytes_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(InputError, match=r"expected documents of 1 to 16 tokens .*, got none among 0 documents"):
        prepare(CorpusConfig(path=str(path)), bytes_tokenizer, tmp_path / "tokens")


def test_a_tokenizer_without_special_tokens(bytes_tokenizer: Any, tmp_path: Path) -> None:
    """No BOS and no EOS: text alone, padding with id 0; a document of one token has nothing to predict."""

    class Plain:
        bos_token_id = eos_token_id = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    corpus = write_corpus(tmp_path / "a.jsonl", ["a", "bc", "d" * 33])
    tokens = prepare(corpus, Plain(), tmp_path / "tokens")
    assert [bytes(each).decode() for each in documents_of(tokens.buckets[0])] == ["bc", "d" * 16, "d" * 16]
    assert documents_of(tokens.buckets[1]) == [[ord("d")] * 33]
    assert (tokens.padding_token_id, tokens.read.num_empty, tokens.greatest_token_id) == (0, 1, ord("d"))


def test_only_the_beginning_of_a_book_is_tokenised_when_only_short_documents_lack(
    tmp_path: Path, one_at_a_time: None
) -> None:
    lengths: list[int] = []

    class Counting:
        bos_token_id, eos_token_id = 0, 1

        def encode(self, text: str, **_: Any) -> list[int]:
            lengths.append(len(text))
            return [ord(letter) for letter in text]

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [self.encode(text) for text in texts]}

    books = [text_of(index, 100_000) for index in range(6)]
    tokens = prepare(write_corpus(tmp_path / "a.jsonl", books), Counting(), tmp_path / "tokens", num_tokens=150_000)
    assert tokens.buckets[1].counts.num_documents == 1
    assert tokens.buckets[0].counts.num_piece_tokens >= 75_064
    assert [length == 100_000 for length in lengths[:2]] == [True, True] and max(lengths[2:]) < 10_000
    assert tokens.read.num_without_room == 4


def never(*_: Any, **__: Any) -> Iterator[Document]:
    raise AssertionError("read")


def test_what_is_prepared_is_not_prepared_again(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(index, 5 + 5 * index) for index in range(12)])
    first = prepare(corpus, bytes_tokenizer, tmp_path / "tokens", THREE)
    monkeypatch.setattr(preparation, "read_documents", never)
    again = prepare(corpus, bytes_tokenizer, tmp_path / "tokens", THREE)
    assert again.fingerprint == first.fingerprint == open_training_tokens(tmp_path / "tokens").fingerprint
    assert again.to_json() == first.to_json() == json.loads(json.dumps(first.to_json()))
    assert [documents_of(bucket) for bucket in again.buckets] == [documents_of(bucket) for bucket in first.buckets]
    for bucket in again.buckets:
        assert bucket.token_ids.dtype == np.int32 and bucket.offsets.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            bucket.token_ids[0] = 5


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mixture": TWO}, "mixture"),
        ({"original_length": 15}, "original_length"),
        ({"row_tokens": 65}, "row_tokens"),
        ({"num_tokens": 10}, "num_tokens"),
        ({"seed": 1}, "seed"),
        ({"corpus": CorpusConfig(path=__file__)}, "corpus"),
    ],
)
def test_what_was_prepared_from_something_else_is_refused(
    bytes_tokenizer: Any, tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(index, 5 + 5 * index) for index in range(12)])
    prepare(corpus, bytes_tokenizer, tmp_path / "tokens", THREE)
    with pytest.raises(InputError, match=f"expected training tokens prepared with {name} = .*; remove the folder"):
        prepare(
            **(
                {"corpus": corpus, "mixture": THREE, "tokenizer": bytes_tokenizer, "folder": tmp_path / "tokens"}
                | changes
            )
        )


def test_other_evaluation_texts_and_another_tokenizer_are_something_else(
    bytes_tokenizer: Any, tokenizer: Any, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [prose(index, 60) for index in range(12)])
    small = dataclasses.replace(corpus, num_search_windows=1, num_selection_windows=1, num_held_out_windows=1)
    prepare(corpus, tokenizer, tmp_path / "tokens", LONG_ONLY)
    exclude = [evaluation_texts(small, tokenizer, 20, 0, None)]
    with pytest.raises(InputError, match="prepared with exclude = "):
        prepare(corpus, tokenizer, tmp_path / "tokens", LONG_ONLY, exclude=exclude)
    with pytest.raises(InputError, match="prepared with tokenizer = "):
        prepare(corpus, bytes_tokenizer, tmp_path / "tokens", LONG_ONLY)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_training_tokens_are_refused(
    bytes_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    corpus = write_corpus(folder / "a.jsonl", [text_of(index, 5 + 5 * index) for index in range(12)])
    prepare(corpus, bytes_tokenizer, folder / "tokens", THREE)
    victim = data.draw(st.sampled_from(sorted((folder / "tokens").iterdir())))
    content = victim.read_bytes()
    at = data.draw(st.integers(0, 10**9)) % (len(content) - 1)  # how long the description is hangs on the folder's name
    kind = data.draw(st.sampled_from(["flip", "cut", "junk", "gone", "longer"]))
    if kind == "flip":
        victim.write_bytes(content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :])
    elif kind == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"cut": content[:at], "longer": content + b"0"}.get(kind, data.draw(st.binary(max_size=99))))
    with pytest.raises(InputError, match=r"tokens: expected (whole )?training tokens.*; remove the folder, so that"):
        prepare(corpus, bytes_tokenizer, folder / "tokens", THREE)


def test_a_changed_count_is_found_out(bytes_tokenizer: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(0, 5), text_of(1, 50)])
    prepare(corpus, bytes_tokenizer, tmp_path / "tokens")
    path = tmp_path / "tokens" / "training_tokens.json"
    values = json.loads(path.read_text())
    values["read"]["num_documents"] += 1
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"something else \(training_tokens\.json is not as it was written\)"):
        open_training_tokens(tmp_path / "tokens")


def test_training_tokens_of_another_version_are_refused(bytes_tokenizer: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(0, 5), text_of(1, 50)])
    prepare(corpus, bytes_tokenizer, tmp_path / "tokens")
    path = tmp_path / "tokens" / "training_tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    with pytest.raises(InputError, match=r"expected training tokens of version 1, got 2; remove the folder"):
        open_training_tokens(tmp_path / "tokens")


def test_a_folder_that_cannot_be_used_is_refused(bytes_tokenizer: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(0, 5), text_of(1, 50)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="full: expected whole training tokens, got damaged ones or something else"):
        prepare(corpus, bytes_tokenizer, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match="expected a folder that training tokens can be written to"):
        prepare(corpus, bytes_tokenizer, tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="expected a folder that training tokens can be written to"):
        prepare(corpus, bytes_tokenizer, tmp_path / "a.jsonl" / "below")
    (tmp_path / "empty").mkdir()
    assert prepare(corpus, bytes_tokenizer, tmp_path / "empty").read.num_documents == 2


def test_a_full_disk_ends_in_one_message_and_leaves_nothing(bytes_tokenizer: Any, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(index, 9000) for index in range(30)])
    real = preparation.BucketWriter

    class OnFullDisk(real):  # type: ignore[misc, valid-type]
        def __init__(self, folder: Path, name: str) -> None:
            (folder / f"{name}.tokens").symlink_to("/dev/full")
            super().__init__(folder, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BucketWriter", OnFullDisk)
        with pytest.raises(InputError, match=r"tokens: expected a folder .* \(No space left on device\); make room"):
            prepare(corpus, bytes_tokenizer, tmp_path / "tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_what_another_process_prepared_meanwhile_is_taken(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", [text_of(0, 5), text_of(1, 50)])

    def slowly(*arguments: Any, **options: Any) -> Iterator[Document]:
        monkeypatch.setattr(preparation, "read_documents", read_documents)
        prepare(corpus, bytes_tokenizer, tmp_path / "tokens")
        yield from read_documents(*arguments, **options)

    monkeypatch.setattr(preparation, "read_documents", slowly)
    assert prepare(corpus, bytes_tokenizer, tmp_path / "tokens").read.num_documents == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokens"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens: expected at least 1 token to train on, got 0"),
        ({"row_tokens": 16}, r"expected a target_length above original_length \(16\)"),
        ({"mixture": THREE, "original_length": 40}, r"long_bounds: expected lengths above original_length \(40\)"),
        ({"mixture": MixtureConfig(shares=[1.0])}, "expected 2 shares"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(preparation, "read_documents", never)
    corpus = write_corpus(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(InputError, match=message):
        prepare(**({"corpus": corpus, "tokenizer": bytes_tokenizer, "folder": tmp_path / "tokens"} | changes))
