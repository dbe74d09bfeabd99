"""Tables that a user brings: a rope_config.json, a config.json of transformers, or a CSV file of factors."""

import dataclasses
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import table_files
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError
from ropesearch.model.load import read_geometry, read_own
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.methods import attention_factor_formula
from ropesearch.rope.regime import Regime
from ropesearch.strict_json import parse_json_object

# Names that say nothing about the table: the folder's is taken.
_COMMON_NAMES = ("rope_config", "config", "checkpoint")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)


def read_tables(
    paths: Sequence[str], geometry: Geometry, target_length: int, taken_names: Collection[str]
) -> tuple[list[Regime], list[str]]:
    """The table in each file as a regime that serves target_length tokens, named after its file; and a sentence for
    each file that is left out, as another one before it holds the same table.

    No two names are the same and none is in `taken_names`: a number is put behind them where need be. Raises
    InputError, see `table_of` and `table_files`.
    """
    tables: list[Regime] = []
    files: list[Path] = []
    notes: list[str] = []
    for path in table_files(paths):
        where = f"tables: {path}"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{where}: expected a readable file, got {error.strerror or error}") from error
        name = _name_of(path, {*taken_names, *(table.name for table in tables)})
        table = table_of(content, where, name, geometry, target_length)
        same = [index for index, other in enumerate(tables) if dataclasses.replace(other, name=name) == table]
        if same:
            notes.append(f"{where} holds the same table as {files[same[0]]}: one row, {tables[same[0]].name}")
            continue
        tables.append(table)
        files.append(path)
    return tables, notes


def table_of(content: bytes, where: str, name: str, geometry: Geometry, target_length: int) -> Regime:
    """The table in `content`, a file's bytes, as a regime `name` for target_length tokens; `where` is for messages.

    - A rope_config.json: its last regime.
    - A config.json that transformers reads, of any rope type: the table for target_length tokens (see `OwnTable`).
    - Numbers in text: one factor a line, as LongRoPE's released code writes its results. A file of two lines more, from
      its `dim_piece_mono` search, begins with the last pair that is held at 1 and the last that is searched; the
      factors that follow hold to these already. Several columns are one row a layer, which must all be equal. There is
      no attention factor in such a file: it is the "longrope" formula's, which that code puts in force.

    Factors are relative to the plain rope_theta. Raises InputError for anything else, another number of pairs or
    another rope_theta, and factors that are not finite or below 1.
    """
    try:
        # A CSV file has no brace, and every JSON object begins with one.
        if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            value = parse_json_object(content.removeprefix(b"\xef\xbb\xbf"), "the file")
            regime = _from_json(value, content, geometry, target_length)
        else:
            regime = _from_text(content, geometry, target_length)
        return dataclasses.replace(regime, name=name, max_length=target_length)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _from_json(value: dict[str, Any], content: bytes, geometry: Geometry, target_length: int) -> Regime:
    if "schema_version" in value:
        rope_config = RopeConfig.from_json(value, "rope_config.json")
        _check_geometry(rope_config.geometry, geometry)
        return rope_config.regimes[-1]
    if "model_type" not in value:
        raise InputError(
            "expected a rope_config.json (with schema_version), a config.json of transformers (with model_type) or "
            f"one factor a line, got a JSON object with {', '.join(list(value)[:4]) or 'no keys'}"
        )
    with tempfile.TemporaryDirectory(prefix="ropesearch-") as folder:
        (Path(folder) / "config.json").write_bytes(content)
        try:
            _check_geometry(read_geometry(Path(folder), geometry.original_length), geometry)
            return read_own(Path(folder), geometry).regime_at(target_length)
        except InputError as error:
            raise InputError(
                str(error).replace(f"{folder}/config.json", "config.json").replace(folder, "it")
            ) from error


def _from_text(content: bytes, geometry: Geometry, target_length: int) -> Regime:
    num_pairs = geometry.num_pairs
    try:
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except UnicodeError as error:
        raise InputError("expected JSON or numbers in UTF-8, got bytes that are no text") from error
    numbered = [(number, [cell.strip() for cell in line.split(",")]) for number, line in enumerate(lines, 1) if line]
    for number, cell in ((number, cell) for number, row in numbered for cell in row):
        if not _NUMBER.fullmatch(cell):
            raise InputError(
                f"expected JSON or one factor a line, got {cell[:40]!a} in line {number}; correct that line"
            )
    rows = [row for _, row in numbered]
    if {len(row) for row in rows} == {1}:
        factors = [float(row[0]) for row in rows]
    else:
        layers = [[float(cell) for cell in row] for row in rows]
        if any(layer != layers[0] for layer in layers):
            raise InputError("expected one table for all layers, got rows that differ")
        factors = layers[0] if layers else []
    if len(factors) == num_pairs + 2:
        held, searched = factors[:2]
        if not (0 <= held <= searched < num_pairs and held.is_integer() and searched.is_integer()):
            raise InputError(
                f"expected {num_pairs} factors, or {num_pairs + 2} numbers that begin with two pairs from 0 to "
                f"{num_pairs - 1} in order, got {num_pairs + 2} that begin with {held:g} and {searched:g}"
            )
        factors = factors[2:]
    if len(factors) != num_pairs:
        raise InputError(
            f"expected {num_pairs} factors, one for each pair of the checkpoint, got {len(factors)}; use a table of "
            f"a model with rotary_dim = {geometry.rotary_dim}"
        )
    return Regime(
        name="table",
        max_length=target_length,
        factors=tuple(factors),
        attention_factor=attention_factor_formula("longrope", geometry.ratio(target_length), geometry.original_length),
    )


def _check_geometry(found: Geometry, expected: Geometry) -> None:
    """Factors are relative to theta^(-2 i / rotary_dim), so that much has to be the same."""
    for name in ("rotary_dim", "rope_theta", "layer_types"):
        if getattr(found, name) != getattr(expected, name):
            raise InputError(
                f"expected a table for {name} = {getattr(expected, name)}, as the checkpoint has, got one for "
                f"{name} = {getattr(found, name)}; use a table of the same kind of model"
            )


def _name_of(path: Path, taken: Collection[str]) -> str:
    stems = [path.stem, *(parent.name for parent in path.absolute().parents)]
    stem = next((stem for stem in stems if stem not in _COMMON_NAMES), path.stem)
    # A leading underscore would keep it out of the pictures' legends.
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", stem)[:40].lstrip("_") or "table"
    number = 1
    while (unique := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return unique
