"""What a job scores and how: regimes on windows, with what is known already read from the run."""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropesearch.data.windows import Windows, check_vocabulary, needle_windows
from ropesearch.errors import ScoringError
from ropesearch.evaluate.needle import NeedleEvaluation, needle_row
from ropesearch.evaluate.perplexity import Evaluation, RegimeAt, perplexity_table
from ropesearch.files import sha256_of_json
from ropesearch.model.install import installed, prove_installable
from ropesearch.model.load import LoadedModel
from ropesearch.rope.regime import Regime
from ropesearch.score.cache import check_memory
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import window_gradient
from ropesearch.score.objective import Objective
from ropesearch.score.score import Score
from ropesearch.score.scorer import prove_scorer, score_windows
from ropesearch.score.store import ScoreStore
from ropesearch.search.once import POLL_SECONDS
from ropesearch.search.presence import Presence
from ropesearch.search.study import OpenStudy
from ropesearch.search.trials import Step, regime_json
from ropesearch.track.progress import ProgressDisplay

_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class JobScorer:
    """Scores regimes on windows; loads and proves the model when the first one is asked for."""

    load: Callable[[], LoadedModel]
    identity: Callable[[Windows, ScoringConfig], dict[str, Any]]
    store: ScoreStore
    scoring: ScoringConfig = dataclasses.field(default_factory=ScoringConfig)
    longest_tokens: int = 0  # of the windows that will be scored
    failures: dict[str, ScoringError] = dataclasses.field(default_factory=dict)  # of `kept`, which are not tried again

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        loaded = self.load()
        prove_installable(loaded)
        # One table for the whole sequence, in chunks too, where the checkpoint's own depends on the length.
        with installed(loaded, loaded.own.regime_at(loaded.geometry.original_length)):
            prove_scorer(loaded, self.scoring.offload_cache)
        if self.scoring.chunk_tokens is not None and self.scoring.chunk_tokens < self.longest_tokens:
            check_memory(loaded.model, self.longest_tokens, self.scoring.offload_cache)
        _log.info("loaded %s as %s with %s attention", loaded.folder, loaded.dtype, loaded.attention)
        return loaded

    def prove(self, windows: Iterable[Windows]) -> None:
        """Load the model now, and raise InputError unless it can be used and knows every token of `windows`.

        For a new run, so that nothing of it is written before.
        """
        for each in windows:
            check_vocabulary(each, self.loaded.model.get_input_embeddings().num_embeddings)

    def score(
        self,
        regime: Regime,
        windows: Windows,
        scoring: ScoringConfig,
        spans: Sequence[tuple[int, int]] | None = None,
        only: int | None = None,
    ) -> Score:
        """Score `windows`, or `only` one of them, under `regime`."""
        with installed(self.loaded, regime):
            return score_windows(self.loaded, windows, scoring, spans=spans, only=only)

    def differentiate(
        self, regime: Regime, windows: Windows, window: int, objective: Objective, guard_weight: float
    ) -> Step:
        """A gradient step: the objective on one window under `regime`, and its derivatives."""
        weights = objective.token_weights(windows, window, self.scoring.last_tokens, guard_weight)
        with installed(self.loaded, regime):
            nats, gradient = window_gradient(self.loaded, windows.token_ids[window], weights, regime.retained_tokens)
        derivatives = (*gradient.log_factors.tolist(), gradient.log_attention_factor)
        return Step(window=window, nats_per_token=nats, gradient=derivatives)

    def kept(
        self,
        regime: Regime,
        windows: Windows,
        scoring: ScoringConfig,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Score:
        """As `score`, but what the run already holds is read, and what could not be scored is not tried again."""
        depends_on = self._depends_on(regime, windows, scoring, spans)
        score = self.store.get(depends_on)
        if score is None:
            key = sha256_of_json(depends_on)
            if key in self.failures:
                raise self.failures[key]
            try:
                score = self.score(regime, windows, scoring, spans)
            except ScoringError as error:
                self.failures[key] = error
                raise
            self.store.put(depends_on, score)
        return score

    def keep_together(
        self,
        tasks: Sequence[tuple[Regime, Windows, ScoringConfig]],
        opened: OpenStudy,
        presence: Presence,
        display: ProgressDisplay,
    ) -> None:
        """Score what the run does not hold yet, each task by one of the study's workers that are at this point too, and
        return when `kept` has all. What cannot be scored is left for it to fail at.
        """
        phase = "held-out windows"
        waiting = list(tasks)
        while waiting:
            left = []
            for place, task in enumerate(waiting, start=1):
                depends_on = self._depends_on(*task)
                if self.store.get(depends_on) is None:
                    claim = f"kept/{sha256_of_json(depends_on)}"
                    if not opened.claim(claim, presence):
                        left.append(task)
                        continue
                    with contextlib.suppress(ScoringError):
                        self.kept(*task)
                    opened.disclaim(claim)
                fraction = 1 - (len(left) + len(waiting) - place) / len(tasks)
                presence.show(phase=phase, fraction=fraction)
                display.show(phase, fraction)
            if len(left) == len(waiting):
                time.sleep(POLL_SECONDS)  # all that is left is being scored by other workers, which may die
            waiting = left

    def _depends_on(
        self,
        regime: Regime,
        windows: Windows,
        scoring: ScoringConfig,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        depends_on = {**self.identity(windows, scoring), "regime": regime_json(regime)}
        if spans is not None:
            depends_on["spans"] = [list(span) for span in spans]
        return depends_on


def perplexity_rows(
    scorer: JobScorer,
    windows: Windows,
    regimes: Mapping[str, RegimeAt],
    lengths: Sequence[int],
    scoring: ScoringConfig,
    display: ProgressDisplay,
    failures: list[str],
) -> list[Evaluation]:
    """The table of perplexities, its progress shown; what could not be scored is added to `failures`."""
    num_cells = len(lengths) * len(regimes)
    done: list[Evaluation] = []
    phase = f"held-out windows of {', '.join(map(str, lengths))} tokens"

    def on_row(row: Evaluation) -> None:
        done.append(row)
        display.show(phase, len(done) / num_cells, f"{row.method} at {row.length} tokens: {row.perplexity:.3f}")

    def on_failure(method: str, length: int, error: ScoringError) -> None:
        failures.append(str(error))

    display.show(phase, 0.0)

    def score(regime: Regime, of: Windows) -> Score:
        return scorer.kept(regime, of, scoring)

    return perplexity_table(score, windows, regimes, lengths, scoring, on_row, on_failure)


def needles_by_split(
    scoring: ScoringConfig, texts: Mapping[str, Windows], tokenizer: Any, seed: int
) -> dict[str, Windows]:
    """Windows with a needle for every split, its documents the haystacks; none where the objective has none."""
    if not scoring.needle_weight:
        return {}
    return {
        split: needle_windows(of, tokenizer, scoring.needle_depths, scoring.num_needle_windows, seed)
        for split, of in texts.items()
    }


def guiding_windows(
    objective: Objective, texts: Mapping[str, Windows], needles: Mapping[str, Windows]
) -> dict[str, Windows]:
    """What the objective is computed on, and the held-out windows, which are plain text whatever guided the search."""

    def guiding(split: str) -> Windows:
        if not needles:
            return texts[split]
        return texts[split].joined(needles[split]) if objective.needs_text else needles[split]

    return {split: texts[split] if split == "held_out" else guiding(split) for split in texts}


def needle_rows_of(
    scorer: JobScorer,
    needles: Windows,
    regimes: Mapping[str, Regime],
    scoring: ScoringConfig,
    display: ProgressDisplay,
    failures: list[str],
) -> list[NeedleEvaluation]:
    """Each method's row on held-out needles; what could not be scored is added to `failures`."""
    rows = []
    for place, (method, regime) in enumerate(regimes.items(), start=1):
        try:
            rows.append(needle_row(scorer.kept(regime, needles, scoring), needles, method))
        except ScoringError as error:
            failures.append(f"{method} on needles of {needles.length_tokens} tokens: {error}")
        display.show("held-out needles", place / len(regimes))
    return rows


def cache_folder(path: str | None) -> Path | None:
    """The folder that the key `cache` names; None for none."""
    return None if path is None else Path(os.path.expanduser(path))
