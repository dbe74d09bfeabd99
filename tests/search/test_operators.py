import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from ropesearch.rope import methods
from ropesearch.search.config import SpaceConfig
from ropesearch.search.operators import NUM_STRETCHES, cross, exchange, move, mutate, nearest_new, shift
from ropesearch.search.space import Candidate
from ropesearch.search.spaces import make_space
from ropesearch.seeding import stream
from tests.search.analytic import TARGET_LENGTH, make_geometry
from tests.search.test_space import SPACES, candidates

SPACE = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig(retained_tokens=[0, 4, 8]))
LARGE = make_space(make_geometry(64), TARGET_LENGTH, SpaceConfig())
TINY = make_space(make_geometry(2), 512, SpaceConfig(factor_step=0.5, attention_factor=1.1, retained_tokens=[0, 3]))
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(sorted(SPACES)), seeds, st.floats(0.01, 1), st.integers(1, 12))
def test_children_lie_in_the_space(data: st.DataObject, name: str, seed: int, probability: float, reach: int) -> None:
    space = SPACES[name]
    first, second = data.draw(candidates(space)), data.draw(candidates(space))
    rng = stream(seed, "test")
    for _ in range(8):
        assert space.contains(mutate(space, first, probability, reach, rng))
        assert space.contains(cross(space, first, second, probability, rng))


@given(st.data(), st.sampled_from(sorted(SPACES)), seeds)
def test_moves_lie_in_the_space_and_change_one_thing(data: st.DataObject, name: str, seed: int) -> None:
    space = SPACES[name]
    parent = data.draw(candidates(space))
    moved = move(space, parent, np.random.default_rng(seed))
    assert space.contains(moved)
    parts = (space.encode(parent) != space.encode(moved)).tolist()
    num_others = sum(parts[space.num_pairs :])
    assert num_others <= 1
    if num_others and not (space.low.searched or space.high.searched):
        assert not any(parts[: space.num_pairs])


def test_moves_are_of_any_size_and_place_and_now_and_then_of_other_things() -> None:
    parent = SPACE.repair(methods.ntk(SPACE.geometry, TARGET_LENGTH))
    rng = np.random.default_rng(0)
    curve = np.log(SPACE.curve(parent))
    moves = [move(SPACE, parent, rng) for _ in range(4000)]
    changes = np.array([np.log(SPACE.curve(moved)) - curve for moved in moves])
    attention = sum(moved.attention_steps != parent.attention_steps for moved in moves)
    retained = sum(moved.retained_tokens != parent.retained_tokens for moved in moves)
    assert 150 < attention < 250 and 340 < retained < 460  # a twentieth and a tenth, but for moves of no whole step
    touched = (np.abs(changes) > 1e-9).mean(axis=0)
    assert touched[0] > 0.15 and 0.01 < touched[-1] < 0.2 * touched[0]  # pairs that turn often, more often
    assert touched.max() < 0.7
    sizes = np.abs(changes).max(axis=1)
    half = np.log(SPACE.factor_grid[-1]) / 2
    assert np.quantile(sizes[sizes > 0], 0.1) < 0.06 * half and sizes.max() <= half + 0.01
    ups = (changes.sum(axis=1) > 0).sum() / (np.abs(changes).sum(axis=1) > 0).sum()
    assert 0.4 < ups < 0.6


@given(st.data(), st.sampled_from(sorted(SPACES)), st.integers(0, NUM_STRETCHES))
def test_an_exchange_takes_a_stretch_of_the_one_or_the_other(data: st.DataObject, name: str, part: int) -> None:
    space = SPACES[name]
    first, second = data.draw(candidates(space)), data.draw(candidates(space))
    exchanged = exchange(space, first, first, second, part)
    assert space.contains(exchanged)
    if part == NUM_STRETCHES:
        others = slice(space.num_pairs, None)
        assert space.encode(exchanged)[others].tolist() == space.encode(second)[others].tolist()
        if not (space.low.searched or space.high.searched):
            assert exchanged.factor_steps == first.factor_steps


def test_exchanges_of_all_stretches_lead_from_one_to_the_other_and_back() -> None:
    """32 pairs in stretches of four, then attention factor and retained tokens."""
    space = make_space(make_geometry(32), TARGET_LENGTH, SpaceConfig(retained_tokens=[0, 8]))
    first = Candidate(tuple(range(0, 320, 10)), 100, 0)
    second = Candidate(tuple(range(5, 325, 10)), 200, 8)
    best = first
    for part in range(NUM_STRETCHES):
        best = exchange(space, best, first, second, part)
        num_taken = 4 * (part + 1)
        assert best.factor_steps == second.factor_steps[:num_taken] + first.factor_steps[num_taken:]
        assert (best.attention_steps, best.retained_tokens) == (100, 0)
        assert exchange(space, exchange(space, best, first, second, part), first, second, part) == best
    assert exchange(space, best, first, second, NUM_STRETCHES) == second


def test_a_shift_moves_the_logs_of_a_block_alike_and_projects() -> None:
    """In the middle of YaRN's ramp, up by more than the pairs right of the block leave: these are pooled with it."""
    space = make_space(make_geometry(), TARGET_LENGTH, SpaceConfig(factor_step=0.001))
    parent = space.repair(methods.ntk(space.geometry, TARGET_LENGTH))
    before, after = space.curve(parent), space.curve(shift(space, parent, 2, 4, 0.01))
    assert after == pytest.approx(before * np.exp([0.01 if pair in (2, 3) else 0 for pair in range(8)]), abs=0.0006)
    pooled = space.curve(shift(space, parent, 2, 4, 1.0))
    wanted = before * np.exp([1.0 if pair in (2, 3) else 0 for pair in range(8)])
    expected = isotonic_regression(np.minimum(wanted, space.factor_grid[-1])).x
    assert pooled == pytest.approx(expected, abs=0.0006)


