"""How a checkpoint folder is written and checked, and which files tables are read from. Standard library only."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from ropesearch.errors import InputError

MAX_TABLE_BYTES = 4 << 20


class WeightsMode(Enum):
    """How the weights come into a checkpoint folder that is written.

    `copy` shares the bytes with the source where the file system can (reflink) and copies them elsewhere; `link` makes
    absolute symbolic links to the source, so the folder may move and the source must stay; `none` leaves them out.
    """

    copy = "copy"
    link = "link"
    none = "none"


class VerifyLevel(Enum):
    """What `verify` looks at.

    `digest`: weights and tokenizer are the bound ones. `table`: what transformers builds from config.json is the
    regime. `logits`: a plain transformers load answers as the model did under the regime in the search.
    """

    digest = "digest"
    table = "table"
    logits = "logits"


def table_files(paths: Sequence[str]) -> list[Path]:
    """The files that the key `tables` names. Raises InputError for one that is missing or too large to be a table."""
    files = []
    for text in paths:
        try:
            path = Path(text).expanduser()
            if not path.is_file():
                what = "a folder; name the file in it" if path.is_dir() else "no such file; give its path from here"
                raise InputError(f"tables: {path}: expected a file with a table, got {what}")
            num_bytes = path.stat().st_size
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"tables: {text!r}: expected a file with a table, got no path ({error})") from error
        if num_bytes > MAX_TABLE_BYTES:
            raise InputError(f"tables: {path}: expected a table of at most {MAX_TABLE_BYTES} bytes, got a larger file")
        files.append(path)
    return files
