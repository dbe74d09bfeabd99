"""ropesearch/config.py: every key composes, what is wrong is named, and no text is ever interpreted."""

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch import config
from ropesearch.artifact.config import VerifyLevel, WeightsMode
from ropesearch.config import JOBS, Key, compose, conf_folder, groups_of, keys_of, plain, type_name
from ropesearch.errors import InputError
from ropesearch.launch.config import LAUNCHERS
from ropesearch.model.config import DType
from ropesearch.search.config import OPTIMIZERS

CORPUS_KEYS = [
    "corpus.path",
    "corpus.text_field",
    "corpus.dataset_config",
    "corpus.dataset_split",
    "corpus.streaming",
    "corpus.num_search_windows",
    "corpus.num_selection_windows",
    "corpus.num_held_out_windows",
    "corpus.max_documents",
]
OBJECTIVE_KEYS = [
    "objective.last_tokens",
    "objective.chunk_tokens",
    "objective.offload_cache",
    "objective.num_blocks",
    "objective.lengths",
    "objective.length_weights",
    "objective.needle_weight",
    "objective.num_needle_windows",
    "objective.needle_depths",
    "objective.max_short_perplexity_increase",
    "objective.two_objectives",
]
ALL_KEYS = {
    "search": [
        "target_length",
        "run",
        "seed",
        "weights",
        "cache",
        "tables",
        "model.path",
        "model.revision",
        "model.dtype",
        "model.device",
        "model.attention",
        "model.trust_remote_code",
        "model.original_length",
        *CORPUS_KEYS,
        "space.factor_step",
        "space.max_factor_over_ratio",
        "space.num_pairs_at_one",
        "space.num_pairs_at_ratio",
        "space.critical_pair",
        "space.attention_factor",
        "space.attention_factor_max",
        "space.attention_factor_step",
        "space.retained_tokens",
        "optimizer.num_population",
        "optimizer.num_parents",
        "optimizer.num_mutations",
        "optimizer.num_crossovers",
        "optimizer.mutation_probability",
        "optimizer.num_generations",
        "optimizer.num_candidates",  # random
        "optimizer.num_candidates",  # tpe
        "optimizer.num_startup",
        "optimizer.num_draws",
        "optimizer.num_knots",
        "optimizer.num_candidates",  # cmaes
        "optimizer.num_population",
        "optimizer.initial_sigma",
        "optimizer.num_candidates",  # gradient
        "optimizer.num_starts",
        "optimizer.num_candidates",  # blockwise
        "optimizer.num_increments",
        *OBJECTIVE_KEYS,
        "racing.mark",
        "selection.num_finalists",
        "budget.num_trials",
        "budget.forward_equivalent_tokens",
        "budget.minutes",
        "budget.patience_trials",
        "storage.url",  # postgresql
        "storage.host",  # grpc
        "storage.port",
        "worker.lease_seconds",
        "worker.grace_seconds",
        "launcher.num_workers",
        "launcher.minutes",
        "launcher.partition",
        "launcher.account",
        "launcher.qos",
        "launcher.constraint",
        "launcher.gres",
        "launcher.num_cpus",
        "launcher.memory_gigabytes",
        "track.mode",  # wandb
        "track.project",
    ],
    "finetune": [
        "path",
        "run",
        "seed",
        "device",
        "attention",
        "trust_remote_code",
        "cache",
        *CORPUS_KEYS,
        "mixture.long_bounds",
        "mixture.shares",
        "mixture.needle_share",
        "training.num_steps",
        "training.num_step_rows",
        "training.peak_learning_rate",
        "training.num_warmup_steps",
        "training.schedule",
        "training.weight_decay",
        "training.clip_norm",
        "training.adapter",
        "training.lora_rank",
        "training.lora_alpha",
        "training.precision",
        "training.checkpoint_activations",
        "training.distill_weight",
        "training.save_every_steps",
        "training.num_kept_states",
        "training.measure_every_steps",
        "track.mode",  # wandb
        "track.project",
    ],
    "evaluate": ["path", "run", "seed", "lengths", "device", "cache", *CORPUS_KEYS, *OBJECTIVE_KEYS],
    "verify": ["path", "levels", "max_logits_tokens"],
    "export": ["path", "to", "single_table", "weights", "seed", "device", "cache", *CORPUS_KEYS],
    "status": ["path"],
}
EACH_KEY = [(job_name, key) for job_name in JOBS for key in keys_of(JOBS[job_name].schema)]
each_key = pytest.mark.parametrize(("job_name", "key"), EACH_KEY, ids=lambda value: getattr(value, "name", value))
DEFAULTS = {"optimizer=gradient", "storage=journal", "launcher=local", "track=none"}

