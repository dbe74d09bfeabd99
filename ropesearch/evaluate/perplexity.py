"""What a regime is worth: perplexity by length and by position, next to the known methods on the same windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ropesearch.errors import InputError, ScoringError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.methods import dynamic_ntk, identity, linear, ntk, yarn
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score, perplexity

if TYPE_CHECKING:
    from ropesearch.data.windows import Windows

# The regime in force for sequences of so many tokens.
RegimeAt = Callable[[int], Regime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One row: a method's nats and tokens on one split's windows cut to `length` tokens.

    Block b holds the positions block_edges[b] .. block_edges[b + 1] - 1; windows are in the order of the split.
    `nats` and `tokens` are the totals of all of them. Fields are those of an entry of rope_config.json's "evaluation".
    """

    measure: ClassVar[str] = "perplexity"

    method: str
    split: str
    length: int
    nats: float
    tokens: int
    block_edges: tuple[int, ...]
    block_nats: tuple[float, ...]
    block_tokens: tuple[int, ...]
    window_nats: tuple[float, ...]
    window_tokens: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens)."""
        return perplexity(self.nats, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, with its measure."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"method": values.pop("method"), "measure": self.measure, **values}


def comparison_regimes(
    geometry: Geometry, target_length: int, searched: Sequence[Regime], unscaled: RegimeAt | None = None
) -> dict[str, RegimeAt]:
    """The methods a searched result is compared with, and the result itself, as method -> regime at a length.

    `searched` holds the result's regimes; at a length the one with the least sufficient max_length is in force. A
    single one goes by its name, which is a baseline's where no candidate beat that. Calling one raises InputError for a
    length that it does not serve. `unscaled` is the checkpoint's own table at a length; None is the plain one.
    """

    def searched_at(length: int) -> Regime:
        sufficient = [regime for regime in searched if regime.max_length >= length]
        if not sufficient:
            longest = max((regime.max_length for regime in searched), default=0)
            raise InputError(f"lengths: expected at most the {longest} tokens that the result serves, got {length}")
        return min(sufficient, key=lambda regime: regime.max_length)

    regimes: dict[str, RegimeAt] = {
        method: partial(_always, make(geometry, target_length))
        for method, make in (("unscaled", identity), ("linear", linear), ("ntk", ntk))
    }
    if unscaled is not None:
        regimes["unscaled"] = unscaled
    regimes["dynamic_ntk"] = partial(dynamic_ntk, geometry, target_length)
    regimes["yarn"] = partial(_always, yarn(geometry, target_length))
    regimes[searched[0].name if len(searched) == 1 else "searched"] = searched_at
    return regimes


def perplexity_table(
    score: Callable[[Regime, "Windows"], Score],
    windows: "Windows",
    regimes: Mapping[str, RegimeAt],
    lengths: Sequence[int],
    scoring: ScoringConfig,
    on_row: Callable[[Evaluation], None] | None = None,
    on_failure: Callable[[str, int, ScoringError], None] | None = None,
) -> list[Evaluation]:
    """Score `windows`, cut to each of `lengths` tokens, under every method's regime at that length, with `score`.

    Rows come by length, then in the order of `regimes`; `on_row` gets each when it is made. With `on_failure`, a method
    that cannot be scored at a length is handed to it and has no row; without, the ScoringError is raised, naming both.
    Everything is checked before the first window is scored. Raises InputError for lengths that are not distinct and
    within the windows, for a regime that does not serve its length, and as `score` does.
    """
    if not lengths or not regimes:
        raise InputError("evaluation: expected at least one length and one method, got none")
    if len(set(lengths)) < len(lengths):
        raise InputError(f"lengths: expected each once, got {list(lengths)}")
    plan = [_planned(windows, method, at, length, scoring) for length in lengths for method, at in regimes.items()]
    cut = {length: windows.cut(length) for length in lengths}
    rows = []
    for method, length, regime in plan:
        try:
            row = _row(score(regime, cut[length]), cut[length], method)
        except ScoringError as error:
            named = ScoringError(f"{method} at {length} tokens: {error}")
            if on_failure is None:
                raise named from error
            on_failure(method, length, named)
            continue
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def _always(regime: Regime, length: int) -> Regime:
    return regime


def _planned(
    windows: "Windows", method: str, regime_at: RegimeAt, length: int, scoring: ScoringConfig
) -> tuple[str, int, Regime]:
    if not 2 <= length <= windows.length_tokens:
        raise InputError(
            f"lengths: expected from 2 to {windows.length_tokens} tokens, as the {windows.split} windows, got {length}"
        )
    scoring.check(length)
    regime = regime_at(length)
    if regime.max_length < length:
        raise InputError(f"{method}: expected a regime that serves {length} tokens, got one for {regime.max_length}")
    return method, length, regime


def _row(score: Score, windows: "Windows", method: str) -> Evaluation:
    return Evaluation(
        method=method,
        split=windows.split,
        length=windows.length_tokens,
        nats=score.total_nats,
        tokens=score.total_tokens,
        block_edges=tuple(score.block_edges.tolist()),
        block_nats=tuple(score.nats.sum(axis=0).tolist()),
        block_tokens=tuple(np.sum(score.tokens, axis=0).tolist()),
        window_nats=tuple(score.window_nats.tolist()),
        window_tokens=tuple(score.window_tokens.tolist()),
    )
