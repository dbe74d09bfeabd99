import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropesearch.artifact import verify as verify_module
from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.limits import loader_limits
from ropesearch.artifact.load import read_bound
from ropesearch.artifact.schema import RopeConfig, content_digest
from ropesearch.artifact.verify import Finding, check_expressible, verify
from ropesearch.errors import BindingError, InputError
from ropesearch.model.load import read_geometry
from tests import tiny_models, toys, walk
from tests.artifact import examples

DIGEST, TABLE, LOGITS = VerifyLevel.digest, VerifyLevel.table, VerifyLevel.logits


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return examples.write_example(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="session")
def written_with_retained_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return examples.write_example(tmp_path_factory.mktemp("retained"), retained_tokens=3)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "folder"))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file; a rope_config.json is sealed anew, as a forger would."""
    value = json.loads(path.read_text())
    change(value)
    if path.name == "rope_config.json":
        value["content_digest"] = content_digest(value)
    path.write_text(json.dumps(value, indent=2))


def wrong(findings: list[Finding], level: VerifyLevel | None = None) -> list[str]:
    return [finding.message for finding in findings if not finding.ok and level in (None, finding.level)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("retained_tokens", [0, 3])
def test_what_was_written_is_as_it_says(tmp_path: Path, architecture: str, retained_tokens: int) -> None:
    folder = examples.write_example(tmp_path, architecture, retained_tokens=retained_tokens)
    findings = verify(folder, device="cpu")
    assert not wrong(findings)
    assert {finding.level for finding in findings} == set(VerifyLevel)
    lengths = [finding.message.split()[0] for finding in findings if finding.level is LOGITS]
    assert lengths == ["1", "63", "64", "65", "256"]
    notes = [finding.message for finding in findings if finding.is_note]
    assert len(notes) == (retained_tokens > 0)
    assert all(note.startswith("config.json cannot express retained_tokens: other loaders") for note in notes)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_two_regimes_are_each_held_to_where_they_serve(tmp_path: Path, architecture: str) -> None:
    folder = examples.write_example(tmp_path, architecture, regimes=examples.TWO)
    findings = verify(folder, device="cpu")
    assert not wrong(findings)
    said = [finding.message for finding in findings if "inverse frequencies" in finding.message]
    assert said == [
        f"inverse frequencies at {length} tokens: 8 pairs, bit for bit the float32 table of {name}"
        for length, name in ((64, "short"), (65, "long"), (256, "long"))
    ]
    lengths = [finding.message.split()[0] for finding in findings if finding.level is LOGITS and not finding.is_note]
    assert lengths == ["1", "63", "64", "65", "256"]
    notes = [finding.message for finding in findings if finding.is_note]
    assert notes[:-1] == list(loader_limits(RopeConfig.read(folder)))
    attention = re.fullmatch(
        r"up to 64 tokens the logits above are those of short with the attention factor 1.137, which transformers has "
        r"for all lengths; with its own, 1, they differ by up to ([0-9.]+)",
        notes[-1],
    )
    assert attention is not None and float(attention[1]) > 0.05


def test_two_regimes_of_one_attention_factor_are_the_same_everywhere(tmp_path: Path) -> None:
    short = dataclasses.replace(examples.SHORT, attention_factor=1.137)
    findings = verify(examples.write_example(tmp_path, regimes=(short, examples.LONG)), device="cpu")
    assert not wrong(findings)
    assert not [finding.message for finding in findings if "attention factor that" in finding.message]
    assert not [finding.message for finding in findings if finding.is_note and finding.level is LOGITS]


@pytest.mark.parametrize(("name", "lengths"), [("short_factor", [64]), ("long_factor", [65, 256])])
def test_a_factor_changed_in_one_list_is_found_where_it_serves(tmp_path: Path, name: str, lengths: list[int]) -> None:
    folder = examples.write_example(tmp_path, regimes=examples.TWO)

    def change(value: Any) -> None:
        for key in ("rope_scaling", "rope_parameters"):
            value[key][name][5] = 5.25

    edit(folder / "config.json", change)
    messages = wrong(verify(folder, device="cpu"))
    assert [int(each.split()[3]) for each in messages if each.startswith("inverse frequencies")] == lengths
    found = [int(each.split()[0]) for each in messages if "greatest difference" in each]
    assert found == ([63, 64] if name == "short_factor" else lengths)
    with pytest.raises(BindingError, match=name):
        read_bound(folder)


def test_a_threshold_that_was_moved_is_found(tmp_path: Path) -> None:
    folder = examples.write_example(tmp_path, regimes=examples.TWO)
    edit(folder / "config.json", lambda value: value.update(original_max_position_embeddings=65))
    messages = wrong(verify(folder, device="cpu"))
    assert "config.json: $.original_max_position_embeddings: expected 64, got 65" in messages
    assert any(each.startswith("inverse frequencies at 65 tokens: pair 1: expected") for each in messages)
    assert any(each.startswith("65 tokens: greatest difference") for each in messages)


def test_two_regimes_beyond_config_json_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    retained = dataclasses.replace(examples.LONG, retained_tokens=3)
    folder = examples.write_example(tmp_path, regimes=(examples.SHORT, retained))
    findings = verify(folder, device="cpu")
    assert not wrong(findings)
    (note,) = (finding.message for finding in findings if finding.is_note)
    assert note.startswith("config.json cannot express regimes, retained_tokens: other loaders see the unscaled")
    edit(folder / "rope_config.json", lambda value: value["regimes"][0].update(attention_factor=1.01))
    assert wrong(verify(folder, [LOGITS, TABLE], device="cpu"))


def test_bfloat16_weights_verify_too(tmp_path: Path) -> None:
    assert not wrong(verify(examples.write_example(tmp_path, dtype="bfloat16"), device="cpu"))


def test_only_the_levels_asked_for_are_looked_at(folder: Path) -> None:
    assert {finding.level for finding in verify(folder, [TABLE])} == {TABLE}
    assert {finding.level for finding in verify(folder, [DIGEST])} == {DIGEST}


def test_lengths_above_the_limit_are_left_out_and_said(folder: Path) -> None:
    findings = verify(folder, [LOGITS], max_logits_tokens=100, device="cpu")
    assert [finding.message.split()[0] for finding in findings[:-1]] == ["1", "63", "64", "65", "100"]
    assert findings[-1].message == "left out: 256 tokens, above max_logits_tokens = 100"
    assert [finding.is_note for finding in findings] == [False] * 5 + [True] and findings[-1].ok
    with pytest.raises(InputError, match="max_logits_tokens: expected at least 1 token, got 0"):
        verify(folder, max_logits_tokens=0)


def test_one_flipped_bit_of_the_weights_is_found_in_its_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    (message,) = wrong(verify(folder, [DIGEST, TABLE]))
    assert message.startswith("weights: expected sha256:")
    assert message.endswith("the difference is in model.safetensors")


def test_another_checkpoint_is_found(folder: Path, tmp_path: Path) -> None:
    other = toys.write_checkpoint(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", folder)
    assert len(wrong(verify(folder, [DIGEST]))) == 1
    wider = toys.write_checkpoint(tmp_path / "wider", "qwen2")
    shutil.copy(wider / "model.safetensors", folder)
    (message,) = wrong(verify(folder, [DIGEST]))
    assert "expected 21 tensors with 35104 parameters, got 27 with 35232" in message
    with pytest.raises(InputError, match=f"{folder}: the weight files hold tensors"):
        verify(folder, [LOGITS], device="cpu")
    assert wrong(verify(folder, [DIGEST, LOGITS], device="cpu"), LOGITS)[0].startswith("not compared: ")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("tokenizer.json", "tokenizer.json"),
        ("tokenizer_config.json", "tokenizer_config.json"),
        ("chat_template.jinja", "chat_template.jinja"),
    ],
)
def test_a_changed_tokenizer_is_found(folder: Path, name: str, where: str) -> None:
    if name.endswith(".json"):
        edit(folder / name, lambda value: value.update(added=1))
    else:
        (folder / name).write_text("{{ other }}")
    (message,) = wrong(verify(folder, [DIGEST]))
    assert message.startswith("tokenizer: expected sha256:")
    assert message.endswith(f"the difference is in {where}")


def test_the_same_weights_in_other_shards_are_the_same(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    config = (folder / "config.json").read_bytes()
    toys.toy_model().save_pretrained(folder, max_shard_size="60KB")
    (folder / "config.json").write_bytes(config)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert not wrong(verify(folder, device="cpu"))


def test_a_factor_changed_in_rope_config_is_found_at_every_level(folder: Path) -> None:
    edit(folder / "rope_config.json", lambda value: value["regimes"][0]["factors"].__setitem__(3, 2.01))
    findings = verify(folder, device="cpu")
    assert not wrong(findings, DIGEST)
    table = wrong(findings, TABLE)
    assert "config.json: $.rope_scaling.long_factor[3]: expected 2.01, got 2.0" in table
    assert any(message.startswith("inverse frequencies at 64 tokens: pair 3: expected 0.0157") for message in table)
    assert any(message.startswith("inverse frequencies at 256 tokens: pair 3: expected 0.0157") for message in table)
    assert any(message.startswith("256 tokens: greatest difference") for message in wrong(findings, LOGITS))


@pytest.mark.parametrize("keys", [("rope_scaling",), ("rope_parameters",), ("rope_scaling", "rope_parameters")])
@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_a_factor_changed_in_config_json_is_found(folder: Path, keys: tuple[str, ...], name: str) -> None:
    def change(value: Any) -> None:
        for key in keys:
            value[key][name][7] = 4.8100001

    edit(folder / "config.json", change)
    messages = wrong(verify(folder, [TABLE]))
    for key in keys:
        assert f"config.json: $.{key}.{name}[7]: expected 4.81, got 4.8100001" in messages


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda value: value["rope_scaling"].update(attention_factor=1.2), "$.rope_scaling.attention_factor"),
        (lambda value: value["rope_scaling"].update(long_mscale=1.2), "$.rope_scaling.long_mscale"),
        (lambda value: value.update(max_position_embeddings=255), "$.max_position_embeddings"),
        (lambda value: value.update(rope_theta=10001.0), "$.rope_theta"),
        (lambda value: value.pop("rope_scaling"), "$.rope_scaling"),
        (lambda value: value.update(rope_config_fingerprint="0"), "$.rope_config_fingerprint"),
        (lambda value: value.update(model_type="mistral"), "$.model_type: expected 'llama', got 'mistral'"),
        (lambda value: value.update(num_hidden_layers=10**9), "$.num_hidden_layers: expected 2, got 1000000000"),
    ],
)
def test_other_changes_of_config_json_are_found(folder: Path, change: Callable[[Any], object], where: str) -> None:
    edit(folder / "config.json", change)
    assert any(where in message for message in wrong(verify(folder, [TABLE])))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"rms_norm_eps": 1e-5}, "$.rms_norm_eps: expected 1e-06, got 1e-05"),
        ("config.json", {"hidden_act": "gelu"}, "$.hidden_act: expected 'silu', got 'gelu'"),
        ("config.json", {"tie_word_embeddings": 0}, "$.tie_word_embeddings: expected False, got 0"),
        ("config.json", {"sliding_window": None}, "$.sliding_window: expected no such key, got None"),
        ("config.json", {"pad_token_id": ...}, "$.pad_token_id: expected None, got no such key"),
        ("config.json", {"a key\n": 1}, "$['a key\\n']: expected no such key, got 1"),
        ("generation_config.json", {"eos_token_id": 2}, "$.eos_token_id: expected 1, got 2"),
    ],
)
def test_what_changes_the_model_but_not_the_table_is_found(
    folder: Path, name: str, change: dict[str, Any], message: str
) -> None:
    value = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps({key: value[key] for key in value if value[key] is not ...}))
    assert wrong(verify(folder, [DIGEST])) == [f"{name}: {message}"]
    assert bool(wrong(verify(folder, [TABLE]))) == (name == "config.json")
    with pytest.raises(BindingError, match=re.escape(message)):
        read_bound(folder)


def test_other_spelling_is_the_same(folder: Path) -> None:
    for name in ("rope_config.json", "config.json", "generation_config.json", "tokenizer_config.json"):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(dict(reversed(value.items())), indent=7, ensure_ascii=False))
    (folder / "README.md").write_text("a model card")
    assert not wrong(verify(folder, [DIGEST, TABLE]))
    read_bound(folder)


def test_a_changed_rope_config_is_refused_whatever_was_changed(folder: Path) -> None:
    text = (folder / "rope_config.json").read_text()
    (folder / "rope_config.json").write_text(text.replace("1234.5", "1234.6"))  # the nats of an evaluation
    with pytest.raises(InputError, match=r"\$\.content_digest: expected sha256:.* the file was changed after"):
        verify(folder, [DIGEST])
    with pytest.raises(InputError, match=r"\$\.content_digest: expected sha256:.* the file was changed after"):
        read_bound(folder)


def test_a_lowered_tokenizer_limit_is_found(tmp_path: Path) -> None:
    source = toys.write_checkpoint(tmp_path / "source")
    edit(source / "tokenizer_config.json", lambda value: value.update(model_max_length=64))
    write_checkpoint_folder(source, tmp_path / "out", examples.bound_rope_config(source))
    assert not wrong(verify(tmp_path / "out", [DIGEST, TABLE]))
    shutil.copy(source / "tokenizer_config.json", tmp_path / "out")
    (message,) = wrong(verify(tmp_path / "out", [DIGEST, TABLE]))
    assert message == "tokenizer_config.json: $.model_max_length: expected 256, got 64"


def test_a_loader_that_builds_another_table_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are compared as built, not as written: a transformers that blends otherwise would be caught."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = ROPE_INIT_FUNCTIONS["longrope"]
    exact = verify_module.rotary_table(examples.toy_geometry(), examples.REGIME)

    def other(*arguments: Any, **keywords: Any) -> Any:
        table, attention_factor = original(*arguments, **keywords)
        table[2] *= 1 + 2**-22
        return table, attention_factor + 0.25

    monkeypatch.setattr(verify_module, "rotary_table", lambda geometry, regime: exact)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "longrope", other)
    messages = wrong(verify(folder, [TABLE]))
    assert [message.split(": expected")[0] for message in messages] == [
        "inverse frequencies at 64 tokens: pair 2",
        "attention factor at 64 tokens",
        "inverse frequencies at 256 tokens: pair 2",
        "attention factor at 256 tokens",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rope_config.json", b"{"),
        ("rope_config.json", b"{}"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "llama", "model_type": "llama"}'),
        ("model.safetensors", b"12345678"),
        ("tokenizer_config.json", b'{"a": NaN}'),
    ],
)
def test_malformed_files_are_the_users_error(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        verify(folder, device="cpu")


def test_missing_files_are_the_users_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a checkpoint folder, got nothing"):
        verify(tmp_path / "absent")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        verify(folder, device="cpu")


def test_a_changed_regime_beyond_config_json_is_found(written_with_retained_tokens: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written_with_retained_tokens, tmp_path / "folder"))
    edit(folder / "rope_config.json", lambda value: value["regimes"][0].update(retained_tokens=4))
    (message,) = wrong(verify(folder, [DIGEST, TABLE]))
    assert message.startswith("config.json: $.rope_config_fingerprint: expected")
    shutil.copy(written_with_retained_tokens / "rope_config.json", folder)
    edit(folder / "config.json", lambda value: value["rope_parameters"].update(rope_theta=10010.0))
    assert all(message.startswith("inverse frequencies at") for message in wrong(verify(folder, [TABLE])))
    assert wrong(verify(folder, [DIGEST])) == [
        "config.json: $.rope_parameters.rope_theta: expected 10000.0, got 10010.0"
    ]


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """`content` with bytes flipped, deleted, inserted or repeated, or with one JSON value exchanged for another."""
    kind = data.draw(st.sampled_from(["flip", "digit", "delete", "insert", "repeat", "value"]))
    where = data.draw(st.integers(0, len(content) - 1))
    match kind:
        case "flip":
            return content[:where] + bytes([content[where] ^ 1 << data.draw(st.integers(0, 7))]) + content[where + 1 :]
        case "digit":
            digits = [index for index, byte in enumerate(content) if chr(byte).isdigit()]
            where = data.draw(st.sampled_from(digits))
            return content[:where] + data.draw(st.sampled_from("0123456789")).encode() + content[where + 1 :]
        case "delete":
            return content[:where] + content[where + data.draw(st.integers(1, 40)) :]
        case "insert":
            return content[:where] + data.draw(st.binary(min_size=1, max_size=4)) + content[where:]
        case "repeat":
            return content[:where] + content[where : where + data.draw(st.integers(1, 200))] + content[where:]
        case _:
            value = json.loads(content)
            owner, key = value, data.draw(st.sampled_from(sorted(value)))
            while isinstance(owner[key], dict | list) and owner[key] and data.draw(st.booleans()):
                owner = owner[key]
                key = data.draw(st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner))))
            values = st.sampled_from([None, True, False, 0, 1, -1, 2, 64, 2**63, 0.5, 1.5, 1e300, "", "x", [], [1], {}])
            owner[key] = data.draw(values)
            if data.draw(st.booleans()) and "content_digest" in value:
                value["content_digest"] = content_digest(value)
            return json.dumps(value).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_rope_config_never_passes_with_another_meaning(
    written: Path, written_with_retained_tokens: Path, folder: Path, data: st.DataObject
) -> None:
    original = data.draw(st.sampled_from([written, written_with_retained_tokens]))
    for name in ("rope_config.json", "config.json"):
        shutil.copy(original / name, folder)
    path = folder / "rope_config.json"
    before = RopeConfig.read(path)
    path.write_bytes(damaged(data, path.read_bytes()))
    try:
        after = RopeConfig.read(path)
        findings = verify(folder, [DIGEST, TABLE])
    except InputError:
        return
    same = after == dataclasses.replace(before, evaluation=after.evaluation, versions=after.versions)
    assert bool(wrong(findings)) == (not same)


def test_no_level_is_no_proof(folder: Path) -> None:
    with pytest.raises(InputError, match="levels: expected at least one of digest, table, logits"):
        verify(folder, [])


@pytest.fixture(scope="session")
def written_by_layer_type(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An extended Gemma 3: one searched table for full attention, a plain one for windowed layers."""
    place = tmp_path_factory.mktemp("by-layer-type")
    loaded = walk.load(tiny_models.write_tiny_model(place / "source", "gemma3_text"))
    rope_config = examples.rope_config(
        target_length=walk.TARGET_LENGTH,
        geometry=loaded.geometry,
        regimes=(walk.searched(loaded.geometry),),
        checkpoint=checkpoint_binding(place / "source"),
    )
    write_checkpoint_folder(place / "source", place / "extended", rope_config)
    return place / "extended"


