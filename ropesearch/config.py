"""One root dataclass per job, and the way from `key=value` to it.

Values live in conf/ as Hydra files, each extending the schema of its owner. Hydra stops here: what leaves this module are
plain dataclasses. Every key is checked before anything is loaded.
"""

import ast
import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import VerifyLevel, WeightsMode
from ropesearch.data.config import CorpusConfig
from ropesearch.errors import InputError
from ropesearch.model.config import ModelConfig
from ropesearch.score.config import ScoringConfig
from ropesearch.search.config import BudgetConfig, EvolutionConfig, SelectionConfig, SpaceConfig, StorageConfig
from ropesearch.settings import group, setting


@dataclasses.dataclass(kw_only=True)
class SearchJob:
    """Search the factors of one checkpoint for one target length."""

    target_length: int = setting(0, "length in tokens that the model shall read to; has to be given")
    run: str | None = setting(None, "run folder; by default runs/search-<fingerprint of what is asked>")
    seed: int = setting(0, "seed of every random stream")
    weights: WeightsMode = setting(WeightsMode.copy, "how the weights get into the run's checkpoint folder")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    model: ModelConfig = group(ModelConfig)
    corpus: CorpusConfig = group(CorpusConfig)
    space: SpaceConfig = group(SpaceConfig)
    optimizer: EvolutionConfig = group(EvolutionConfig)
    objective: ScoringConfig = group(ScoringConfig)
    selection: SelectionConfig = group(SelectionConfig)
    budget: BudgetConfig = group(BudgetConfig)
    storage: StorageConfig = group(StorageConfig)


@dataclasses.dataclass(kw_only=True)
class EvaluateJob:
    """Measure a searched checkpoint against the unscaled model and the usual methods, by length and position."""

    path: str = setting("", "checkpoint folder with a rope_config.json, or the run folder of a search")
    run: str | None = setting(None, "folder for the results; by default runs/evaluate-<fingerprint of what is asked>")
    seed: int = setting(0, "seed of the splits (as in the search) and of the intervals")
    lengths: list[int] = setting([], "lengths in tokens; by default original_length and its doublings up to the target")
    device: str = setting("auto", "torch device, or auto: a GPU where there is one")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    corpus: CorpusConfig = group(CorpusConfig)
    objective: ScoringConfig = group(ScoringConfig)


