"""ropesearch/train/loss.py against each document alone, and against the logits of the whole model at once."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from ropesearch.data.mixture import MicroBatch
from ropesearch.train import loss as loss_module
from ropesearch.train.loss import RowLoss
from tests import tiny_models, toys
from tests.train.examples import packed, tensors, whole

LENGTHS = (20, 3, 30)  # and 11 of padding
ARCHITECTURES = ["llama", "mistral", "phi3", "qwen3"]


def by_documents(model: Any, micro: MicroBatch) -> torch.Tensor:
    """The nats of a row's documents, each in a forward pass of its own, by the logits of the whole model."""
    token_ids, positions, is_scored = tensors(micro)
    starts = [*torch.nonzero(positions[0] == 0)[:, 0].tolist(), token_ids.shape[1]]
    total = torch.zeros((), dtype=torch.float64)
    for start, end in itertools.pairwise(starts):
        if not bool(is_scored[0, start:end].any()):
            continue
        document = token_ids[:, start:end]
        logits = model(input_ids=document, use_cache=False).logits[0, :-1].double()
        total = total + cross_entropy(logits, document[0, 1:], reduction="sum")
    return total


def gradients(module: Any, nats: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    nats.backward()
    return {name: each.grad.clone() for name, each in module.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_row_is_its_documents_one_by_one(architecture: str, attention: str) -> None:
    """Nats and the gradient of every weight; padding and the first token of each document count for nothing."""
    model = toys.toy_model(architecture).train()
    model.set_attn_implementation(attention)
    micro = packed(*LENGTHS)
    assert micro.num_scored == sum(LENGTHS) - len(LENGTHS)
    nats, divergence = RowLoss(model)(*tensors(micro))
    expected = by_documents(model, micro)
    assert float(nats.detach()) == pytest.approx(float(expected.detach()), rel=2e-6)
    assert float(divergence.detach()) == 0.0
    found, wanted = gradients(model, nats), gradients(model, by_documents(model, micro))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = toys.toy_model()
    rows = [packed(*LENGTHS, seed=1), packed(50, 9, seed=2)]
    both = [torch.cat(each) for each in zip(*map(tensors, rows), strict=True)]
    with torch.no_grad():
        together, _ = RowLoss(model)(*both)
        alone = sum(float(RowLoss(model)(*tensors(row))[0]) for row in rows)
    assert float(together) == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_logits_that_a_family_caps_or_multiplies_are_as_in_its_own_forward_pass(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_models.write_tiny_model(tmp_path / name, name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    micro = whole(48)
    with torch.no_grad():
        nats, _ = RowLoss(model)(*tensors(micro))
        expected = by_documents(model, micro)
    assert float(nats) == pytest.approx(float(expected), rel=2e-6)


def test_pieces_of_the_output_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 7 places, computed again in the backward pass, the nats and all gradients are the same."""
    model, teacher = toys.toy_model(), RowLoss(toys.toy_model(seed=1))
    micro = whole(64)

    def outcome() -> tuple[float, float, dict[str, torch.Tensor]]:
        nats, divergence = RowLoss(model, teacher)(*tensors(micro), True)
        return float(nats.detach()), float(divergence.detach()), gradients(model, nats + 0.3 * divergence)

    nats, divergence, by_weight = outcome()
    monkeypatch.setattr(loss_module, "num_head_rows", lambda model, device: (7, 7))
    nats_in_pieces, divergence_in_pieces, by_weight_in_pieces = outcome()
    assert nats_in_pieces == pytest.approx(nats, rel=1e-6)
    assert divergence_in_pieces == pytest.approx(divergence, rel=1e-5)
    for name, gradient in by_weight.items():
        torch.testing.assert_close(by_weight_in_pieces[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_divergence_is_of_the_predictions_from_the_teachers() -> None:
    model, teacher = toys.toy_model(), toys.toy_model(seed=1)
    micro = packed(*LENGTHS)
    token_ids, positions, is_scored = tensors(micro)
    _, divergence = RowLoss(model, RowLoss(teacher))(token_ids, positions, is_scored, True)
    expected = 0.0
    for start, length in ((0, 20), (20, 3), (23, 30)):
        document = token_ids[:, start : start + length]
        with torch.no_grad():
            mine, theirs = (
                log_softmax(each(input_ids=document, use_cache=False).logits[0, :-1].double(), dim=-1)
                for each in (model, teacher)
            )
        expected += float(kl_div(mine, theirs, reduction="sum", log_target=True))
    assert expected > 1
    assert float(divergence.detach()) == pytest.approx(expected, rel=1e-5)
    divergence.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    _, none = RowLoss(model, RowLoss(copy.deepcopy(model)))(token_ids, positions, is_scored, True)
    assert float(none.detach()) == pytest.approx(0.0, abs=1e-4)


def test_a_row_that_counts_for_nothing_gives_every_weight_a_gradient_of_zero() -> None:
    """What a process without a row goes through: the others wait for its part of each gradient."""
    model = toys.toy_model()
    token_ids, positions, is_scored = tensors(whole(16))
    nats, _ = RowLoss(model)(token_ids, positions, is_scored & False)
    assert float(nats.detach()) == 0.0
    for name, gradient in gradients(model, nats).items():
        assert not gradient.any(), name
