"""Whole documents packed into sequences of one length."""

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropesearch.errors import InputError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Which documents stand together: `documents` int64 (num_documents,), sequence by sequence; the documents of
    sequence i are those from `starts[i]` to `starts[i + 1]`, `starts` int64 (num_sequences + 1,).
    """

    documents: IntArray
    starts: IntArray

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    def sequence(self, index: int) -> IntArray:
        """The documents of one sequence, in their order there."""
        return self.documents[self.starts[index] : self.starts[index + 1]]


def pack(lengths: IntArray, sequence_tokens: int) -> Packing:
    """Pack documents of these lengths whole into sequences of `sequence_tokens`: best fit decreasing.

    The longest come first, of equals the first; each goes to a sequence with the least room that it fits into, of
    equals the latest to have come by that room, a new one where there is none. That takes at most 11/9 of the fewest
    sequences that could do, and 4 (D. Johnson, "Near-optimal bin packing algorithms", 1973).

    Raises:
        InputError: a length is below 1 or above sequence_tokens.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= sequence_tokens:
        raise InputError(
            f"lengths: expected 1 to {sequence_tokens} tokens for each document that is packed, got "
            f"{lengths.min()} to {lengths.max()}"
        )
    rooms: list[int] = []  # what is left somewhere, ascending, each once
    with_room: dict[int, list[int]] = {}  # sequences by what is left in them
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    num_sequences = 0
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            sequence, room = num_sequences, sequence_tokens
            num_sequences += 1
        else:
            room = rooms[at]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        sequence_of[document] = sequence
        if left := room - length:
            if left not in with_room:
                bisect.insort(rooms, left)
                with_room[left] = []
            with_room[left].append(sequence)
    by_sequence = order[np.argsort(sequence_of[order], kind="stable")]
    starts = np.searchsorted(sequence_of[by_sequence], np.arange(num_sequences + 1))
    return Packing(by_sequence, starts.astype(np.int64))
