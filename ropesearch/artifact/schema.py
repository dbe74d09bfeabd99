"""rope_config.json, schema 1: what a search found, bound to the weights it was found for."""

import functools
import importlib.resources
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import jsonschema

from ropesearch import files
from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry, LayerRope
from ropesearch.rope.regime import Regime
from ropesearch.strict_json import parse_json_object, read_json_object

SCHEMA_VERSION = 1
FILE_NAME = "rope_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A file as it was when the binding was made: its name within the folder, length and hexadecimal SHA-256."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What identifies weights and tokenizer; `ropesearch.artifact.digest.checkpoint_binding` makes it.

    `digest` and `tokenizer_digest` decide whether a folder is the one meant. `config` and `generation_config` are the
    values of config.json and generation_config.json (None where there is none) as they were before anything was
    written, `model_max_length` what tokenizer_config.json says under that key. `files` only helps to say where a
    difference lies: the same tensors in other shards have the same digest and other files.
    """

    digest: str
    num_tensors: int
    num_parameters: int
    tokenizer_digest: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None = None
    model_max_length: Any = None
    files: tuple[CheckpointFile, ...]

    def to_json(self) -> dict[str, Any]:
        """The value of `checkpoint` in rope_config.json."""
        return {
            "digest": self.digest,
            "num_tensors": self.num_tensors,
            "num_parameters": self.num_parameters,
            "tokenizer_digest": self.tokenizer_digest,
            "config": self.config,
            "generation_config": self.generation_config,
            "model_max_length": self.model_max_length,
            "files": [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in self.files],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The content of a rope_config.json.

    `regimes` have ascending max_length, and the last serves `target_length` tokens. `base_checkpoint` is None when the
    weights were not fine-tuned; where they were, `training` records how (None in files of a search alone, which lack
    the key). `search`, `training` and the rows of `evaluation` are JSON objects; the JSON Schema that ships with the
    package (rope_config.schema.json) says which keys they must have, and more are welcome. `versions` names software.

    Raises InputError when made of values that the schema, or the geometry, does not admit.
    """

    target_length: int
    geometry: Geometry
    regimes: tuple[Regime, ...]
    checkpoint: Checkpoint
    search: Mapping[str, Any]
    evaluation: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    base_checkpoint: Checkpoint | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            given = {"search": self.search, "evaluation": self.evaluation, "versions": self.versions}
            given |= {} if self.training is None else {"training": self.training}
            checkpoints = [each.to_json() for each in (self.checkpoint, self.base_checkpoint) if each is not None]
            text = json.dumps({**given, "checkpoints": checkpoints})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{FILE_NAME}: expected values that JSON can hold, got {error}") from error
        plain = parse_json_object(text.encode(), FILE_NAME)
        object.__setattr__(self, "search", plain["search"])
        object.__setattr__(self, "evaluation", plain["evaluation"])
        object.__setattr__(self, "versions", plain["versions"])
        object.__setattr__(self, "training", plain.get("training"))
        _check_schema(self.to_json(), FILE_NAME)
        self.geometry.ratio(self.target_length)
        for index, regime in enumerate(self.regimes):
            if len(regime.factors) != self.geometry.num_pairs:
                raise InputError(
                    f"$.regimes[{index}].factors: expected one for each of the {self.geometry.num_pairs} pairs, "
                    f"got {len(regime.factors)}"
                )
        lengths = [regime.max_length for regime in self.regimes]
        if any(after <= before for before, after in itertools.pairwise(lengths)):
            raise InputError(f"$.regimes: expected ascending max_length, got {lengths}")
        if lengths[-1] != self.target_length:
            raise InputError(
                f"$.regimes: expected the last max_length to be target_length = {self.target_length}, got {lengths[-1]}"
            )
        if len({regime.name for regime in self.regimes}) != len(self.regimes):
            raise InputError(f"$.regimes: expected distinct names, got {[regime.name for regime in self.regimes]}")
        if self.training is not None and self.base_checkpoint is None:
            raise InputError("$.base_checkpoint: expected the weights before the training that is recorded, got null")

    @property
    def not_portable(self) -> tuple[str, ...]:
        """What plain loaders do not serve as it is meant: "regimes" (more than one), "retained_tokens" (above 0); see
        `ropesearch.artifact.limits`.
        """
        reasons = []
        if len(self.regimes) > 1:
            reasons.append("regimes")
        if any(regime.retained_tokens for regime in self.regimes):
            reasons.append("retained_tokens")
        return tuple(reasons)

    def regime_for(self, length_tokens: int) -> Regime:
        """The regime of a sequence whose final length is `length_tokens`: the first that serves so many.

        Raises InputError for a length below 1 or above target_length.
        """
        if isinstance(length_tokens, bool) or not isinstance(length_tokens, Integral):
            raise InputError(f"length_tokens: expected a whole number of tokens, got {length_tokens!r}")
        if length_tokens < 1:
            raise InputError(f"length_tokens: expected at least 1 token, got {length_tokens}")
        for regime in self.regimes:
            if length_tokens <= regime.max_length:
                return regime
        raise InputError(
            f"length_tokens, prompt and answer together: expected at most target_length = {self.target_length} tokens, "
            f"got {length_tokens}; give less text or ask for a shorter answer, or search for a longer target_length"
        )

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 over all but `evaluation` and `versions`, to which more may be added later."""
        value = self.to_json()
        left_out = ("evaluation", "versions", "content_digest")
        return files.sha256_of_json({key: value[key] for key in value if key not in left_out})

    def to_json(self) -> dict[str, Any]:
        """The JSON object of schema 1, sealed with its `content_digest`; `from_json` of it equals this."""
        geometry = self.geometry
        layer_types = None
        if geometry.layer_types is not None:
            layer_types = {
                name: {"rope_theta": layer.rope_theta, "rescaled": layer.rescaled}
                for name, layer in geometry.layer_types.items()
            }
        value = {
            "schema_version": SCHEMA_VERSION,
            "target_length": self.target_length,
            "geometry": {
                "model_type": geometry.model_type,
                "head_dim": geometry.head_dim,
                "rotary_dim": geometry.rotary_dim,
                "num_pairs": geometry.num_pairs,
                "original_length": geometry.original_length,
                "rope_theta": geometry.rope_theta,
                "layer_types": layer_types,
            },
            "regimes": [
                {
                    "name": regime.name,
                    "max_length": regime.max_length,
                    "factors": list(regime.factors),
                    "attention_factor": regime.attention_factor,
                    "retained_tokens": regime.retained_tokens,
                }
                for regime in self.regimes
            ],
            "portable": list(self.not_portable) or True,
            "checkpoint": self.checkpoint.to_json(),
            "base_checkpoint": None if self.base_checkpoint is None else self.base_checkpoint.to_json(),
            "search": self.search,
            **({} if self.training is None else {"training": self.training}),
            "evaluation": self.evaluation,
            "versions": self.versions,
        }
        return {**value, "content_digest": content_digest(value)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = FILE_NAME) -> "RopeConfig":
        """The RopeConfig that `value` (as parsed from strict JSON) describes; `where` names it in messages.

        Raises InputError with the JSON path, what was expected and what was found, for a schema version other than the
        one understood, and for a value that is not the one its `content_digest` was taken of.
        """
        _check_schema(value, where)
        try:
            result = cls(
                target_length=value["target_length"],
                geometry=_geometry(value["geometry"]),
                regimes=tuple(
                    Regime(
                        name=regime["name"],
                        max_length=regime["max_length"],
                        factors=tuple(float(factor) for factor in regime["factors"]),
                        attention_factor=float(regime["attention_factor"]),
                        retained_tokens=regime["retained_tokens"],
                    )
                    for regime in value["regimes"]
                ),
                checkpoint=_checkpoint(value["checkpoint"]),
                base_checkpoint=None if value["base_checkpoint"] is None else _checkpoint(value["base_checkpoint"]),
                search=value["search"],
                training=value.get("training"),
                evaluation=value["evaluation"],
                versions=value["versions"],
            )
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for key, expected, found in (
            ("geometry.num_pairs", result.geometry.num_pairs, value["geometry"]["num_pairs"]),
            ("portable", list(result.not_portable) or True, value["portable"]),
        ):
            if found != expected:
                raise InputError(f"{where}: $.{key}: expected {expected} for what the rest says, got {found}")
        if (digest := content_digest(value)) != value["content_digest"]:
            raise InputError(
                f"{where}: $.content_digest: expected {digest} for what the rest says, got {value['content_digest']}; "
                "the file was changed after it was written: restore it, or write it anew"
            )
        return result

    @classmethod
    def read(cls, path: Path) -> "RopeConfig":
        """The RopeConfig in a file, or in a folder's rope_config.json. Raises InputError, see `from_json`."""
        file = path / FILE_NAME if path.is_dir() else path
        return cls.from_json(read_json_object(file), str(file))

    def write(self, path: Path) -> None:
        """Write the file in one step (beside, then renamed)."""
        files.write_json(path, self.to_json())