# What shells, YAML, Hydra and OmegaConf make something of, and a user may have in the name of a folder.
ODD_TEXTS = [
    "a=b",
    "a,b",
    "[a]",
    "{a",
    "{a: 1}",
    "a b",
    " a ",
    "'",
    '"',
    "'a'",
    '"a"',
    "it's",
    "a\\",
    "a\\\\",
    "a\\b",
    "\\'",
    "\\${a}",
    "$HOME",
    "${seed}",
    "${oc.env:HOME}",
    "${",
    "x${y",
    "???",
    "*",
    "choice(a,b)",
    "1",
    "1.5",
    "true",
    "~/a",
    "+a",
    "#a",
    "a\nb",
    "a\tb",
    "h\u00e9\u4e2d\U0001f600",
]


def value_at(job: Any, name: str) -> Any:
    for part in name.split("."):
        job = getattr(job, part)
    return job


def kinds_of(key: Key) -> list[Any]:
    """The alternatives of a key's type."""
    return (
        list(typing.get_args(key.type))
        if typing.get_origin(key.type) is not list and typing.get_args(key.type)
        else [key.type]
    )


def examples(key: Key) -> Iterator[tuple[str, Any]]:
    """(text, value) for each alternative of a key's type, none of them its default."""
    for kind in kinds_of(key):
        if kind is int:
            yield "37", 37
        elif kind is float:
            yield "0.625", 0.625
            yield "3", 3.0
        elif kind is bool:
            yield str(not key.default).lower(), not key.default
        elif kind is str:
            yield "some text", "some text"
        elif kind is type(None):
            yield "null", None
            yield "", None
        elif isinstance(kind, enum.EnumMeta):
            yield from kind.__members__.items()
        elif kind == list[int]:
            yield "[5]", [5]
            yield "[5, 6,7]", [5, 6, 7]
            yield "[]", []
        elif kind == list[float]:
            yield "[0.5]", [0.5]
            yield "[0.5, 2]", [0.5, 2.0]
        elif kind == list[str]:
            yield "[a.csv]", ["a.csv"]
            yield "[/x y/${a}.json, b=[1].csv]", ["/x y/${a}.json", "b=[1].csv"]
        elif kind == list[VerifyLevel]:
            yield "[table]", [VerifyLevel.table]
            yield "[logits,digest]", [VerifyLevel.logits, VerifyLevel.digest]
        else:
            pytest.fail(f"{key.name}: no example of {kind}")


@pytest.mark.parametrize("job_name", JOBS)
def test_the_keys_are_those_that_are_meant_to_be(job_name: str) -> None:
    """A key that is added, renamed or dropped changes what users type: do it here too."""
    assert [key.name for key in keys_of(JOBS[job_name].schema)] == ALL_KEYS[job_name]
    assert JOBS[job_name].main_key in ALL_KEYS[job_name]


@pytest.mark.parametrize("job_name", JOBS)
def test_nothing_given_gives_the_defaults_of_the_schema(job_name: str) -> None:
    assert compose(job_name, None, []) == JOBS[job_name].schema()