def test_each_layer_type_is_held_against_its_own_table(written_by_layer_type: Path, tmp_path: Path) -> None:
    findings = verify(written_by_layer_type, device="cpu")
    assert not wrong(findings)
    said = [finding.message for finding in findings if finding.message.startswith("inverse frequencies at 128")]
    assert said == [
        "inverse frequencies at 128 tokens (full_attention): 8 pairs, bit for bit the float32 table of searched",
        "inverse frequencies at 128 tokens (sliding_attention): 8 pairs, the plain ones of theta 10000",
    ]
    folder = Path(shutil.copytree(written_by_layer_type, tmp_path / "folder"))
    edit(folder / "config.json", lambda value: value["rope_parameters"]["sliding_attention"].update(rope_theta=9e3))
    messages = wrong(verify(folder, [TABLE]))
    assert "config.json: $.rope_parameters.sliding_attention.rope_theta: expected 10000.0, got 9000.0" in messages
    assert any(each.startswith("inverse frequencies at 32 tokens (sliding_attention): pair 1") for each in messages)
    shutil.copy(written_by_layer_type / "config.json", folder)
    edit(folder / "rope_config.json", lambda value: value["regimes"][0].update(attention_factor=1.2))
    assert any("(full_attention): expected 1.2, got 1.17" in message for message in wrong(verify(folder, [TABLE])))


