import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from ropesearch.artifact.digest import checkpoint_binding, read_header, weight_files
from ropesearch.errors import InputError
from tests import toys

TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.norm.weight": np.ones(3, dtype=np.float16),
    "model.other.weight": np.ones(3, dtype=np.float16),
    "steps": np.array(7, dtype=np.int64),
    "nothing": np.zeros((0, 5), dtype=np.uint8),
}


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64, "clean": false}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path, shards: dict[str, list[str]], tensors: dict[str, Any] | None = None) -> None:
    """Replace model.safetensors by these shards and their index."""
    tensors = TENSORS if tensors is None else tensors
    (folder / "model.safetensors").unlink(missing_ok=True)
    for name, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_digest_is_the_one_of_the_definition(folder: Path) -> None:
    digests = []
    for name, array in TENSORS.items():
        dtype = {"f4": "F32", "f2": "F16", "i8": "I64", "u1": "U8"}[array.dtype.str[1:]]
        content = hashlib.sha256(array.tobytes()).hexdigest()
        shape = ",".join(str(length) for length in array.shape)
        digests.append(hashlib.sha256(f'["{name}","{dtype}",[{shape}],"{content}"]'.encode()).hexdigest())
    binding = checkpoint_binding(folder)
    assert binding.digest == "sha256:" + hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    assert binding.num_tensors == 5
    assert binding.num_parameters == 12 + 3 + 3 + 1 + 0
    files = {file.name: file for file in binding.files}
    assert list(files) == ["model.safetensors", "tokenizer.json"]
    for name, file in files.items():
        content = (folder / name).read_bytes()
        assert (file.num_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_the_same_weights_sharded_anew_have_the_same_digest(folder: Path) -> None:
    before = checkpoint_binding(folder)
    names = list(TENSORS)
    shard(folder, {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]})
    after = checkpoint_binding(folder)
    assert (after.digest, after.num_tensors, after.num_parameters) == (
        before.digest,
        before.num_tensors,
        before.num_parameters,
    )
    assert after.tokenizer_digest == before.tokenizer_digest
    assert after.files != before.files


