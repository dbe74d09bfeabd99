"""The jobs, read from top to bottom: what `ropesearch search`, `evaluate` and `verify` do."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import VerifyLevel, WeightsMode
from ropesearch.artifact.digest import check_entries
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.load import find_folder, load_unscaled, own_table, read_bound
from ropesearch.artifact.origin import Origin, checkpoint_states
from ropesearch.artifact.schema import FILE_NAME, RopeConfig
from ropesearch.artifact.tables import read_tables
from ropesearch.artifact.verify import Finding, check_expressible
from ropesearch.artifact.verify import verify as verify_folder
from ropesearch.config import NOT_IN_ITS_NAME, EvaluateJob, SearchJob, VerifyJob, expect_given, plain
from ropesearch.data.windows import Windows, build_windows
from ropesearch.errors import InputError, NothingScoredError
from ropesearch.evaluate.needle import NeedleEvaluation
from ropesearch.evaluate.perplexity import Evaluation, RegimeAt, comparison_regimes
from ropesearch.files import remove_folder, write_json
from ropesearch.model.checkpoint import find_checkpoint
from ropesearch.model.config import ModelConfig
from ropesearch.model.load import (
    load_model,
    load_tokenizer,
    quiet_transformers,
    read_geometry,
    read_layer_limits,
    read_length_note,
    read_own,
)
from ropesearch.model.own import UNSCALED, UNSCALED_LONG
from ropesearch.report import EvaluateOutcome, SearchOutcome, VerifyOutcome
from ropesearch.rope.regime import Regime
from ropesearch.run_folder import CONFIG, RunFolder, by_key, versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import GRADIENT_COST
from ropesearch.score.objective import objective_of
from ropesearch.score.scorer import forward_equivalent_tokens, scoring_identity
from ropesearch.score.store import ScoreStore
from ropesearch.scoring import (
    JobScorer,
    cache_folder,
    guiding_windows,
    needle_rows_of,
    needles_by_split,
    perplexity_rows,
)
from ropesearch.search.baselines import RESERVED_NAMES, baseline_regimes, seed_regimes
from ropesearch.search.budget import Budget
from ropesearch.search.optimizers import make_sampler
from ropesearch.search.ownership import exclusive
from ropesearch.search.presence import working
from ropesearch.search.racing import Racing, race_rule
from ropesearch.search.run import SearchResult, run_search
from ropesearch.search.sharing_config import JournalConfig
from ropesearch.search.space import SEARCHED
from ropesearch.search.spaces import make_space
from ropesearch.search.study import open_study
from ropesearch.search.trials import regime_json
from ropesearch.search.worker import SearchEvent
from ropesearch.strict_json import read_json_object
from ropesearch.track.plots import plot_course, plot_factors, plot_front
from ropesearch.track.progress import ProgressDisplay
from ropesearch.tracking import SearchTracker

_EVALUATION = "evaluation.json"

_log = logging.getLogger(__name__)


def search(job: SearchJob) -> SearchOutcome:
    """Search the factors of a checkpoint; begin, join or go on with the run, and show it when it is finished.

    Everything that can be wrong with the job is found before the weights are loaded. Raises InputError for that,
    NothingScoredError when no candidate could be scored; KeyboardInterrupt leaves a run that goes on when asked again.
    """
    quiet_transformers()
    expect_given("search", job)
    job.check()
    small_files = find_checkpoint(job.model, with_weights=False)
    check_entries(small_files)
    small_states = checkpoint_states(small_files)
    geometry = read_geometry(small_files, job.model.original_length, trust_remote_code=job.model.trust_remote_code)
    geometry.ratio(job.target_length)
    check_expressible(small_files, geometry, job.target_length, trust_remote_code=job.model.trust_remote_code)
    limits = read_layer_limits(small_files, trust_remote_code=job.model.trust_remote_code)
    notes = [f"{geometry.model_type}: {limit}" for limit in limits]
    notes += read_length_note(small_files, job.model.original_length, trust_remote_code=job.model.trust_remote_code)
    own = read_own(small_files, geometry, trust_remote_code=job.model.trust_remote_code)
    tables, table_notes = read_tables(job.tables, geometry, job.target_length, RESERVED_NAMES)
    baselines = baseline_regimes(geometry, job.target_length, own.regime_at(job.target_length), tables)
    space = make_space(geometry, job.target_length, job.space)
    seeds = seed_regimes(baselines, tables)
    objective = objective_of(job.objective, job.target_length, geometry.original_length)
    whole_windows = dataclasses.replace(job.objective, last_tokens=None)  # what short inputs are reported on
    whole_windows.check(geometry.original_length)
    tokenizer = load_tokenizer(job.model)
    texts = build_windows(job.corpus, tokenizer, job.target_length, job.seed, cache_folder(job.cache))
    needles = needles_by_split(job.objective, texts, tokenizer, job.seed)
    windows = guiding_windows(objective, texts, needles)
    num_windows = windows["search"].num_windows
    sampler = make_sampler(space, job.optimizer, job.seed, seeds, len(baselines), num_windows, objective, job.racing)
    if job.budget.num_trials is not None and job.budget.num_trials > sampler.num_candidates:
        notes.append(
            f"the search ends after {sampler.num_candidates} candidates, before the {job.budget.num_trials} of "
            f"budget.num_trials: optimizer.{sampler.limit} is a limit too; raise it for more"
        )
    cost_tokens = forward_equivalent_tokens(windows["search"], objective.spans)
    step_cost_tokens = GRADIENT_COST * job.target_length
    rule = race_rule(job.racing, job.selection, sampler, objective, num_windows)
    Budget(job.budget, sampler, cost_tokens, len(baselines), step_cost_tokens)
    source = find_checkpoint(job.model)
    origin = Origin.read(source)
    origin.expect_same(small_states)
    binding = origin.binding

    run = RunFolder.of("search", job.run, plain(job), without=NOT_IN_ITS_NAME)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.logged())
        display = stack.enter_context(ProgressDisplay())
        tracker = stack.enter_context(SearchTracker(job.track, run.path, display.say))
        for note in [*notes, *table_notes]:
            _log.warning("%s", note)
            display.say(f"note: {note}")
        fingerprints = {
            "weights": binding.digest,
            "config": origin.config_digest,
            "own_table": own.to_json(),
            "original_length": geometry.original_length,
            "target_length": job.target_length,
            "scoring": {
                split: scoring_identity(
                    job.model, windows[split], job.objective, None if split == "held_out" else objective.spans
                )
                for split in windows
            },
            **({"held_out_needles": needles["held_out"].fingerprint} if needles else {}),
            "objective": objective.to_json(),
            "space": plain(job.space),
            "optimizer": plain(job)["optimizer"],
            "tables": {table.name: regime_json(table) for table in tables},
            **({} if rule is None else {"racing": rule._asdict()}),
            "seed": job.seed,
        }
        short_regime = None
        if objective.guarded_tokens is not None and own.varies:
            # Short inputs get another table than trial 0 from the checkpoint; what they cost under it is the measure.
            short_regime = own.regime_at(geometry.original_length)
            fingerprints["guard_reference"] = regime_json(short_regime)
        depends_on = {**origin.identity, "own_table": own.to_json()}
        scorer = JobScorer(
            load=lambda: origin.loaded_with(lambda: load_model(job.model)),
            identity=lambda of, scoring: {**depends_on, **scoring_identity(job.model, of, scoring)},
            store=ScoreStore(run.path / "scores"),
            scoring=job.objective,
            longest_tokens=job.target_length,
        )
        if run.is_new:
            scorer.prove([*windows.values(), *needles.values()])
        # Another search in this folder keeps its description.
        opened = open_study(run.path, fingerprints, sampler, objective.num_values, job.storage)
        stack.callback(opened.store.close)
        num_held = len(opened.trials()) - len(baselines)
        if job.budget.num_trials is not None and num_held > job.budget.num_trials:
            display.say(
                f"note: the run folder holds {num_held} candidates, more than the {job.budget.num_trials} of "
                "budget.num_trials: all of them count"
            )
        run.describe(plain(job))
        presence = stack.enter_context(working(run.path, job.worker.lease_seconds, str(job.model.device)))
        tracker.begin(opened, fingerprints, geometry, job.target_length, plain(job))

        def on_event(event: SearchEvent) -> None:
            display.show(f"{event.split} windows", event.spent_fraction, _best_so_far(event))
            tracker.update(event)

        # What a study's server that is away cannot be told is on disk, and is read when the trial is gone on with.
        scored = scorer.score if isinstance(job.storage, JournalConfig) else scorer.kept
        racing = None
        if rule is not None:
            racing = Racing(
                evaluate=lambda regime, window: scorer.score(
                    regime, windows["search"], job.objective, objective.spans, only=window
                ),
                num_windows=num_windows,
                window_cost_tokens=cost_tokens // num_windows,
                objective=objective,
                rule=rule,
            )
        result = run_search(
            opened,
            sampler,
            lambda regime, split: scored(regime, windows[split], job.objective, objective.spans),
            differentiate=lambda regime, window, guard_weight: scorer.differentiate(
                regime, windows["search"], window, objective, guard_weight
            ),
            baselines=baselines,
            cost_tokens=cost_tokens,
            step_cost_tokens=step_cost_tokens,
            budget=job.budget,
            racing=racing,
            selection=job.selection,
            presence=presence,
            grace_seconds=job.worker.grace_seconds,
            objective=objective,
            guard_reference=None
            if short_regime is None
            else lambda split: scorer.score(short_regime, texts[split].cut(geometry.original_length), whole_windows),
            on_event=on_event,
        )
        if own.varies and result.method == UNSCALED:
            # One table for all lengths is another result than a table that depends on them.
            held = dataclasses.replace(result.regime, name=UNSCALED_LONG)
            result = dataclasses.replace(result, regime=held, method=UNSCALED_LONG)
        best = [finalist.regime for finalist in result.finalists if finalist.method == SEARCHED][:1]
        at_target = {regime.name: regime for regime in [*baselines, *best, result.regime]}
        at_original = {name: at_target[name] for name in dict.fromkeys([UNSCALED, result.method])}
        between = [
            length for length in job.objective.lengths if length not in (job.target_length, geometry.original_length)
        ]
        tables_at: list[tuple[int, dict[str, RegimeAt], ScoringConfig]] = []
        for length, regimes, scoring in (
            (job.target_length, at_target, job.objective),
            *((length, at_target, job.objective) for length in between),
            (geometry.original_length, at_original, whole_windows),
        ):
            at: dict[str, RegimeAt] = {name: functools.partial(_constant, regime) for name, regime in regimes.items()}
            at[UNSCALED] = own.regime_at
            tables_at.append((length, at, scoring))
        held_out = [
            (regime_at(length), windows["held_out"].cut(length), scoring)
            for length, at, scoring in tables_at
            for regime_at in at.values()
        ]
        if needles:
            held_out += [(regime, needles["held_out"], job.objective) for regime in at_target.values()]
        scorer.keep_together(held_out, opened, presence, display)
        rows: list[Evaluation] = []
        failures: list[str] = []
        for length, at, scoring in tables_at:
            rows += perplexity_rows(scorer, windows["held_out"], at, [length], scoring, display, failures)
        needle_rows: list[NeedleEvaluation] = []
        if needles:
            needle_rows = needle_rows_of(scorer, needles["held_out"], at_target, job.objective, display, failures)
        if (result.method, job.target_length) not in {(row.method, row.length) for row in rows}:
            raise NothingScoredError(f"the result could not be scored on the held-out windows: {'; '.join(failures)}")

        rope_config = RopeConfig(
            target_length=job.target_length,
            geometry=geometry,
            regimes=(result.regime,),
            checkpoint=binding,
            search=_search_record(job, result, windows, fingerprints),
            evaluation=[*(row.to_json() for row in rows), *(row.to_json() for row in needle_rows)],
            versions=versions(),
        )
        plot_factors(run.path / "factors.png", geometry, job.target_length, at_target)
        baseline_nats = {
            name: objective.value(score) for name, score in result.search_scores.items() if name != SEARCHED
        }
        plot_course(run.path / "course.png", result.course, baseline_nats)
        if result.points:
            front = {"chosen": result.trial_number, "num_scored": len(result.points), "objective": objective.to_json()}
            write_json(run.path / "front.json", {**front, "front": _front_json(result, with_regimes=True)})
            plot_front(run.path / "front.png", geometry.original_length, result.points, result.trial_number)
        checkpoint = run.path / "checkpoint"
        with exclusive(run.path):  # another worker of this run may be at the same point
            rope_config = _written(run.path, checkpoint, source, rope_config, job.weights)
            levels = [level for level in VerifyLevel if level is not VerifyLevel.logits]
            findings = [] if job.weights is WeightsMode.none else verify_folder(checkpoint, levels)
        tracker.result(rope_config, result)
        return SearchOutcome(
            run_folder=run.path,
            checkpoint_folder=checkpoint,
            rope_config=rope_config,
            result=result,
            rows=rows,
            needle_rows=needle_rows,
            failures=failures,
            findings=findings,
        )


def evaluate(job: EvaluateJob) -> EvaluateOutcome:
    """Perplexity by length and position on held-out documents: unscaled, linear, NTK, dynamic NTK, YaRN, searched.

    Raises InputError for a folder, corpus or lengths that cannot be used, BindingError for weights that are not those
    of the folder's rope_config.json. A method that cannot be scored at a length is named, and has no row.
    """
    quiet_transformers()
    expect_given("evaluate", job)
    job.check()
    folder = find_folder(Path(job.path))
    check_entries(folder)
    rope_config = RopeConfig.read(folder)
    geometry, target_length = rope_config.geometry, rope_config.target_length
    own = own_table(folder, rope_config)
    lengths = job.lengths or job.objective.lengths or _doublings(geometry.original_length, target_length)
    for length in lengths:
        if not 2 <= length <= target_length:
            raise InputError(
                f"lengths: expected from 2 to target_length = {target_length} tokens, got {length}; a longer table "
                "takes a search of its own"
            )
        job.objective.check(length)
    model_config = ModelConfig(path=str(folder), device=job.device)
    tokenizer = load_tokenizer(model_config)
    windows = build_windows(job.corpus, tokenizer, max(lengths), job.seed, cache_folder(job.cache))["held_out"]

    asked = {**plain(job), "path": str(folder.resolve())}
    run = RunFolder.of("evaluate", job.run, asked, without=("run", "cache"))
    if (run.path / _EVALUATION).is_file():
        begun = read_json_object(run.path / CONFIG)
        keys = [key for key in asked if key not in ("run", "cache")]
        run.expect_same(*(by_key({key: of.get(key) for key in keys}) for of in (begun, asked)))
    with run.logged(), ProgressDisplay() as display:
        origin = Origin.read(folder, lambda folder: read_bound(folder).checkpoint)
        depends_on = {**origin.identity, "own_table": own.to_json()}
        scorer = JobScorer(
            load=lambda: origin.loaded_with(lambda: load_unscaled(folder, rope_config, device=job.device)),
            identity=lambda of, scoring: {**depends_on, **scoring_identity(model_config, of, scoring)},
            store=ScoreStore(run.path / "scores"),
            scoring=job.objective,
            longest_tokens=max(lengths),
        )
        if run.is_new:
            scorer.prove([windows])
        run.describe(asked)
        regimes = comparison_regimes(geometry, target_length, rope_config.regimes, own.regime_at)
        failures: list[str] = []
        rows = perplexity_rows(scorer, windows, regimes, lengths, job.objective, display, failures)
        outcome = EvaluateOutcome(
            run_folder=run.path,
            rows=rows,
            failures=failures,
            last_tokens=job.objective.last_tokens,
            regimes=rope_config.regimes,
        )
        write_json(run.path / _EVALUATION, outcome.to_json())
        return outcome


def verify(job: VerifyJob) -> VerifyOutcome:
    """Check a folder against its rope_config.json; see `ropesearch.artifact.verify.verify`."""
    quiet_transformers()
    expect_given("verify", job)
    folder = find_folder(Path(job.path))
    findings = verify_folder(folder, job.levels, job.max_logits_tokens)
    of_run = Path(job.path) / FILE_NAME
    if VerifyLevel.digest in job.levels and folder != Path(job.path) and of_run.is_file():
        same = of_run.read_bytes() == (folder / FILE_NAME).read_bytes()
        message = f"{of_run}: {'the same file as' if same else 'another file than'} in {folder.name}/"
        findings = [*findings, Finding(level=VerifyLevel.digest, ok=same, message=message)]
    return VerifyOutcome(folder=folder, findings=findings)


def _written(run: Path, checkpoint: Path, source: Path, rope_config: RopeConfig, weights: WeightsMode) -> RopeConfig:
    """Write the run's rope_config.json and checkpoint folder; what a larger budget has improved on is replaced.

    A result that is already there stays as it was written, with the versions that it was found with.
    """
    if (run / FILE_NAME).is_file():
        there = RopeConfig.read(run)
        if there.fingerprint == rope_config.fingerprint:
            rope_config = there
        elif checkpoint.is_dir():
            remove_folder(checkpoint)
    rope_config.write(run / FILE_NAME)
    write_checkpoint_folder(source, checkpoint, rope_config, weights, allow_unportable=True)
    return rope_config


def _search_record(
    job: SearchJob, result: SearchResult, windows: Mapping[str, Windows], fingerprints: Mapping[str, Any]
) -> dict[str, Any]:
    """The "search" entry of rope_config.json: how the result was found, and the scores it was chosen by."""
    objective = result.objective
    selection = [
        {
            "trial_number": finalist.trial_number,
            "method": finalist.method,
            "nats": None if finalist.selection_score is None else finalist.selection_score.total_nats,
            "tokens": None if finalist.selection_score is None else finalist.selection_score.total_tokens,
            "objective": None if finalist.selection_score is None else objective.value(finalist.selection_score),
            "short_excess_nats": finalist.excess_nats,
        }
        for finalist in result.finalists
    ]
    return {
        "optimizer": plain(job)["optimizer"],
        "space": plain(job.space),
        "objective": {"name": "perplexity", **plain(job.objective), **objective.to_json()},
        "num_candidates_in_guard": result.num_candidates_in_guard,
        "seed": job.seed,
        "method": result.method,
        "trial_number": result.trial_number,
        "num_trials": result.num_trials,
        "num_failed": result.num_failed,
        "num_stopped": result.num_stopped,
        "num_saved_tokens": result.num_saved_tokens,
        "num_forward_equivalent_tokens": result.num_forward_equivalent_tokens,
        "stopped_because": result.stopped_because,
        "data_fingerprint": {split: windows[split].fingerprint for split in windows},
        "documents": {split: list(windows[split].documents) for split in windows},
        "scoring": fingerprints["scoring"],
        "search_scores": {
            name: {"nats": score.total_nats, "tokens": score.total_tokens, "objective": objective.value(score)}
            for name, score in result.search_scores.items()
        },
        "selection_scores": selection,
        **({"front": _front_json(result, with_regimes=False)} if result.points else {}),
    }


def _front_json(result: SearchResult, *, with_regimes: bool) -> list[dict[str, Any]]:
    """The front of a search with two objectives on the search windows: its members, by first objective."""
    return [
        {
            "trial_number": point.trial_number,
            "method": point.method,
            "long_nats_per_token": point.long_nats_per_token,
            "short_nats_per_token": point.short_nats_per_token,
            "short_excess_nats": point.excess_nats,
            **(regime_json(point.regime) if with_regimes else {}),
        }
        for point in result.front
    ]


def _best_so_far(event: SearchEvent) -> str:
    if event.best_nats_per_token is None:
        return f"trial {event.trial_number} failed: {event.failure}"
    stopped = f", {event.num_stopped} stopped early" if event.num_stopped else ""
    return f"best {math.exp(event.best_nats_per_token):.3f} ({event.best_method}), {event.num_finished} trials{stopped}"


def _constant(regime: Regime, length: int) -> Regime:
    return regime


def _doublings(original_length: int, target_length: int) -> list[int]:
    lengths = [original_length]
    while lengths[-1] * 2 < target_length:
        lengths.append(lengths[-1] * 2)
    return [*lengths, target_length]
