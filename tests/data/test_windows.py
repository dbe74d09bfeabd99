import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.data.documents import read_documents
from ropesearch.data.needles import draw_words, fact_ids
from ropesearch.data.tokens import first_tokens
from ropesearch.data.windows import Windows, build_windows, check_vocabulary, evaluation_texts, needle_windows
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.seeding import stream
from tests.data.conftest import prose

TOKENS = st.integers(1, 4).flatmap(
    lambda rows: st.integers(2, 12).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length), min_size=rows, max_size=rows
        )
    )
)


def make(rows: list[list[int]], **values: Any) -> Windows:
    parts: dict[str, Any] = {
        "split": "search",
        "length_tokens": len(rows[0]),
        "token_ids": np.array(rows, dtype=np.int32),
        "documents": tuple(f"{i}.txt" for i in range(len(rows))),
        "has_bos": True,
    }
    return Windows(**(parts | values))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusConfig:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i}.txt").write_text(prose(i, 80))
    return CorpusConfig(path=str(folder), num_search_windows=4, num_selection_windows=3, num_held_out_windows=2)


@pytest.mark.parametrize("with_bos", [True, False])
def test_window_is_bos_and_the_beginning_of_its_document(
    request: pytest.FixtureRequest, corpus: CorpusConfig, with_bos: bool
) -> None:
    tokenizer = request.getfixturevalue("tokenizer" if with_bos else "tokenizer_without_bos")
    windows = build_windows(corpus, tokenizer, 50, 0, None)
    assert {split: windows[split].token_ids.shape for split in windows} == dict(
        zip(SPLITS, [(4, 50), (3, 50), (2, 50)], strict=True)
    )
    for split in SPLITS:
        assert windows[split].split == split and windows[split].has_bos is with_bos
        for name, row in zip(windows[split].documents, windows[split].token_ids.tolist(), strict=True):
            text = (Path(corpus.path) / name).read_text()
            all_tokens = tokenizer.encode(text, add_special_tokens=False)
            assert row == [*([0] if with_bos else []), *all_tokens][:50]
    names = [name for split in SPLITS for name in windows[split].documents]
    assert len(set(names)) == 9


def test_bos_is_not_put_twice(tokenizer: Any, corpus: CorpusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import processors

    expected = build_windows(corpus, tokenizer, 50, 0, None)["search"].token_ids
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    previous = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = template
    try:
        assert tokenizer.encode("a")[0] == 0
        np.testing.assert_array_equal(build_windows(corpus, tokenizer, 50, 0, None)["search"].token_ids, expected)
    finally:
        tokenizer.backend_tokenizer.post_processor = previous


def test_same_seed_same_bytes_with_and_without_cache(tokenizer: Any, corpus: CorpusConfig, tmp_path: Path) -> None:
    runs = [build_windows(corpus, tokenizer, 50, 3, folder) for folder in (None, tmp_path, tmp_path)]
    for split in SPLITS:
        assert len({run[split].token_ids.tobytes() for run in runs}) == 1
        assert len({run[split].fingerprint for run in runs}) == 1
    other = build_windows(corpus, tokenizer, 50, 4, None)
    assert {run["search"].documents for run in runs} != {other["search"].documents}


def test_moved_corpus_keeps_its_fingerprint(tokenizer: Any, corpus: CorpusConfig, tmp_path: Path) -> None:
    before = build_windows(corpus, tokenizer, 50, 0, None)
    for path in Path(corpus.path).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    moved = CorpusConfig(path=str(tmp_path), num_search_windows=4, num_selection_windows=3, num_held_out_windows=2)
    after = build_windows(moved, tokenizer, 50, 0, None)
    assert [before[split].fingerprint for split in SPLITS] == [after[split].fingerprint for split in SPLITS]


def test_exactly_long_enough_documents_are_taken(tokenizer: Any, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(prose(i, 30))
    lengths = [len(tokenizer.encode(prose(i, 30), add_special_tokens=False)) for i in range(3)]
    config = CorpusConfig(path=str(tmp_path), num_search_windows=1, num_selection_windows=1, num_held_out_windows=1)
    build_windows(config, tokenizer, 1 + min(lengths), 0, None)
    with pytest.raises(
        InputError, match=f"of at least {min(lengths) + 1} tokens .* got {sum(n > min(lengths) for n in lengths)} long"
    ):
        build_windows(config, tokenizer, 2 + min(lengths), 0, None)


def test_windows_of_streamed_records_and_files_are_alike(tokenizer: Any, corpus: CorpusConfig, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [prose(i, 80) for i in range(12)]}), tmp_path / "a.parquet")
    config = CorpusConfig(path=str(tmp_path), num_search_windows=4, num_selection_windows=3, num_held_out_windows=2)
    windows = build_windows(config, tokenizer, 50, 0, None)
    for name, row in zip(windows["search"].documents, windows["search"].token_ids.tolist(), strict=True):
        seed = int(name.removeprefix("a.parquet:")) - 1
        assert row[1:] == tokenizer.encode(prose(seed, 80), add_special_tokens=False)[:49]


