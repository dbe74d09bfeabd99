from typing import Any

import numpy as np
import pytest
import torch

from ropesearch.errors import InputError
from ropesearch.model.rotary import (
    RotaryTable,
    check_plain,
    find_tables,
    layout_of,
    matching_layout,
    rescaled_tables,
)
from ropesearch.model.skeleton import build_skeleton
from tests import tiny_models, toys


def skeleton(model_type: str, **overrides: Any) -> Any:
    return build_skeleton(tiny_models.tiny_config(model_type, **overrides))


def test_the_one_table_of_a_decoder() -> None:
    model = toys.toy_model()
    (table,) = find_tables(model, "llama")
    assert (table.name, table.module, table.layer_type) == ("model.rotary_emb", model.model.rotary_emb, None)
    assert rescaled_tables([table], "llama") == (table,)


def test_tables_by_layer_type() -> None:
    model = skeleton("gemma3_text")
    full, sliding = find_tables(model, "gemma3_text")
    assert (full.layer_type, sliding.layer_type) == ("full_attention", "sliding_attention")
    assert full.inv_freq is model.model.rotary_emb.full_attention_inv_freq
    assert rescaled_tables([full, sliding], "gemma3_text") == (full,)
    with pytest.raises(InputError, match=r"only tables of windowed layers .*sliding_attention"):
        rescaled_tables([sliding], "gemma3_text")


def test_a_module_in_every_layer_is_one_table() -> None:
    tables = find_tables(skeleton("moshi"), "moshi")
    assert [table.name for table in tables] == [f"model.layers.{layer}.self_attn.rotary_emb" for layer in range(4)]
    assert rescaled_tables(tables, "moshi") == tables


def test_tables_that_differ_are_refused() -> None:
    model = toys.toy_model()
    model.model.layers[1].self_attn.rotary_emb = toys.toy_model().model.rotary_emb
    tables = find_tables(model, "llama")
    with pytest.raises(InputError, match=r"\(model.layers.1.self_attn.rotary_emb, model.rotary_emb\); which factors"):
        rescaled_tables(tables, "llama")
    model.model.layers[1].self_attn.rotary_emb.config = model.config
    rescaled_tables(tables, "llama")
    model.model.layers[1].self_attn.rotary_emb.inv_freq *= 2
    with pytest.raises(InputError, match="several that differ"):
        rescaled_tables(tables, "llama")


def test_no_table_is_refused() -> None:
    with pytest.raises(InputError, match=r"'other': expected a model with rotary position embeddings, got one without"):
        find_tables(torch.nn.Linear(2, 2), "other")
    holder = torch.nn.Module()
    holder.register_buffer("inv_freq", torch.ones(4))
    with pytest.raises(InputError, match="expected rotary modules with attention_scaling and rope_type"):
        find_tables(torch.nn.Sequential(holder), "other")


def test_theta_is_held_against_the_table() -> None:
    table = find_tables(toys.toy_model(), "llama")[0]
    check_plain(table, 1e4, "llama")
    with pytest.raises(InputError, match=r"at model.rotary_emb are not those of rope_theta = 10001"):
        check_plain(table, 10001.0, "llama")
    table.module.to(torch.bfloat16)
    with pytest.raises(InputError, match=r"expected a float32 table .* got torch.bfloat16"):
        check_plain(table, 1e4, "llama")


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", "halves"),
        ("cohere", "neighbours"),
        ("gpt_oss", "single"),
        ("llama4_text", "single"),
        ("gemma3_text", "halves"),
        ("qwen3_5_text", "halves"),
    ],
)
def test_layouts_are_learnt_from_the_module(model_type: str, layout: str) -> None:
    tables = find_tables(skeleton(model_type), model_type)
    assert [layout_of(table, model_type) for table in tables] == [layout] * len(tables)


def test_rows_match_in_their_layout_only() -> None:
    angles = np.arange(3)[:, None] * np.array([1.0, 0.5, 0.1])
    cos, sin, tolerance = np.cos(angles), np.sin(angles), np.full((3, 3), 1e-6)

    def rows(values: np.ndarray, layout: str) -> torch.Tensor:
        answer = {
            "halves": lambda: np.concatenate([values, values], axis=-1),
            "neighbours": lambda: np.repeat(values, 2, axis=-1),
            "single": lambda: values,
        }[layout]()
        return torch.tensor(answer)[None]

    for layout in ("halves", "neighbours", "single"):
        assert matching_layout((rows(cos, layout), rows(sin, layout)), cos, sin, tolerance) == layout
        # One value that is off, in either tensor and in either copy, is no match.
        for place in (0, -1):
            wrong = rows(cos, layout)
            wrong[0, 1, place] += 1e-5
            assert matching_layout((wrong, rows(sin, layout)), cos, sin, tolerance) is None
            assert matching_layout((rows(cos, layout), rows(sin, layout).roll(1, -1)), cos, sin, tolerance) is None
    assert matching_layout(torch.complex(rows(cos, "single"), rows(sin, "single")), cos, sin, tolerance) == "single"
    for other in (None, rows(cos, "single"), (rows(cos, "single"),), (rows(cos, "halves"), rows(sin, "single"))):
        assert matching_layout(other, cos, sin, tolerance) is None


def test_a_module_that_cannot_be_asked_is_refused() -> None:
    table = find_tables(toys.toy_model(), "llama")[0]

    class Deaf(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inv_freq, self.attention_scaling = table.inv_freq, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(InputError, match="cannot be asked for cos and sin at given positions"):
        layout_of(RotaryTable(name="here", module=Deaf()), "other")
