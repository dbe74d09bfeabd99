"""ropesearch/files.py: whole files or none, strict JSON, fingerprints."""

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from ropesearch.files import (
    expect_room,
    naming,
    sha256_of_file,
    sha256_of_json,
    write_bytes,
    write_json,
    written_beside,
)


def test_content_is_written_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"one\0\xff")
    assert path.read_bytes() == b"one\0\xff"
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_nothing_is_at_the_path_before_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with written_beside(path) as file:
        file.write(b"content")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_content_and_no_litter(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(error), written_beside(path) as file:
        file.write(b"new, cut sh")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_in_the_way_stays_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_bytes(tmp_path / "file", b"content")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "file", b"")
        assert os.umask(umask) == umask  # and the umask is left as it was
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_json_text(tmp_path: Path) -> None:
    write_json(tmp_path / "value.json", {"b": [1, 2.5], "a": None})
    expected = b'{\n  "b": [\n    1,\n    2.5\n  ],\n  "a": null\n}\n'
    assert (tmp_path / "value.json").read_bytes() == expected


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_is_strict(tmp_path: Path, number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "value.json", {"number": number})
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="not JSON compliant"):
        sha256_of_json([number])


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) + 3])
def test_sha256_of_file_across_the_pieces_it_is_read_in(tmp_path: Path, num_bytes: int) -> None:
    content = (b"0123456789abcdefg" * (num_bytes // 17 + 1))[:num_bytes]
    (tmp_path / "file").write_bytes(content)
    assert sha256_of_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_fingerprint_is_that_of_the_canonical_json() -> None:
    canonical = b'{"a":[1,2.5,null],"b":"\\u00e9"}'
    assert sha256_of_json({"b": "\u00e9", "a": (1, 2.5, None)}) == hashlib.sha256(canonical).hexdigest()


def test_a_refusal_without_a_place_gets_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as refusal, naming(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert refusal.value.filename == str(tmp_path / "file")
    with pytest.raises(FileNotFoundError) as refusal, naming(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    assert refusal.value.filename == str(tmp_path / "other")


def test_too_little_room_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    expect_room(tmp_path, 1000)
    with pytest.raises(OSError, match="1,001 bytes are needed, 1,000 are free") as refusal:
        expect_room(tmp_path, 1001)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(tmp_path))