def content_digest(value: Mapping[str, Any]) -> str:
    """ "sha256:" and the SHA-256 of the canonical JSON of all keys of `value` but `content_digest` itself."""
    return "sha256:" + files.sha256_of_json({key: value[key] for key in value if key != "content_digest"})


def _geometry(value: Mapping[str, Any]) -> Geometry:
    layer_types = value["layer_types"]
    return Geometry(
        model_type=value["model_type"],
        head_dim=value["head_dim"],
        rotary_dim=value["rotary_dim"],
        original_length=value["original_length"],
        rope_theta=float(value["rope_theta"]),
        layer_types=None
        if layer_types is None
        else {
            name: LayerRope(rope_theta=float(layer["rope_theta"]), rescaled=layer["rescaled"])
            for name, layer in layer_types.items()
        },
    )


def _checkpoint(value: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        digest=value["digest"],
        num_tensors=value["num_tensors"],
        num_parameters=value["num_parameters"],
        tokenizer_digest=value["tokenizer_digest"],
        config=value["config"],
        generation_config=value["generation_config"],
        model_max_length=value["model_max_length"],
        files=tuple(
            CheckpointFile(name=file["name"], num_bytes=file["bytes"], sha256=file["sha256"]) for file in value["files"]
        ),
    )


def _check_schema(value: Mapping[str, Any], where: str) -> None:
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool | float):
        raise InputError(
            f"{where}: $.schema_version: expected {SCHEMA_VERSION}, the version that this ropesearch understands, "
            f"got {_shown(version)}; read it with the ropesearch that wrote it, or a newer one"
        )
    for error in _validator().iter_errors(value):
        raise InputError(f"{where}: {error.json_path}: {_expected_and_got(error)}")