@settings(deadline=None)
@given(rows=TOKENS, data=st.data())
def test_cut_is_the_beginning_of_every_window(rows: list[list[int]], data: st.DataObject) -> None:
    windows = make(rows)
    length = data.draw(st.integers(2, windows.length_tokens))
    cut = windows.cut(length)
    assert cut.token_ids.tolist() == [row[:length] for row in rows]
    assert (cut.split, cut.length_tokens, cut.documents, cut.has_bos) == ("search", length, windows.documents, True)
    assert cut.fingerprint == make([row[:length] for row in rows]).fingerprint
    assert (cut.fingerprint == windows.fingerprint) == (length == windows.length_tokens)
    assert cut.cut(2).fingerprint == windows.cut(2).fingerprint


@settings(deadline=None)
@given(rows=TOKENS, data=st.data())
def test_fingerprint_changes_with_any_token(rows: list[list[int]], data: st.DataObject) -> None:
    windows = make(rows)
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    changed = [list(tokens) for tokens in rows]
    changed[row][column] = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != rows[row][column]))
    assert make(changed).fingerprint != windows.fingerprint
    assert make(rows).fingerprint == windows.fingerprint


def test_fingerprint_covers_everything_else() -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    variants = [
        make(rows),
        make(rows, split="held_out"),
        make(rows, has_bos=False),
        make(rows, documents=("0.txt", "2.txt")),
        make([[1, 2, 3, 4, 5, 6, 7, 8]]),
        make([[1, 2], [3, 4], [5, 6], [7, 8]]),
    ]
    assert len({windows.fingerprint for windows in variants}) == len(variants)
    # SHA-256 of [split, length, documents, has_bos, SHA-256 of the little-endian int32 tokens], by sha256sum
    assert make([[0, 1]], documents=("a",)).fingerprint == (
        "a751ff095d54e1e3a9585d4e1b63cbc6ab084dc1e81cccffe72be608a84b23a1"
    )


