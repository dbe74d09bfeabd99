import copy
import dataclasses
import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.artifact.schema import Checkpoint, CheckpointFile, RopeConfig
from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry, LayerRope
from ropesearch.rope.regime import Regime
from ropesearch.strict_json import parse_json_object
from tests.artifact import examples

SHIPPED = json.loads(importlib.resources.files("ropesearch.artifact").joinpath("rope_config.schema.json").read_text())


def good() -> dict[str, Any]:
    return copy.deepcopy(examples.rope_config().to_json())


def test_the_keys_are_those_of_schema_1() -> None:
    value = good()
    assert list(value) == [
        "schema_version", "target_length", "geometry", "regimes", "portable", "checkpoint", "base_checkpoint", "search",
        "evaluation", "versions", "content_digest",
    ]  # fmt: skip
    assert value["schema_version"] == 1
    assert value["target_length"] == 256
    assert value["geometry"] == {
        "model_type": "llama", "head_dim": 16, "rotary_dim": 16, "num_pairs": 8, "original_length": 64,
        "rope_theta": 10000.0, "layer_types": None,
    }  # fmt: skip
    assert value["regimes"] == [
        {
            "name": "searched",
            "max_length": 256,
            "factors": [1.0, 1.01, 1.37, 2.0, 2.93, 3.6, 4.4, 4.81],
            "attention_factor": 1.137,
            "retained_tokens": 0,
        }
    ]
    assert value["portable"] is True
    assert value["checkpoint"] == {
        "digest": "sha256:" + "1" * 64,
        "num_tensors": 21,
        "num_parameters": 35_104,
        "tokenizer_digest": "sha256:" + "2" * 64,
        "config": {"model_type": "llama", "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
        "generation_config": None,
        "model_max_length": None,
        "files": [{"name": "model.safetensors", "bytes": 142_000, "sha256": "3" * 64}],
    }
    assert value["base_checkpoint"] is None


def test_the_shipped_schema_is_a_json_schema_and_the_writer_holds_to_it(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SHIPPED)
    config = examples.rope_config(base_checkpoint=examples.CHECKPOINT)
    config.write(tmp_path / "rope_config.json")
    jsonschema.Draft202012Validator(SHIPPED).validate(json.loads((tmp_path / "rope_config.json").read_bytes()))
    assert RopeConfig.read(tmp_path) == RopeConfig.read(tmp_path / "rope_config.json") == config


def test_what_config_json_cannot_express_is_listed() -> None:
    retained = dataclasses.replace(examples.REGIME, retained_tokens=3)
    short = dataclasses.replace(examples.REGIME, name="short", max_length=64)
    assert examples.rope_config(regimes=(retained,)).to_json()["portable"] == ["retained_tokens"]
    assert examples.rope_config(regimes=(short, examples.REGIME)).to_json()["portable"] == ["regimes"]
    assert examples.rope_config(regimes=(short, retained)).to_json()["portable"] == ["regimes", "retained_tokens"]


def test_the_record_of_a_training_is_a_key_of_its_own_where_there_was_one() -> None:
    config, training = examples.rope_config(**examples.FINE_TUNED), examples.FINE_TUNED["training"]
    value = json.loads(json.dumps(config.to_json()))
    keys = list(good())
    assert list(value) == [*keys[:8], "training", *keys[8:]]
    assert value["training"] == training
    jsonschema.Draft202012Validator(SHIPPED).validate(value)
    again = RopeConfig.from_json(value)
    assert again == config and again.training == training
    assert examples.rope_config().training is None
    for other in (None, [], {}):
        with pytest.raises(InputError, match=r"\$\.training: expected"):
            RopeConfig.from_json({**value, "training": other})
    del value["training"]
    with pytest.raises(InputError, match=r"\$\.content_digest"):
        RopeConfig.from_json(value)
    with pytest.raises(InputError, match=r"\$\.base_checkpoint: expected the weights before the training"):
        examples.rope_config(training=training)


def test_the_regime_of_a_sequence_is_the_first_that_serves_its_final_length() -> None:
    config = examples.rope_config(regimes=examples.TWO)
    for length, name in ((1, "short"), (64, "short"), (65, "long"), (256, "long")):
        assert config.regime_for(length).name == config.regime_for(np.int64(length)).name == name
    with pytest.raises(InputError, match="expected at most target_length = 256 tokens, got 257; give less text"):
        config.regime_for(257)
    with pytest.raises(InputError, match="length_tokens: expected at least 1 token, got 0"):
        config.regime_for(0)


def changed(path: str, new: Any) -> dict[str, Any]:
    """A good file with one value replaced (or removed, where `new` is ...); `path` has dots, numbers index lists."""
    value = good()
    *parents, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    owner: Any = value
    for parent in parents:
        owner = owner[parent]
    if new is ...:
        del owner[last]
    else:
        owner[last] = new
    return value


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("target_length", ..., r"\$: expected the key 'target_length', got none"),
        ("extra", 1, r"\$: expected no keys but .*, got 'extra'"),
        ("target_length", "256", r"\$\.target_length: expected integer, got '256'"),
        ("target_length", 256.0, r"\$\.target_length: expected integer, got 256\.0"),
        ("target_length", True, r"\$\.target_length: expected integer, got True"),
        ("target_length", 0, r"\$\.target_length: expected at least 1, got 0"),
        ("target_length", 10**400, r"\$\.target_length: expected at most 9007199254740991, got 10000"),
        ("target_length", 64, "expected more than original_length = 64 tokens, got 64"),
        ("target_length", 300, r"expected the last max_length to be target_length = 300, got 256"),
        ("geometry.rotary_dim", 15, "rotary_dim: expected an even number"),
        ("geometry.rotary_dim", 32, "rotary_dim: expected at most head_dim"),
        ("geometry.num_pairs", 9, r"\$\.geometry\.num_pairs: expected 8 .*, got 9"),
        ("geometry.rope_theta", 1, r"\$\.geometry\.rope_theta: expected more than 1, got 1"),
        ("geometry.rope_theta", 10**400, r"\$\.geometry\.rope_theta: expected at most"),
        ("geometry.scale", 4, r"\$\.geometry: expected no keys but .*, got 'scale'"),
        ("geometry.layer_types", {}, r"\$\.geometry\.layer_types: expected at least 1 keys"),
        ("regimes", [], r"\$\.regimes: expected a list of at least 1 items, got \[\]"),
        ("regimes.0.factors", [1.0] * 7, r"\$\.regimes\[0\]\.factors: expected one for each of the 8 pairs, got 7"),
        ("regimes.0.factors.3", 0.5, r"\$\.regimes\[0\]\.factors\[3\]: expected at least 1, got 0\.5"),
        ("regimes.0.factors.3", None, r"\$\.regimes\[0\]\.factors\[3\]: expected number, got None"),
        ("regimes.0.factors.3", True, r"\$\.regimes\[0\]\.factors\[3\]: expected number, got True"),
        ("regimes.0.attention_factor", 0, r"\$\.regimes\[0\]\.attention_factor: expected more than 0, got 0"),
        ("regimes.0.retained_tokens", -1, r"\$\.regimes\[0\]\.retained_tokens: expected at least 0, got -1"),
        ("regimes.0.retained_tokens", 257, "expected retained_tokens from 0 to max_length = 256, got 257"),
        ("regimes.0.retained_tokens", 3, r"\$\.portable: expected \['retained_tokens'\] .*, got True"),
        ("regimes.0.name", "", r"\$\.regimes\[0\]\.name: expected text of at least 1 characters, got ''"),
        ("regimes", [good()["regimes"][0]] * 2, r"\$\.regimes: expected ascending max_length, got \[256, 256\]"),
        (
            "regimes",
            [{**good()["regimes"][0], "max_length": 64}, good()["regimes"][0]],
            r"\$\.regimes: expected distinct names",
        ),
        ("portable", False, r"\$\.portable: expected true or a list of reasons, got False"),
        ("portable", [], r"\$\.portable: expected a list of at least 1 items, got \[\]"),
        ("portable", ["flying"], r"\$\.portable\[0\]: expected one of .*, got 'flying'"),
        ("portable", ["regimes"], r"\$\.portable: expected True .*, got \['regimes'\]"),
        ("checkpoint", None, r"\$\.checkpoint: expected object, got None"),
        ("checkpoint.digest", "1" * 64, r"\$\.checkpoint\.digest: expected text that matches"),
        ("checkpoint.digest", "sha256:" + "1" * 64 + "\n", r"\$\.checkpoint\.digest: expected text of at most 71"),
        ("checkpoint.files.0.sha256", "A" * 64, r"\$\.checkpoint\.files\[0\]\.sha256: expected text that matches"),
        ("checkpoint.files", [], r"\$\.checkpoint\.files: expected a list of at least 1 items"),
        ("base_checkpoint", {}, r"\$\.base_checkpoint: expected the key 'digest', got none"),
        ("search.seed", ..., r"\$\.search: expected the key 'seed', got none"),
        ("evaluation.0.nats", ..., r"\$\.evaluation\[0\]: expected the key 'nats', got none"),
        ("evaluation.0.tokens", 0, r"\$\.evaluation\[0\]\.tokens: expected at least 1, got 0"),
        ("versions.torch", 2.13, r"\$\.versions\.torch: expected string, got 2\.13"),
        ("versions.torch", "2.14", r"\$\.content_digest: expected sha256:.*, got sha256:.* was changed after"),
        ("evaluation.0.tokens", 4081, r"\$\.content_digest: expected sha256:.*, got sha256:.* was changed after"),
        ("checkpoint.config.rms_norm_eps", 1e-5, r"\$\.content_digest: expected sha256:.*, got sha256:"),
        ("content_digest", "sha256:" + "0" * 64, r"\$\.content_digest: expected sha256:.*, got sha256:0000"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: str, new: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"^some\.json: .*" + message):
        RopeConfig.from_json(changed(path, new), "some.json")


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [1]])
def test_other_schema_versions_are_refused_naming_the_one_understood(version: Any) -> None:
    with pytest.raises(InputError, match=r"\$\.schema_version: expected 1, the version that this ropesearch"):
        RopeConfig.from_json(changed("schema_version", version))
    with pytest.raises(InputError, match=r"expected the key 'schema_version', got none"):
        RopeConfig.from_json(changed("schema_version", ...))


