from pathlib import Path

import pytest

from ropesearch.errors import InputError
from ropesearch.strict_json import parse_json_object, read_json_object


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"3",
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 1}',
        b'{"b": {"a": 1, "a": 2}}',
        b'{"a": 1} x',
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"[" * 200_000,
        b'{"a": ' + b"9" * 5_000 + b"}",
    ],
)
def test_whatever_is_not_strict_json_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match=r"^here: expected"):
        parse_json_object(content, "here")


def test_strict_json_is_read_as_it_is() -> None:
    content = '{"a": [1, -2.5e-3, true, null, "\\u00e9\\ud83d\\ude00\u00fc"], "b": {}}'.encode()
    assert parse_json_object(content, "here") == {"a": [1, -0.0025, True, None, "\xe9\U0001f600\xfc"], "b": {}}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: expected a readable JSON file"):
        read_json_object(tmp_path / "absent.json")
