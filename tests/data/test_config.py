from typing import Any

import pytest

from ropesearch.data.config import SPLITS, CorpusConfig
from ropesearch.errors import InputError


def test_num_windows_go_to_their_splits() -> None:
    config = CorpusConfig(num_search_windows=3, num_selection_windows=4, num_held_out_windows=5)
    assert config.num_windows() == {"search": 3, "selection": 4, "held_out": 5}
    assert tuple(config.num_windows()) == SPLITS


@pytest.mark.parametrize(
    "name", ["num_search_windows", "num_selection_windows", "num_held_out_windows", "max_documents"]
)
def test_counts_below_one_are_refused(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(InputError, match=f"{name}: expected at least 1, got 0"):
        CorpusConfig(**values)
