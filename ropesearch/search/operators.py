"""Mutation, crossover and neighbours of candidates: non-decreasing by construction, in bounded time.

The published algorithm redraws a whole candidate until it happens to be non-decreasing and new (LongRoPE, Alg. 1 and
its released code). A redraw that keeps failing touches nearly every pair, whatever the probability says; here a pair is
touched with the probability that was asked.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ropesearch.search.space import Candidate, Space

_BLOCK_SHARE = 0.25  # mean length of a block of pairs that move together, as a part of all pairs
_END_PAIRS = 2.0  # standard deviation of a move of the retained pairs' end, as in LongRoPE's released code
# A move's size is between this part of half the factors' extent, in logs, and that half.
_LEAST_MOVE = 0.02
_MOST_MOVED = 0.5  # longest block of a move, as a part of the pairs
_CHOICE_SHARE, _ATTENTION_SHARE = 0.1, 0.05  # of moves, for each dimension of choices, and for the attention factor
NUM_STRETCHES = 8  # of pairs that are exchanged
_MOVED_ATTENTION = 0.02  # standard deviation of an attention factor's move
_FINE_ATTENTION, _COARSE_ATTENTION = 0.012, 0.06  # standard deviations of an attention factor's move


def mutate(space: Space, parent: Candidate, probability: float, reach: int, rng: np.random.Generator) -> Candidate:
    """A mutant of `parent`: each pair, the attention factor and the retained tokens change with `probability`.

    A quarter of the mutants are LongRoPE's: a pair is drawn on the grid between its neighbours, f[i-1] and f[i+1];
    `reach` > 1 takes neighbours that many pairs away, kept within the pairs that stay. In a second quarter pairs of
    equal factors move as one: else a plateau, such as YaRN's, could only be worn down from its ends. In the other half
    blocks of pairs move together, the same part of the way to their neighbours, which slides a stretch of the curve
    sideways: a model's loss is smooth along the pairs, and independent moves of theirs cancel out. Where the numbers of
    retained pairs are searched, or the critical pair, each of them changes with `probability` too. Held pairs stay, and
    those before the critical pair follow.
    """
    every = np.array(parent.factor_steps)
    moving, free = space.moving_pairs(parent), space.free_pairs
    steps = every[moving]
    kind = rng.random()
    if kind < 0.5:
        mutated = _slide(steps, _blocks(len(steps), probability, rng), 2 * reach, space.max_factor_steps, rng)
    else:
        starts = _level_starts(steps) if kind < 0.75 else np.arange(len(steps))
        flags = rng.random(len(starts)) < probability
        levels = _resample(steps[starts], flags, reach, space.max_factor_steps, rng)
        mutated = np.repeat(levels, np.diff(np.append(starts, len(steps))))
    every[moving] = mutated
    every[free] = _moved_ends(space, every[free], probability, rng)
    return Candidate(
        tuple(every.tolist()),
        _moved_attention(space, parent.attention_steps, probability, rng),
        _moved_retained(space, parent.retained_tokens, probability, rng),
    )


def move(space: Space, parent: Candidate, rng: np.random.Generator) -> Candidate:
    """`parent` with one thing moved: a block of neighbouring pairs, all by the same part of their factors, or, with a
    chance of a tenth each, retained tokens, critical pair or a number of held pairs by one choice, or, with a
    twentieth, the attention factor.

    Blocks of up to half of the pairs and parts are of any size, small ones as often as large (log-uniform): a loss that
    is smooth over one stretch of pairs is rugged over another, where angles wrap, and only a try can tell which. It is
    rugged where pairs turn often, and does not change where they hardly turn: a pair is the middle of a block in
    proportion to the log of 1 plus its turns in target_length.
    """
    others = space.dimensions[space.num_pairs :]
    shares = np.cumsum([_CHOICE_SHARE if dimension.choices else _ATTENTION_SHARE for dimension in others])
    other = int(np.searchsorted(shares, rng.random(), side="right"))
    if other < len(others):
        position = space.num_pairs + other
        dimension, vector = space.dimensions[position], space.encode(parent)
        step = float(rng.choice((-1, 1))) if dimension.choices else float(rng.normal(0, _MOVED_ATTENTION))
        if not dimension.low <= vector[position] + step <= dimension.high:
            step = -step
        vector[position] += step
        return space.decode(vector)
    turns = space.target_length / space.geometry.periods_tokens()[space.moving_pairs(parent)]
    weights = np.log1p(turns)
    num_moving = len(weights)
    size = int(np.exp(rng.uniform(0, np.log(_MOST_MOVED * num_moving + 1))))
    middle = int(rng.choice(num_moving, p=weights / weights.sum()))
    first = max(0, middle - size // 2)
    largest = np.log(space.factor_grid[-1] / space.factor_grid[0]) / 2
    increment = rng.choice((-1, 1)) * largest * np.exp(rng.uniform(np.log(_LEAST_MOVE), 0))
    return shift(space, parent, first, min(num_moving, first + size), increment)


def shift(space: Space, parent: Candidate, first: int, last: int, increment: float) -> Candidate:
    """`parent` with the logs of the factors of its moving pairs from number `first` to before `last` moved by
    `increment`, projected onto the space.
    """
    start = range(space.num_pairs)[space.moving_pairs(parent)].start
    vector = space.encode(parent)
    vector[start + first : start + last] *= np.exp(increment)
    return space.decode(vector)


def exchange(space: Space, best: Candidate, first: Candidate, second: Candidate, part: int) -> Candidate:
    """`best` with a stretch of pairs as it is in `second` where it has that of `first`, else as in `first`, projected
    onto the space. `part` is the number of the stretch, of NUM_STRETCHES of about as many pairs each, counted from the
    fast ones; part NUM_STRETCHES is all other dimensions.
    """
    here = _stretch(space, part)
    vector, one, other = (space.encode(each) for each in (best, first, second))
    vector[here] = other[here] if np.array_equal(vector[here], one[here]) else one[here]
    return space.decode(vector)


def _stretch(space: Space, part: int) -> slice:
    if part == NUM_STRETCHES:
        return slice(space.num_pairs, None)
    edges = np.linspace(0, space.num_pairs, NUM_STRETCHES + 1).round().astype(int)
    return slice(int(edges[part]), int(edges[part + 1]))


def cross(space: Space, first: Candidate, second: Candidate, probability: float, rng: np.random.Generator) -> Candidate:
    """A child of two parents, of which `first` is the better.

    Half of the children are LongRoPE's: the first parent with pairs of the second, each taken with `probability`, made
    non-decreasing by projection. The other half lie on the line through the parents in log factors, up to half their
    distance beyond the better: where that way led down, it goes on. Both kinds treat the attention factor alike.
    """
    left, right = space.curve(first), space.curve(second)
    if rng.random() < 0.5:
        taken = _blocks(len(left), probability, rng) if rng.random() < 0.5 else rng.random(len(left)) < probability
        factors = np.where(taken, right, left)
        attention = second.attention_steps if rng.random() < probability else first.attention_steps
    else:
        part = rng.uniform(-0.5, 0.5)
        factors = np.exp(np.log(left) + part * (np.log(right) - np.log(left)))
        line = first.attention_steps + part * (second.attention_steps - first.attention_steps)
        attention = int(np.clip(round(line), 0, space.max_attention_steps))
    retained = second.retained_tokens if rng.random() < probability else first.retained_tokens
    return Candidate(space.repair_steps(space.positions(factors)), attention, retained)


def nearest_new(space: Space, start: Candidate, known: Collection[Candidate]) -> Candidate | None:
    """The first candidate not in `known` on a breadth-first walk from `start`; None when the space holds no other.

    A step of the walk changes one pair or the attention factor by one grid step, or the retained tokens to a
    neighbouring choice. The walk reaches every candidate and leaves only known ones behind, so it ends.
    """
    if start not in known:
        return start
    queue, seen = deque([start]), {start}
    while queue:
        for neighbour in _neighbours(space, queue.popleft()):
            if neighbour in seen:
                continue
            if neighbour not in known:
                return neighbour
            seen.add(neighbour)
            queue.append(neighbour)
    return None


def _neighbours(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    for move in (1, -1):
        yield from _inside(space, replace(candidate, attention_steps=candidate.attention_steps + move))
        position = space.retained_choices.index(candidate.retained_tokens) + move
        if 0 <= position < len(space.retained_choices):
            yield replace(candidate, retained_tokens=space.retained_choices[position])
        for pair in range(space.num_pairs):
            steps = list(candidate.factor_steps)
            steps[pair] += move
            yield from _inside(space, replace(candidate, factor_steps=tuple(steps)))


def _inside(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    if space.contains(candidate):
        yield candidate


def _level_starts(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """First pair of each stretch of equal factors."""
    return np.flatnonzero(np.diff(steps, prepend=-1))


def _blocks(num_pairs: int, probability: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """bool (num_pairs,): each true with `probability`, in blocks (a two-state Markov chain)."""
    leave = 1 / max(2.0, _BLOCK_SHARE * num_pairs)
    enter = min(1.0, leave * probability / (1 - probability)) if probability < 1 else 1.0
    if enter == 1.0:  # denser than blocks of that length can be
        leave = (1 - probability) / probability
    draws = rng.random(num_pairs)
    flags = np.empty(num_pairs, dtype=np.bool_)
    inside = draws[0] < probability
    flags[0] = inside
    for pair in range(1, num_pairs):
        inside = draws[pair] >= leave if inside else draws[pair] < enter
        flags[pair] = inside
    return flags


def _resample(
    steps: NDArray[np.int64], flags: NDArray[np.bool_], reach: int, highest: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Redraw flagged entries of a non-decreasing sequence, uniformly on the grid between their neighbours, never the
    old value where another is possible. From left to right: the left neighbour is the one already drawn."""
    lows, highs = _intervals(steps, flags, reach, highest)
    drawn = steps.copy()
    previous = 0
    for place in np.flatnonzero(flags).tolist():
        low, high, old = max(int(lows[place]), previous), int(highs[place]), int(steps[place])
        if low <= old <= high and low < high:
            value = int(rng.integers(low, high))
            drawn[place] = value + (value >= old)
        else:
            drawn[place] = int(rng.integers(low, high + 1))
        previous = int(drawn[place])
    return drawn


