"""One root dataclass per job, and the way from `key=value` to it.

Values live in conf/ as Hydra files, each extending the schema of its owner. Hydra stops here: what leaves this module
are plain dataclasses. Every key is checked before anything is loaded.
"""

import dataclasses
import difflib
import enum
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import VerifyLevel, WeightsMode, table_files
from ropesearch.data.config import CorpusConfig, MixtureConfig
from ropesearch.errors import InputError
from ropesearch.launch.config import LAUNCHERS, LauncherConfig, LocalConfig
from ropesearch.model.config import Attention, ModelConfig
from ropesearch.score.config import ScoringConfig
from ropesearch.search.config import (
    OPTIMIZERS,
    BudgetConfig,
    EvolutionConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    SelectionConfig,
    SpaceConfig,
)
from ropesearch.search.sharing_config import STORAGES, JournalConfig, StorageConfig, WorkerConfig
from ropesearch.settings import group, setting
from ropesearch.track.config import TRACKERS, NoTracking, TrackConfig
from ropesearch.train.config import TrainingConfig


@dataclasses.dataclass(kw_only=True)
class JobConfig:
    """What a job can be told."""

    def check(self) -> None:
        """Raise InputError for what is wrong in itself, whatever the files hold; needs no heavy library."""


# Keys of a search that say how it is done, not what is sought: asked with others of these, it is the same run.
NOT_IN_ITS_NAME = ("run", "budget", "cache", "weights", "worker", "launcher", "track")


@dataclasses.dataclass(kw_only=True)
class SearchJob(JobConfig):
    """Search the factors of one checkpoint for one target length."""

    target_length: int = setting(0, "length in tokens that the model shall read to; has to be given")
    run: str | None = setting(None, "run folder; by default runs/search-<fingerprint of what is asked>")
    seed: int = setting(0, "seed of every random stream")
    weights: WeightsMode = setting(WeightsMode.copy, "how the weights get into the run's checkpoint folder")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    tables: list[str] = setting(
        [],
        "files with tables to start from and to compare with: rope_config.json, config.json of any rope type, or CSV "
        "with one factor a line",
    )
    model: ModelConfig = group(ModelConfig)
    corpus: CorpusConfig = group(CorpusConfig)
    space: SpaceConfig = group(SpaceConfig)
    optimizer: OptimizerConfig = group(GradientConfig, OPTIMIZERS)
    objective: ScoringConfig = group(ScoringConfig)
    racing: RacingConfig = group(RacingConfig)
    selection: SelectionConfig = group(SelectionConfig)
    budget: BudgetConfig = group(BudgetConfig)
    storage: StorageConfig = group(JournalConfig, STORAGES)
    worker: WorkerConfig = group(WorkerConfig)
    launcher: LauncherConfig = group(LocalConfig, LAUNCHERS)
    track: TrackConfig = group(NoTracking, TRACKERS)

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def check(self) -> None:
        """Raise InputError for what no model and no texts could make right."""
        self.objective.check_search(self.target_length)
        self.space.check(self.target_length)
        self.optimizer.check()
        if self.objective.two_objectives and not isinstance(self.optimizer, EvolutionConfig):
            raise InputError(
                f"optimizer: expected evolution, which can spread along the front of two objectives, got "
                f"{plain(self)['optimizer']['name']}; give optimizer=evolution, or leave objective.two_objectives out"
            )
        if self.objective.offload_cache and isinstance(self.optimizer, GradientConfig):
            raise InputError(
                "optimizer: expected one without gradients beside objective.offload_cache=true, got gradient: it needs "
                "the whole window's activations on the device, more than the cache that has no room there; give "
                "optimizer=evolution, or leave objective.offload_cache out"
            )
        self.selection.check()
        self.budget.check()
        self.storage.check()
        self.worker.check()
        self.launcher.check()
        self.corpus.check()
        table_files(self.tables)
        self.track.check()