@functools.cache
def _validator() -> Any:
    schema = json.loads(importlib.resources.files(__package__).joinpath("rope_config.schema.json").read_text("utf-8"))
    # JSON Schema takes 1.0 for an integer; a count written as a float is a writer's mistake here.
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, instance: isinstance(instance, int) and not isinstance(instance, bool)
    )
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)(schema)


_EXPECTED = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "pattern": "text that matches {}",
    "minLength": "text of at least {} characters",
    "maxLength": "text of at most {} characters",
    "minItems": "a list of at least {} items",
    "minProperties": "at least {} keys",
    "uniqueItems": "items that all differ",
    "enum": "one of {}",
    "const": "{}",
    "not": "true or a list of reasons",
}


def _expected_and_got(error: Any) -> str:
    keyword, limit, instance = error.validator, error.validator_value, error.instance
    if keyword == "required":
        return f"expected the key {next(key for key in limit if key not in instance)!r}, got none"
    if keyword == "additionalProperties":
        known = error.schema.get("properties", {})
        return (
            f"expected no keys but {', '.join(known)}, got {_shown(next(key for key in instance if key not in known))}"
        )
    if keyword == "type":
        expected = limit if isinstance(limit, str) else " or ".join(limit)
        return f"expected {expected}, got {_shown(instance)}"
    return f"expected {_EXPECTED[keyword].format(limit)}, got {_shown(instance)}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
