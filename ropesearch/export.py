"""`ropesearch export`: a written folder anew, as it is or with its long table for all lengths, for other loaders."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import VerifyLevel, WeightsMode
from ropesearch.artifact.digest import check_entries
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.load import find_folder, load_unscaled, own_table, read_bound, source_folder
from ropesearch.artifact.origin import Origin
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.verify import Finding
from ropesearch.artifact.verify import verify as verify_folder
from ropesearch.config import ExportJob, expect_given
from ropesearch.data.mixture import SHORT
from ropesearch.data.windows import Windows, build_windows, check_vocabulary
from ropesearch.errors import InputError, NothingScoredError, ScoringError
from ropesearch.evaluate.perplexity import Evaluation, RegimeAt, perplexity_table
from ropesearch.model.config import ModelConfig
from ropesearch.model.install import installed, prove_installable
from ropesearch.model.load import load_tokenizer, quiet_transformers
from ropesearch.model.own import UNSCALED
from ropesearch.report import AFTER, above_text, short_price_text
from ropesearch.rope.regime import Regime
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score
from ropesearch.score.scorer import score_windows
from ropesearch.scoring import cache_folder
from ropesearch.search.space import SEARCHED
from ropesearch.track.progress import ProgressDisplay

# Methods whose rows are the result's own, each at the lengths that its regime serves: of a search, of a fine-tuning.
_OF_THE_RESULT = (SEARCHED, AFTER)


def export(job: ExportJob) -> "ExportOutcome":
    """Write the folder's checkpoint to a new folder, bound to the same weights; with `single_table` the long regime
    serves all lengths, and what that costs on short inputs is measured on held-out windows and recorded.

    Raises InputError for a folder, a place or texts that cannot be used, BindingError for weights that are not those of
    the folder's rope_config.json, NothingScoredError where the price cannot be measured. Nothing is written then.
    """
    quiet_transformers()
    expect_given("export", job)
    job.check()
    folder, destination = find_folder(Path(job.path)), Path(os.path.expanduser(job.to))
    check_entries(folder)
    _expect_new(destination)
    if destination.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"to: expected a folder outside of {folder}, which is read, got {destination}; give another")
    rope_config = RopeConfig.read(folder)
    rows: list[Evaluation] = []
    if job.single_table:
        _expect_expressible(rope_config)
        length = rope_config.geometry.original_length
        ScoringConfig().check(length)
        tokenizer = load_tokenizer(ModelConfig(path=str(folder), device=job.device))
        every = build_windows(job.corpus, tokenizer, rope_config.target_length, job.seed, cache_folder(job.cache))
        rows = _short_rows(folder, rope_config, every["held_out"].cut(length), job.device)
        exported = _with_single_table(rope_config, rows)
    else:
        exported = rope_config = read_bound(folder)
    with source_folder(folder, rope_config) as source:
        write_checkpoint_folder(source, destination, exported, job.weights, allow_unportable=True)
    levels = [level for level in VerifyLevel if level is not VerifyLevel.logits]
    findings = [] if job.weights is WeightsMode.none else verify_folder(destination, levels)
    return ExportOutcome(folder=destination, rope_config=exported, rows=rows, findings=findings)


def _expect_new(destination: Path) -> None:
    try:
        os.lstat(destination)
        if not destination.is_dir() or destination.is_symlink() or any(destination.iterdir()):
            raise InputError(
                f"to: expected a new or empty folder, got {destination}, which is there; remove it, or give another"
            )
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"to: expected a folder that can be made, got {str(destination)!a:.200} ({reason})") from error


def _expect_expressible(rope_config: RopeConfig) -> None:
    num_retained = rope_config.regimes[-1].retained_tokens
    if num_retained:
        raise InputError(
            f"single_table: expected a long regime that one table can express, got one with {num_retained} "
            "retained_tokens, which only ropesearch.load serves; search without (space.retained_tokens=[0])"
        )


def _short_rows(folder: Path, rope_config: RopeConfig, windows: Windows, device: str) -> list[Evaluation]:
    """What sequences of original_length tokens cost under the table that they have had, and under the long one."""
    origin = Origin.read(folder, lambda folder: read_bound(folder).checkpoint)
    loaded = origin.loaded_with(lambda: load_unscaled(folder, rope_config, device=device))
    check_vocabulary(windows, loaded.model.get_input_embeddings().num_embeddings)
    prove_installable(loaded)
    length, long = windows.length_tokens, rope_config.regimes[-1]
    before = rope_config.regime_for(length)
    own = own_table(folder, rope_config)
    regimes: dict[str, RegimeAt] = {before.name: lambda _: before}
    if before == long:  # what short inputs had was the checkpoint's own table, which fine-tuning has made a regime of
        regimes = {SHORT if rope_config.training else UNSCALED: own.regime_at}
    regimes[long.name] = lambda _: long

    def score(regime: Regime, of: Windows) -> Score:
        with installed(loaded, regime):
            return score_windows(loaded, of, ScoringConfig())

    with ProgressDisplay() as display:
        done: list[str] = []

        def on_row(row: Evaluation) -> None:
            done.append(row.method)
            display.show(phase, len(done) / len(regimes), f"{row.method}: {row.perplexity:.3f}")

        phase = f"held-out windows of {length} tokens"
        display.show(phase, 0.0)
        try:
            return perplexity_table(score, windows, regimes, [length], ScoringConfig(), on_row)
        except ScoringError as error:
            raise NothingScoredError(f"the price on short inputs could not be measured: {error}") from error


def _with_single_table(rope_config: RopeConfig, rows: Sequence[Evaluation]) -> RopeConfig:
    """`rope_config` with its long regime alone, and `rows` in its evaluation.

    Of the rows that are there, those measured under a regime that goes are left out: its own, and the result's at the
    lengths that it served.
    """
    *others, long = rope_config.regimes
    names = {*_OF_THE_RESULT, *(regime.name for regime in others)}
    longest_of_others = max((regime.max_length for regime in others), default=0)
    added = [row.to_json() for row in rows]
    replaced = [_cell(row) for row in added]

    def stays(row: Mapping[str, Any]) -> bool:
        is_of_another = row["method"] in names and row["length"] <= longest_of_others
        return not is_of_another and _cell(row) not in replaced

    kept = [row for row in rope_config.evaluation if stays(row)]
    return dataclasses.replace(rope_config, regimes=(long,), evaluation=[*kept, *added])


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("method", "measure", "split", "length"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOutcome:
    """A folder that was exported, the rows of its price on short inputs, and what was found in it."""

    folder: Path
    rope_config: RopeConfig
    rows: Sequence[Evaluation]
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """0 where the folder is what its rope_config.json says, else 1."""
        return 0 if all(finding.ok for finding in self.findings) else 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values; `short_price` has the rows before and after, none where nothing was measured."""
        return {
            "checkpoint": str(self.folder),
            "rope_config": self.rope_config.to_json(),
            "short_price": [row.to_json() for row in self.rows],
            "limits": list(loader_limits(self.rope_config)),
            "verified": bool(self.findings) and self.exit_code == 0,
        }

    def to_text(self) -> str:
        """Which regimes the folder has, what they cost on short inputs, and what other loaders make of it."""
        lines = [
            f"{regime.name}: up to {regime.max_length} tokens, attention factor {regime.attention_factor:.3f}, factors "
            f"{min(regime.factors):.2f} to {max(regime.factors):.2f}"
            for regime in self.rope_config.regimes
        ]
        if self.rows:
            before, after = self.rows[0], self.rows[-1]
            lines.append(f"price on short inputs: {short_price_text(before, after)}")
            lines.append(f"nats per token above {before.method} (95 % interval): {above_text(after, before)}")
        lines += [f"note: {limit}" for limit in loader_limits(self.rope_config)]
        lines += [finding.message for finding in self.findings if not finding.ok]
        state = "NOT verified" if self.exit_code else "as its rope_config.json says"
        command = shlex.join(["ropesearch", "verify", str(self.folder)])
        state = f"{state}; all levels: {command}" if self.findings else "without weights, so not verified"
        return "\n".join([*lines, "", f"checkpoint  {self.folder}  ({state})"])