@dataclasses.dataclass(kw_only=True)
class FinetuneJob(JobConfig):
    """Fine-tune a searched checkpoint on short rows under its plain table and long rows under the searched one."""

    path: str = setting("", "checkpoint folder with a rope_config.json, or the run folder of a search")
    run: str | None = setting(None, "run folder; by default runs/finetune-<fingerprint of what is asked>")
    seed: int = setting(0, "seed of the splits (as in the search), of the order of documents and of dropout")
    device: str = setting("auto", "torch device, or auto: a GPU where there is one, with torchrun each process its own")
    attention: Attention = setting(Attention.sdpa, "attention implementation of transformers")
    trust_remote_code: bool = setting(False, "run model code that the checkpoint brings along")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    corpus: CorpusConfig = group(CorpusConfig)
    mixture: MixtureConfig = group(MixtureConfig)
    training: TrainingConfig = group(TrainingConfig)
    track: TrackConfig = group(NoTracking, TRACKERS)

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def check(self) -> None:
        """Raise InputError for what no folder and no texts could make right."""
        self.corpus.check()
        self.training.check()
        self.track.check()


@dataclasses.dataclass(kw_only=True)
class EvaluateJob(JobConfig):
    """Measure a searched checkpoint against the unscaled model and the usual methods, by length and position."""

    path: str = setting("", "checkpoint folder with a rope_config.json, or the run folder of a search or fine-tuning")
    run: str | None = setting(None, "folder for the results; by default runs/evaluate-<fingerprint of what is asked>")
    seed: int = setting(0, "seed of the splits (as in the search) and of the intervals")
    lengths: list[int] = setting([], "lengths in tokens; by default original_length and its doublings up to the target")
    device: str = setting("auto", "as model.device of a search: torch device, auto or balanced")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    corpus: CorpusConfig = group(CorpusConfig)
    objective: ScoringConfig = group(ScoringConfig)

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def check(self) -> None:
        """Raise InputError for what no folder and no texts could make right."""
        lengths = self.lengths or self.objective.lengths
        if len(set(lengths)) < len(lengths):
            raise InputError(f"lengths: expected each once, got {lengths}")
        for length in lengths:
            self.objective.check(length)
        self.corpus.check()


@dataclasses.dataclass(kw_only=True)
class VerifyJob(JobConfig):
    """Prove that a folder's weights, table and logits are what its rope_config.json says."""

    path: str = setting("", "checkpoint folder with a rope_config.json, or the run folder of a search or fine-tuning")
    levels: list[VerifyLevel] = setting(list(VerifyLevel), "what to check")
    max_logits_tokens: int = setting(8192, "greatest length in tokens at which logits are compared")

    def __post_init__(self) -> None:
        if not self.levels:
            raise InputError(f"levels: expected at least one of {', '.join(VerifyLevel.__members__)}, got none")
        if self.max_logits_tokens < 1:
            raise InputError(f"max_logits_tokens: expected at least 1 token, got {self.max_logits_tokens}")


@dataclasses.dataclass(kw_only=True)
class ExportJob(JobConfig):
    """Write a folder anew elsewhere, bound to the same weights: as it is, or with its long table for all lengths."""

    path: str = setting("", "checkpoint folder with a rope_config.json, or the run folder of a search or fine-tuning")
    to: str = setting("", "folder to write, which is not there yet or empty; has to be given")
    single_table: bool = setting(
        False,
        "whether the long table serves all lengths, which every loader can do: its price on inputs of original_length "
        "tokens is measured on held-out windows of corpus.path, which has to be given then",
    )
    weights: WeightsMode = setting(WeightsMode.copy, "how the weights get into the new folder")
    seed: int = setting(0, "seed of the splits (as in the search)")
    device: str = setting("auto", "torch device, or auto: a GPU where there is one")
    cache: str | None = setting("~/.cache/ropesearch", "folder that keeps tokenised texts between runs; null for none")
    corpus: CorpusConfig = group(CorpusConfig)

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def check(self) -> None:
        """Raise InputError for texts that are missing, cannot be there, or would not be looked at."""
        if self.single_table:
            self.corpus.check()
        elif self.corpus.path:
            raise InputError(
                f"corpus.path: expected none without single_table=true, as nothing is measured, got {self.corpus.path}"
            )