@pytest.mark.parametrize(
    "changes",
    [
        {"model.norm.weight": np.ones(3, dtype=np.uint16) * 0x3C00},  # the same bytes as another dtype
        {"model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(3, 4)},
        {"renamed": TENSORS["steps"], "steps": None},
        {"model.other.weight": None},
        {"more": np.zeros((0,), dtype=np.uint8)},
    ],
)
def test_name_dtype_shape_and_number_of_tensors_enter_the_digest(folder: Path, changes: dict[str, Any]) -> None:
    before = checkpoint_binding(folder).digest
    tensors = {name: array for name, array in (TENSORS | changes).items() if array is not None}
    save_file(tensors, folder / "model.safetensors")
    assert checkpoint_binding(folder).digest != before


def test_exchanging_the_content_of_two_tensors_changes_the_digest(folder: Path) -> None:
    tensors = {"a": np.float32([1, 2]), "b": np.float32([3, 4])}
    save_file(tensors, folder / "model.safetensors")
    before = checkpoint_binding(folder).digest
    save_file({"a": tensors["b"], "b": tensors["a"]}, folder / "model.safetensors")
    assert checkpoint_binding(folder).digest != before


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_of_the_tensors_changes_the_digest(folder: Path, data: st.DataObject) -> None:
    path = folder / "model.safetensors"
    save_file(TENSORS, path)
    before = checkpoint_binding(folder)
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(start, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    after = checkpoint_binding(folder)
    assert after.digest != before.digest
    assert after.tokenizer_digest == before.tokenizer_digest


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_the_safetensors_library_refuses_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Damaged headers give InputError or, where both readers accept, the same tensors; never anything else."""
    content = bytearray(save(TENSORS, metadata={"format": "np"}))
    start = 8 + int.from_bytes(content[:8], "little")
    where = data.draw(st.integers(0, start - 1))
    match data.draw(st.sampled_from(["flip", "delete", "insert", "truncate", "append"])):
        case "flip":
            content[where] ^= 1 << data.draw(st.integers(0, 7))
        case "delete":
            del content[where : where + data.draw(st.integers(1, 8))]
        case "insert":
            content[where:where] = data.draw(st.binary(min_size=1, max_size=4))
        case "truncate":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "append":
            content += data.draw(st.binary(min_size=1, max_size=9))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except InputError as error:
        assert str(path) in str(error)
        return
    with safetensors.safe_open(path, "np") as file:
        assert {entry.name for entry in entries} == set(file.keys())
        for entry in entries:
            stored = file.get_slice(entry.name)
            assert (entry.dtype, list(entry.shape)) == (stored.get_dtype(), stored.get_shape())
            if entry.dtype in ("F32", "F16", "I64", "U8"):
                assert file.get_tensor(entry.name).tobytes() == path.read_bytes()[entry.begin : entry.end]


def header_file(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), "expected 8 bytes for F32 of shape"),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "one of the dtypes"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "one of the dtypes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4), "expected counts"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4), "expected counts"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4), "expected counts"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [True, 5]}}, bytes(5), "expected counts"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "expected dtype, shape and data_offsets"),
        ({"a": 3}, bytes(4), "expected dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8), "to start at byte 0"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5), "got .* bytes?|something appended"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(5), "truncated"),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            bytes(6),
            "to start at byte 4",
        ),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        (b"[]", b"", "expected a JSON object"),
        ({"__metadata__": {"format": 3}}, b"", "expected text under __metadata__"),
        ({"__metadata__": {"format": "qt"}}, b"", "expected one of the formats pt, .* in the header, got 'qt'"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_header(header_file(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0", (2**63).to_bytes(8, "little") + b"{}", b"PK\x03\x04" * 9])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.safetensors: expected a safetensors header"):
        read_header(tmp_path / "bad.safetensors")


def test_a_truncated_shard_is_named(folder: Path) -> None:
    names = list(TENSORS)
    shard(folder, {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]})
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors: expected .* truncated"):
        checkpoint_binding(folder)


def test_indexes_that_do_not_fit_the_shards_are_refused(folder: Path) -> None:
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    index = folder / "model.safetensors.index.json"

    shard(folder, shards)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"expected the shard model-00002-of-00002\.safetensors"):
        weight_files(folder)

    shard(folder, {**shards, "model-00002-of-00002.safetensors": names[1:]})
    with pytest.raises(InputError, match=r"expected tensor 'model.norm.weight' in one file, got it in"):
        checkpoint_binding(folder)

    shard(folder, shards)
    value = json.loads(index.read_text())
    value["weight_map"]["steps"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(value))
    with pytest.raises(InputError, match="expected tensor 'steps' in model-00001"):
        checkpoint_binding(folder)

    for name in ("../model.safetensors", "model.bin", "/etc/x.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(InputError, match="expected names of safetensors files in this folder"):
            weight_files(folder)
    for content in ({}, {"weight_map": []}, {"weight_map": {"a": 3}}):
        index.write_text(json.dumps(content))
        with pytest.raises(InputError, match="expected weight_map"):
            weight_files(folder)


def test_folders_without_weights_or_tokenizer_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="expected tokenizer files"):
        checkpoint_binding(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"put the weights there \(pickled ones are not read"):
        checkpoint_binding(folder)
    with pytest.raises(InputError, match="expected a checkpoint folder, got nothing"):
        checkpoint_binding(folder / "absent")


def test_a_tied_output_head_counts_once(folder: Path) -> None:
    embeddings = TENSORS["model.embed_tokens.weight"]
    tied = TENSORS | {"lm_head.weight": embeddings}
    once = checkpoint_binding(folder)

    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    save_file(tied, folder / "model.safetensors")
    stored_twice = checkpoint_binding(folder)
    assert (stored_twice.digest, stored_twice.num_parameters) == (once.digest, once.num_parameters)

    # Stored twice with other content, it is not the same weight, whatever config.json says.
    save_file(tied | {"lm_head.weight": embeddings + 1}, folder / "model.safetensors")
    assert checkpoint_binding(folder).num_tensors == once.num_tensors + 1

    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file(tied, folder / "model.safetensors")
    assert checkpoint_binding(folder).num_tensors == once.num_tensors + 1


def test_a_tied_toy_counts_its_parameters_as_torch_does(tmp_path: Path) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", "qwen3", tie_word_embeddings=True)
    model = toys.toy_model("qwen3", tie_word_embeddings=True)
    assert checkpoint_binding(folder).num_parameters == sum(weight.numel() for weight in model.parameters())


def test_the_tokenizer_digest_covers_what_changes_text_or_ids(folder: Path) -> None:
    def digest() -> str:
        return checkpoint_binding(folder).tokenizer_digest

    before = digest()
    config = folder / "tokenizer_config.json"
    config.write_text('{"clean": false, "model_max_length": 1048576}')
    assert digest() == before
    config.write_text('{"clean": true, "model_max_length": 64}')
    assert digest() != before
    config.write_text('{"model_max_length": 64, "clean": false}')
    assert digest() == before

    seen = {before}
    for name in (
        "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "x.tiktoken", "x.py",
    ):  # fmt: skip
        (folder / name).write_text("x")
        seen.add(digest())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    seen.add(digest())
    (folder / "tokenizer.json").write_text('{"model": {} }')
    seen.add(digest())
    assert len(seen) == 9
    (folder / "README.md").write_text("x")
    assert digest() in seen


def test_a_folder_elsewhere_has_the_same_binding(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "folder"
    shutil.copytree(folder, copy)
    assert checkpoint_binding(copy) == checkpoint_binding(folder)


def test_the_settings_are_taken_over_as_they_are(folder: Path) -> None:
    binding = checkpoint_binding(folder)
    assert binding.config == {"tie_word_embeddings": False}
    assert (binding.generation_config, binding.model_max_length) == (None, 64)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "config.json").write_text('{"a": {"b": 1.0}}')
    binding = checkpoint_binding(folder)
    assert (binding.config, binding.generation_config) == ({"a": {"b": 1.0}}, {"eos_token_id": [1, 2]})
    (folder / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    with pytest.raises(InputError, match="transformers_weights names another file"):
        checkpoint_binding(folder)


def test_what_would_make_a_reader_wait_or_put_an_adapter_on_is_refused(folder: Path) -> None:
    for name, message in (("adapter_config.json", "holds an adapter"), ("README.md", "got a broken link")):
        if name == "README.md":
            (folder / name).symlink_to(folder / "gone")
        else:
            (folder / name).write_text("{}")
        with pytest.raises(InputError, match=message):
            checkpoint_binding(folder)
        (folder / name).unlink()
    (folder / "additional_chat_templates").mkdir()
    for path in (folder / "pipe", folder / "additional_chat_templates" / "x.jinja"):
        os.mkfifo(path)
        with pytest.raises(InputError, match=f"{path}: expected a regular file or a folder, got something else"):
            checkpoint_binding(folder)
        path.unlink()
