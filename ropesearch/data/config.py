"""What to read texts from, and how many windows to make of them."""

from dataclasses import dataclass

from ropesearch.errors import InputError

SPLITS = ("search", "selection", "held_out")


@dataclass(kw_only=True, slots=True)
class CorpusConfig:
    """The texts of a run. Raises InputError for counts below 1."""

    # A text file, a folder (of .txt and .md files, or of .jsonl and .parquet files, at any depth), a .jsonl or .parquet
    # file, a folder with the subfolders search, selection and held_out (already split), or the name of a dataset on the
    # hub. Must be given.
    path: str = ""
    # The field of a .jsonl, .parquet or hub record that holds the text.
    text_field: str = "text"
    # Configuration of a hub dataset that has several.
    dataset_config: str | None = None
    # Split of a hub dataset to read; the three splits of a run are made from it.
    dataset_split: str = "train"
    # Read a hub dataset record by record; false downloads all of it first.
    streaming: bool = True
    # Windows (one a document) that guide the search.
    num_search_windows: int = 16
    # Windows that choose among the finalists.
    num_selection_windows: int = 16
    # Windows that only report.
    num_held_out_windows: int = 16
    # Documents to read at most (in each split, of a corpus already split) while looking for long enough ones.
    max_documents: int = 100_000

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