def test_tokens_are_a_read_only_copy() -> None:
    rows = np.array([[1, 2, 3]], dtype=np.int32)
    windows = make([[1, 2, 3]], token_ids=rows)
    rows[0, 0] = 9
    assert windows.token_ids[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        windows.token_ids[0, 0] = 9
    with pytest.raises(ValueError, match="read-only"):
        windows.cut(2).token_ids[0, 0] = 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_ids": np.zeros((1, 3), np.int64)}, "expected int32"),
        ({"length_tokens": 4}, r"= \(1, 4\), got int32 of shape \(1, 3\)"),
        ({"documents": ()}, r"= \(0, 3\)"),
        ({"documents": ("a", "a"), "token_ids": np.zeros((2, 3), np.int32)}, "a document twice"),
        ({"token_ids": np.array([[1, -1, 2]], np.int32)}, "none below 0, got -1"),
        ({"length_tokens": 1, "token_ids": np.zeros((1, 1), np.int32)}, "at least 2 tokens, got 1 of 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make([[1, 2, 3]], **values)


@pytest.mark.parametrize("length", [-1, 0, 1, 4])
def test_cut_outside_the_length_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=f"expected 2 to 3 .* got {length}"):
        make([[1, 2, 3]]).cut(length)


def test_length_below_two_is_refused(tokenizer: Any, corpus: CorpusConfig) -> None:
    with pytest.raises(InputError, match="length_tokens: expected at least 2, got 1"):
        build_windows(corpus, tokenizer, 1, 0, None)
    with pytest.raises(InputError, match="length_tokens: expected at least 2, got 1"):
        evaluation_texts(corpus, tokenizer, 1, 0, None)


@pytest.mark.parametrize("with_bos", [True, False])
def test_evaluation_texts_are_those_of_the_windows(
    request: pytest.FixtureRequest, corpus: CorpusConfig, with_bos: bool
) -> None:
    tokenizer = request.getfixturevalue("tokenizer" if with_bos else "tokenizer_without_bos")
    windows = build_windows(corpus, tokenizer, 50, 3, None)
    texts = evaluation_texts(corpus, tokenizer, 50, 3, None)
    assert texts.num_tokens == 50 - with_bos
    held = {
        document.name
        for document in read_documents(corpus)
        if texts.holds(document.text, first_tokens(tokenizer, document.text, 50))
    }
    assert held == {name for split in SPLITS for name in windows[split].documents}


def test_vocabulary() -> None:
    windows = make([[1, 2, 99]])
    check_vocabulary(windows, 100)
    with pytest.raises(
        InputError, match=r"below 99, .* got 99 in the search windows; the tokenizer belongs to another"
    ):
        check_vocabulary(windows, 99)


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusConfig:
    folder = tmp_path_factory.mktemp("long")
    for i in range(12):
        (folder / f"{i}.txt").write_text(prose(i, 400))
    return CorpusConfig(path=str(folder), num_search_windows=4, num_selection_windows=3, num_held_out_windows=2)


@pytest.mark.parametrize("with_bos", [True, False])
def test_needle_windows_hold_the_whole_needle_and_end_in_its_answer(
    request: pytest.FixtureRequest, long_corpus: CorpusConfig, with_bos: bool
) -> None:
    """Every token of every window is accounted for: BOS, haystack with the needle in it, question, answer."""
    tokenizer = request.getfixturevalue("tokenizer" if with_bos else "tokenizer_without_bos")
    texts = build_windows(long_corpus, tokenizer, 220, 0, None)["search"]
    depths = [0.0, 0.05, 1.0]
    needles = needle_windows(texts, tokenizer, depths, 9, 0)
    assert needles.token_ids.shape == (9, 220) and needles.has_bos is with_bos and needles.split == "search"
    keys, met = set(), set()
    for index, row in enumerate(needles.token_ids.tolist()):
        document = index % 4
        key, words = draw_words(stream(0, "needles/search", index))
        start = needles.answer_start(index)
        sentence, question, answer = fact_ids(tokenizer, key, words)
        assert row[start:] == answer  # to the last token
        assert row[start - len(question) : start] == question
        depth = depths[(index + index // 4) % 3]
        first, num_haystack = int(with_bos), start - len(question) - len(sentence) - int(with_bos)
        at = first + round(depth * num_haystack)
        assert row[at : at + len(sentence)] == sentence
        haystack = [*row[first:at], *row[at + len(sentence) : start - len(question)]]
        assert haystack == texts.token_ids[document, first : first + num_haystack].tolist()
        assert row[:first] == texts.token_ids[0, :first].tolist()
        assert needles.documents[index] == f"{texts.documents[document]} with needle {index} ({key}) at depth {depth:g}"
        keys.add(key)
        met.add((document, depth))
    assert len(keys) > 5 and len(met) == 9  # other keys; no document twice at the same depth


def test_needles_are_drawn_by_seed_and_split(tokenizer: Any, long_corpus: CorpusConfig) -> None:
    texts = build_windows(long_corpus, tokenizer, 220, 0, None)
    first, again, other = (needle_windows(texts["search"], tokenizer, [0.0], 3, seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    longer = needle_windows(texts["search"], tokenizer, [0.0], 7, 0)
    np.testing.assert_array_equal(longer.token_ids[:3], first.token_ids)
    in_selection = needle_windows(texts["selection"], tokenizer, [0.0], 3, 0)
    assert {name.split("(")[1] for name in first.documents} != {name.split("(")[1] for name in in_selection.documents}


def test_windows_too_short_for_a_needle_are_refused(tokenizer: Any, long_corpus: CorpusConfig) -> None:
    texts = build_windows(long_corpus, tokenizer, 30, 0, None)["search"]
    with pytest.raises(InputError, match=r"a needle prompt needs at least \d+ tokens .* got length_tokens=30"):
        needle_windows(texts, tokenizer, [0.0], 1, 0)


def test_the_fingerprint_covers_answers_and_leaves_plain_windows_theirs() -> None:
    rows = [[0, 1, 2, 3], [0, 4, 5, 6]]
    plain, answered, later = make(rows), make(rows, answer_starts=(0, 2)), make(rows, answer_starts=(0, 3))
    assert len({plain.fingerprint, answered.fingerprint, later.fingerprint}) == 3
    tokens = hashlib.sha256(np.array(rows, dtype="<i4").tobytes()).hexdigest()
    assert plain.fingerprint == sha256_of_json(["search", 4, ["0.txt", "1.txt"], True, tokens])
    assert [plain.answer_start(1), answered.answer_start(0), answered.answer_start(1)] == [0, 0, 2]
    with pytest.raises(InputError, match="end in answers and cannot be cut"):
        answered.cut(3)
    for starts in ((1,), (0, 4), (-1, 2)):
        with pytest.raises(InputError, match="answer_starts"):
            make(rows, answer_starts=starts)


def test_joined_windows_are_spread_among_each_other() -> None:
    plain = make([[0, each] for each in range(1, 6)])
    needles = make([[0, 8], [0, 9]], documents=("a", "b"), answer_starts=(1, 1))
    joined = plain.joined(needles)
    assert joined.token_ids[:, 1].tolist() == [1, 8, 2, 3, 4, 9, 5]
    assert joined.answer_starts == (0, 1, 0, 0, 0, 1, 0)
    assert joined.documents == ("0.txt", "a", "1.txt", "2.txt", "3.txt", "b", "4.txt")
    for others in (make([[0, 8, 9]], documents=("a",)), make([[0, 8]], documents=("a",), split="selection")):
        with pytest.raises(InputError, match="of the same split, length and BOS"):
            plain.joined(others)
    with pytest.raises(InputError, match="a document twice"):
        plain.joined(plain)
