"""Proving that a folder's weights, table and logits are what its rope_config.json says."""

import copy
import dataclasses
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.config_json import described_regimes, regime_config
from ropesearch.artifact.digest import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    check_entries,
    checkpoint_binding,
)
from ropesearch.artifact.folder import Difference, json_differences
from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.load import load, load_unscaled, own_table
from ropesearch.artifact.logits import greatest_difference, logits_under, plain_load, random_logits
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import BindingError, InputError
from ropesearch.model.devices import BALANCED
from ropesearch.model.install import rotary_table
from ropesearch.model.load import LOAD_ERRORS
from ropesearch.model.own import OwnTable
from ropesearch.model.rotary import find_tables, rescaled_tables
from ropesearch.model.skeleton import build_skeleton
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime, inverse_frequencies
from ropesearch.strict_json import read_json_object

# float32 powers of theta are this close to the float64 ones (relative); the float32 table itself is compared exactly.
_TABLE_TOLERANCE = 1e-5
_LOGITS_TOLERANCE = 1e-5
_NUM_SHOWN = 10
# Keys of config.json that change the table and nothing else of the model.
_TABLE_KEYS = (
    "max_position_embeddings", "original_max_position_embeddings", "rope_config_fingerprint", "rope_parameters",
    "rope_scaling", "rope_theta",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: its level, whether it is as it should be, and what and where it is.

    A note is a limit of the folder, or of what was looked at, that no rope_config.json could lift: it is ok.
    """

    level: VerifyLevel
    ok: bool
    message: str
    is_note: bool = False


def verify(
    folder: Path,
    levels: Sequence[VerifyLevel] = tuple(VerifyLevel),
    max_logits_tokens: int = 8192,
    *,
    device: str = "auto",
) -> list[Finding]:
    """Check a written folder against its rope_config.json; the answer is yes when every finding is ok.

    - digest: weights and tokenizer against the digests, and every key of config.json and generation_config.json that
      the writing of the folder left alone against its value in rope_config.json. There are digests of files, not of
      each tensor, so a difference in the weights is narrowed to a file.
    - table: every key of config.json that the writing set (and model_max_length of tokenizer_config.json) against what
      would be written, and the rotary module that transformers builds from config.json, below and above
      original_length, against the float32 table (bit for bit), against the float64 formula (relative tolerance 1e-5)
      and against the attention factor (exactly). From another model's config.json nothing is built.
    - logits: the folder as transformers loads it by itself against the unscaled model with the regime installed, on
      random tokens of lengths 1, original_length - 1, original_length, original_length + 1 and target_length, at up to
      64 positions, in the checkpoint's dtype (absolute tolerance 1e-5, times the greatest logit where that is above 1).
      Lengths above `max_logits_tokens` are left out, and `max_logits_tokens` itself takes their place.

    Of two regimes, each is held to at the lengths it serves, and the lengths looked at are those around the short one's
    max_length in place of original_length. transformers multiplies by the long one's attention factor at all lengths:
    so much is expected of a plain load, and by how much its logits of short inputs thus differ from those of the short
    regime is a note. For regimes that config.json cannot express, table asks that config.json describes the unscaled
    model, that is the checkpoint's own table, and logits compares what `ropesearch.load` gives instead. What other
    loaders make of the folder (`loader_limits`) is noted.

    What counts as the same folder: the same tensors (name, dtype, shape, bytes) in other shards or another order, with
    other notes in the headers and the index; rope_config.json, config.json, generation_config.json and
    tokenizer_config.json with other white space or another order of keys; other files that no loader of weights and
    tokenizer reads (README, licence). Everything else is a difference: any JSON value that is another (1, 1.0 and true
    are three values; null is not a missing key), a key more or less, known or not, any byte of the other tokenizer
    files, the chat templates and Python code. A rope_config.json that is not the one its own content_digest was taken
    of is refused, its evaluation and versions included.

    Raises InputError for files that cannot be read, are malformed, or cannot be loaded; for a folder with pipes, broken
    links or an adapter in it.
    """
    if not levels:
        raise InputError(f"levels: expected at least one of {', '.join(level.name for level in VerifyLevel)}, got none")
    if max_logits_tokens < 1:
        raise InputError(f"max_logits_tokens: expected at least 1 token, got {max_logits_tokens}")
    check_entries(folder)
    rope_config = RopeConfig.read(folder)
    differences = json_differences(folder, rope_config)
    findings: list[Finding] = []
    if VerifyLevel.digest in levels:
        findings += _check_digest(folder, rope_config)
        findings += _check_settings(differences)
    if VerifyLevel.table in levels:
        findings += _check_table(folder, rope_config, differences)
    if VerifyLevel.logits in levels:
        try:
            findings += _check_logits(folder, rope_config, differences, max_logits_tokens, device)
        except (InputError, BindingError) as error:
            # What was found already explains why the model cannot be built; the answer is no, not "malformed".
            if all(finding.ok for finding in findings):
                raise
            findings.append(Finding(level=VerifyLevel.logits, ok=False, message=f"not compared: {error}"))
    return findings


def check_expressible(folder: Path, geometry: Geometry, target_length: int, *, trust_remote_code: bool = False) -> None:
    """InputError unless the folder's model is of a family in which a config.json can put a regime in force.

    No weights are read: the model is built from the config.json of a probe regime, and its tables are compared.
    """
    probe = Regime(
        name="probe",
        max_length=target_length,
        factors=tuple(1 + (pair + 1) / (2 * geometry.num_pairs) for pair in range(geometry.num_pairs)),
        attention_factor=1.25,
    )
    refusal = f"model type {geometry.model_type!r}: transformers cannot serve a searched table for this family"
    with tempfile.TemporaryDirectory(prefix="ropesearch-") as name:
        config = regime_config(read_json_object(folder / "config.json"), geometry, probe, probe, target_length)
        (Path(name) / "config.json").write_text(json.dumps(config))
        for path in folder.glob("*.py"):  # code that ships with the checkpoint, used only where that was asked for
            (Path(name) / path.name).symlink_to(path.resolve())
        try:
            lengths = (geometry.original_length, target_length)
            findings = [*_table_findings(Path(name), geometry, lambda _: probe, lengths, trust_remote_code)]
        except InputError as error:
            reason = str(error).replace(name, str(folder))
            raise InputError(f"{refusal} ({reason}); a search would be of no use, it is not supported") from error
    for finding in findings:
        if not finding.ok:
            raise InputError(f"{refusal} ({finding.message}); a search would be of no use, it is not supported")


def _check_digest(folder: Path, rope_config: RopeConfig) -> Iterator[Finding]:
    bound, found = rope_config.checkpoint, checkpoint_binding(folder)
    before, after = ({file.name: file.sha256 for file in files} for files in (bound.files, found.files))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    weights = ", ".join(name for name in changed if name.endswith(".safetensors"))
    tokenizer = ", ".join(name for name in changed if not name.endswith(".safetensors"))
    counted = (found.num_tensors, found.num_parameters)
    if bound.digest != found.digest:
        where = f"the difference is in {weights}" if weights else "the files are others"
        message = f"weights: expected {bound.digest}, got {found.digest}; {where}"
        if (bound.num_tensors, bound.num_parameters) != counted:
            message += (
                f"; expected {bound.num_tensors} tensors with {bound.num_parameters} parameters, "
                f"got {counted[0]} with {counted[1]}"
            )
        yield Finding(level=VerifyLevel.digest, ok=False, message=message)
    elif (bound.num_tensors, bound.num_parameters) != counted:
        yield Finding(
            level=VerifyLevel.digest,
            ok=False,
            message=f"rope_config.json: expected {counted[0]} tensors with {counted[1]} parameters, as in the weights, "
            f"got {bound.num_tensors} with {bound.num_parameters}",
        )
    else:
        message = f"weights: {found.digest} ({found.num_tensors} tensors, {found.num_parameters:,} parameters)"
        yield Finding(level=VerifyLevel.digest, ok=True, message=message)
    if bound.tokenizer_digest != found.tokenizer_digest:
        where = tokenizer or TOKENIZER_CONFIG
        message = (
            f"tokenizer: expected {bound.tokenizer_digest}, got {found.tokenizer_digest}; the difference is in {where}"
        )
        yield Finding(level=VerifyLevel.digest, ok=False, message=message)
    else:
        yield Finding(level=VerifyLevel.digest, ok=True, message=f"tokenizer: {found.tokenizer_digest}")


def _check_settings(differences: Sequence[Difference]) -> Iterator[Finding]:
    others = [each for each in differences if not each.is_position]
    yield from _shown_differences(VerifyLevel.digest, others)
    if not others:
        message = f"{CONFIG}, {GENERATION_CONFIG}: every value as in rope_config.json, but for those of the table"
        yield Finding(level=VerifyLevel.digest, ok=True, message=message)


def _shown_differences(level: VerifyLevel, differences: Sequence[Difference]) -> Iterator[Finding]:
    for each in differences[:_NUM_SHOWN]:
        yield Finding(level=level, ok=False, message=f"{each.name}: {each.text}")
    if len(differences) > _NUM_SHOWN:
        yield Finding(level=level, ok=False, message=f"and {len(differences) - _NUM_SHOWN} more differences")


def _check_table(folder: Path, rope_config: RopeConfig, differences: Sequence[Difference]) -> Iterator[Finding]:
    geometry = rope_config.geometry
    yield from _shown_differences(VerifyLevel.table, [each for each in differences if each.is_position])
    another = _another_model(differences)
    if another is not None:
        message = f"inverse frequencies: not compared, config.json describes another model ({another})"
        yield Finding(level=VerifyLevel.table, ok=False, message=message)
        return
    served = _served_by_transformers(rope_config)
    threshold = _threshold(rope_config)
    is_one = len(rope_config.regimes) == 1
    lengths = sorted({threshold, threshold + (0 if is_one else 1), rope_config.target_length})
    try:
        yield from [*_table_findings(folder, geometry, served or own_table(folder, rope_config), lengths)]
    except InputError as error:
        if not differences:
            raise
        yield Finding(level=VerifyLevel.table, ok=False, message=f"inverse frequencies: not compared: {error}")
        return
    for limit in loader_limits(rope_config):
        yield Finding(level=VerifyLevel.table, ok=True, message=limit, is_note=True)


def _served_by_transformers(rope_config: RopeConfig) -> Callable[[int], Regime] | None:
    """The regime that a plain load has in force in a pass of so many tokens: the table for that length, the attention
    factor that transformers has for all. None where config.json describes the unscaled model.
    """
    regimes = described_regimes(rope_config.checkpoint.config, rope_config)
    if regimes is None:
        return None
    short, long = regimes
    shortened = dataclasses.replace(short, attention_factor=long.attention_factor)
    return lambda length: shortened if length <= short.max_length else long


def _threshold(rope_config: RopeConfig) -> int:
    """The length around which loaders switch tables, or would."""
    is_one = len(rope_config.regimes) == 1
    return rope_config.geometry.original_length if is_one else rope_config.regimes[0].max_length


def _table_findings(
    folder: Path,
    geometry: Geometry,
    in_force: Callable[[int], Regime] | OwnTable,
    lengths: Sequence[int],
    trust_remote_code: bool = False,
) -> Iterator[Finding]:
    """The tables that transformers builds from the folder's config.json at `lengths` against those of the regime that
    is in force there, or own table."""
    for built in _built_by_transformers(folder, lengths, trust_remote_code):
        if isinstance(in_force, OwnTable):
            regime, exact = in_force.regime_at(built.length), in_force.table_at(built.length)[0]
        else:
            regime = in_force(built.length)
            exact = rotary_table(geometry, regime)
        layer = (geometry.layer_types or {}).get(built.layer_type)
        if layer is not None and not layer.rescaled:
            plain = layer.rope_theta ** -(np.arange(len(built.table)) / len(built.table))
            wrong, factor = _wrong_pairs(built.table, built.table, plain), 1.0
            meant = f"the plain ones of theta {layer.rope_theta:g}"
        else:
            formula = inverse_frequencies(geometry, regime.factors)
            wrong, factor = _wrong_pairs(built.table, exact.numpy(), formula), regime.attention_factor
            meant = f"bit for bit the float32 table of {regime.name}"
        where = f"inverse frequencies {built.where}"
        message = f"{where}: {wrong}" if wrong else f"{where}: {len(built.table)} pairs, {meant}"
        yield Finding(level=VerifyLevel.table, ok=wrong is None, message=message)
        message = f"attention factor {built.where}: expected {factor!r}, got {built.attention_factor!r}"
        yield Finding(level=VerifyLevel.table, ok=built.attention_factor == factor, message=message)


def _another_model(differences: Sequence[Difference]) -> str | None:
    """A difference that makes config.json describe a model of another kind or extent, which may not fit in memory."""
    for each in differences:
        of_the_table = each.key in _TABLE_KEYS and "partial_rotary_factor" not in each.text
        if each.name == CONFIG and not of_the_table:
            return each.text
    return None


def _wrong_pairs(table: Any, exact: Any, formula: Any) -> str | None:
    if table.shape != exact.shape:
        return f"expected {len(exact)} pairs, got {len(table)}"
    wrong = np.flatnonzero((table != exact) | ~np.isclose(table.astype(np.float64), formula, _TABLE_TOLERANCE, 0))
    if not len(wrong):
        return None
    shown = [f"pair {pair}: expected {float(exact[pair])!r}, got {float(table[pair])!r}" for pair in wrong[:5]]
    return "; ".join(shown) + (f"; and {len(wrong) - 5} more pairs" if len(wrong) > 5 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A float32 table that transformers has in force: at which length, of which layer type, its attention factor."""

    where: str
    length: int
    layer_type: str
    table: Any
    attention_factor: float


def _built_by_transformers(folder: Path, lengths: Sequence[int], trust_remote_code: bool) -> Iterator[_Built]:
    """The tables in force in a first pass of each length; no weights needed."""
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except LOAD_ERRORS as error:
        raise InputError(
            f"{folder}: transformers cannot build the model that config.json describes: {error}"
        ) from error
    model = build_skeleton(config, trust_remote_code=trust_remote_code)
    tables = find_tables(model, config.model_type)
    rescaled_tables(tables, config.model_type)
    # A table that several modules share is looked at once.
    distinct = {table.layer_type: table for table in tables}
    for length in lengths:
        for each in distinct.values():
            table = dataclasses.replace(each, module=copy.deepcopy(each.module))
            try:
                table.answer([length - 1])
            except LOAD_ERRORS as error:
                raise InputError(f"{folder}: transformers cannot make the rotary table: {error}") from error
            yield _Built(
                where=f"at {length} tokens" + (f" ({table.layer_type})" if table.layer_type else ""),
                length=length,
                layer_type=table.layer_type or "",
                table=table.inv_freq.numpy().copy(),
                attention_factor=table.attention_factor,
            )


def _check_logits(
    folder: Path, rope_config: RopeConfig, differences: Sequence[Difference], max_logits_tokens: int, device: str
) -> Iterator[Finding]:
    another = _another_model(differences)
    if another is not None:
        raise BindingError(f"{folder}: config.json describes another model than rope_config.json: {another}")
    threshold = _threshold(rope_config)
    wanted = sorted({1, threshold - 1, threshold, threshold + 1, rope_config.target_length} - {0})
    left_out = [length for length in wanted if length > max_logits_tokens]
    lengths = [length for length in wanted if length <= max_logits_tokens]
    if left_out and max_logits_tokens not in lengths:
        lengths.append(max_logits_tokens)

    if device == BALANCED:
        raise InputError(f"device: logits are compared on one device, got {BALANCED!r}; give one, or leave logits out")
    served = _served_by_transformers(rope_config)
    loaded = load_unscaled(folder, rope_config, device=device)
    device, attention = loaded.device, loaded.attention
    expected = logits_under(loaded, served or rope_config.regime_for, lengths)
    short_lengths = [length for length in lengths if served and served(length) != rope_config.regime_for(length)]
    as_meant = logits_under(loaded, rope_config.regime_for, short_lengths)
    del loaded
    gc.collect()
    found: dict[int, torch.Tensor] = {}
    if served is None:
        for length in lengths:
            found |= random_logits(load(folder, device=device, length_tokens=length)[0], [length])
    else:
        found = random_logits(plain_load(folder, device, attention), lengths)

    for length, reference in expected.items():
        difference = greatest_difference(found[length], reference)
        tolerance = _LOGITS_TOLERANCE * max(1.0, float(reference.abs().max()))
        message = f"{length} tokens: greatest difference {difference:.3g}, tolerance {tolerance:.3g}"
        yield Finding(level=VerifyLevel.logits, ok=difference <= tolerance, message=message)
    if as_meant:
        difference = max(greatest_difference(found[length], as_meant[length]) for length in as_meant)
        short, long = rope_config.regimes
        message = (
            f"up to {short.max_length} tokens the logits above are those of {short.name} with the attention factor "
            f"{long.attention_factor:g}, which transformers has for all lengths; with its own, "
            f"{short.attention_factor:g}, they differ by up to {difference:.3g}"
        )
        yield Finding(level=VerifyLevel.logits, ok=True, message=message, is_note=True)
    if left_out:
        message = (
            f"left out: {', '.join(str(length) for length in left_out)} tokens, above max_logits_tokens = "
            f"{max_logits_tokens}"
        )
        yield Finding(level=VerifyLevel.logits, ok=True, message=message, is_note=True)
