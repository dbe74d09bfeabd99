"""Attention heads that find what stood before: drawn near a solution, because a small model takes long to reach one.

A head that looks one token back, and one in the next layer that looks for a token whose predecessor is the current one,
together continue what was read before ("induction", Olsson et al., "In-context Learning and Induction Heads", 2022).
Weights of queries and keys that are alike, and of values and outputs that undo each other, bring them about (Trockman
and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023); query and key biases that are one position apart
under the rotary embedding make the first head look back from the start.
"""

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

PROJECTION_STD = 0.08
OUTPUT_FACTOR = 0.3
LOOK_BACK_BIAS = 4.0
NUM_LOOK_BACK_PAIRS = 8  # the fastest ones: only they tell neighbours apart


def with_copying_heads(model: LlamaForCausalLM, rng: np.random.Generator) -> LlamaForCausalLM:
    """A copy of a model without attention biases, with zero biases (they change nothing) but for the first head of the
    first two layers, which is drawn anew: the first looks one token back, the second for the current token.
    """
    config = copy.deepcopy(model.config)
    config.attention_bias = True
    widened = LlamaForCausalLM(config).train(model.training)
    plain = dict(model.named_parameters())
    for name, parameter in widened.named_parameters():
        parameter.data = plain[name].detach().clone() if name in plain else torch.zeros_like(parameter)
    width = config.head_dim

    def draw() -> Tensor:
        values = rng.normal(0.0, PROJECTION_STD, size=(width, config.hidden_size))
        return torch.from_numpy(values.astype(np.float32))

    first, second = (layer.self_attn for layer in widened.model.layers[:2])
    with torch.no_grad():
        for attention in (first, second):
            attention.q_proj.weight[:width] = draw()
            attention.k_proj.weight[:width] = draw() if attention is first else attention.q_proj.weight[:width]
            attention.v_proj.weight[:width] = draw()
            attention.o_proj.weight[:, :width] = OUTPUT_FACTOR * attention.v_proj.weight[:width].T
        angles = widened.model.rotary_emb.inv_freq[:NUM_LOOK_BACK_PAIRS]  # between neighbours
        half = width // 2  # where the second elements of the pairs begin
        first.q_proj.bias[:NUM_LOOK_BACK_PAIRS] = LOOK_BACK_BIAS
        first.k_proj.bias[:NUM_LOOK_BACK_PAIRS] = LOOK_BACK_BIAS * torch.cos(angles)
        first.k_proj.bias[half : half + NUM_LOOK_BACK_PAIRS] = LOOK_BACK_BIAS * torch.sin(angles)
    return widened
