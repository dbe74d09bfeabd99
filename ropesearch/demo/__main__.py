"""`python -m ropesearch.demo DIR`: write the demo model and its texts as an ordinary checkpoint folder and corpus."""

import argparse
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from ropesearch.errors import InputError, RopesearchError
from ropesearch.files import write_bytes

FOLDERS = ("model", "texts")


def packaged_files() -> Iterator[tuple[PurePosixPath, Traversable]]:
    """Every file of the demo with its path below DIR."""

    def below(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from below(entry, path / entry.name)
            else:
                yield path / entry.name, entry

    for name in FOLDERS:
        yield from below(resources.files("ropesearch.demo") / name, PurePosixPath(name))


def write_demo(folder: Path) -> None:
    """Write FOLDER/model and FOLDER/texts; files that are there already and the same are left alone.

    Raises:
        InputError: a file is there and differs (then nothing is written), or the folder cannot be written.
    """
    try:
        missing = []
        for path, source in packaged_files():
            target = folder / path
            if not target.exists():
                missing.append((target, source))
            elif not target.is_file() or target.read_bytes() != source.read_bytes():
                raise InputError(f"{target} exists and is not the demo's: remove it, or give another folder")
        for target, source in missing:
            write_bytes(target, source.read_bytes())
    except OSError as error:
        raise InputError(f"the demo cannot be written to {folder} ({error}): give another folder") from error


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ropesearch.demo", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="gets model/ and texts/")
    folder: Path = parser.parse_args(arguments).folder
    try:
        write_demo(folder)
    except RopesearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {folder / 'model'} and {folder / 'texts'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
