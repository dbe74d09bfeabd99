"""The measuring functions against the definitions, on the shipped model; its figures are those of the card."""

import math
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from ropesearch.demo.measure import (
    LENGTH_TOKENS,
    load,
    main,
    measure,
    needle_prompts,
    num_exact,
    read_texts,
    token_nats,
)
from ropesearch.errors import InputError

DEMO = Path(str(resources.files("ropesearch.demo")))
MODEL = DEMO / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return load(MODEL, "unscaled", 1.0)


@pytest.fixture(scope="module")
def document(tokenizer):
    return np.array(tokenizer(read_texts(DEMO / "texts" / "held_out")[0])["input_ids"], dtype=np.int64)


@pytest.mark.parametrize("method", ["unscaled", "linear", "ntk"])
def test_tables_are_the_formulas(method):
    pair = np.arange(32)
    plain = 1000.0 ** (-pair / 32)
    expected = {"unscaled": plain, "linear": plain / 8, "ntk": (1000.0 * 8 ** (64 / 62)) ** (-pair / 32)}[method]
    rotary = load(MODEL, method, 8.0).model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.numpy(), expected, rtol=1e-6)
    assert rotary.attention_scaling == 1.0


def test_yarn_keeps_fast_pairs_and_divides_slow_ones_by_the_ratio():
    rotary = load(MODEL, "yarn", 8.0).model.rotary_emb
    plain = 1000.0 ** (-np.arange(32) / 32)
    low, high = (64 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(1000)) for turns in (32, 1))
    ramp = np.clip((np.arange(32) - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0, 1)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), plain * (1 - ramp) + plain / 8 * ramp, rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(8) + 1)


def test_token_nats_are_those_of_transformers_loss(model, document):
    rows = np.stack([document[:100], document[100:200]])
    ids = torch.from_numpy(rows)
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert token_nats(model, rows).shape == (2, 99)
    assert token_nats(model, rows).mean() == pytest.approx(loss, abs=1e-5)


def test_num_exact_agrees_with_greedy_generation(model, tokenizer, document):
    prompts, num_answer_tokens = needle_prompts(tokenizer, [document[1:]], 128, 12)
    prompts[:4, -num_answer_tokens:] = prompts[4:8, -num_answer_tokens:]  # some answers are wrong
    generated = model.generate(
        torch.from_numpy(prompts[:, :-num_answer_tokens]),
        attention_mask=torch.ones(prompts[:, :-num_answer_tokens].shape, dtype=torch.long),
        max_new_tokens=num_answer_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    ).numpy()
    right = (generated == prompts).all(axis=1)
    assert num_exact(model, prompts, num_answer_tokens) == right.sum()
    assert not right[:4].any()


def test_short_texts_are_refused():
    with pytest.raises(InputError, match=f"at least {LENGTH_TOKENS} tokens"):
        measure(MODEL, ["short"], ["short"])


def test_a_folder_without_texts_ends_in_one_message(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "expected text files in" in capsys.readouterr().err
