"""Ways to damage a file: its bytes, its JSON, its place in the folder."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NUMBERS = [0, 1, -1, 2, 64, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, 5e-324]
TEXTS = ["", "x", "\x00", "\u00e9", "\U0001f600", "null", "../x", "x" * 300, "llama", "default"]
JSON_VALUES = st.one_of(
    st.sampled_from([None, True, False, [], {}, [1], [[]], {"a": 1}, {"": None}, *NUMBERS, *TEXTS]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
BYTE_KINDS = ("flip", "cut", "insert", "delete", "repeat", "empty", "bom", "utf-16", "latin-1", "append")
JSON_KINDS = ("value", "drop", "rename", "twice", "swap", "ulp", "type", "add", "huge", "nested", "constant", "order")
PLACE_KINDS = ("missing", "folder", "pipe", "broken link", "link to itself", "link to another file")


def damaged_bytes(data: st.DataObject, content: bytes, kind: str) -> bytes:
    """`content` with one thing done to it that knows nothing of the format."""
    where = data.draw(st.integers(0, max(0, len(content) - 1)))
    match kind:
        case "flip":
            return content[:where] + bytes([content[where] ^ 1 << data.draw(st.integers(0, 7))]) + content[where + 1 :]
        case "cut":
            return content[:where]
        case "insert":
            return content[:where] + data.draw(st.binary(min_size=1, max_size=9)) + content[where:]
        case "delete":
            return content[:where] + content[where + data.draw(st.integers(1, 60)) :]
        case "repeat":
            return content[:where] + content[where : where + data.draw(st.integers(1, 200))] + content[where:]
        case "empty":
            return b""
        case "bom":
            return b"\xef\xbb\xbf" + content
        case "append":
            return content + data.draw(st.sampled_from([b"\n", b" ", b"\0", b"{}", b"x", b"\xff" * 8]))
        case _:
            try:
                return content.decode().replace('": "', '": "\u00e9', 1).encode(kind)
            except UnicodeError:
                return content.decode("latin-1").encode("utf-16")


def damaged_json(data: st.DataObject, value: Any, kind: str) -> bytes:
    """The JSON object `value` as text, with one thing done to it; the text may be no JSON any more."""
    value = json.loads(json.dumps(value))
    owner, key = _place(data, value)
    match kind:
        case "value":
            owner[key] = data.draw(JSON_VALUES)
        case "drop":
            del owner[key]
        case "rename" if isinstance(owner, dict):
            owner[data.draw(st.sampled_from([key + " ", key.upper(), key[:-1], "x"]))] = owner.pop(key)
        case "swap":
            other, other_key = _place(data, value)
            owner[key], other[other_key] = json.loads(json.dumps([other[other_key], owner[key]]))
        case "ulp" if isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = math.nextafter(owner[key], data.draw(st.sampled_from([-math.inf, math.inf])))
        case "type":
            now = owner[key]
            turned = {bool: int, int: float, float: str, str: lambda text: [text]}.get(type(now), lambda _: None)
            owner[key] = turned(now)
        case "add" if isinstance(owner, dict):
            owner[data.draw(st.sampled_from(["x", "", "sliding_window", "attention_bias", "a\nb"]))] = data.draw(
                JSON_VALUES
            )
        case "order":
            value = dict(reversed(value.items()))
        case "twice" | "huge" | "nested" | "constant":
            mark = "@here@"
            now = json.dumps(owner[key])
            owner[key] = mark
            new = {
                "twice": f'{now}, "x": 1, "x": 1' if isinstance(owner, dict) else "NaN",
                "huge": data.draw(st.sampled_from(["1e999", "-1e400", "9" * 5000, "1" + "0" * 310])),
                "nested": "[" * 3000 + "]" * data.draw(st.sampled_from([0, 2999, 3000])),
                "constant": data.draw(
                    st.sampled_from(["NaN", "Infinity", "-Infinity", "nan", "+1", "01", "1.", "'x'"])
                ),
            }[kind]
            return json.dumps(value).replace(json.dumps(mark), new).encode()
    return json.dumps(value, indent=data.draw(st.sampled_from([None, 2]))).encode()


def _place(data: st.DataObject, value: dict[str, Any]) -> tuple[Any, Any]:
    owner: Any = value
    key: Any = data.draw(st.sampled_from(sorted(value)))
    while isinstance(owner[key], dict | list) and owner[key] and data.draw(st.booleans()):
        owner = owner[key]
        key = data.draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
    return owner, key


def put_in_place_of(path: Path, kind: str, other: Path) -> None:
    """Put something that is no regular file, or a link to `other`, in the place of a file."""
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "broken link":
            path.symlink_to(path.parent / "gone")
        case "link to itself":
            path.symlink_to(path)
        case "link to another file":
            path.symlink_to(other)
        case _:
            shutil.rmtree(path, ignore_errors=True)


def same_json(first: Any, second: Any) -> bool:
    """Whether two JSON values are the same, whatever the order of keys; 1, 1.0 and true are not."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
