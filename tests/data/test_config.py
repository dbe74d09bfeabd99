import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ropesearch.data.config import SPLITS, CorpusConfig, MixtureConfig
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


def test_buckets_of_a_mixture() -> None:
    assert MixtureConfig().bucket_bounds(4096) == [(0, 4096), (4096, None)]
    longer = MixtureConfig(long_bounds=[8192, 100_000], shares=[0.25] * 4)
    assert longer.bucket_bounds(4096) == [(0, 4096), (4096, 8192), (8192, 100_000), (100_000, None)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"long_bounds": [100, 100]}, r"long_bounds: expected ascending lengths of at least 1 token, got \[100, 100\]"),
        ({"long_bounds": [100, 50]}, "long_bounds: expected ascending lengths"),
        ({"long_bounds": [0]}, "long_bounds: expected ascending lengths of at least 1 token"),
        ({"shares": [1.2, -0.2]}, "shares: expected numbers from 0 on, got -0.2"),
        ({"shares": [math.nan, 1.0]}, "shares: expected numbers from 0 on, got nan"),
        ({"shares": [math.inf, 1.0]}, "shares: expected numbers from 0 on, got inf"),
    ],
)
def test_values_of_a_mixture_that_can_never_be_right_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        MixtureConfig(**values)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ({}, (4096, 4096), r"mixture: expected a target_length above original_length \(4096\) .*, got 4096"),
        ({}, (4096, 2048), "mixture: expected a target_length above original_length"),
        ({}, (1, 4), "mixture: expected a target_length above original_length"),
        (
            {"long_bounds": [4096]},
            (4096, 8192),
            r"mixture.long_bounds: expected lengths above original_length \(4096\)",
        ),
        ({"long_bounds": [5000]}, (4096, 8192), r"mixture.shares: expected 3 shares, .* got \[0.3, 0.7\]"),
        ({"shares": [1.0]}, (4096, 8192), "mixture.shares: expected 2 shares"),
        (
            {"shares": [0.3, 0.6]},
            (4096, 8192),
            r"mixture.shares: expected shares that are 1 together, got \[0.3, 0.6\]",
        ),
        ({"needle_share": -0.1}, (4096, 8192), "mixture.needle_share: expected a part .*, 0 to 1, got -0.1"),
        ({"needle_share": 1.5}, (4096, 8192), "mixture.needle_share: expected a part .*, 0 to 1, got 1.5"),
        ({"needle_share": math.nan}, (4096, 8192), "mixture.needle_share: expected a part .*, 0 to 1, got nan"),
        ({"shares": [0.0, 0.0]}, (4096, 8192), "mixture.shares: expected shares that are 1 together"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(values: dict[str, Any], lengths: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        MixtureConfig(**values).check(*lengths)


def test_mixtures_that_fit() -> None:
    MixtureConfig().check(4096, 4097)
    MixtureConfig(shares=[0.0, 1.0]).check(4096, 8192)
    MixtureConfig(long_bounds=[100_000], shares=[0.333333, 0.333333, 0.333334]).check(8192, 131_072)
    MixtureConfig(long_bounds=[9000], shares=[0.3, 0.7, 0.0]).check(4096, 8192)


@pytest.mark.parametrize("name", ["short_and_long", "longrope2"])
def test_presets_of_mixtures_fit_the_lengths_that_they_are_made_for(name: str) -> None:
    values = yaml.safe_load((Path(__file__).parents[2] / "conf" / "mixture" / f"{name}.yaml").read_text())
    assert values.pop("defaults") == ["schema", "_self_"]
    config = MixtureConfig(**values)
    config.check(8192, 131_072)
    if name == "short_and_long":
        assert config == MixtureConfig()
    else:  # LongRoPE2, table 1: up to original_length, to 100,000, to 200,000 tokens; 3, 3 and 4 of 10 B tokens
        assert config == MixtureConfig(long_bounds=[100_000], shares=[0.3, 0.3, 0.4], needle_share=0.0)
