"""The job `finetune`, read from top to bottom: a searched checkpoint in, one with two regimes and new weights out."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ropesearch import files
from ropesearch.artifact.config import VerifyLevel, WeightsMode
from ropesearch.artifact.digest import check_entries, checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.load import find_folder, load_unscaled, own_table, read_bound
from ropesearch.artifact.origin import Origin
from ropesearch.artifact.schema import FILE_NAME, RopeConfig
from ropesearch.artifact.verify import verify as verify_folder
from ropesearch.artifact.weights import check_stored_names, stored_dtypes, write_weights
from ropesearch.config import FinetuneJob, expect_given, plain
from ropesearch.data.mixture import LONG, SHORT, Mixture, check_needle_rows
from ropesearch.data.preparation import prepare_training_tokens
from ropesearch.data.training_tokens import TrainingTokens
from ropesearch.data.windows import build_windows, check_vocabulary, evaluation_texts
from ropesearch.errors import InputError
from ropesearch.evaluate.perplexity import Evaluation
from ropesearch.evaluate.table import perplexity_text
from ropesearch.finetune_folder import (
    ASKED,
    NEW_WEIGHTS,
    TOKENS,
    expect_own,
    expect_room_for_all,
    expect_same,
    only_one,
)
from ropesearch.finetune_tracking import FinetuneTracker
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, prove_installable
from ropesearch.model.load import LoadedModel, load_tokenizer, quiet_transformers
from ropesearch.report import AFTER, BEFORE, FinetuneOutcome
from ropesearch.rope.regime import Regime
from ropesearch.run_folder import RunFolder, versions
from ropesearch.score.forward import vocabulary_tokens
from ropesearch.score.scorer import prove_scorer
from ropesearch.scoring import cache_folder
from ropesearch.search.trials import regime_json
from ropesearch.track.config import NoTracking
from ropesearch.track.progress import ProgressDisplay
from ropesearch.train.adapter import add_adapter, merged_tensors
from ropesearch.train.config import Adapter, Precision
from ropesearch.train.loop import STATES, FineTuning, HeldOut, Measurement, StepEvent
from ropesearch.train.loss import RowLoss
from ropesearch.train.processes import Processes
from ropesearch.train.regimes import prove_documents_apart
from ropesearch.train.weights import shard

_log = logging.getLogger(__name__)

# Keys that say how it is done and not what comes out.
_NOT_IN_ITS_NAME = ("run", "cache", "device", "track")
_NOT_IN_ITS_RESULT = ("save_every_steps", "num_kept_states", "measure_every_steps")


def finetune(job: FinetuneJob) -> FinetuneOutcome:
    """Fine-tune a searched checkpoint; go on with a run that was stopped, and show one that is finished.

    With torchrun every process calls this with the same job; the first one writes. Everything that can be wrong with
    the job is found before the first step. Raises InputError for that, TrainingError for a loss that is not finite and
    for ruined weights, OSError where the disk refuses; Stopped, with the state saved, when a signal asks for it.
    """
    quiet_transformers()
    expect_given("finetune", job)
    job.check()
    source = find_folder(Path(job.path))
    check_entries(source)
    base = RopeConfig.read(source)
    own = own_table(source, base, trust_remote_code=job.trust_remote_code)
    original_length, target_length = base.geometry.original_length, base.target_length
    job.mixture.check(original_length, target_length)
    regimes = {
        SHORT: dataclasses.replace(own.regime_at(original_length), name=SHORT, max_length=original_length),
        LONG: base.regimes[-1],
    }
    if regimes[LONG].name == SHORT:
        raise InputError(f"{source}: expected a regime for {target_length} tokens with another name, got {SHORT!r}")
    processes = Processes.joined(job.device)
    run = RunFolder.of("finetune", job.run, plain(job), without=_NOT_IN_ITS_NAME)
    if processes.is_first:
        expect_own(run)
    with contextlib.ExitStack() as stack:
        if processes.is_first:
            stack.enter_context(run.logged())
        stack.enter_context(only_one(run, processes))
        display = stack.enter_context(ProgressDisplay(quiet=not processes.is_first))

        def say(note: str) -> None:
            _log.warning("%s", note)
            display.say(f"note: {note}")

        tracking = job.track if processes.is_first else NoTracking()
        tracker = stack.enter_context(FinetuneTracker(tracking, run.path, display.say))
        origin = Origin.read(source, lambda folder: read_bound(folder).checkpoint)
        asked = _asked(job, origin)
        expect_same(run, asked, job.corpus.path)
        if (finished := _finished(run, processes)) is not None:
            _tidied(run, processes)
            tracker.begin(asked, origin.binding.digest, plain(job))
            tracker.result(finished.rope_config)
            return finished

        tokenizer = load_tokenizer(ModelConfig(path=str(source), trust_remote_code=job.trust_remote_code))
        check_needle_rows(job.mixture, tokenizer, target_length)
        cache = cache_folder(job.cache)
        held_out = build_windows(job.corpus, tokenizer, target_length, job.seed, cache)["held_out"]
        loaded = origin.loaded_with(lambda: _loaded(job, source, base, processes.device))
        check_vocabulary(held_out, vocabulary_tokens(loaded.model))
        check_stored_names(source, merged_tensors(loaded.model))
        prove_installable(loaded)
        with installed(loaded, regimes[SHORT]):
            prove_scorer(loaded)
        dtype = _compute_dtype(job, source)
        loss = _prepared(job, loaded, processes, dtype, regimes[SHORT])

        if processes.is_first:
            expect_room_for_all(run, loss, source, job.training)
        for note in _notes(job, regimes):
            say(note)
        num_tokens = job.training.num_steps * job.training.num_step_rows * target_length
        with _first_before_the_others(processes):
            tokens = prepare_training_tokens(
                job.corpus,
                tokenizer,
                job.mixture,
                original_length=original_length,
                row_tokens=target_length,
                num_tokens=num_tokens,
                exclude=[evaluation_texts(job.corpus, tokenizer, target_length, job.seed, cache)],
                folder=run.path / TOKENS,
                seed=job.seed,
            )
        for note in tokens.notes():
            say(note)
        mixture = Mixture(tokens, job.mixture, tokenizer, original_length, target_length, job.seed)
        _check_training_vocabulary(tokens, vocabulary_tokens(loaded.model))

        if processes.is_first:
            run.describe(plain(job))
            files.write_json(run.path / ASKED, asked)
        tracker.begin(asked, origin.binding.digest, plain(job))

        losses: dict[str, str] = {}  # of each regime's last rows, as not every step has some of each

        def on_event(event: StepEvent) -> None:
            losses.update(_losses(event))
            shown = " ".join(losses[name] for name in (SHORT, LONG) if name in losses)
            parts = [f"nats per token {shown}"] if losses else []
            if event.measured:
                parts.append("held out " + ", ".join(f"{each.name} {_perplexity(each)}" for each in event.measured))
            note = " ".join(parts)
            if event.measured:
                _log.info("step %d: %s", event.step, note)
            display.show("steps", event.step / job.training.num_steps, note)
            tracker.update(event)

        training = FineTuning(
            loaded,
            loss,
            mixture,
            regimes,
            job.training,
            held_out=[
                HeldOut(SHORT, SHORT, held_out.cut(original_length)),
                HeldOut(LONG, LONG, held_out),
            ],
            folder=run.path,
            identity={**asked, "rows": mixture.fingerprint},
            seed=job.seed,
            processes=processes,
            compute_dtype=dtype,
            stored_dtypes=stored_dtypes(source),
            on_event=on_event,
            on_note=say,
        )
        measured = training.run()

        usage = mixture.usage(job.training.num_steps, job.training.num_step_rows)
        rows = [
            _row(each, method, length)
            for method, step in ((BEFORE, 0), (AFTER, job.training.num_steps))
            for each, length in zip(measured[step], (original_length, target_length), strict=True)
        ]
        record = {
            "asked": asked,
            "base": {
                "digest": origin.binding.digest,
                "search_seed": base.search.get("seed"),
                "num_regimes": len(base.regimes),
            },
            "mixture": {**tokens.to_json(), "usage": [each.to_json() for each in usage]},
            "num_processes": processes.num_processes,
            "num_training_tokens": num_tokens,
        }
        rope_config = _written(run, source, base, regimes, rows, record, loaded, processes)
        _tidied(run, processes)
        tracker.result(rope_config)
        return _outcome(run, rope_config)


@contextlib.contextmanager
def _first_before_the_others(processes: Processes) -> Iterator[None]:
    """The block is for the first process alone at first, then for the others, who find what it has made."""
    if not processes.is_first:
        processes.wait_for_all()
    yield
    if processes.is_first:
        processes.wait_for_all()


def _asked(job: FinetuneJob, origin: Origin) -> dict[str, Any]:
    """All that the weights that come out depend on, as JSON values, but for the tokens themselves."""
    training = {name: value for name, value in plain(job.training).items() if name not in _NOT_IN_ITS_RESULT}
    return {
        **origin.identity,
        "training": training,
        "mixture": plain(job.mixture),
        # Who is given the checkpoint need not know where the texts lie.
        "corpus": {**plain(job.corpus), "path": files.sha256_of_json(job.corpus.path)},
        "attention": job.attention.name,
        "seed": job.seed,
    }


def _finished(run: RunFolder, processes: Processes) -> FinetuneOutcome | None:
    """The result of a run that has come to its end, or None. A checkpoint folder is whole once it is there; where one
    of the two copies of rope_config.json is gone, it is written again from the other.
    """
    of_run, checkpoint = run.path / FILE_NAME, run.path / "checkpoint"
    of_checkpoint = checkpoint / FILE_NAME
    if processes.is_first:
        for there, missing in ((of_checkpoint, of_run), (of_run, of_checkpoint)):
            if there.is_file() and not missing.exists() and checkpoint.is_dir():
                RopeConfig.read(there).write(missing)
    processes.wait_for_all()
    return _outcome(run, RopeConfig.read(run.path)) if of_run.is_file() else None


def _tidied(run: RunFolder, processes: Processes) -> None:
    """Remove what only a training under way needs."""
    for name in (STATES, TOKENS, NEW_WEIGHTS):
        if processes.is_first and (run.path / name).is_dir():
            files.remove_folder(run.path / name)


def _outcome(run: RunFolder, rope_config: RopeConfig) -> FinetuneOutcome:
    checkpoint = run.path / "checkpoint"
    levels = [level for level in VerifyLevel if level is not VerifyLevel.logits]
    findings = verify_folder(checkpoint, levels) if (checkpoint / FILE_NAME).is_file() else []
    return FinetuneOutcome(
        run_folder=run.path, checkpoint_folder=checkpoint, rope_config=rope_config, findings=findings
    )


def _loaded(
    job: FinetuneJob, source: Path, base: RopeConfig, device: torch.device, dtype: DType = DType.float32
) -> LoadedModel:
    return load_unscaled(
        source,
        base,
        device=str(device),
        dtype=dtype,
        attention=job.attention,
        trust_remote_code=job.trust_remote_code,
    )


def _check_training_vocabulary(tokens: TrainingTokens, vocabulary: int) -> None:
    if tokens.greatest_token_id >= vocabulary:
        raise InputError(
            f"expected token ids below {vocabulary}, the rows of the model's embedding, got {tokens.greatest_token_id} "
            "in the training texts; the tokenizer belongs to another model"
        )


def _compute_dtype(job: FinetuneJob, source: Path) -> torch.dtype:
    if job.training.precision is Precision.auto:
        return torch.float32 if torch.float32 in stored_dtypes(source).values() else torch.bfloat16
    return torch.float32 if job.training.precision is Precision.float32 else torch.bfloat16


def _prepared(
    job: FinetuneJob, loaded: LoadedModel, processes: Processes, dtype: torch.dtype, short: Regime
) -> RowLoss:
    """The model ready to be trained: proven, with adapters or all weights free, sharded over the processes."""
    model: Any = loaded.model
    if job.mixture.shares[0] > 0:
        with installed(loaded, short):
            prove_documents_apart(loaded, RowLoss(model))
    teacher = None
    if job.training.distill_weight > 0:
        # Whole in every process: it is asked for its states and its logits, not for one forward pass.
        held = DType.float32 if dtype == torch.float32 else DType.bfloat16
        frozen = _loaded(job, loaded.folder, RopeConfig.read(loaded.folder), processes.device, held)
        teacher = RowLoss(frozen.model)
    model.requires_grad_(True)
    if job.training.adapter is Adapter.lora:
        add_adapter(model, job.training, job.seed)
    loss = RowLoss(model, teacher)
    shard(loss, processes, dtype)
    loss.train()
    return loss


def _notes(job: FinetuneJob, regimes: Mapping[str, Regime]) -> list[str]:
    """What a user should know before the first step."""
    notes = []
    if regimes[SHORT].is_same_table(regimes[LONG]):
        notes.append(
            f"the base's searched table ({regimes[LONG].name}) is its own: there is no second table to learn, the "
            "weights alone are trained to read on"
        )
    shares = job.mixture.shares
    for name, share in ((SHORT, shares[0]), (LONG, math.fsum(shares[1:]))):
        if not share:
            notes.append(f"mixture.shares gives no {name} rows: what the {name} table costs is measured, not trained")
    return notes


def _losses(event: StepEvent) -> dict[str, str]:
    """In nats per token of the step's rows, by regime; of short ones also the divergence from the base, if asked."""
    found = {}
    for name in (SHORT, LONG):
        loss = event.nats_per_token(name)
        if loss is not None:
            found[name] = f"{name} {loss:.3f}"
    if event.divergence_nats:
        num_tokens = sum(event.tokens[bucket] for bucket, name in event.regime_of.items() if name == SHORT)
        found[SHORT] += f" (divergence from the base {event.divergence_nats / num_tokens:.4f})"
    return found


