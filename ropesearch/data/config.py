"""What to read texts from, and how many windows to make of them."""

from dataclasses import dataclass

from ropesearch.errors import InputError
from ropesearch.settings import setting

SPLITS = ("search", "selection", "held_out")


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

    def num_windows(self) -> dict[str, int]:
        """Windows asked for, by split."""
        return {
            "search": self.num_search_windows,
            "selection": self.num_selection_windows,
            "held_out": self.num_held_out_windows,
        }
