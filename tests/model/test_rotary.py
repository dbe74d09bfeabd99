import pytest
import torch

from ropesearch.errors import InputError
from ropesearch.model.rotary import check_geometry, find_rotary
from tests import toys
from tests.rope.test_geometry import make_geometry


def test_the_one_module_of_a_decoder() -> None:
    model = toys.toy_model()
    assert find_rotary(model, "llama") is model.model.rotary_emb


def test_a_second_holder_is_refused() -> None:
    model = toys.toy_model()
    model.model.layers[1].self_attn.rotary_emb = toys.toy_model().model.rotary_emb
    with pytest.raises(InputError, match=r"got model.layers.1.self_attn.rotary_emb, model.rotary_emb"):
        find_rotary(model, "llama")


def test_no_holder_is_refused() -> None:
    with pytest.raises(InputError, match=r"'other': expected one rotary module at <decoder>.rotary_emb, .* got none"):
        find_rotary(torch.nn.Linear(2, 2), "other")


def test_geometry_is_held_against_the_table() -> None:
    rotary = toys.toy_model().model.rotary_emb
    check_geometry(rotary, make_geometry(rotary_dim=16, rope_theta=1e4))
    with pytest.raises(InputError, match="describes 16 rotary pairs, the built model has 8"):
        check_geometry(rotary, make_geometry(rotary_dim=32, rope_theta=1e4))
    with pytest.raises(InputError, match="are not those of rope_theta = 10001"):
        check_geometry(rotary, make_geometry(rotary_dim=16, rope_theta=10001.0))
    with pytest.raises(InputError, match=r"expected a float32 table .* got torch.bfloat16"):
        check_geometry(rotary.to(torch.bfloat16), make_geometry(rotary_dim=16, rope_theta=1e4))