@dataclasses.dataclass(kw_only=True)
class VerifyJob:
    """Prove that a folder's weights, table and logits are what its rope_config.json says."""

    path: str = setting("", "checkpoint folder with a rope_config.json")
    levels: list[VerifyLevel] = setting(list(VerifyLevel), "what to check")
    max_logits_tokens: int = setting(8192, "greatest length in tokens at which logits are compared")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job of the command line: its schema, the key that a bare path stands for, and a line for the list."""

    schema: type
    main_key: str
    path_meaning: str
    summary: str


JOBS = {
    "search": Job(SearchJob, "model.path", "CHECKPOINT", "search the factors of a checkpoint for a target length"),
    "evaluate": Job(EvaluateJob, "path", "FOLDER", "perplexity by length and position, searched against the usual methods"),
    "verify": Job(VerifyJob, "path", "FOLDER", "prove that a folder is what its rope_config.json says"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a job: its dotted name, type, default and meaning."""

    name: str
    type: Any
    default: Any
    meaning: str

    @property
    def choices(self) -> list[str]:
        """Names of an enum key's values, else empty."""
        kinds = [*_alternatives(self.type), *typing.get_args(self.type)]
        kind = next((kind for kind in kinds if isinstance(kind, enum.EnumMeta)), None)
        return list(kind.__members__) if kind else []


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a job's schema in order, groups unfolded."""
    hints = typing.get_type_hints(schema)
    defaults = schema()
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from keys_of(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            meaning = field.metadata.get("meaning", "")
            yield Key(prefix + field.name, kind, getattr(defaults, field.name), meaning)


def groups_of(schema: type) -> dict[str, list[str]]:
    """Config groups of a job and their choices, read from conf/."""
    hints = typing.get_type_hints(schema)
    names = [field.name for field in dataclasses.fields(schema) if dataclasses.is_dataclass(hints[field.name])]
    choices = {name: sorted(file.stem for file in (conf_folder() / name).glob("*.yaml")) for name in names}
    return {name: stems for name, stems in choices.items() if stems}


def conf_folder() -> Path:
    """Where the Hydra files are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def compose(job_name: str, path: str | None, overrides: Sequence[str]) -> Any:
    """The job's root dataclass for `key=value` overrides and an optional bare path (which Hydra never parses).

    Raises InputError, with the nearest key, for an unknown, misspelt, ill-typed or out-of-range value.
    """
    job = JOBS[job_name]
    known = {key.name: key for key in keys_of(job.schema)}
    groups = groups_of(job.schema)
    checked = [_checked_override(text, known, groups) for text in overrides]
    given = [text.partition("=")[0] for text in overrides]
    for name in given:
        if given.count(name) > 1:
            raise InputError(f"{name}: given more than once; give it once")
    if path is not None and job.main_key in given:
        raise InputError(f"{job.main_key}: given as a bare path ({path}) and as a key; give it once")
    config = _composed(job_name, checked)
    if path is not None:
        *parents, leaf = job.main_key.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, leaf, path)
    return config


def plain(config: Any) -> Any:
    """A config as JSON values: dataclasses to objects, enums to their names."""
    if dataclasses.is_dataclass(config):
        return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, list):
        return [plain(item) for item in config]
    return config


def _checked_override(text: str, known: dict[str, Key], groups: dict[str, list[str]]) -> str:
    name, equals, value = text.partition("=")
    bare = name.lstrip("+~")
    if not equals:
        raise InputError(f"{text}: expected key=value{_nearest(bare, [*known, *groups])}")
    if name != bare or (name not in known and name not in groups):
        raise InputError(f"{name}: no such key{_nearest(bare, [*known, *groups])}; see --help for all keys")
    if name in groups:
        if value not in groups[name]:
            raise InputError(f"{name}: expected one of {', '.join(groups[name])}, got {value!r}")
        return text
    kinds = _alternatives(known[name].type)
    if type(None) in kinds and value in ("null", ""):
        return f"{name}=null"
    if str in kinds:
        return f"{name}={_quoted(value)}"
    return text


def _quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's grammar, so that no path or name is ever parsed."""
    try:
        already = isinstance(ast.literal_eval(value), str)
    except (SyntaxError, ValueError):
        already = False
    text = ast.literal_eval(value) if already else value
    # In Hydra's grammar a backslash only counts before a quote (or before the backslashes that end in one).
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def _composed(job_name: str, overrides: list[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = JOBS[job_name].schema
    store = ConfigStore.instance()
    store.store(name=f"schema_{job_name}", node=schema)
    hints = typing.get_type_hints(schema)
    for name in groups_of(schema):
        store.store(group=name, name="schema", node=hints[name])
    try:
        with initialize_config_dir(str(conf_folder().resolve()), version_base="1.3"):
            return OmegaConf.to_object(hydra_compose(job_name, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(_readable(error, schema)) from error


def _readable(error: Exception, schema: type) -> str:
    override = re.search(r"Error merging override (\S+?)=(.*)", str(error))
    if override is None:
        return f"the configuration cannot be read: {str(error).splitlines()[0]}"
    name, value = override[1], override[2]
    key = next(key for key in keys_of(schema) if key.name == name)
    return f"{name}: expected {type_name(key)}, got {value!r} ({key.meaning})"


def type_name(key: Key) -> str:
    """A key's type in words, for messages and the help page."""
    if key.choices:
        words = "one of " + ", ".join(key.choices)
        return f"a list [...] of {words}" if typing.get_origin(key.type) is list else words
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    parts = []
    for kind in _alternatives(key.type):
        parts.append(names.get(kind) or f"a list [...] of {typing.get_args(kind)[0].__name__}")
    return " or ".join(parts)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _nearest(name: str, names: Sequence[str]) -> str:
    leaves: dict[str, str] = {other: other for other in names}
    matches = difflib.get_close_matches(name, list(leaves), n=1, cutoff=0.5)
    if not matches:
        by_leaf = {other.rsplit(".", 1)[-1]: other for other in names}
        matches = [by_leaf[leaf] for leaf in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(by_leaf), n=1)]
    return f"; did you mean {matches[0]}?" if matches else ""
