"""Proving that a folder's weights, table and logits are what its rope_config.json says."""

import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ropesearch import seeding
from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.config_json import older_loaders, regime_config
from ropesearch.artifact.digest import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    check_entries,
    checkpoint_binding,
)
from ropesearch.artifact.folder import Difference, json_differences
from ropesearch.artifact.load import load, load_unscaled, own_table
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.strict_json import read_json_object
from ropesearch.errors import BindingError, InputError
from ropesearch.model.devices import BALANCED
from ropesearch.model.install import installed, rotary_table
from ropesearch.model.load import LOAD_ERRORS
from ropesearch.model.own import OwnTable
from ropesearch.model.rotary import find_tables, rescaled_tables
from ropesearch.model.skeleton import build_skeleton
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime, inverse_frequencies

# float32 powers of theta are this close to the float64 ones (relative); the float32 table itself is compared exactly.
_TABLE_TOLERANCE = 1e-5
_LOGITS_TOLERANCE = 1e-5
_NUM_POSITIONS = 64
_NUM_SHOWN = 10
# Keys of config.json that change the table and nothing else of the model.
_TABLE_KEYS = (
    "max_position_embeddings", "original_max_position_embeddings", "rope_config_fingerprint", "rope_parameters",
    "rope_scaling", "rope_theta",
)  # fmt: skip
_AUTO_MODEL: Any = transformers.AutoModelForCausalLM


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

    For a regime that config.json cannot express, table asks that config.json describes the unscaled model, that is the
    checkpoint's own table, and logits compares what `ropesearch.load` gives instead.

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
        config = regime_config(read_json_object(folder / "config.json"), geometry, probe, target_length)
        (Path(name) / "config.json").write_text(json.dumps(config))
        for path in folder.glob("*.py"):  # code that ships with the checkpoint, used only where that was asked for
            (Path(name) / path.name).symlink_to(path.resolve())
        try:
            findings = [*_table_findings(Path(name), geometry, probe, target_length, trust_remote_code)]
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
    geometry, regime = rope_config.geometry, rope_config.regimes[-1]
    yield from _shown_differences(VerifyLevel.table, [each for each in differences if each.is_position])
    another = _another_model(differences)
    if another is not None:
        message = f"inverse frequencies: not compared, config.json describes another model ({another})"
        yield Finding(level=VerifyLevel.table, ok=False, message=message)
        return
    in_force = own_table(folder, rope_config) if rope_config.not_portable else regime
    try:
        yield from [*_table_findings(folder, geometry, in_force, rope_config.target_length)]
    except InputError as error:
        if not differences:
            raise
        yield Finding(level=VerifyLevel.table, ok=False, message=f"inverse frequencies: not compared: {error}")
        return
    if rope_config.not_portable:
        message = (
            f"config.json cannot express {', '.join(rope_config.not_portable)}: other loaders see the unscaled model, "
            "ropesearch.load the regime"
        )
        yield Finding(level=VerifyLevel.table, ok=True, message=message, is_note=True)
    elif (limits := older_loaders(geometry)) is not None:
        yield Finding(level=VerifyLevel.table, ok=True, message=limits, is_note=True)


def _table_findings(
    folder: Path, geometry: Geometry, in_force: Regime | OwnTable, target_length: int, trust_remote_code: bool = False
) -> Iterator[Finding]:
    """The tables that transformers builds from the folder's config.json against those of the regime, or own table."""
    for built in _built_by_transformers(folder, geometry.original_length, target_length, trust_remote_code):
        if isinstance(in_force, OwnTable):
            regime, exact = in_force.regime_at(built.length), in_force.table_at(built.length)[0]
        else:
            regime, exact = in_force, rotary_table(geometry, in_force)
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


def _built_by_transformers(
    folder: Path, original_length: int, target_length: int, trust_remote_code: bool
) -> Iterator[_Built]:
    """The tables in force at original_length and target_length; no weights needed."""
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
    for length in (original_length, target_length):
        for table in distinct.values():
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
    original_length, target_length = rope_config.geometry.original_length, rope_config.target_length
    wanted = sorted({1, original_length - 1, original_length, original_length + 1, target_length})
    left_out = [length for length in wanted if length > max_logits_tokens]
    lengths = [length for length in wanted if length <= max_logits_tokens]
    if left_out and max_logits_tokens not in lengths:
        lengths.append(max_logits_tokens)

    if device == BALANCED:
        raise InputError(f"device: logits are compared on one device, got {BALANCED!r}; give one, or leave logits out")
    loaded = load_unscaled(folder, rope_config, device=device)
    device, attention = loaded.device, loaded.attention
    with installed(loaded, rope_config.regimes[-1], as_shipped=True):
        expected = _logits(loaded.model, lengths)
    del loaded
    gc.collect()
    if rope_config.not_portable:
        found = _logits(load(folder, device=device)[0], lengths)
    else:
        found = _logits(_plain_load(folder, device, attention), lengths)

    for length, reference, logits in zip(lengths, expected, found, strict=True):
        difference = float((logits - reference).abs().max())
        tolerance = _LOGITS_TOLERANCE * max(1.0, float(reference.abs().max()))
        message = f"{length} tokens: greatest difference {difference:.3g}, tolerance {tolerance:.3g}"
        yield Finding(level=VerifyLevel.logits, ok=difference <= tolerance, message=message)
    if left_out:
        message = (
            f"left out: {', '.join(str(length) for length in left_out)} tokens, above max_logits_tokens = "
            f"{max_logits_tokens}"
        )
        yield Finding(level=VerifyLevel.logits, ok=True, message=message, is_note=True)


def _plain_load(folder: Path, device: str, attention: str) -> Any:
    try:
        model = _AUTO_MODEL.from_pretrained(
            folder,
            dtype="auto",
            device_map={"": device},
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
        )
    except LOAD_ERRORS as error:
        raise InputError(f"{folder}: transformers cannot load the folder: {error}") from error
    model.eval()
    return model


def _logits(model: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """float32 logits on the CPU, shape (positions, vocabulary), of random tokens of each length."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.from_numpy(seeding.stream(0, "verify").integers(vocabulary, size=max(lengths)))
    result = []
    for length in lengths:
        positions = torch.linspace(0, length - 1, min(length, _NUM_POSITIONS), dtype=torch.float64).round().long()
        with torch.no_grad():
            answer = model(
                input_ids=tokens[None, :length].to(model.device),
                use_cache=False,
                logits_to_keep=positions.to(model.device),
            )
        result.append(answer.logits[0].float().cpu())
    return result