@pytest.mark.parametrize(
    ("job_name", "preset"),
    [
        *((name, None) for name in JOBS),
        *(("search", f"optimizer={name}") for name in OPTIMIZERS),
        *(("search", f"launcher={name}") for name in LAUNCHERS),
        ("search", "track=wandb"),
        ("finetune", "track=wandb"),
    ],
)
def test_every_key_composes(job_name: str, preset: str | None) -> None:
    chosen = DEFAULTS
    if preset:
        group_name = preset.partition("=")[0]
        chosen = {preset, *(each for each in DEFAULTS if each.partition("=")[0] != group_name)}
    keys = [key for key in keys_of(JOBS[job_name].schema) if key.preset is None or key.preset in chosen]
    rounds = [dict(zip([key.name for key in keys], texts, strict=True)) for texts in padded(keys)]
    for texts in rounds:
        given = [f"{name}={text}" for name, (text, _) in texts.items()]
        job = compose(job_name, None, [*given, preset] if preset else given)
        for name, (_, value) in texts.items():
            assert value_at(job, name) == value and type(value_at(job, name)) is type(value), name


def padded(keys: list[Key]) -> Iterator[list[tuple[str, Any]]]:
    """The examples of all keys at once: as many rounds as the longest list of examples has."""
    lists = [list(examples(key)) for key in keys]
    for index in range(max(map(len, lists))):
        yield [each[index % len(each)] for each in lists]


@each_key
def test_every_key_has_a_meaning_and_a_type_in_words(job_name: str, key: Key) -> None:
    assert len(key.meaning) > 5 and not key.meaning.endswith(".")
    assert type_name(key)