def _perplexity(measured: Measurement) -> str:
    return perplexity_text(float(measured.window_nats.sum()), measured.num_window_tokens * len(measured.window_nats))


def _row(measured: Measurement, method: str, length: int) -> Evaluation:
    nats, num_windows = float(measured.window_nats.sum()), len(measured.window_nats)
    return Evaluation(
        method=method,
        split="held_out",
        length=length,
        nats=nats,
        tokens=measured.num_window_tokens * num_windows,
        block_edges=(0, length),
        block_nats=(nats,),
        block_tokens=(measured.num_window_tokens * num_windows,),
        window_nats=tuple(measured.window_nats.tolist()),
        window_tokens=(measured.num_window_tokens,) * num_windows,
    )


def _written(
    run: RunFolder,
    source: Path,
    base: RopeConfig,
    regimes: Mapping[str, Regime],
    rows: Sequence[Evaluation],
    record: Mapping[str, Any],
    loaded: LoadedModel,
    processes: Processes,
) -> RopeConfig:
    """Write the new weights and, bound to them, the checkpoint folder and rope_config.json; all processes take part."""
    tensors = merged_tensors(loaded.model)
    if not processes.is_first:
        write_weights(source, None, base, lambda name: tensors[name]())
        processes.wait_for_all()
        return RopeConfig.read(run.path)
    plain_folder = run.path / NEW_WEIGHTS
    if plain_folder.is_dir():  # of a run that was killed before its end
        files.remove_folder(plain_folder)
    with files.naming(plain_folder), files.folder_beside(plain_folder) as stage:
        write_weights(source, stage / "checkpoint", base, lambda name: tensors[name]())
    folder = plain_folder / "checkpoint"
    rope_config = RopeConfig(
        target_length=base.target_length,
        geometry=base.geometry,
        regimes=(regimes[SHORT], regimes[LONG]),
        checkpoint=checkpoint_binding(folder),
        base_checkpoint=base.checkpoint,
        search=base.search,
        training={**record, "regimes": {name: regime_json(regime) for name, regime in regimes.items()}},
        evaluation=[row.to_json() for row in rows],
        versions=versions(),
    )
    checkpoint = run.path / "checkpoint"
    if checkpoint.is_dir():
        files.remove_folder(checkpoint)
    files.expect_room(run.path, sum(file.num_bytes for file in rope_config.checkpoint.files))
    write_checkpoint_folder(folder, checkpoint, rope_config, WeightsMode.copy, allow_unportable=True)
    rope_config.write(run.path / FILE_NAME)
    processes.wait_for_all()
    return rope_config