@dataclasses.dataclass(kw_only=True)
class StatusJob(JobConfig):
    """Look at a search or fine-tuning from any machine that sees its run folder: how far it is, and how good."""

    path: str = setting("", "run folder of a search or fine-tuning")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job of the command line: its schema, the key that a bare path stands for, the keys that must be given, and the
    module with the function of its name."""

    schema: type[JobConfig]
    main_key: str
    path_meaning: str
    summary: str
    required: tuple[str, ...]
    module: str = "ropesearch.pipeline"


JOBS = {
    "search": Job(
        schema=SearchJob,
        main_key="model.path",
        path_meaning="CHECKPOINT",
        summary="search the factors of a checkpoint for a target length",
        required=("model.path", "corpus.path", "target_length"),
    ),
    "finetune": Job(
        schema=FinetuneJob,
        main_key="path",
        path_meaning="FOLDER",
        summary="fine-tune a searched checkpoint on short and long rows, each under its own table",
        required=("path", "corpus.path"),
        module="ropesearch.finetuning",
    ),
    "evaluate": Job(
        schema=EvaluateJob,
        main_key="path",
        path_meaning="FOLDER",
        summary="perplexity by length and position, searched against the usual methods",
        required=("path", "corpus.path"),
    ),
    "verify": Job(
        schema=VerifyJob,
        main_key="path",
        path_meaning="FOLDER",
        summary="prove that a folder is what its rope_config.json says",
        required=("path",),
    ),
    "export": Job(
        schema=ExportJob,
        main_key="path",
        path_meaning="FOLDER",
        summary="write a folder anew for other loaders, also with one table for all lengths",
        required=("path", "to"),
        module="ropesearch.export",
    ),
    "status": Job(
        schema=StatusJob,
        main_key="path",
        path_meaning="RUN",
        summary="how far a search is, from any machine that sees its run folder",
        required=("path",),
        module="ropesearch.status",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a job: its dotted name, type, default and meaning; `preset` is the one that has it, where not all do
    (optimizer=tpe)."""

    name: str
    type: Any
    default: Any
    meaning: str
    preset: str | None = None

    @property
    def choices(self) -> list[str]:
        """Names of an enum key's values, else empty."""
        kinds = [*_alternatives(self.type), *typing.get_args(self.type)]
        kind = next((kind for kind in kinds if isinstance(kind, enum.EnumMeta)), None)
        return list(kind.__members__) if kind else []


def keys_of(schema: type, prefix: str = "", preset: str | None = None) -> Iterator[Key]:
    """Every key of a job's schema in order, groups unfolded, with all variants of those that have some."""
    hints = typing.get_type_hints(schema)
    defaults = schema()
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if variants := field.metadata.get("variants"):
            for name, variant in variants.items():
                yield from keys_of(variant, f"{prefix}{field.name}.", f"{field.name}={name}")
        elif dataclasses.is_dataclass(kind):
            yield from keys_of(typing.cast(type, kind), f"{prefix}{field.name}.", preset)
        else:
            meaning = field.metadata.get("meaning", "")
            yield Key(prefix + field.name, kind, getattr(defaults, field.name), meaning, preset)


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
    """The job's root dataclass for `key=value` overrides and an optional bare path.

    Hydra chooses the presets. Values are read here, by the type of their key, and never by Hydra's grammar, in which
    paths with brackets or `${` would mean something: a text is exactly what was given.

    Raises InputError, with the nearest key, for an unknown, misspelt, ill-typed or out-of-range value.
    """
    job = JOBS[job_name]
    groups = groups_of(job.schema)
    every = list(keys_of(job.schema))
    given: dict[str, str] = {}
    for text in overrides:
        name, value = _name_and_value(text, [*dict.fromkeys(key.name for key in every), *groups])
        if name in given:
            raise InputError(f"{name}: given more than once; give it once")
        if name in groups and value not in groups[name]:
            raise InputError(f"{name}: expected one of {', '.join(groups[name])}, got {value!r}")
        given[name] = value
    presets = [f"{name}={value}" for name, value in given.items() if name in groups]
    chosen = {**_default_variants(job.schema)}
    chosen |= {name: _variant_of(name, value) for name, value in given.items() if name in chosen}
    known = {key.name: key for key in every if key.preset in (None, *(f"{name}={of}" for name, of in chosen.items()))}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            values[name] = _read(known[name], value)
        elif name not in groups:
            group_name = name.partition(".")[0]
            having = [str(key.preset) for key in every if key.name == name]
            raise InputError(
                f"{name}: a key of {' and '.join(having)}, got {group_name}={chosen[group_name]}; choose that preset, "
                "or leave the key out (see --help)"
            )
    if path is not None:
        if job.main_key in values:
            raise InputError(f"{job.main_key}: given as a bare path ({path}) and as a key; give it once")
        values[job.main_key] = path
    return _with_values(_composed(job_name, presets), values)


def expect_given(job_name: str, config: Any) -> None:
    """Raise InputError unless all that the job requires has a value."""
    required = JOBS[job_name].required
    missing = [name for name in required if not functools.reduce(getattr, name.split("."), config)]
    if missing:
        raise InputError(f"{', '.join(missing)}: expected a value, got none; give {missing[0]}=... (see --help)")


