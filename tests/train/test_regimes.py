"""ropesearch/train/regimes.py: each row under the table that it names, whatever its positions, and documents apart."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from ropesearch.artifact.config_json import regime_config
from ropesearch.data.mixture import LONG, SHORT
from ropesearch.errors import InputError
from ropesearch.model.config import Attention, DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.score.gradient import recomputed
from ropesearch.train.loss import RowLoss
from ropesearch.train.regimes import RegimeSwitch, prove_documents_apart
from tests import toys
from tests.artifact.examples import REGIME, TARGET_LENGTH, toy_geometry
from tests.artifact.examples import SHORT as SHORT_REGIME
from tests.train.examples import packed, tensors, whole

REGIMES = {SHORT: SHORT_REGIME, LONG: dataclasses.replace(REGIME, name="long")}


def plain_model(loaded: LoadedModel, changes: dict[str, Any]) -> Any:
    """The same weights as plain transformers builds them with other config.json keys."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    values = loaded.model.config.to_dict()
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        values.pop(key, None)
    config = LlamaConfig(**{**values, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(loaded.model.state_dict())
    return model


def nats_of(model: Any, token_ids: torch.Tensor) -> float:
    logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1].double()
    return float(cross_entropy(logits, token_ids[0, 1:], reduction="sum"))


@torch.no_grad()
def test_a_long_row_has_the_searched_table_and_a_short_one_the_plain_one(toy_loaded: LoadedModel) -> None:
    """Against models that transformers builds from a config.json of each table: a row of many short documents is still
    short although it is longer than original_length, and one long document is long although it is cut shorter. The
    short table has its own attention factor, 1."""
    switch, loss = RegimeSwitch(toy_loaded, REGIMES), RowLoss(toy_loaded.model)
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    plain = plain_model(toy_loaded, theta)
    source = {"model_type": "llama", "max_position_embeddings": toys.ORIGINAL_LENGTH, **theta}
    long_config = regime_config(source, toy_geometry(), REGIME, REGIME, TARGET_LENGTH)
    stretched = plain_model(toy_loaded, {key: long_config[key] for key in ("rope_parameters", "head_dim")})

    row = packed(60, 64, 50, num_tokens=180)
    with switch.within(SHORT):
        nats, _ = loss(*tensors(row))
    parts = torch.from_numpy(row.token_ids).split([60, 64, 50, 6], dim=1)[:3]
    assert float(nats) == pytest.approx(sum(nats_of(plain, part) for part in parts), rel=2e-6)

    for num_tokens in (TARGET_LENGTH, toys.ORIGINAL_LENGTH // 2):
        micro = whole(num_tokens)
        with switch.within(LONG):
            nats, _ = loss(*tensors(micro))
        expected = nats_of(stretched, torch.from_numpy(micro.token_ids))
        assert float(nats) == pytest.approx(expected, rel=2e-6)
        assert abs(float(nats) - nats_of(plain, torch.from_numpy(micro.token_ids))) > 1e-3 * expected


def test_the_table_of_the_backward_pass_is_that_of_the_forward_pass(toy_loaded: LoadedModel) -> None:
    """With layers computed again, the gradient is the one with every activation kept."""
    model = toy_loaded.model
    switch, loss = RegimeSwitch(toy_loaded, REGIMES), RowLoss(model)
    model.requires_grad_(True).train()
    try:
        found = []
        for around in (contextlib.nullcontext, recomputed):
            model.zero_grad()
            for name, micro in ((SHORT, packed(30, 30)), (LONG, whole(TARGET_LENGTH))):
                with switch.within(name), around(model):
                    nats, _ = loss(*tensors(micro))
                    nats.backward()
            found.append({name: each.grad.clone() for name, each in model.named_parameters()})
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    finally:
        model.zero_grad()
        model.requires_grad_(False).eval()


@pytest.fixture(params=["sdpa", "eager"])
def by_attention(request: pytest.FixtureRequest, toy_folder: Path) -> Iterator[LoadedModel]:
    yield load_model(
        ModelConfig(path=str(toy_folder), dtype=DType.float32, device="cpu", attention=Attention[request.param])
    )


def test_packed_documents_are_apart_with_each_attention(by_attention: LoadedModel) -> None:
    with installed(by_attention, SHORT_REGIME):
        prove_documents_apart(by_attention, RowLoss(by_attention.model))


class WithCache(RowLoss):
    """What transformers does by default: with a cache, packed documents see each other."""

    def predicting(self, token_ids: Any, position_ids: Any, is_scored: Any) -> Any:
        base = self.model.model
        hidden_states = base(input_ids=token_ids, position_ids=position_ids, use_cache=True).last_hidden_state
        return hidden_states[:, :-1][is_scored[:, 1:]], token_ids[:, 1:][is_scored[:, 1:]]


class WithoutPositions(RowLoss):
    """Documents one after the other, as if they were one."""

    def predicting(self, token_ids: Any, position_ids: Any, is_scored: Any) -> Any:
        return super().predicting(token_ids, torch.arange(token_ids.shape[1])[None], is_scored)


class Alone(RowLoss):
    """Every row as packed documents, the whole ones too."""

    def predicting(self, token_ids: Any, position_ids: Any, is_scored: Any) -> Any:
        return super().predicting(token_ids, position_ids % 24, is_scored)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithCache, "documents of a row see each other"),
        (WithoutPositions, "documents of a row see each other"),
        (Alone, "a token does not depend on what was before it"),
    ],
)
def test_documents_that_see_each_other_are_refused(
    kind: type[RowLoss], message: str, by_attention: LoadedModel
) -> None:
    with installed(by_attention, SHORT_REGIME), pytest.raises(InputError, match=message):
        prove_documents_apart(by_attention, kind(by_attention.model))