def _slide(
    steps: NDArray[np.int64], flags: NDArray[np.bool_], reach: int, highest: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Move every block of flagged pairs the same part of the way to its neighbours `reach` pairs to the left or right:
    a mixture of two non-decreasing sequences is one."""
    lows, highs = _intervals(steps, flags, reach, highest)
    block = np.cumsum(np.diff(flags, prepend=False))
    parts = rng.uniform(-1, 1, size=int(block[-1]) + 1)[block]
    way = np.where(parts < 0, steps - lows, highs - steps)
    return np.where(flags, steps + np.rint(parts * way).astype(np.int64), steps)


def _moved_ends(
    space: Space, steps: NDArray[np.int64], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Move either end of the searched pairs, where it is searched, by some pairs: pairs that it passes take the end's
    step, pairs that it frees are drawn between that and the first beyond."""
    for end, other, turn in ((space.low, space.high, 1), (space.high, space.low, -1)):
        if not end.searched or rng.random() >= probability:
            continue
        turned = steps[::turn].copy()  # the pairs of this end come first
        num_held = int((turned == end.step).sum())
        move = round(float(rng.normal(0, _END_PAIRS))) or 1
        if move > 0:
            turned[: min(num_held + move, end.most - end.least)] = end.step
        else:
            first = max(0, num_held + move)
            beyond = int(turned[num_held]) if num_held < len(turned) else other.step
            low, high = min(end.step + turn, beyond), max(end.step + turn, beyond)
            turned[first:num_held] = np.sort(rng.integers(low, high + 1, num_held - first))[::turn]
        steps = turned[::turn]
    return steps


def _intervals(
    steps: NDArray[np.int64], flags: NDArray[np.bool_], reach: int, highest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each pair the values `reach` pairs to its left and right, not beyond the next pair that is not flagged."""
    num_pairs = len(steps)
    left = np.concatenate([np.zeros(reach, dtype=np.int64), steps])[:num_pairs]
    right = np.concatenate([steps, np.full(reach, highest)])[reach:]
    kept_left = np.maximum.accumulate(np.where(flags, 0, steps))
    kept_right = np.minimum.accumulate(np.where(flags, highest, steps)[::-1])[::-1]
    return np.maximum(left, kept_left), np.minimum(right, kept_right)


def _moved_attention(space: Space, steps: int, probability: float, rng: np.random.Generator) -> int:
    """The attention factor's step, moved a little or a lot, by at least one."""
    if space.max_attention_steps == 0 or rng.random() >= probability:
        return steps
    deviation = _FINE_ATTENTION if rng.random() < 0.5 else _COARSE_ATTENTION
    grid = space.attention_grid
    move = round(float(rng.normal(0, deviation)) / float(grid[1] - grid[0]))
    moved = min(max(steps + (move or 1), 0), space.max_attention_steps)
    if moved == steps:  # at an end, outwards
        moved = min(max(steps - (move or 1), 0), space.max_attention_steps)
    return moved


def _moved_retained(space: Space, tokens: int, probability: float, rng: np.random.Generator) -> int:
    """Another of the choices, with `probability`."""
    others = [choice for choice in space.retained_choices if choice != tokens]
    if not others or rng.random() >= probability:
        return tokens
    return others[int(rng.integers(len(others)))]