@each_key
def test_ill_typed_values_are_refused(job_name: str, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_composed", never)  # refused before anything is composed
    for text in ("not a value of this", "${seed}", "???", "choice(1,2)", "int(3.7)", "[1", "[a]", "{a:1}", "nan"):
        if str in kinds_of(key) or (text == "[a]" and key.type == list[str]):
            continue
        with pytest.raises(InputError) as caught:
            compose(job_name, None, [*([key.preset] if key.preset else []), f"{key.name}={text}"])
        assert str(caught.value).startswith(f"{key.name}: expected {type_name(key)}, got {text!r} (")


def never(*_: Any) -> None:
    raise AssertionError("composed")


@pytest.mark.parametrize(
    "override",
    [
        "target_length=1.5",
        "target_length=1e3",
        "target_length=true",
        "target_length=null",
        "target_length=",
        "target_length=[1]",
        "weights=COPY",
        "weights=0",
        "weights=null",
        "model.trust_remote_code=yes",
        "model.trust_remote_code=1",
        "space.factor_step=inf",
        "space.factor_step=1e999",
        "budget.minutes=inf",
        "space.retained_tokens=1,2",
        "space.retained_tokens=[1.5]",
        "space.retained_tokens=[null]",
        "space.retained_tokens=[1,]",
        "space.retained_tokens=[[1]]",
        "space.retained_tokens=null",
    ],
)
def test_near_misses_of_a_type_are_refused(override: str) -> None:
    with pytest.raises(InputError, match=rf"^{override.partition('=')[0]}: expected "):
        compose("search", None, [override])


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("target_lenght=5", "target_length"),
        ("+target_length=5", "target_length"),
        ("++target_length=5", "target_length"),
        ("~target_length=5", "target_length"),
        ("~target_length", "target_length"),
        ("target_length", "target_length"),
        ("corpus.num_windows=3", "corpus.num_search_windows"),
        ("num_finalists=3", "selection.num_finalists"),
        ("retained_tokens=[1]", "space.retained_tokens"),
        ("budget.trials=3", "budget.num_trials"),
        ("spaces=longrope", "space"),
        ("+space=longrope", "space"),
        ("Seed=1", "seed"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(override: str, nearest: str) -> None:
    with pytest.raises(InputError, match=rf"did you mean {nearest}\?"):
        compose("search", None, [override])


@pytest.mark.parametrize(
    "override", ["hydra.run.dir=x", "=1", "zzzz=1", "model.=1", "model.path.x=1", "--x=1", "a@b=1"]
)
def test_what_is_no_key_is_refused(override: str) -> None:
    with pytest.raises(InputError, match=r": no such key.*\(see --help for all keys\)"):
        compose("search", None, [override])


def test_a_key_is_given_once() -> None:
    with pytest.raises(InputError, match=r"^seed: given more than once"):
        compose("search", None, ["seed=1", "run=a", "seed=1"])
    with pytest.raises(InputError, match=r"^space: given more than once"):
        compose("search", None, ["space=longrope", "space=longrope"])
    with pytest.raises(InputError, match=r"^model.path: given as a bare path \(a\) and as a key"):
        compose("search", "a", ["model.path=a"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("corpus.num_search_windows=0", "corpus.num_search_windows: expected at least 1, got 0"),
        ("seed=-1", "seed: expected at least 0, got -1"),
    ],
)
def test_values_out_of_range_are_named_in_full(override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        compose("search", None, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "value"),
    [("search", "search"), ("longrope", "longrope"), ("yarn", "yarn"), ("1.2", 1.2), ("1", 1.0), ("nan", "nan")],
)
def test_attention_factor_is_a_word_or_a_number(text: str, value: str | float) -> None:
    """Words, "nan" among them, are judged by the space, which knows which there are."""
    got = compose("search", None, [f"space.attention_factor={text}"]).space.attention_factor
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_texts_survive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_texts_survive(text, monkeypatch)


@settings(max_examples=100)
@given(st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda text: text != "null"))
def test_any_text_survives(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_texts_survive(text, monkeypatch)


def check_texts_survive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text as key, as optional key and as bare path. Hydra is spared: it only gets presets, as the end holds."""
    given_to_hydra: list[tuple[str, list[str]]] = []

    def composed(job_name: str, presets: list[str]) -> config.SearchJob:
        given_to_hydra.append((job_name, presets))
        return config.SearchJob()

    monkeypatch.setattr(config, "_composed", composed)
    job = compose("search", text, [f"corpus.path={text}", f"run={text}", f"cache={text}", f"model.revision={text}"])
    assert (job.model.path, job.corpus.path, job.run, job.cache, job.model.revision) == (text,) * 5
    assert given_to_hydra == [("search", [])]


@given(st.text(max_size=30))
@settings(max_examples=100)
def test_any_word_is_a_setting_or_an_input_error(word: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(config, "_composed", lambda *_: config.SearchJob())
        for override in (
            word,
            f"seed={word}",
            f"budget.minutes={word}",
            f"space.retained_tokens={word}",
            f"space={word}",
        ):
            try:
                compose("search", None, [override])
            except InputError:
                continue


def test_presets_are_chosen_by_hydra_and_keys_win_over_them() -> None:
    job = compose("search", None, ["space.factor_step=0.02", "space=longrope"])
    assert job.space == dataclasses.replace(config.SearchJob().space, factor_step=0.02)
    with pytest.raises(InputError, match=r"^space: expected one of longrope, longrope2, piecewise, got 'longrop'"):
        compose("search", None, ["space=longrop"])
    job = compose("search", None, ["space=piecewise", "space.num_pairs_at_one=3"])
    assert (job.space.num_pairs_at_one, job.space.num_pairs_at_ratio, job.space.max_factor_over_ratio) == (
        3,
        "search",
        1,
    )


def test_the_preset_of_longrope2_searches_the_critical_pair() -> None:
    job = compose("search", None, ["space=longrope2"])
    assert (job.space.critical_pair, job.space.max_factor_over_ratio) == ("search", 2)
    job = compose("search", None, ["space=longrope2", "space.critical_pair=33"])
    assert job.space.critical_pair == 33
    assert compose("search", None, ["space=longrope2", "space.critical_pair=null"]).space.critical_pair is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_has_its_own_keys(name: str) -> None:
    job = compose("search", None, [f"optimizer={name}"])
    assert job.optimizer == OPTIMIZERS[name]() and type(job.optimizer) is OPTIMIZERS[name]
    assert plain(job)["optimizer"] == {"name": name, **plain(job.optimizer)}
    own = {field.name for field in dataclasses.fields(OPTIMIZERS[name])}
    for key in keys_of(JOBS["search"].schema):
        if key.name.startswith("optimizer.") and key.preset and key.name.partition(".")[2] not in own:
            with pytest.raises(InputError, match=rf"^{key.name}: a key of .*{key.preset}.*, got optimizer={name};"):
                compose("search", None, [f"{key.name}=3", f"optimizer={name}"])


def test_presets_are_the_files_of_conf() -> None:
    assert groups_of(JOBS["search"].schema) == {
        "model": ["causal_lm"],
        "corpus": ["documents"],
        "space": ["longrope", "longrope2", "piecewise"],
        "optimizer": ["auto", "blockwise", "cmaes", "evolution", "gradient", "random", "tpe"],
        "objective": ["guarded", "last_tokens", "needle", "perplexity", "two_objectives"],
        "storage": ["grpc", "journal", "postgresql"],
        "launcher": ["local", "slurm"],
        "track": ["none", "wandb"],
    }


@pytest.mark.parametrize("file", sorted(conf_folder().rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_of_conf_extends_a_schema_and_belongs_to_a_job(file: Path) -> None:
    defaults = yaml.safe_load(file.read_text())["defaults"]
    group = file.parent.name if file.parent != conf_folder() else None
    schema = {"auto": "gradient"}.get(file.stem, file.stem)
    has_variants = group in ("optimizer", "storage", "launcher", "track")
    assert defaults[0] == ("schema" if group and not has_variants else f"schema_{schema}")
    assert file.stem in JOBS if group is None else any(group in groups_of(job.schema) for job in JOBS.values())
    for job_name, job in JOBS.items():
        if group in groups_of(job.schema):
            assert isinstance(compose(job_name, None, [f"{group}={file.stem}"]), job.schema)


def test_a_file_of_conf_with_an_unknown_key_or_an_ill_typed_value_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "conf_folder", lambda: tmp_path)
    for line in (
        "max_logits_tokns: 5",
        "max_logits_tokens: many",
        "levels: [none]",
        "max_logits_tokens: ${nothing}",
    ):
        (tmp_path / "verify.yaml").write_text(f"defaults:\n  - schema_verify\n  - _self_\n{line}\n")
        with pytest.raises(InputError, match=r": cannot be read: ") as caught:
            compose("verify", None, [])
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}: ") and "\n" not in message
        assert line.split(":")[0] in message or "nothing" in message


def test_composing_within_and_after_another_hydra_application(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("verify", None, ["max_logits_tokens=5"]).max_logits_tokens == 5
        assert hydra_compose("theirs").a == 1  # and theirs is as it was
    GlobalHydra.instance().clear()
    assert compose("verify", None, ["max_logits_tokens=6"]).max_logits_tokens == 6
    assert not GlobalHydra.instance().is_initialized()


def test_what_is_composed_is_ones_own() -> None:
    compose("search", None, []).space.retained_tokens.append(5)
    assert compose("search", None, []).space.retained_tokens == [0]
    assert config.SearchJob().space.retained_tokens == [0]


@pytest.mark.parametrize("job_name", JOBS)
def test_plain_is_json_by_key(job_name: str) -> None:
    job = compose(job_name, None, [])
    values = plain(job)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    for key in keys_of(JOBS[job_name].schema):
        if key.preset not in {None, *DEFAULTS}:
            continue
        there = values
        for part in key.name.split("."):
            there = there[part]
        assert there == plain(key.default)
    assert plain([WeightsMode.link, DType.auto, None, 1.5]) == ["link", "auto", None, 1.5]
