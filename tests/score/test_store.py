"""ropesearch/score/store.py: a score comes back exactly, for exactly what it depends on, or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from ropesearch.score.score import Score
from ropesearch.score.store import ScoreStore

SCORE = Score(
    nats=np.array([[0.1 + 0.2, 1e-300], [123456789.123456789, 0.0]]),
    tokens=np.array([[3, 1], [4, 0]]),
    block_edges=np.array([0, 4, 8]),
)
DEPENDS_ON = {"weights": "sha256:1", "regime": {"factors": [1.0, 1.5]}, "windows": "a"}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    store = ScoreStore(folder)
    assert store.get(DEPENDS_ON) is None and not folder.exists()
    store.put(DEPENDS_ON, SCORE)
    kept = ScoreStore(folder).get(dict(reversed(DEPENDS_ON.items())))
    assert kept is not None
    for name in ("nats", "tokens", "block_edges"):
        assert getattr(kept, name).tobytes() == getattr(SCORE, name).tobytes()


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "sha256:2"},
        {"regime": {"factors": [1.0, 1.5000000000000002]}},
        {"regime": {"factors": [1.5, 1.0]}},
        {"windows": "b"},
        {"more": None},
    ],
)
def test_what_depends_on_anything_else_is_another_score(other: dict[str, object], tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    store.put(DEPENDS_ON, SCORE)
    assert store.get({**DEPENDS_ON, **other}) is None


def corrupted(content: bytes) -> list[bytes]:
    value = json.loads(content)
    changed = [
        {**value, **change}
        for change in ({"nats": [[1.0]]}, {"tokens": "x"}, {"nats": None}, {"more": 1}, {"nats": [[10**400]]})
    ]
    return [
        b"",
        content[: len(content) // 2],
        b"\xff\xfe",
        b"null",
        b"[]",
        content.replace(b"1e-300", b"NaN"),
        *(json.dumps(each).encode() for each in changed),
    ]


def test_a_corrupt_file_counts_as_none_and_is_written_anew(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    store.put(DEPENDS_ON, SCORE)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for corrupt in corrupted(content):
        path.write_bytes(corrupt)
        assert store.get(DEPENDS_ON) is None, corrupt
    store.put(DEPENDS_ON, SCORE)
    assert path.read_bytes() == content and store.get(DEPENDS_ON) is not None


def test_a_folder_in_a_files_place_counts_as_none(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    store.put(DEPENDS_ON, SCORE)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert store.get(DEPENDS_ON) is None
