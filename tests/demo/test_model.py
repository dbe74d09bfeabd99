"""The shipped model is what the card says: small, 32 pairs, plain rotary tables, and these very weights."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropesearch.demo.measure import LENGTH_TOKENS, load, read_texts, token_nats

DEMO = Path(str(resources.files("ropesearch.demo")))
MODEL = DEMO / "model"
PERPLEXITY = 40.2096  # of the first held-out document's first 2,048 tokens, unscaled


def test_files_are_those_of_a_checkpoint_folder_and_small():
    names = {path.name for path in MODEL.iterdir()}
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == files | {"README.md"}
    assert (MODEL / "model.safetensors").stat().st_size < 6_000_000


def test_model_has_the_geometry_of_the_card():
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.num_parameters() <= 1_500_000
    assert model.config.max_position_embeddings == 256
    assert model.config.rope_parameters == {"rope_theta": 1000.0, "rope_type": "default"}
    assert model.config.head_dim == 64
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), 1000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    with safe_open(MODEL / "model.safetensors", framework="np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118


def test_tokenizer_prepends_bos_splits_digits_and_gives_text_back():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "In 1823 the sum was $10,450;\n\ncaf\u00e9  and \u2014 so on.\n"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 2048
    assert (ids[0], tokenizer.convert_ids_to_tokens(ids[0])) == (0, "<s>")
    assert ids[1:] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[1:]) == text
    pieces = [tokenizer.decode([token]) for token in ids]
    assert all(len(piece.strip()) == 1 for piece in pieces if any(character.isdigit() for character in piece))


def test_perplexity_of_one_held_out_window_is_the_recorded_one():
    ids = AutoTokenizer.from_pretrained(MODEL)(read_texts(DEMO / "texts" / "held_out")[0])["input_ids"]
    nats = token_nats(load(MODEL, "unscaled", 1.0), np.array([ids[:LENGTH_TOKENS]]))
    assert np.exp(nats.mean()) == pytest.approx(PERPLEXITY, rel=1e-3)
