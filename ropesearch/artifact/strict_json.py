"""Reading JSON without leniency: what two readers could understand differently is refused."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from ropesearch.errors import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, naming the file, when it cannot be read or is not strict JSON."""
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
