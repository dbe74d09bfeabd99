"""ropesearch/seeding.py: golden values, and streams that are apart."""

import subprocess
import sys

import pytest

from ropesearch.seeding import stream

GOLDEN: list[tuple[tuple[int, str, *tuple[int, ...]], int]] = [  # arguments, first number
    ((0, "search"), 2500431448646999802),
    ((1, "search"), 8837320184949880439),
    ((0, "splits"), 5276260935036854649),
    ((0, "search", 0), 7613502569888213819),
    ((0, "search", 1), 9050082249058078769),
    ((0, "search", 0, 0), 7546600276614336525),
    ((1099511627776, "search", 7), 2415832415686083626),
]


def numbers(seed: int, name: str, *indices: int) -> list[int]:
    return [int(number) for number in stream(seed, name, *indices).integers(2**63, size=2)]


@pytest.mark.parametrize(("arguments", "first"), GOLDEN)
def test_golden_values(arguments: tuple[int, str, *tuple[int, ...]], first: int) -> None:
    """A change here changes every search."""
    assert numbers(*arguments)[0] == first


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from ropesearch.seeding import stream; print(*stream(3, 'candidate', 5).integers(2**63, size=2))"
    command = [sys.executable, "-c", code]
    for hash_seed in ("1", "2"):
        done = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
        assert [int(word) for word in done.stdout.split()] == numbers(3, "candidate", 5)


def test_each_call_begins_the_stream_anew() -> None:
    assert numbers(0, "search") == numbers(0, "search")


def test_seeds_names_and_indices_give_different_streams() -> None:
    names = ["", "a", "A", "a ", "ab", "search", "selection"]
    tails: list[tuple[int, ...]] = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    all_arguments: list[tuple[int, str, *tuple[int, ...]]] = [
        (seed, name, *tail) for seed in (0, 1, 2**32, 2**32 + 1) for name in names for tail in tails
    ]
    drawn = {tuple(numbers(*arguments)) for arguments in all_arguments}
    assert len(drawn) == len(all_arguments)


@pytest.mark.parametrize("arguments", [(-1, "a"), (0, "a", -1)])
def test_negative_numbers_are_refused(arguments: tuple[int, str]) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        stream(*arguments)
