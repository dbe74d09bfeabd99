"""The block-wise search of DCIS, replayed from the study."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from ropesearch.rope.regime import Regime
from ropesearch.search.config import BlockwiseConfig
from ropesearch.search.operators import shift
from ropesearch.search.sampler import CandidateSampler, Past, Scored
from ropesearch.search.space import Candidate, Dimension, Space
from ropesearch.seeding import stream

_NUM_KEPT = 3  # best increments of a block that span the range of its parts


class _Range(NamedTuple):
    low: float
    high: float


class BlockwiseSampler(CandidateSampler):
    """Divide-and-conquer incremental search (DCIS; Yang, Xu, Xiong 2024, arXiv 2412.18811, and its released code).

    The pairs are searched in blocks, first two halves, the slow one first. For a block num_increments candidates are
    scored, which are the best one so far with an increment on all factors of the block; the best is kept. When all
    blocks have had their turn they are halved, down to single pairs. A block's increments cover its range, and the
    range of its halves is the span of its three best increments, one step wider on either side.

    What differs from the paper:
    - Candidates are projected onto the space, whose factors do not decrease; the paper's may.
    - An increment is one in log factors, at first up to half of the space's extent in either direction; in the released
      code it is one in factors, up to 5 in either direction, for fast and slow pairs alike.
    - Increments are drawn, one in each of num_increments equal parts of the range, so that seeds differ; in the
      released code they are evenly spaced, and 10 by default.
    - It begins at the best seed and keeps the best so far, no increment being one of the choices; the released code
      begins at YaRN and takes the best increment even where it makes the score worse.
    - The attention factor is a block of its own after the pairs of each round, in its own units. So is every choice,
      such as retained tokens and critical pair, whose increments are the other choices.
    - Blocks part the pairs that move, those from the critical pair on, evenly, whatever their number.
    - After the round of single pairs it begins again with halves and their first ranges; the paper's ends.

    With one worker a block's candidates start from the best of the trials before the block, and while a trial with a
    lower number is still running, from the best of those that are finished. Failed trials are passed over.

    Raises InputError when the configuration cannot be run.
    """

    name: ClassVar[str] = "blockwise"

    def __init__(
        self, space: Space, config: BlockwiseConfig, seed: int, seeds: Sequence[Regime], num_baselines: int
    ) -> None:
        super().__init__(space, seed, seeds, num_baselines)
        config.check()
        self.config = config
        self._others = space.dimensions[space.num_pairs :]

    @property
    def num_candidates(self) -> int:
        """As configured."""
        return self.config.num_candidates

    def _draw(self, past: Past, index: int, rng: np.random.Generator) -> Candidate:
        study = _Scores(past)
        number = self._num_baselines + index
        start = self._num_baselines + len(self.seeds)  # the first trial of the block
        while True:
            ranges = [_first_range(self._extent)]
            others = {other: _first_range(other.high - other.low) for other in self._others}
            for num_blocks in self._rounds():
                ranges = [ranges[block * len(ranges) // num_blocks] for block in range(num_blocks)]
                for block in reversed(range(num_blocks)):
                    increments = self._increments(ranges[block], start)
                    if number < start + len(increments):
                        increment = increments[max(0, number - start)]
                        return self._with_pairs_moved(self._base(study, start), block, num_blocks, increment)
                    ranges[block] = study.narrowed(ranges[block], increments, start)
                    start += len(increments)
                for other in self._others:
                    increments = self._increments(others[other], start)
                    increments = increments[: len(other.choices) - 1] if other.choices else increments
                    if number < start + len(increments):
                        return self._with_moved(self._base(study, start), other, increments, max(0, number - start))
                    others[other] = study.narrowed(others[other], increments, start)
                    start += len(increments)

    def _rounds(self) -> list[int]:
        """The numbers of blocks of each round: 2, 4, ... and at last as many as there are pairs that always move."""
        found, least = [2], self.space.least_moving_pairs
        while 2 * found[-1] < least:
            found.append(2 * found[-1])
        return [*found, least] if least > 2 else [least]

    @property
    def _extent(self) -> float:
        """Of the grid, in log factors."""
        grid = self.space.factor_grid
        return float(np.log(grid[-1] / grid[0]))

    def _base(self, study: "_Scores", start: int) -> Candidate:
        """What the candidates of the block that begins at trial `start` are made from."""
        best = study.best_before(start)
        if best is not None:
            return best.candidate
        return self.seeds[0] if self.seeds else self.space.decode(np.ones(self.space.num_dimensions))

    def _increments(self, within: _Range, start: int) -> list[float]:
        """The increments of the block that begins at trial `start`, each in its part of the range, ascending."""
        num = self.config.num_increments
        rng = stream(self._seed, self.name, start - self._num_baselines)
        parts = (np.arange(num) + rng.random(num)) / num
        return [within.low + part * (within.high - within.low) for part in parts.tolist()]

    def _with_pairs_moved(self, base: Candidate, block: int, num_blocks: int, increment: float) -> Candidate:
        num_moving = len(range(self.space.num_pairs)[self.space.moving_pairs(base)])
        first, last = (num_moving * place // num_blocks for place in (block, block + 1))
        return shift(self.space, base, first, last, increment)

    def _with_moved(self, base: Candidate, other: Dimension, increments: list[float], place: int) -> Candidate:
        """`other` moved by an increment, or to one of its other choices, which are spread over all of them."""
        vector = self.space.encode(base)
        position = self.space.num_pairs + self._others.index(other)
        if not other.choices:
            vector[position] += increments[place]
        else:
            rest = [choice for choice in range(len(other.choices)) if choice != vector[position]]
            vector[position] = rest[round(place * (len(rest) - 1) / max(1, len(increments) - 1))]
        return self.space.decode(vector)


class _Scores:
    """What the study holds, for the questions of a replay."""

    def __init__(self, past: Past) -> None:
        self._scored = past.scored
        self._ranks = {entry.number: entry.rank for entry in past.scored}

    def best_before(self, number: int) -> Scored | None:
        """The best of the trials before `number`."""
        return next((entry for entry in self._scored if entry.number < number), None)

    def narrowed(self, within: _Range, increments: list[float], start: int) -> _Range:
        """The range of a block's parts, relative to the best increment of the block that began at trial `start`."""
        tried = [
            (self._ranks[number], increment)
            for number, increment in enumerate(increments, start)
            if number in self._ranks
        ]
        if not tried:
            return within
        base = self.best_before(start)
        found = sorted([*tried, *([(base.rank, 0.0)] if base is not None else [])])[:_NUM_KEPT]
        best, step = found[0][1], (within.high - within.low) / len(increments)
        kept = [increment for _, increment in found]
        return _Range(min(kept) - step - best, max(kept) + step - best)


def _first_range(extent: float) -> _Range:
    return _Range(-extent / 2, extent / 2)