@pytest.mark.parametrize(
    "changes",
    [
        {"search": {**examples.SEARCH, "temperature": math.nan}},
        {"search": {**examples.SEARCH, "temperature": {1, 2}}},
        {"search": {**examples.SEARCH, "seed": "7"}},
        {"evaluation": [{**examples.EVALUATION[0], "nats": math.inf}]},
        {"versions": {"torch": None}},
        {"target_length": 256.0},
        {"regimes": ()},
        examples.FINE_TUNED | {"training": {"loss": math.nan}},
    ],
)
def test_a_writer_cannot_make_what_a_reader_would_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        examples.rope_config(**changes)


def test_further_keys_are_kept_in_search_and_evaluation() -> None:
    search = {**examples.SEARCH, "finalists": [{"trial": 3, "nats": 1.5}], "pair": (1, 2)}
    rows = [{"method": "yarn", "measure": "passkey", "split": "held_out", "length": 256, "accuracy": 0.9}]
    config = examples.rope_config(search=search, evaluation=rows)
    again = RopeConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.search["finalists"] == [{"trial": 3, "nats": 1.5}]
    assert again.search["pair"] == [1, 2]
    assert again.evaluation[0]["accuracy"] == 0.9


def test_the_fingerprint_covers_all_but_evaluation_and_versions() -> None:
    config = examples.rope_config()
    assert dataclasses.replace(config, evaluation=[], versions={}).fingerprint == config.fingerprint
    for changes in (
        {"regimes": (dataclasses.replace(examples.REGIME, attention_factor=1.138),)},
        {"geometry": dataclasses.replace(examples.toy_geometry(), rope_theta=10001.0)},
        {"checkpoint": dataclasses.replace(examples.CHECKPOINT, num_tensors=22)},
        {"base_checkpoint": examples.CHECKPOINT},
        {"search": {**examples.SEARCH, "seed": 8}},
    ):
        assert dataclasses.replace(config, **changes).fingerprint != config.fingerprint
    tuned = examples.rope_config(**examples.FINE_TUNED)
    for training in (None, {"num_steps": 4}):
        assert dataclasses.replace(tuned, training=training).fingerprint != tuned.fingerprint


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
counts = st.integers(1, 2**53 - 1)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
checkpoints = st.builds(
    Checkpoint,
    digest=digests.map("sha256:{}".format),
    num_tensors=counts,
    num_parameters=counts,
    tokenizer_digest=digests.map("sha256:{}".format),
    config=st.dictionaries(names, plain_json, max_size=3),
    generation_config=st.none() | st.dictionaries(names, plain_json, max_size=3),
    model_max_length=plain_json,
    files=st.lists(
        st.builds(CheckpointFile, name=names, num_bytes=st.integers(0, 2**53 - 1), sha256=digests),
        min_size=1,
        max_size=3,
    ).map(tuple),
)


