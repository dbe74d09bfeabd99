import math

import numpy as np
import pytest
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from ropesearch.rope import methods
from ropesearch.search.blockwise import BlockwiseSampler
from ropesearch.search.config import BlockwiseConfig, SpaceConfig
from ropesearch.search.space import SEARCHED, Candidate, Space
from ropesearch.search.spaces import make_space
from ropesearch.search.trials import CANDIDATE, METHOD, candidate_json
from tests.search.analytic import TARGET_LENGTH, make_geometry
from tests.search.test_sampler import trial_of

NUM = 5  # increments of a block
STEEP = tuple(np.geomspace(1.2, 8.4, 8).tolist())  # so that pairs can move some way before others have to make way


def space_of(num_pairs: int = 8, **change: object) -> Space:
    config = SpaceConfig(**{"factor_step": 1e-4, "attention_factor": 1.1, **change})  # type: ignore[arg-type]
    return make_space(make_geometry(num_pairs), TARGET_LENGTH, config)


def sampler_of(space: Space, factors: tuple[float, ...] = STEEP, seed: int = 0) -> BlockwiseSampler:
    """A sampler with one seed, the given table."""
    table = methods.longrope(space.geometry, TARGET_LENGTH, factors, 1.1)
    return BlockwiseSampler(space, BlockwiseConfig(num_increments=NUM), seed, [table], 0)


def logs(space: Space, candidate: Candidate) -> NDArray[np.float64]:
    return np.log(space.curve(candidate))


def run(sampler: BlockwiseSampler, values: list[float | None]) -> list[Candidate]:
    """Candidates of a study in which the trials come to `values`, None for failed ones; one more is proposed."""
    trials: list[FrozenTrial] = []
    for number, value in enumerate(values):
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        attributes = {CANDIDATE: candidate_json(sampler.propose(trials, number)), METHOD: SEARCHED}
        trials.append(trial_of(number, attributes, value, state))
    return [*(sampler.propose(trials[:number], number) for number in range(len(values) + 1))]


def moved(space: Space, candidates: list[Candidate], base: Candidate) -> list[tuple[int, ...]]:
    """The pairs in which each candidate differs from `base`."""
    return [
        tuple(np.flatnonzero(np.not_equal(candidate.factor_steps, base.factor_steps)).tolist())
        for candidate in candidates
    ]


def test_the_first_block_is_the_slow_half_moved_over_half_the_spaces_extent() -> None:
    """Where the fast half is far below, nothing has to be projected, and every increment is seen as it is."""
    space = space_of()
    low_then_high = (1.0, 1.0, 1.0, 1.0, 3.3, 3.3, 3.3, 3.3)
    base, *block = run(sampler_of(space, low_then_high), [1.0] * NUM)
    increments = [logs(space, candidate)[4:] - math.log(3.3) for candidate in block]
    extent = math.log(10)  # factors from 1 to 1.25 * 8
    for place, increment in enumerate(increments):
        assert increment == pytest.approx(increment[0], abs=1e-4)  # on every pair of the half alike
        part = increment[0] / extent + 0.5
        assert place / NUM < part < (place + 1) / NUM
    assert set(moved(space, block, base)) == {(4, 5, 6, 7)}
    again = run(sampler_of(space, low_then_high), [1.0] * NUM)
    assert again == [base, *block]
    assert run(sampler_of(space, low_then_high, seed=1), [1.0] * NUM)[1:] != block


def test_the_best_is_kept_and_slow_blocks_come_first() -> None:
    space = space_of()
    values: list[float | None] = [1.0, 3.0, 2.0, 1.5, 2.0, 3.0, 3.0, 2.0, 0.5, 2.0, 3.0, *[2.0] * 4 * NUM]
    found = run(sampler_of(space), values)
    blocks = [found[first : first + NUM] for first in range(1, 1 + 6 * NUM, NUM)]
    seed, best = found[0], blocks[1][2]
    for block, base, pairs in zip(
        blocks, [seed, seed, *[best] * 4], [(4, 5, 6, 7), (0, 1, 2, 3), (6, 7), (4, 5), (2, 3), (0, 1)], strict=True
    ):
        assert pairs in moved(space, block, base)  # where the increment is small, no other pair has to make way
        assert all(set(pairs) & set(changed) for changed in moved(space, block, base))


