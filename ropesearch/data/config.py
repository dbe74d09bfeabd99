"""What to read texts from, how many windows to make of them, and how to mix them for training."""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ropesearch.errors import InputError
from ropesearch.settings import setting

SPLITS = ("search", "selection", "held_out")
TEXT_SUFFIXES = frozenset({".txt", ".md"})
RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
TRAINING = "training"  # the subfolder of a corpus already split that is trained on
SHARE_TOLERANCE = 1e-6  # of a sum of shares that were rounded
CORPUS_KINDS = "a folder of .txt or .md files (one document each), a .jsonl or .parquet file, or a dataset's name"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(kw_only=True, slots=True)
class CorpusConfig:
    """The texts of a run. Raises InputError for counts below 1."""

    path: str = setting(
        "",
        "a folder of .txt and .md files, each one document, or of .jsonl and .parquet files, each record one document, "
        "at any depth; one such file; a folder with the subfolders search, selection and held_out (already split); or "
        "the name of a dataset on the hub. Has to be given; a run takes at least three documents",
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


@dataclass(kw_only=True, slots=True)
class MixtureConfig:
    """What fine-tuning reads: how many of its tokens come from documents of which lengths.

    Raises InputError for bounds that do not ascend and shares that are none; `check` says whether they fit together.
    """

    long_bounds: list[int] = setting(
        [],
        "lengths in tokens, ascending, that part the documents longer than original_length into buckets; a document "
        "of just that length is below",
    )
    shares: list[float] = setting(
        [0.3, 0.7],
        "what part of the training tokens each bucket gives, 1 together: first documents of at most original_length "
        "tokens, which train the short regime, then the longer ones, one share for each bucket between the bounds",
    )
    needle_share: float = setting(
        0.3,
        "what part of the long rows has a fact put into its text, and asked for at the row's end, as in a needle "
        "test: so that retrieval over long distances is kept, which prose alone does not ask for",
    )

    def __post_init__(self) -> None:
        bounds = self.long_bounds
        if any(bound < 1 for bound in bounds) or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise InputError(f"long_bounds: expected ascending lengths of at least 1 token, got {bounds}")
        for share in self.shares:
            if not (math.isfinite(share) and share >= 0):
                raise InputError(f"shares: expected numbers from 0 on, got {share}")

    def check(self, original_length: int, target_length: int) -> None:
        """Raise InputError unless these buckets can train two regimes, to original_length and to target_length."""
        if not 1 < original_length < target_length:
            raise InputError(
                f"mixture: expected a target_length above original_length ({original_length}) and that above 1, got "
                f"{target_length}; without a longer target there is nothing to train"
            )
        if self.long_bounds and self.long_bounds[0] <= original_length:
            raise InputError(
                f"mixture.long_bounds: expected lengths above original_length ({original_length}), got "
                f"{self.long_bounds}; the bucket of the short documents is there without being named"
            )
        num_buckets = len(self.long_bounds) + 2
        if len(self.shares) != num_buckets:
            raise InputError(
                f"mixture.shares: expected {num_buckets} shares, one for documents of at most original_length tokens "
                f"and {num_buckets - 1} for the longer ones as long_bounds={self.long_bounds} parts them, got "
                f"{self.shares}"
            )
        if abs(math.fsum(self.shares) - 1.0) > SHARE_TOLERANCE:
            raise InputError(f"mixture.shares: expected shares that are 1 together, got {self.shares}")
        if not 0 <= self.needle_share <= 1:
            raise InputError(f"mixture.needle_share: expected a part of the long rows, 0 to 1, got {self.needle_share}")

    def bucket_bounds(self, original_length: int) -> list[tuple[int, int | None]]:
        """For each bucket (above, up_to): it has the documents of more than `above` and at most `up_to` tokens."""
        bounds = [original_length, *self.long_bounds]
        return list(zip([0, *bounds], [*bounds, None], strict=True))
