import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ropesearch.artifact import folder as folder_module
from ropesearch.artifact.config import WeightsMode
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import BindingError, InputError
from tests import toys
from tests.artifact import examples

KEPT = {
    "README.md": "card",
    "LICENSE": "licence",
    "USE_POLICY.md": "policy",
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": "{}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}
LEFT_BEHIND = {
    "consolidated.safetensors": "other weights",
    "model.fp16.safetensors": "other weights",
    "optimizer.pt": "pickle",
    "pytorch_model.bin": "pickle",
    "training_args.bin": "pickle",
    "trainer_state.json": "{}",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = toys.write_checkpoint(tmp_path / "source")
    tokenizer_config = source / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"model_max_length": 64}))
    for name, content in (KEPT | LEFT_BEHIND | {"original/params.json": "{}", ".cache/x": "x"}).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    return source


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_holds_the_model_and_what_belongs_to_it(source: Path, tmp_path: Path) -> None:
    rope_config = examples.bound_rope_config(source)
    before = content_of(source)
    left_behind = write_checkpoint_folder(source, tmp_path / "out", rope_config)
    assert content_of(source) == before
    assert left_behind == (".cache", *sorted([*LEFT_BEHIND, "original"]))

    written = content_of(tmp_path / "out")
    changed = {"config.json", "tokenizer_config.json", "rope_config.json"}
    assert set(written) == changed | set(KEPT) | {"model.safetensors", "tokenizer.json", "generation_config.json"}
    assert {name: content for name, content in written.items() if name not in changed} == {
        name: before[name] for name in written if name not in changed
    }
    assert RopeConfig.read(tmp_path / "out") == rope_config
    assert json.loads(written["config.json"])["rope_scaling"]["long_factor"] == list(examples.REGIME.factors)
    assert json.loads(written["config.json"])["max_position_embeddings"] == 256
    assert json.loads(written["tokenizer_config.json"])["model_max_length"] == 256
    binding = checkpoint_binding(tmp_path / "out")
    written_values = {"config": json.loads(written["config.json"]), "model_max_length": 256}
    assert binding == dataclasses.replace(rope_config.checkpoint, **written_values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()


def test_linked_weights_are_absolute_links_and_none_leaves_them_out(source: Path, tmp_path: Path) -> None:
    rope_config = examples.bound_rope_config(source)
    write_checkpoint_folder(source, tmp_path / "linked", rope_config, WeightsMode.link)
    link = tmp_path / "linked" / "model.safetensors"
    assert Path(os.readlink(link)) == (source / "model.safetensors").resolve()
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "linked", tmp_path / "moved")
    assert checkpoint_binding(tmp_path / "moved" / "linked").files == rope_config.checkpoint.files

    write_checkpoint_folder(source, tmp_path / "bare", rope_config, WeightsMode.none)
    assert not [name for name in content_of(tmp_path / "bare") if "safetensors" in name]
    assert "config.json" in content_of(tmp_path / "bare")


def test_shards_come_with_their_index(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    toys.toy_model().save_pretrained(source, max_shard_size="60KB")
    shards = sorted(path.name for path in source.glob("model-*.safetensors"))
    assert len(shards) > 1
    rope_config = examples.bound_rope_config(source)
    assert not set(shards) & set(write_checkpoint_folder(source, tmp_path / "out", rope_config))
    assert checkpoint_binding(tmp_path / "out").files == rope_config.checkpoint.files
    assert write_checkpoint_folder(source, tmp_path / "out", rope_config)
    write_checkpoint_folder(source, tmp_path / "bare", rope_config, WeightsMode.none)
    assert not list((tmp_path / "bare").glob("*.safetensors*"))


@pytest.mark.parametrize("weights", list(WeightsMode))
def test_writing_the_same_again_leaves_the_folder_alone(source: Path, tmp_path: Path, weights: WeightsMode) -> None:
    rope_config = examples.bound_rope_config(source)
    write_checkpoint_folder(source, tmp_path / "out", rope_config, weights)
    times = {path: path.lstat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    write_checkpoint_folder(source, tmp_path / "out", rope_config, weights)
    assert {path: path.lstat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times


@pytest.mark.parametrize("name", ["config.json", "README.md", "model.safetensors", "rope_config.json", "extra", None])
def test_a_different_destination_is_refused_and_kept(source: Path, tmp_path: Path, name: str | None) -> None:
    rope_config = examples.bound_rope_config(source)
    out = tmp_path / "out"
    write_checkpoint_folder(source, out, rope_config)
    weights = WeightsMode.copy
    if name is None:
        weights = WeightsMode.link
    else:
        with (out / name).open("ab") as file:
            file.write(b" ")
    before = content_of(out)
    with pytest.raises(InputError, match=rf"expected nothing, or the same content, got other: .*{name or 'link'}"):
        write_checkpoint_folder(source, out, rope_config, weights)
    assert content_of(out) == before


def test_a_file_or_a_link_in_the_place_is_refused(source: Path, tmp_path: Path) -> None:
    rope_config = examples.bound_rope_config(source)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(InputError, match="expected a folder or nothing"):
            write_checkpoint_folder(source, tmp_path / name, rope_config)
    with pytest.raises(InputError, match="expected nothing, or the same content"):
        write_checkpoint_folder(source, source, rope_config)
    (tmp_path / "empty").mkdir()
    write_checkpoint_folder(source, tmp_path / "empty", rope_config)
    assert RopeConfig.read(tmp_path / "empty") == rope_config


def test_another_checkpoint_is_refused_showing_both_digests(source: Path, tmp_path: Path) -> None:
    other = toys.write_checkpoint(tmp_path / "other", seed=1)
    rope_config = examples.bound_rope_config(other)
    with pytest.raises(BindingError) as caught:
        write_checkpoint_folder(source, tmp_path / "out", rope_config)
    assert rope_config.checkpoint.digest in str(caught.value)
    assert checkpoint_binding(source).digest in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_source_whose_settings_have_changed_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    rope_config = examples.bound_rope_config(source)
    (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | {"eos_token_id": 7}))
    with pytest.raises(BindingError, match=rf"expected the {name} .*: \$\.eos_token_id: expected 1, got 7"):
        write_checkpoint_folder(source, tmp_path / "out", rope_config)
    assert not (tmp_path / "out").exists()


def test_what_config_json_cannot_express_needs_permission(source: Path, tmp_path: Path) -> None:
    rope_config = examples.bound_rope_config(source, retained_tokens=3)
    with pytest.raises(InputError, match=r"expected a regime that config.json can express, got retained_tokens"):
        write_checkpoint_folder(source, tmp_path / "out", rope_config)
    write_checkpoint_folder(source, tmp_path / "out", rope_config, allow_unportable=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("rope_config_fingerprint") == rope_config.fingerprint
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_disk_space_is_said_before_copying(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope_config = examples.bound_rope_config(source)
    monkeypatch.setattr(folder_module, "_reflinked", lambda path, target: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(InputError, match="bytes of free disk space for the weights, got 1,000"):
        write_checkpoint_folder(source, tmp_path / "out", rope_config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    write_checkpoint_folder(source, tmp_path / "out", rope_config, WeightsMode.link)


def test_a_failure_on_the_way_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope_config = examples.bound_rope_config(source)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(InputError, match="No space left on device"):
        write_checkpoint_folder(source, tmp_path / "out", rope_config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