def test_a_blocks_parts_search_around_its_best_increments() -> None:
    """From the three best to one step further out on either side, relative to the best; the base itself is 0."""
    space = space_of()
    shape = (1.0, 1.0, 1.0, 1.0, 3.3, 3.3, 3.3, 3.3)
    sampler = sampler_of(space, shape)
    values: list[float | None] = [9.0, 5.0, 2.0, 1.0, 3.0, 6.0, *[9.0] * NUM]
    found = run(sampler, [*values, *[9.0] * (NUM - 1)])
    increments = [float(logs(space, candidate)[7] - math.log(3.3)) for candidate in found[1 : 1 + NUM]]
    best = increments[2]
    step = math.log(10) / NUM
    low, high = increments[1] - step - best, increments[3] + step - best
    quarter = found[1 + 2 * NUM : 1 + 3 * NUM]
    base = logs(space, found[3])
    for place, candidate in enumerate(quarter):
        increment = (logs(space, candidate) - base)[6:].mean()
        if increment > 0.02:  # upwards nothing has to make way
            assert place / NUM < (increment - low) / (high - low) < (place + 1) / NUM
    assert sum((logs(space, candidate) - base)[6:].mean() > 0.02 for candidate in quarter) >= 2
    kept = run(sampler, [0.5, *values[1:], *[9.0] * (NUM - 1)])  # nothing is better than the base: 0 is the best
    span = [0.0, increments[1], increments[2]]
    low, high = min(span) - step, max(span) + step
    for place, candidate in enumerate(kept[1 + 2 * NUM : 1 + 3 * NUM]):
        increment = (logs(space, candidate) - logs(space, kept[0]))[6:].mean()
        if increment > 0.02:
            assert place / NUM < (increment - low) / (high - low) < (place + 1) / NUM


def test_failed_trials_are_passed_over() -> None:
    """A block of which nothing was scored keeps its range, and a failed trial is no choice."""
    space = space_of()
    shape = (1.0, 1.0, 1.0, 1.0, 3.3, 3.3, 3.3, 3.3)
    found = run(sampler_of(space, shape), [1.0, *[None] * NUM, *[2.0] * NUM, *[2.0] * (NUM - 1)])
    quarter = found[1 + 2 * NUM : 1 + 3 * NUM]
    increments = [(logs(space, candidate) - logs(space, found[0]))[6:].mean() for candidate in quarter]
    assert math.log(10) * 0.3 < increments[-1] < math.log(10) * 0.5
    one = run(sampler_of(space), [1.0, None, None, 0.5, None, None, *[2.0] * NUM, *[2.0] * NUM])
    assert (6, 7) in moved(space, one[1 + 2 * NUM :], one[3])


def test_attention_factor_and_choices_are_blocks_of_their_own() -> None:
    space = space_of(attention_factor="search", retained_tokens=[0, 4, 8])
    found = run(sampler_of(space), [1.0, *[2.0] * 2 * NUM, *[2.0, 2.0, 0.5, 2.0, 2.0], 2.0, 0.25, 2.0])
    attention = found[1 + 2 * NUM : 1 + 3 * NUM]
    assert {candidate.factor_steps for candidate in attention} == {found[0].factor_steps}
    steps = [candidate.attention_steps - found[0].attention_steps for candidate in attention]
    assert steps == sorted(steps) and len(set(steps)) == NUM and steps[-1] > 100
    tokens = found[1 + 3 * NUM : 3 + 3 * NUM]  # the two other choices, from the best attention factor
    assert [candidate.retained_tokens for candidate in tokens] == [4, 8]
    assert {candidate.attention_steps for candidate in tokens} == {attention[2].attention_steps}
    assert found[-1].retained_tokens == 8  # the next round starts from the better one


def test_the_critical_pair_is_a_choice_and_blocks_part_the_pairs_from_it_on() -> None:
    space = space_of(critical_pair="search", max_factor_over_ratio=2.0)
    curve = (1.0, 2.5, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0)
    found = run(sampler_of(space, curve), [1.0, *[2.0] * (2 * NUM + 2)])
    base = found[0]
    assert base.factor_steps[:3] == (-1, -1, 10_000)  # critical pairs 2, 3 and 4 are searched
    assert (5, 6, 7) in moved(space, found[1 : 1 + NUM], base)
    assert all(5 in changed or 7 in changed for changed in moved(space, found[1 : 1 + NUM], base))
    pairs = [candidate.factor_steps.count(-1) for candidate in found[1 + 2 * NUM : 3 + 2 * NUM]]
    assert pairs == [3, 4]


def test_after_single_pairs_it_begins_again_with_halves() -> None:
    space = space_of(num_pairs=4)
    shape = (1.0, 1.0, 3.3, 3.3)
    num_trials = 1 + (2 + 4) * NUM
    found = run(sampler_of(space, shape), [1.0, *[2.0] * (num_trials - 1 + NUM)])
    single = found[1 + 2 * NUM : 1 + 3 * NUM]
    assert any(pairs == (3,) for pairs in moved(space, single, found[0]))
    halves = found[num_trials : num_trials + NUM]
    increments = [(logs(space, candidate) - logs(space, found[0]))[2:].mean() for candidate in halves]
    assert increments[-1] > 0.3 * math.log(10) and increments == sorted(increments)
