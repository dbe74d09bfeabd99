import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from ropesearch.errors import InputError
from ropesearch.model.config import Attention, DType, ModelConfig
from ropesearch.model.load import load_model, load_tokenizer, read_geometry
from ropesearch.rope.geometry import Geometry
from tests import toys


@pytest.fixture
def folder(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the toy Llama's folder, to be spoilt."""
    return Path(shutil.copytree(toy_folder, tmp_path / "model"))


def load(path: Path | str, **changes: Any) -> Any:
    return load_model(ModelConfig(path=str(path), device="cpu", **changes))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_loaded_as_it_was_written(tmp_path: Path, architecture: str, dtype: str) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", architecture, dtype=dtype)
    loaded = load(folder)
    assert loaded.geometry == Geometry(
        model_type=architecture, head_dim=16, rotary_dim=16, original_length=64, rope_theta=10000.0
    )
    assert (loaded.folder, loaded.dtype, loaded.attention, loaded.device) == (folder, dtype, "sdpa", "cpu")
    stored = load_file(folder / "model.safetensors")
    state = loaded.model.state_dict()
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer("hi").input_ids[0] == 0
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_dtype_asked_for_wins(toy_folder: Path) -> None:
    assert load(toy_folder, dtype=DType.bfloat16).model.dtype == torch.bfloat16


def test_tied_and_sharded_weights(tmp_path: Path) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy", tie_word_embeddings=True)
    toys.toy_model(tie_word_embeddings=True).save_pretrained(tmp_path / "sharded", max_shard_size="20kB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "sharded")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    one, other = load(folder).model, load(tmp_path / "sharded").model
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    shard = next((tmp_path / "sharded").glob("model-00002*.safetensors"))
    shard.unlink()
    with pytest.raises(InputError, match=f"names shards that are not there: {shard.name}"):
        load(tmp_path / "sharded")


def test_tokenizer_alone_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert (
        tokenizer("a", add_special_tokens=False).input_ids
        == toys.toy_tokenizer()("a", add_special_tokens=False).input_ids
    )


class TestGeometry:
    def test_of_older_config_files(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"], config["head_dim"]
        config |= {"rope_theta": 500000.0, "rope_scaling": None, "hidden_size": 256, "num_attention_heads": 8}
        (folder / "config.json").write_text(json.dumps(config))
        geometry = read_geometry(folder)
        assert (geometry.rope_theta, geometry.head_dim, geometry.num_pairs) == (500000.0, 32, 16)

    def test_head_dim_is_the_one_written(self, folder: Path) -> None:
        toys.edit_config(folder, {"head_dim": 128})
        assert read_geometry(folder).num_pairs == 64

    def test_original_length_given_wins(self, toy_folder: Path) -> None:
        assert read_geometry(toy_folder).original_length == 64
        assert read_geometry(toy_folder, 32).original_length == 32
        assert load(toy_folder, original_length=32).geometry.original_length == 32

    def test_pairs_are_counted_in_the_built_module(self, folder: Path) -> None:
        # Llama's default table ignores partial_rotary_factor, its scaled ones do not.
        parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        toys.edit_config(folder, {"rope_parameters": parameters})
        assert load(folder).geometry.num_pairs == 8


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("rope_type", SCALED)
def test_scaled_checkpoints_need_original_length(folder: Path, key: str, rope_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {key: {"rope_theta": 10000.0, "original_max_position_embeddings": 64} | SCALED[rope_type]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"^model.original_length: expected the length .*rope_type '{rope_type}'"):
        load(folder)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


OTHER_CONFIGS = {
    "gpt2": ({"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1}, "'gpt2': expected a model with rotary"),
    "t5": ({"model_type": "t5"}, "'t5': expected a model with rotary"),
    "llava": ({"model_type": "llava"}, "'llava': expected a plain decoder"),
    "unheard-of": ({"model_type": "unheard-of"}, "model type 'unheard-of'. is not usable"),
    "no type": ({"hidden_size": 8}, "expected a model_type, got none"),
    "quantised": (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        "got a quantised checkpoint",
    ),
    "theta": ({"model_type": "llama", "rope_theta": "big"}, "config.json"),
    "heads": ({"model_type": "llama", "num_attention_heads": 0}, "config.json"),
    "length": ({"model_type": "llama", "max_position_embeddings": 1}, "expected at least 2 tokens, got 1"),
}


@pytest.mark.parametrize(("config", "expected"), OTHER_CONFIGS.values(), ids=OTHER_CONFIGS.keys())
def test_configs_that_cannot_be_used_are_named(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    write_config(tmp_path, config)
    with pytest.raises(InputError, match=expected):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "expected a checkpoint with config.json, got none"),
        ("{", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
    ],
)
def test_config_files_that_are_none(folder: Path, content: str | None, expected: str) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(InputError, match=expected):
        load(folder)


def test_remote_code_runs_only_when_asked_for(tmp_path: Path) -> None:
    """A checkpoint with code of its own, which would leave a mark; nothing runs, and the refusal says why."""
    folder = toys.write_checkpoint(tmp_path / "toy")
    mark = tmp_path / "mark"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    write_config(
        folder,
        {"model_type": "of-its-own", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}},
    )
    with pytest.raises(InputError, match=r"'of-its-own'. is not usable.*contains custom code"):
        load(folder)
    assert not mark.exists()


class TestWeightsRefused:
    def test_pickled(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(InputError, match=r"got pytorch_model.bin, a pickled file"):
            load(folder)

    def test_gguf(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "toy-Q4.gguf")
        with pytest.raises(InputError, match=r"toy-Q4.gguf is a GGUF file"):
            load(folder)
        with pytest.raises(InputError, match=r"toy-Q4.gguf is a GGUF file"):
            load(folder / "toy-Q4.gguf")

    def test_none(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(
            InputError, match=r"expected model.safetensors or model.safetensors.index.json, got neither"
        ):
            load(folder)

    def test_adapter(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(InputError, match="holds an adapter"):
            load(folder)

    def test_cut_short(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(InputError, match="the llama model could not be loaded: SafetensorError"):
            load(folder)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"num_hidden_layers": 3}, r"the weight files lack model.layers.2\..* and 6 more"),
            ({"num_hidden_layers": 1}, r"hold tensors that config.json has no place for: model.layers.1\."),
            ({"intermediate_size": 48}, "tensors of other shapes than config.json asks for: "),
        ],
    )
    def test_not_of_this_config(self, folder: Path, changes: dict[str, int], expected: str) -> None:
        toys.edit_config(folder, changes)
        with pytest.raises(InputError, match=expected):
            load(folder)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, folder: Path, value: float) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match=r"got NaN or infinity in model.layers.1.mlp.up_proj.weight"):
            load(folder)


class TestPlaces:
    def test_nothing(self) -> None:
        with pytest.raises(InputError, match="expected a checkpoint folder or a hub id, got nothing"):
            load("")

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such folder"):
            load(tmp_path / "none")

    def test_a_file(self, toy_folder: Path) -> None:
        with pytest.raises(InputError, match="got the file"):
            load(toy_folder / "config.json")

    def test_revision_of_a_folder(self, toy_folder: Path) -> None:
        with pytest.raises(InputError, match=r"model.revision: expected none for the local folder"):
            load(toy_folder, revision="main")

    @pytest.mark.parametrize("path", ["nobody/nothing", "no-such-model", "a/b/c", "a b"])
    def test_hub_ids_that_cannot_be_had(self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        for call in (load_model, load_tokenizer):
            with pytest.raises(InputError, match=f"'{path}' is no folder here, .* neither in the local cache nor"):
                call(ModelConfig(path=path))

    def test_hub_id_in_the_cache(self, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        commit = "0123456789abcdef0123456789abcdef01234567"
        snapshot = tmp_path / "models--somebody--toy" / "snapshots" / commit
        shutil.copytree(toy_folder, snapshot)
        (tmp_path / "models--somebody--toy" / "refs").mkdir()
        (tmp_path / "models--somebody--toy" / "refs" / "main").write_text(commit)
        loaded = load("somebody/toy")
        assert (loaded.folder, loaded.geometry.num_pairs) == (snapshot, 8)
        assert load("somebody/toy", revision=commit).folder == snapshot
        with pytest.raises(InputError, match="at revision 'v2' it is neither"):
            load("somebody/toy", revision="v2")


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="expected a tokenizer"):
        load(folder)


def test_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer could not be loaded"):
        load(folder)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", "mps", "privateuseone", "cuda:x"])
def test_devices_that_are_not_there(toy_folder: Path, device: str) -> None:
    """Of all jobs: the key is `device` in most, and torch's list of all that it could be built for helps nobody."""
    with pytest.raises(InputError, match=f"^device: expected a torch device that is here, .*'{device}'") as refusal:
        load_model(ModelConfig(path=str(toy_folder), device=device))
    assert str(refusal.value).endswith("; give another, or auto") and "opengl" not in str(refusal.value)
    assert len(str(refusal.value)) < 250


def test_attention_that_is_not_installed(toy_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("flash attention may be installed here")
    with pytest.raises(InputError, match=r"^attention: .*of flash_attention_2 .*; install it, or give attention sdpa$"):
        load(toy_folder, attention=Attention.flash_attention_2)


def test_a_config_that_contradicts_itself_is_an_input_error(tmp_path: Path) -> None:
    folder = toys.write_checkpoint(tmp_path / "toy")
    toys.edit_config(folder, {"hidden_size": 33})
    with pytest.raises(InputError, match=r"config\.json .*not usable.*multiple of the number of attention heads"):
        read_geometry(folder)


def test_a_tokenizer_that_contradicts_itself_is_an_input_error(tmp_path: Path) -> None:
    """The tokenizers library answers such a file with a plain Exception."""
    folder = toys.write_checkpoint(tmp_path / "toy")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = ["a nowhere"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="the tokenizer could not be loaded"):
        load_tokenizer(ModelConfig(path=str(folder)))
