"""The copying heads change nothing but themselves, and look where they are drawn to look."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ropesearch.demo.copying import LOOK_BACK_BIAS, NUM_LOOK_BACK_PAIRS, OUTPUT_FACTOR, with_copying_heads
from ropesearch.demo.train import model_config
from ropesearch.seeding import stream


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(model_config()).eval()


@pytest.fixture(scope="module")
def widened(plain) -> LlamaForCausalLM:
    return with_copying_heads(plain, stream(0, "tests.copying"))


def test_only_the_first_head_of_the_first_two_layers_differs(plain, widened):
    before, after = plain.state_dict(), widened.state_dict()
    for name, value in after.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        value = value.clone()
        if layer in (0, 1) and name.endswith("o_proj.weight"):
            value[:, :64] = before[name][:, :64]
        elif layer in (0, 1) and "_proj.weight" in name and "self_attn" in name:
            value[:64] = before[name][:64]
        elif layer == 0 and name.endswith(("q_proj.bias", "k_proj.bias")):
            value[:64] = 0.0
        assert torch.equal(value, before[name] if name in before else torch.zeros_like(value)), name
    assert not plain.config.attention_bias and plain.state_dict().keys() < after.keys()


def test_weights_are_alike_where_they_shall_match(widened):
    first, second = (layer.self_attn for layer in widened.model.layers[:2])
    assert torch.equal(second.k_proj.weight[:64], second.q_proj.weight[:64])
    assert not torch.equal(first.k_proj.weight[:64], first.q_proj.weight[:64])
    for attention in (first, second):
        assert torch.equal(attention.o_proj.weight[:, :64], OUTPUT_FACTOR * attention.v_proj.weight[:64].T)


def test_biases_alone_look_one_token_back(widened):
    """The scores of query and key biases under the rotary embedding depend on the distance only: greatest at 1, where
    every pair's rotation is undone and each contributes the square of its bias."""
    attention = widened.model.layers[0].self_attn
    query, key = (layer.bias[:64].detach().double().numpy() for layer in (attention.q_proj, attention.k_proj))
    angles = widened.model.rotary_emb.inv_freq.double().numpy()[:, None] * np.arange(256)
    rotated = np.exp(-1j * angles) * (key[:32] + 1j * key[32:])[:, None]  # of a key that stands this far back
    scores = ((query[:32] - 1j * query[32:])[:, None] * rotated).real.sum(0)
    assert scores.argmax() == 1
    assert scores[1] == pytest.approx(NUM_LOOK_BACK_PAIRS * LOOK_BACK_BIAS**2)


def test_the_stream_decides(plain):
    a, b, other = (with_copying_heads(plain, stream(seed, "tests.copying")).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.layers.0.self_attn.q_proj.weight"], other["model.layers.0.self_attn.q_proj.weight"])
