"""Reading JSON without leniency: what two readers could understand differently is refused."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ropesearch.errors import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, naming the file, when it cannot be read or is not strict JSON."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise InputError(f"{path}: expected a readable JSON file, got something else than a regular file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a readable JSON file, got {error.strerror or error}") from error
    return parse_json_object(content, str(path))


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object (RFC 8259) in `content`; `where` names it in messages.

    Beyond what the json module refuses: NaN and infinity in any spelling (1e999 too), a key given twice, text that is
    not UTF-8 or holds half a surrogate pair, nesting that exhausts the stack, anything but an object at the top.
    Raises InputError.
    """
    try:
        value = json.loads(
            content.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_duplicates,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InputError(f"{where}: expected UTF-8 text, got {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected strict JSON, got {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def differences(expected: Any, found: Any, path: str = "$") -> Iterator[str]:
    """Where two JSON values differ, each place with its JSON path and both values.

    Stricter than `==` of Python: true, 1 and 1.0 are three values, and a key that is null is not a key that is missing.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys((*expected, *found)):
            place = f"{path}.{key}" if key.isascii() and key.isidentifier() else f"{path}[{key!a}]"
            if key not in found:
                yield f"{place}: expected {_shown(expected[key])}, got no such key"
            elif key not in expected:
                yield f"{place}: expected no such key, got {_shown(found[key])}"
            else:
                yield from differences(expected[key], found[key], place)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (expected_item, found_item) in enumerate(zip(expected, found, strict=True)):
            yield from differences(expected_item, found_item, f"{path}[{index}]")
    elif json.dumps(expected, sort_keys=True) != json.dumps(found, sort_keys=True):
        yield f"{path}: expected {_shown(expected)}, got {_shown(found)}"


def _shown(value: Any) -> str:
    return f"{value!a:.80}"


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]}, which no double holds")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!a} twice in one object")
    return result
