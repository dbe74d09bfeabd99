import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropesearch.data.config import CorpusConfig
from ropesearch.data.documents import Document, read_documents
from ropesearch.errors import InputError


def read(path: Path | str, **values: Any) -> list[Document]:
    return list(read_documents(CorpusConfig(path=str(path), **values)))


def write_parquet(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa9\n")
    assert read(path) == [Document("novel.txt", "one\ntwo \u00e9\n")]


def test_folder_is_read_at_any_depth_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c/d.TXT", "c.rst", ".hidden.txt", ".git/x.txt", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in read(tmp_path)] == ["B.txt", "a/c/d.TXT", "a/z.md", "b.txt"]
    assert all(document.name == document.text for document in read(tmp_path))


def test_order_is_drawn_from_the_generator(tmp_path: Path) -> None:
    names = [f"{i:02d}.txt" for i in range(20)]
    for name in names:
        (tmp_path / name).write_text(name)
    config = CorpusConfig(path=str(tmp_path))
    orders = [
        [document.name for document in read_documents(config, order=np.random.default_rng(seed))] for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == names for order in orders)


def test_records_beside_text_files_are_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "b.parquet", text=["three"])
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(tmp_path) == [
        Document("data/a.jsonl:1", "one"),
        Document("data/a.jsonl:2", "two"),
        Document("data/b.parquet:1", "three"),
    ]


def test_jsonl_passes_over_empty_documents_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"body": "one"}\n\n{"body": " \\n"}\n{"body": null}\r\n{"body": "two", "text": "no"}'
    )
    assert read(path, text_field="body") == [Document("a.jsonl:1", "one"), Document("a.jsonl:5", "two")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "line 2: expected one JSON object, got what is not JSON"),
        (b"[" * 100_000, "line 2: expected one JSON object, got what is not JSON"),
        (b'["text"]', "line 2: expected a JSON object, got list"),
        (b'{"text": ["x"]}', "line 2: expected text in the field 'text', got list"),
        (b'{"title": "x", "body": "y"}', "line 2: expected the text in a field 'text', got the fields 'body', 'title'"),
        (b'{"text": "caf\xe9"}', "line 2: expected UTF-8 text, got the byte 0xe9 at byte 13"),
        (b'{"text": "\\ud800"}', "line 2: expected Unicode text, got a lone surrogate at character 0"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(InputError) as caught:
        read(path)
    assert f"{path}, {message}" in str(caught.value)


def test_parquet_is_read_in_order_over_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(50)]
    pq.write_table(pa.table({"id": list(range(50)), "text": [*texts[:7], None, *texts[8:]]}), path, row_group_size=20)
    expected = [Document(f"a.parquet:{i + 1}", text) for i, text in enumerate(texts) if i != 7]
    assert read(path) == expected


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "fields.parquet", title=["a"], body=["b"])
    with pytest.raises(InputError, match=r"fields\.parquet: .* 'text', got the fields 'body', 'title'"):
        read(tmp_path / "fields.parquet")
    write_parquet(tmp_path / "rows.parquet", text=pa.array([], pa.string()))
    with pytest.raises(InputError, match=r"rows\.parquet: expected documents, got no rows"):
        read(tmp_path / "rows.parquet")
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"junk\.parquet: expected a parquet file"):
        read(tmp_path / "junk.parquet")
    write_parquet(tmp_path / "type.parquet", text=[1, 2])
    with pytest.raises(InputError, match=r"type\.parquet: expected text in the field 'text', got int64"):
        read(tmp_path / "type.parquet")
    invalid = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"], pa.binary()).buffers())
    write_parquet(tmp_path / "bytes.parquet", text=invalid)
    with pytest.raises(InputError, match=r"bytes\.parquet.*UTF-8"):
        read(tmp_path / "bytes.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected text, got an empty file"),
        (b" \n\t", "expected text, got nothing but white space"),
        ("text".encode("utf-16"), "expected UTF-8 text, got UTF-16"),
        (b"caf\xe9 au lait", "expected UTF-8 text, got the byte 0xe9 at byte 3"),
        (b"\x1f\x8b\x08\x00", "expected UTF-8 text, got the byte 0x8b at byte 1"),
        (b"a\x00b", "expected text, got binary content"),
    ],
)
def test_bad_text_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_text("good")
    path = tmp_path / "b.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_jsonl_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match=r"a\.jsonl: expected JSON records"):
        read(tmp_path)


def test_broken_link_and_pipe_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.mkdir()
    (link / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"a\.txt: expected a regular file"):
        read(link)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: expected a regular file"):
        read(pipe)


@pytest.mark.parametrize("path", ["texts/not/there", "/not/there", "gone.jsonl", "./gone", "a\0b", "x" * 5000])
def test_path_without_corpus_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"no such file or folder|cannot be used"):
        read(path)


def test_missing_path_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the corpus path is missing"):
        read("")
    with pytest.raises(InputError, match="got an empty folder"):
        read(tmp_path)


def test_hub_dataset_out_of_reach_is_one_clear_error() -> None:
    with pytest.raises(InputError) as caught:
        read("nobody/nothing")
    message = str(caught.value)
    assert message.startswith("nobody/nothing: no such file or folder, so expected a dataset that can be loaded")
    assert "Couldn't reach" in message and "without a network" in message and "\n" not in message


def test_folder_of_another_format_goes_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]')
    assert read(tmp_path) == [Document("train:1", "one"), Document("train:2", "two")]
    with pytest.raises(InputError, match="'body', got the fields 'id', 'text'"):
        read(tmp_path, text_field="body")
    with pytest.raises(InputError, match="Bad split"):
        read(tmp_path, dataset_split="nope")


def test_saved_dataset_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "more": rows.select([1])}).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "rows") == [Document("train:1", "one"), Document("train:2", "two")]
    assert read(tmp_path / "splits", dataset_split="more") == [Document("more:1", "two")]
    with pytest.raises(InputError, match="expected one of the splits train, more, got test"):
        read(tmp_path / "splits", dataset_split="test")


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\nbad\n")
    documents = read_documents(CorpusConfig(path=str(path)))
    assert next(documents) == Document("a.jsonl:1", "good")
    with pytest.raises(InputError, match="line 2"):
        next(documents)


def test_split_folder(tmp_path: Path) -> None:
    config = CorpusConfig(path=str(tmp_path))
    assert not config.is_split()
    for split in ("search", "selection"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(split)
    with pytest.raises(InputError, match="got search, selection without held_out"):
        config.is_split()
    (tmp_path / "held_out").mkdir()
    assert config.is_split()
    assert list(read_documents(config, "selection")) == [Document("selection/a.txt", "selection")]
    with pytest.raises(InputError, match="got an empty folder"):
        list(read_documents(config, "held_out"))
