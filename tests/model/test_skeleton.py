import pytest
import torch

from ropesearch.errors import InputError
from ropesearch.model.rotary import find_tables
from ropesearch.model.skeleton import build_skeleton, rotary_modules
from tests import tiny_models, toys


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "phi", "moshi", "zaya"])
def test_tables_are_real_and_weights_are_not(model_type: str) -> None:
    config = tiny_models.tiny_config(model_type)
    skeleton, model = build_skeleton(config), tiny_models.tiny_model(config)
    tables, whole = find_tables(skeleton, model_type), find_tables(model, model_type)
    assert [table.name for table in tables] == [table.name for table in whole]
    for one, other in zip(tables, whole, strict=True):
        assert one.inv_freq.dtype == torch.float32
        assert torch.equal(one.inv_freq, other.inv_freq)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert not skeleton.training


def test_a_large_model_is_built_without_its_weights() -> None:
    config = toys.toy_config(hidden_size=16384, intermediate_size=65536, num_hidden_layers=126, head_dim=128)
    skeleton = build_skeleton(config)
    assert sum(parameter.numel() for parameter in skeleton.parameters()) > 4e11
    assert [module.inv_freq.numel() for module in rotary_modules(skeleton)] == [64]


def test_what_cannot_be_built_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"'hunyuan_v1_dense': transformers cannot build the model .*TypeError"):
        build_skeleton(tiny_models.tiny_config("hunyuan_v1_dense", head_dim=None))
    from transformers import LlavaConfig, ViTConfig

    with pytest.raises(InputError, match="'llava': expected a causal language model"):
        build_skeleton(LlavaConfig())
    assert not rotary_modules(build_skeleton(ViTConfig()))