def test_the_ends_of_the_searched_pairs_move_where_they_are_searched() -> None:
    """By two pairs or so, as often as asked, and both ways."""
    space = make_space(make_geometry(32), TARGET_LENGTH, SpaceConfig(num_pairs_at_one="search"))
    parent = Candidate((*[0] * 10, *range(200, 860, 30)), 250, 0)
    rng = stream(0, "test")
    moved = [mutate(space, parent, 0.02, 1, rng).factor_steps for _ in range(4000)]
    more = [steps for steps in moved if steps.count(0) > 10 and steps[20:] == parent.factor_steps[20:]]
    fewer = [steps for steps in moved if steps.count(0) < 10 and steps[10:] == parent.factor_steps[10:]]
    assert 20 < len(more) < 80 and 20 < len(fewer) < 80
    lengths = [abs(steps.count(0) - 10) for steps in more + fewer]
    assert 1 < np.mean(lengths) < 3
    assert all(0 < steps[9] <= 200 for steps in fewer)  # freed pairs lie between 1 and the first factor beyond


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.7])
def test_a_mutation_changes_a_pair_with_its_probability(probability: float) -> None:
    parent = Candidate(tuple(range(5, 5 + 64 * 14, 14)), 250, 0)
    rng = stream(0, "test")
    mutants = [mutate(LARGE, parent, probability, 1, rng) for _ in range(3000)]
    changed = np.array([np.not_equal(mutant.factor_steps, parent.factor_steps) for mutant in mutants])
    # Every pair has room, so it changes when touched; only a slide may round to no move (a step of 14, by half a step).
    assert changed.mean() == pytest.approx(probability, rel=0.05)
    assert changed.mean(axis=0).min() > 0.8 * probability
    assert np.mean([mutant.attention_steps != 250 for mutant in mutants]) == pytest.approx(probability, rel=0.1)


def test_a_mutation_of_yarn_changes_its_plateaus_with_the_same_probability() -> None:
    space = make_space(make_geometry(64, 4096), 8 * 4096, SpaceConfig())
    yarn = space.repair(methods.yarn(space.geometry, space.target_length))
    rng = stream(0, "test")
    mutants = [mutate(space, yarn, 0.3, 1, rng) for _ in range(3000)]
    assert np.mean([np.not_equal(mutant.factor_steps, yarn.factor_steps) for mutant in mutants]) < 0.32
    high = yarn.factor_steps.count(700)
    low = yarn.factor_steps.count(0)
    assert high > 8 and low > 8
    moved = [mutant for mutant in mutants if len(set(mutant.factor_steps[-high:])) == 1]
    assert any(mutant.factor_steps[-1] > 700 for mutant in moved)  # the whole of it at once, both ways
    assert any(mutant.factor_steps[-1] < 700 for mutant in moved)
    assert any(mutant.factor_steps[0] > 0 and len(set(mutant.factor_steps[:low])) == 1 for mutant in mutants)


def test_a_pair_is_drawn_between_its_neighbours() -> None:
    parent = Candidate((0, 100, 200, 300, 400, 500, 600, 700), 250, 0)
    rng = stream(1, "test")
    drawn = [mutate(SPACE, parent, 0.05, 1, rng).factor_steps for _ in range(6000)]
    changed = np.not_equal(drawn, parent.factor_steps)
    alone = np.array(drawn)[changed[:, 3] & (changed.sum(axis=1) == 1), 3]
    assert len(alone) > 100
    assert 200 <= alone.min() < 215
    assert 385 < alone.max() <= 500  # a slide may go as far as two neighbours
    assert 300 not in alone


def test_the_attention_factor_moves_by_small_and_large_steps_and_off_its_ends() -> None:
    parent = Candidate((0,) * 8, 200, 0)
    rng = stream(0, "test")
    moves = np.array([mutate(SPACE, parent, 1.0, 1, rng).attention_steps - 200 for _ in range(500)])
    assert (moves != 0).all()
    assert (np.abs(moves) <= 10).mean() > 0.25
    assert (np.abs(moves) >= 50).mean() > 0.1
    for end in (0, 500):
        at_end = Candidate((0,) * 8, end, 0)
        assert all(mutate(SPACE, at_end, 1.0, 1, rng).attention_steps != end for _ in range(50))


def test_a_cross_takes_pairs_of_both_or_lies_on_their_line() -> None:
    first, second = Candidate((0,) * 8, 0, 0), Candidate((700,) * 8, 500, 8)
    rng = stream(0, "test")
    children = [cross(SPACE, first, second, 0.3, rng) for _ in range(300)]
    assert {child.retained_tokens for child in children} == {0, 8}
    lines = [child for child in children if 0 < child.attention_steps < 500]
    for child in lines:  # towards the worse parent, log factors and attention factor alike
        part = np.log(SPACE.factor_grid[child.factor_steps[0]]) / np.log(8)
        assert part == pytest.approx(child.attention_steps / 500, abs=0.01)
        assert part <= 0.5
    beyond = [cross(SPACE, second, first, 0.3, rng) for _ in range(300)]
    assert any(child.factor_steps == (900,) * 8 for child in beyond)  # on from the better parent, up to the bound


def test_walk_finds_every_candidate_and_then_none() -> None:
    start = Candidate((1, 2), 0, 3)
    known: set[Candidate] = set()
    for _ in range(TINY.num_candidates):
        found = nearest_new(TINY, start, known)
        assert found is not None and TINY.contains(found) and found not in known
        known.add(found)
    assert nearest_new(TINY, start, known) is None
    assert nearest_new(TINY, start, set()) == start