@st.composite
def rope_configs(draw: st.DrawFn) -> RopeConfig:
    num_pairs = draw(st.integers(1, 6))
    thetas = st.floats(1, 1e30, exclude_min=True)
    layers = st.dictionaries(names, st.builds(LayerRope, rope_theta=thetas, rescaled=st.booleans()), min_size=1)
    geometry = Geometry(
        model_type=draw(names),
        head_dim=2 * num_pairs + draw(st.integers(0, 9)),
        rotary_dim=2 * num_pairs,
        original_length=draw(st.integers(2, 1000)),
        rope_theta=draw(thetas),
        layer_types=draw(st.none() | layers),
    )
    lengths = sorted(draw(st.sets(st.integers(geometry.original_length + 1, 10**7), min_size=1, max_size=3)))
    factors = st.lists(st.floats(1, allow_nan=False, allow_infinity=False), min_size=num_pairs, max_size=num_pairs).map(
        tuple
    )
    regimes = tuple(
        Regime(
            name=f"{index}{draw(names)}",
            max_length=length,
            factors=draw(factors),
            attention_factor=draw(st.floats(0, exclude_min=True, allow_infinity=False)),
            retained_tokens=draw(st.integers(0, length)),
        )
        for index, length in enumerate(lengths)
    )
    base_checkpoint = draw(st.none() | checkpoints)
    trainings = st.none() if base_checkpoint is None else st.none() | st.dictionaries(names, plain_json, min_size=1)
    return RopeConfig(
        target_length=lengths[-1],
        geometry=geometry,
        regimes=regimes,
        checkpoint=draw(checkpoints),
        base_checkpoint=base_checkpoint,
        training=draw(trainings),
        search={**draw(st.dictionaries(names, plain_json, max_size=3)), **examples.SEARCH},
        evaluation=draw(st.lists(st.just(examples.EVALUATION[0]), max_size=2)),
        versions=draw(st.dictionaries(names, names, max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@given(config=rope_configs())
def test_writing_and_reading_gives_back_every_bit(config: RopeConfig) -> None:
    text = json.dumps(config.to_json(), allow_nan=False)
    again = RopeConfig.from_json(parse_json_object(text.encode(), "here"))
    assert again == config
    assert json.dumps(again.to_json(), allow_nan=False) == text
