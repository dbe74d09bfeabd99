"""Whatever lies in a corpus: documents, or an InputError that names the place; never a hang or a wrong text."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.data.splits import split_documents
from ropesearch.data.tokens import TokenReader, first_tokens
from ropesearch.data.windows import build_windows, check_vocabulary
from ropesearch.errors import InputError
from ropesearch.model.config import ModelConfig
from ropesearch.model.load import load_tokenizer
from tests import toys
from tests.data.conftest import prose
from tests.fuzz.mutations import BYTE_KINDS, JSON_VALUES, damaged_bytes

SHARED = [HealthCheck.function_scoped_fixture]  # every example writes over the one before

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(
        st.sampled_from(
            ["word", " ", "\n", "\r\n", "\r", "\t", "\0", "\ufeff", "\u2028", "<s>", "</s>", "\u00e9", "\U0001f600"]
        ),
        max_size=12,
    ).map("".join),
)
CONTENTS = st.one_of(
    st.binary(max_size=60),
    st.tuples(TEXTS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252"])).map(
        lambda given: given[0].encode(given[1], "replace")
    ),
    st.tuples(TEXTS, st.binary(min_size=1, max_size=3)).map(
        lambda given: given[0].encode("utf-8", "replace") + given[1]
    ),
)


def read(path: Path, **values: Any) -> list[Document] | str:
    """The documents of a corpus, or the message that refuses it."""
    try:
        return list(read_documents(CorpusConfig(path=str(path), **values)))
    except InputError as error:
        return str(error)


@settings(max_examples=120, suppress_health_check=SHARED)
@given(content=CONTENTS)
def test_a_text_file_is_its_text_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    found = read(tmp_path)
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        text = ""
    if not text.strip() or "\0" in text:
        assert isinstance(found, str) and found.startswith(f"{path}: expected "), found
    else:
        assert found == [Document("a.txt", text)]


FIELDS = st.dictionaries(st.sampled_from(["text", "Text", "", "id", "t\u00e9xt"]), TEXTS | JSON_VALUES, max_size=3)
LINES = st.one_of(
    FIELDS.map(lambda fields: json.dumps(fields).encode()),
    FIELDS.map(lambda fields: json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")),
    TEXTS.map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from(
        [b"", b" ", b"null", b"[]", b'{"text": NaN}', b'{"text": "\\ud800"}', b"\xff", b"9" * 5000, b"[" * 9999]
    ),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
)


@settings(max_examples=120, suppress_health_check=SHARED)
@given(lines=st.lists(LINES, max_size=4), bom=st.booleans())
def test_records_are_their_texts_or_refused_by_line(tmp_path: Path, lines: list[bytes], bom: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + b"\n".join(lines))
    found = read(tmp_path)
    expected: list[Document] | str = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig")
            if not text.strip():
                continue
            record = json.loads(text)
            words = record["text"] if isinstance(record, dict) else 3
            words if words is None else words.encode()
        except (ValueError, RecursionError, KeyError, AttributeError):
            expected = f"{path}, line {number}: expected "
            break
        if words and words.strip("\ufeff").strip():
            expected.append(Document(f"a.jsonl:{number}", words.removeprefix("\ufeff")))
    if isinstance(expected, str) or not any(line.removeprefix(b"\xef\xbb\xbf").strip() for line in lines):
        assert isinstance(found, str) and found.startswith(str(path) if expected == [] else str(expected)), found
    else:
        assert found == expected


@settings(max_examples=150, suppress_health_check=SHARED)
@given(data=st.data())
def test_a_damaged_parquet_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    texts = ["first text", None, "", "second \u00e9 text"] * data.draw(st.integers(1, 9))
    compression = data.draw(st.sampled_from(["none", "snappy", "zstd"]))
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), buffer, compression=compression)
    path = tmp_path / "a.parquet"
    path.write_bytes(damaged_bytes(data, buffer.getvalue(), data.draw(st.sampled_from(BYTE_KINDS))))
    found = read(tmp_path)
    if isinstance(found, str):
        assert found.startswith(str(path))
    else:
        assert all(document.text.strip() for document in found)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2]),
        pa.array([["x"], []]),
        pa.array([{"text": "x"}]),
        pa.array([2**62, -(2**62)], pa.timestamp("us")),
        pa.array([2**40], pa.duration("s")),
        pa.array([b"\xff"]),
        pa.array([True]),
    ],
)
def test_parquet_columns_that_hold_no_text_are_refused(tmp_path: Path, array: pa.Array) -> None:
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    found = read(tmp_path)
    assert isinstance(found, str) and found.startswith(f"{tmp_path / 'a.parquet'}"), found
    assert "expected text in the field 'text'" in found


def test_a_parquet_file_with_the_field_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "expected one field 'text', got 2" in str(read(tmp_path))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_texts_of_every_type_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array(["one", None, "two"]).cast(kind)
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    assert read(tmp_path) == [Document("a.parquet:1", "one"), Document("a.parquet:3", "two")]


OTHER_FORMATS = [
    "txt.gz",
    "md.gz",
    "jsonl.gz",
    "csv",
    "json",
    "zip",
    "tar",
    "arrow",
    "h5",
    "png",
    "xml",
    "rst",
    "state",
]


@settings(max_examples=15, suppress_health_check=SHARED)
@given(suffix=st.sampled_from(OTHER_FORMATS), content=st.binary(min_size=1, max_size=50))
def test_folders_of_other_formats_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    heads = {"zip": b"PK\x03\x04", "txt.gz": b"\x1f\x8b\x08\x00", "jsonl.gz": b"\x1f\x8b\x08\x00", "png": b"\x89PNG"}
    name = "dataset_dict.json" if suffix == "state" else f"a.{suffix}"
    (folder / name).write_bytes(heads.get(suffix, b"") + content)
    found = read(folder)
    assert isinstance(found, list) or str(folder) in found


def test_compressed_texts_are_not_read_line_by_line(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one line\nanother line\n"))
    assert "each line as a document; unpack them" in str(read(tmp_path))
    (tmp_path / "a.txt.gz").unlink()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert read(tmp_path) == [Document("train:1", "one"), Document("train:2", "two")]


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("one")
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "linked").symlink_to(tmp_path / "books")
    (corpus / "linked again").symlink_to(tmp_path / "books")
    (corpus / "deep" / "up").symlink_to(corpus)
    (corpus / "deep" / "b.txt").write_text("two")
    assert [document.text for document in read(corpus) if isinstance(document, Document)] == ["two", "one"]
    (corpus / "c.txt").symlink_to(corpus / "c.txt")
    assert str(read(corpus)).startswith(f"{corpus / 'c.txt'}: expected a regular file")


def test_a_pipe_is_refused_whatever_would_have_read_it(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.parquet", "a.csv", "a.gz"):
        os.mkfifo(tmp_path / name)
        for corpus in (tmp_path, tmp_path / name):
            assert str(read(corpus)).startswith(f"{tmp_path / name}: expected a regular file"), name
        (tmp_path / name).unlink()


VARIANTS = (
    lambda text: text,
    lambda text: text + "\n\n",
    lambda text: "\n " + text,
    lambda text: text.replace(" ", "\r\n"),
    lambda text: text.replace(" ", "\r"),
    lambda text: "\ufeff" + text,
    lambda text: text.replace(" ", "\t \u2003"),
    lambda text: text + " another end",
)


@settings(max_examples=25)
@given(
    copies=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(VARIANTS)), max_size=12),
    as_records=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_no_text_is_in_two_splits(
    tokenizer_with_words: Any, tmp_path_factory: pytest.TempPathFactory, copies: list[Any], as_records: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("copies")
    texts = [prose(number, 60) for number in range(9)] + [variant(prose(number, 60)) for number, variant in copies]
    if as_records:
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_bytes(text.encode())
    config = CorpusConfig(path=str(folder), num_search_windows=3, num_selection_windows=3, num_held_out_windows=3)
    found = split_documents(config, TokenReader(tokenizer_with_words, None), 40, seed)
    drawn = [beginning.name for split in SPLITS for beginning in found[split]]
    numbers = []
    for name in drawn:
        index = int(name.partition(":")[2]) - 1 if as_records else int(Path(name).stem)
        numbers.append(index if index < 9 else copies[index - 9][0])
    assert sorted(numbers) == list(range(9))


@pytest.fixture(scope="module")
def tokenizer_with_words() -> Any:
    from tests.data.conftest import train_tokenizer

    return train_tokenizer("<s>")


@settings(max_examples=80)
@given(text=TEXTS)
def test_a_document_cannot_spell_a_special_token(tokenizer_with_words: Any, text: str) -> None:
    for tokenizer in (tokenizer_with_words, toys.toy_tokenizer()):
        ids = first_tokens(tokenizer, text, 10_000).tolist()
        assert not {0, 1} & set(ids)
    assert toys.toy_tokenizer().decode(ids) == text
    assert tokenizer_with_words.encode("<s>", add_special_tokens=False) == [0]  # and nothing of it lasts


TOKENIZER_VALUES = [None, True, 0, -1, 2**70, 1.5, "", "x", [], {}, [1], {"a": 1}, {"content": "x"}]


@settings(max_examples=60, suppress_health_check=SHARED)
@given(data=st.data())
def test_a_damaged_tokenizer_is_refused_or_works(tmp_path: Path, data: st.DataObject) -> None:
    """One value of a tokenizer file exchanged for another."""
    toys.toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    value = json.loads(path.read_text())
    owner: Any = value
    key = data.draw(st.sampled_from(sorted(owner)))
    while isinstance(owner[key], dict | list) and owner[key] and len(owner[key]) < 20 and data.draw(st.booleans()):
        owner = owner[key]
        key = data.draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
    owner[key] = data.draw(st.sampled_from(TOKENIZER_VALUES))
    path.write_text(json.dumps(value))
    try:
        tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    except InputError as error:
        assert str(tmp_path) in str(error)
    else:
        assert len(first_tokens(tokenizer, "a text of words", 5)) <= 5


@pytest.mark.parametrize("bos", ["<s>", None])
def test_windows_begin_with_one_bos_or_none_whatever_the_text(tmp_path: Path, bos: str | None) -> None:
    from tests.data.conftest import train_tokenizer

    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("<s><s> </s> " + prose(number, 60))
    counts = {f"num_{split}_windows": 1 for split in SPLITS}
    windows = build_windows(CorpusConfig(path=str(tmp_path), **counts), train_tokenizer(bos), 40, 0, None)
    for split in SPLITS:
        special = np.flatnonzero(windows[split].token_ids < 2).tolist()
        assert special == ([0] if bos else [])


def test_a_tokenizer_of_another_model_is_refused_with_numbers(tmp_path: Path, tokenizer_with_words: Any) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(prose(number, 60))
    counts = {f"num_{split}_windows": 1 for split in SPLITS}
    windows = build_windows(CorpusConfig(path=str(tmp_path), **counts), tokenizer_with_words, 40, 0, None)["search"]
    greatest = int(windows.token_ids.max())
    check_vocabulary(windows, greatest + 1)
    with pytest.raises(InputError, match=f"expected token ids below {greatest}, .*, got {greatest} in the search"):
        check_vocabulary(windows, greatest)


MEASURED = """
import sys
from ropesearch.data.config import CorpusConfig
from ropesearch.data.splits import split_documents
from ropesearch.data.tokens import TokenReader
from tests.toys import toy_tokenizer
import datasets
def peak_bytes():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
corpus = CorpusConfig(path=sys.argv[1], num_search_windows=1, num_selection_windows=1, num_held_out_windows=1)
tokenizer = toy_tokenizer()
before = peak_bytes()
split_documents(corpus, TokenReader(tokenizer, None), 1000, 0)
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "piece", "limit"), [("a.txt", "words ", 2.5), ("a.txt", "w\u00f6rds ", 2.5), ("a.jsonl", "words ", 4.5)]
)
def test_a_line_of_100_megabytes_stays_in_bounds(tmp_path: Path, name: str, piece: str, limit: float) -> None:
    """Peak memory beyond what the program needs anyway, as a multiple of the file: its bytes and its text."""
    line = (piece * (100_000_000 // len(piece.encode()))).rstrip()
    (tmp_path / name).write_text(json.dumps({"text": line}, ensure_ascii=False) if name == "a.jsonl" else line)
    num_bytes = (tmp_path / name).stat().st_size
    del line
    for number in (1, 2):
        extra = prose(number, 400)
        (tmp_path / f"{number}{Path(name).suffix}").write_text(json.dumps({"text": extra}) if "json" in name else extra)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < limit * num_bytes


@pytest.mark.slow
def test_twenty_thousand_tiny_files_are_counted(tmp_path: Path) -> None:
    for number in range(20_000):
        folder = tmp_path / str(number % 100)
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"tiny {number}")
    config = CorpusConfig(path=str(tmp_path), num_search_windows=1, num_selection_windows=1, num_held_out_windows=1)
    with pytest.raises(InputError, match="got 0 long enough among 20000 documents, 0 of them duplicates"):
        split_documents(config, TokenReader(toys.toy_tokenizer(), None), 100, 0)
