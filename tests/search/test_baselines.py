"""ropesearch/search/baselines.py: what the first trials are, and what a search starts from."""

import dataclasses

from ropesearch.rope import methods
from ropesearch.search.baselines import baseline_regimes, seed_regimes
from tests.search.analytic import TARGET_LENGTH, make_geometry


def test_tables_come_before_the_methods_among_the_seeds() -> None:
    geometry = make_geometry()
    table = methods.longrope(geometry, TARGET_LENGTH, [1.5] * 8, attention_factor=1.1)
    scaled = dataclasses.replace(methods.llama3(geometry, 4.0, 1.0, 4.0), name="unscaled", max_length=TARGET_LENGTH)
    baselines = baseline_regimes(geometry, TARGET_LENGTH, scaled, [table])
    assert [regime.name for regime in baselines] == ["unscaled", "linear", "ntk", "yarn", "longrope"]
    assert baselines[0] == scaled and baselines[4] == table
    assert seed_regimes(baselines, [table]) == [table, scaled, *baselines[1:4]]
    assert seed_regimes(baseline_regimes(geometry, TARGET_LENGTH)) == baselines[1:4]  # the plain table is none
