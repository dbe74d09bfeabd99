import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropesearch.data.packing import pack
from ropesearch.errors import InputError


def best_fit_decreasing(lengths: list[int], sequence_tokens: int) -> list[list[int]]:
    """The lengths in each sequence, looking at every sequence for every document; those last added to come first."""
    sequences: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [each for each in sequences if sum(each) + length <= sequence_tokens]
        fullest = max(fitting, key=sum) if fitting else []
        sequences = [[*fullest, length], *(each for each in sequences if each is not fullest)]
    return sequences


@given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), max_size=60))))
def test_every_document_is_packed_once_by_best_fit(case: tuple[int, list[int]]) -> None:
    sequence_tokens, lengths = case
    packing = pack(np.array(lengths, dtype=np.int64), sequence_tokens)
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    sequences = [packing.sequence(index).tolist() for index in range(packing.num_sequences)]
    assert [document for sequence in sequences for document in sequence] == packing.documents.tolist()
    packed = [[lengths[document] for document in sequence] for sequence in sequences]
    assert sorted(packed) == sorted(best_fit_decreasing(lengths, sequence_tokens))
    assert all(0 < sum(sequence) <= sequence_tokens for sequence in packed)


def test_a_packing_by_hand() -> None:
    packing = pack(np.array([3, 7, 5, 2, 4, 7]), 10)
    # 7 of document 1, 7 of 5, then 5 opens a third, 4 joins it, 3 fits exactly beside a 7, 2 beside the other
    assert [packing.sequence(index).tolist() for index in range(packing.num_sequences)] == [[1, 3], [5, 0], [2, 4]]


@pytest.mark.parametrize(("lengths", "found"), [([3, 11], "3 to 11"), ([0, 4], "0 to 4")])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], found: str) -> None:
    with pytest.raises(InputError, match=f"expected 1 to 10 tokens for each document that is packed, got {found}"):
        pack(np.array(lengths), 10)