def plain(config: Any) -> Any:
    """A config as JSON values: dataclasses to objects, enums to their names; a variant of a group says its name."""
    if dataclasses.is_dataclass(config):
        values = {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
        for field in dataclasses.fields(config):
            for name, variant in field.metadata.get("variants", {}).items():
                if type(getattr(config, field.name)) is variant:
                    values[field.name] = {"name": name, **values[field.name]}
        return values
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, list):
        return [plain(item) for item in config]
    return config


def _name_and_value(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text}: expected key=value{_nearest(name, names)}")
    if name not in names:
        raise InputError(f"{name}: no such key{_nearest(name, names)} (see --help for all keys)")
    return name, value


def _read(key: Key, text: str) -> Any:
    """The value that `text` stands for under the key's type; of several types the first that fits, text last."""
    for kind in sorted(_alternatives(key.type), key=lambda kind: kind is str):
        try:
            return _read_as(kind, text)
        except ValueError:
            continue
    raise InputError(f"{key.name}: expected {type_name(key)}, got {text!r} ({key.meaning})")


def _read_as(kind: Any, text: str) -> Any:
    """`text` as a value of `kind`; ValueError where it is none."""
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if not (text.startswith("[") and text.endswith("]")):
            raise ValueError(text)
        inside = text[1:-1].strip()
        return [_read_as(item, part.strip()) for part in inside.split(",")] if inside else []
    if kind is float and not math.isfinite(float(text)):
        raise ValueError(text)
    if kind in (int, float, str):
        return kind(text)
    words: dict[Any, dict[str, Any]] = {type(None): {"null": None, "": None}, bool: {"true": True, "false": False}}
    members = kind.__members__ if isinstance(kind, enum.EnumMeta) else words[kind]
    if text not in members:
        raise ValueError(text)
    return members[text]


def _with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """`config` with `values` by dotted name; each dataclass that changes is made anew, so that it checks itself."""
    fields = {name: value for name, value in values.items() if "." not in name}
    for group_name in {name.partition(".")[0]: None for name in values if "." in name}:
        below = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{group_name}.")}
        try:
            fields[group_name] = _with_values(getattr(config, group_name), below)
        except InputError as error:
            raise InputError(f"{group_name}.{error}") from error
    return dataclasses.replace(config, **fields)


def _default_variants(schema: type) -> dict[str, str]:
    """The variant of each group with variants that is chosen when none is given."""
    return {
        field.name: name
        for field in dataclasses.fields(schema)
        for name, variant in field.metadata.get("variants", {}).items()
        if variant is field.default_factory
    }


def _variant_of(group_name: str, preset: str) -> str:
    """The variant whose schema a preset's file extends: several presets may share one, as `auto` has another's."""
    from omegaconf import OmegaConf

    defaults: Any = OmegaConf.load(conf_folder() / group_name / f"{preset}.yaml")["defaults"]
    return str(defaults[0]).removeprefix("schema_")


def _composed(job_name: str, presets: list[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = JOBS[job_name].schema
    store = ConfigStore.instance()
    root = OmegaConf.structured(schema)
    variants = {field.name: field.metadata.get("variants") for field in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    for name in groups_of(schema):
        for variant, node in (variants[name] or {}).items():
            store.store(group=name, name=f"schema_{variant}", node=node)
        if variants[name]:
            root[name] = "???"  # so that the preset's schema takes its place
        else:
            store.store(group=name, name="schema", node=hints[name])
    store.store(name=f"schema_{job_name}", node=root)
    around = GlobalHydra.instance().hydra  # of a program that calls this one; there can be only one at a time
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder().resolve()), version_base="1.3"):
            return OmegaConf.to_object(hydra_compose(job_name, presets))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{conf_folder()}: cannot be read: {reason}") from error
    finally:
        GlobalHydra.instance().hydra = around


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"seed: expected at least 0, got {seed}")


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
    bare = name.lstrip("+~")
    matches = difflib.get_close_matches(bare, names, n=1, cutoff=0.5)
    if not matches:
        by_leaf = {other.rsplit(".", 1)[-1]: other for other in names}
        matches = [by_leaf[leaf] for leaf in difflib.get_close_matches(bare.rsplit(".", 1)[-1], list(by_leaf), n=1)]
    return f"; did you mean {matches[0]}?" if matches else ""