def test_what_transformers_4_cannot_load_is_said(tmp_path: Path) -> None:
    loaded = walk.load(tiny_models.write_tiny_model(tmp_path / "source", "phi3"))
    rope_config = examples.rope_config(
        target_length=walk.TARGET_LENGTH,
        geometry=loaded.geometry,
        regimes=(walk.searched(loaded.geometry),),
        checkpoint=checkpoint_binding(tmp_path / "source"),
    )
    write_checkpoint_folder(tmp_path / "source", tmp_path / "extended", rope_config)
    findings = verify(tmp_path / "extended", [TABLE])
    assert not wrong(findings)
    (note,) = (finding for finding in findings if finding.is_note)
    assert note.ok and note.message.startswith("transformers 4.57 cannot load this config.json")


def test_a_family_that_cannot_express_a_table_is_refused_from_its_config(tmp_path: Path) -> None:
    tiny_models.tiny_config("recurrent_gemma").save_pretrained(tmp_path)
    geometry = read_geometry(tmp_path, 32)
    with pytest.raises(InputError, match="'recurrent_gemma': transformers cannot serve a searched table"):
        check_expressible(tmp_path, geometry, 128)
    tiny_models.tiny_config("gemma3_text").save_pretrained(tmp_path / "gemma")
    check_expressible(tmp_path / "gemma", read_geometry(tmp_path / "gemma"), 128)
