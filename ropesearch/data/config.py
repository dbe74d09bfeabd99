"""What to read texts from, and how many windows to make of them."""

import re
from dataclasses import dataclass
from pathlib import Path

from ropesearch.errors import InputError
from ropesearch.settings import setting

SPLITS = ("search", "selection", "held_out")
TEXT_SUFFIXES = frozenset({".txt", ".md"})
RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
CORPUS_KINDS = "a text file, a folder of .txt or .md files, a .jsonl or .parquet file, or a dataset's name"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(kw_only=True, slots=True)
class CorpusConfig:
    """The texts of a run. Raises InputError for counts below 1."""

    path: str = setting(
        "",
        "A text file, a folder (of .txt and .md files, or of .jsonl and .parquet files, at any depth), a "
        ".jsonl or .parquet file, a folder with the subfolders search, selection and held_out (already "
        "split), or the name of a dataset on the hub. Must be given",
    )
    text_field: str = setting("text", "the field of a .jsonl, .parquet or hub record that holds the text")
    dataset_config: str | None = setting(None, "configuration of a hub dataset that has several")
    dataset_split: str = setting("train", "split of a hub dataset to read; the three splits of a run are made from it")
    streaming: bool = setting(True, "read a hub dataset record by record; false downloads all of it first")
    num_search_windows: int = setting(16, "windows (one a document) that guide the search")
    num_selection_windows: int = setting(16, "windows that choose among the finalists")
    num_held_out_windows: int = setting(16, "windows that only report")
    max_documents: int = setting(
        100_000,
        "documents to read at most (in each split, of a corpus already split) while looking for long enough ones",
    )

    def __post_init__(self) -> None:
        for name in ("num_search_windows", "num_selection_windows", "num_held_out_windows", "max_documents"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name}: expected at least 1, got {value}")

    def check(self) -> None:
        """Raise InputError where there can be no corpus at the path."""
        self.is_split()

    def local_path(self) -> Path | None:
        """The local file or folder; None for what can only be a dataset's name. Raises InputError for neither."""
        if not self.path:
            raise InputError(f"corpus.path: the corpus path is missing; give {CORPUS_KINDS}")
        try:
            local = Path(self.path).expanduser()
            if local.exists():
                return local
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"corpus.path: {self.path!r}: expected the path of a corpus, got one that cannot be used ({error})"
            ) from error
        if _HUB_NAME.fullmatch(self.path) and local.suffix.lower() not in TEXT_SUFFIXES | RECORD_SUFFIXES:
            return None
        raise InputError(f"corpus.path: {self.path}: no such file or folder; give {CORPUS_KINDS}")

    def is_split(self) -> bool:
        """Whether the corpus is a folder that is already split: with the subfolders search, selection and held_out.

        Raises:
            InputError: nothing at this path; the folder has some of these subfolders, but not all.
        """
        path = self.local_path()
        present = [name for name in SPLITS if path is not None and (path / name).is_dir()]
        if present and len(present) < len(SPLITS):
            missing = [name for name in SPLITS if name not in present]
            raise InputError(
                f"{path}: expected the subfolders {', '.join(SPLITS)} of a corpus already split, or none of them, got "
                f"{', '.join(present)} without {', '.join(missing)}; add what is missing, or rename "
                f"{', '.join(present)}"
            )
        return bool(present)

    def num_windows(self) -> dict[str, int]:
        """Windows asked for, by split."""
        return {
            "search": self.num_search_windows,
            "selection": self.num_selection_windows,
            "held_out": self.num_held_out_windows,
        }
