"""ropesearch/artifact/weights.py: other weights in the files, names and types of the checkpoint that they come from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.schema import RopeConfig
from ropesearch.artifact.weights import check_stored_names, stored_dtypes, write_weights
from ropesearch.errors import InputError
from tests import toys
from tests.artifact.examples import write_example


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def sharded(folder: Path) -> Path:
    """The toy's extended folder with its weights in three files, one tensor in bfloat16."""
    extended = write_example(folder)
    tensors = load_file(extended / "model.safetensors")
    (extended / "model.safetensors").unlink()
    names = sorted(tensors)
    tensors[names[0]] = tensors[names[0]].to(torch.bfloat16)
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, extended / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[part::3], file)
    (extended / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return extended


def test_files_names_and_types_are_the_source_s_and_values_are_new(tmp_path: Path) -> None:
    source = sharded(tmp_path / "model")
    rope_config, old = RopeConfig.read(source), tensors_in(source)
    generator = torch.Generator().manual_seed(0)
    new = {name: torch.randn(each.shape, generator=generator) for name, each in old.items()}
    asked = []

    def tensor_of(name: str) -> torch.Tensor:
        asked.append(name)
        return new[name]

    write_weights(source, tmp_path / "new", rope_config, tensor_of)
    assert sorted(path.name for path in (tmp_path / "new").glob("*.safetensors")) == sorted(
        path.name for path in source.glob("*.safetensors")
    )
    found = tensors_in(tmp_path / "new")
    assert found.keys() == old.keys()
    for name, each in found.items():
        assert each.dtype == old[name].dtype
        assert torch.equal(each, new[name].to(each.dtype)), name
    assert {each.dtype for each in found.values()} == {torch.float32, torch.bfloat16}
    binding = checkpoint_binding(tmp_path / "new")
    bound = rope_config.checkpoint
    assert binding.config == bound.config and binding.model_max_length == bound.model_max_length
    assert binding.tokenizer_digest == bound.tokenizer_digest
    assert binding.digest != checkpoint_binding(source).digest
    # A process without a folder asks for the same tensors in the same order.
    in_order = list(asked)
    asked.clear()
    write_weights(source, None, rope_config, tensor_of)
    assert asked == in_order


def test_the_same_values_make_the_same_checkpoint(tmp_path: Path) -> None:
    source = write_example(tmp_path / "model")
    old = tensors_in(source)
    write_weights(source, tmp_path / "new", RopeConfig.read(source), lambda name: old[name])
    assert checkpoint_binding(tmp_path / "new").digest == RopeConfig.read(source).checkpoint.digest


def test_types_are_told_by_name(tmp_path: Path) -> None:
    source = sharded(tmp_path / "model")
    assert stored_dtypes(source) == {name: each.dtype for name, each in tensors_in(source).items()}


def test_names_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    source = toys.write_checkpoint(tmp_path / "model")
    names = set(tensors_in(source))
    check_stored_names(source, names)
    with pytest.raises(InputError, match="expected stored tensors with the names that transformers' model gives them"):
        check_stored_names(source, names - {"lm_head.weight"})


def test_weights_that_are_no_numbers_with_a_point_are_refused(tmp_path: Path) -> None:
    source = toys.write_checkpoint(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"expected weights in floating point .*, got I8 in 'lm_head.weight'"):
        check_stored_names(source, set(tensors))
