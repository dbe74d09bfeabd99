"""What a regime does to a model, against models that transformers builds from the same lists and float64 formulas."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from ropesearch.errors import InputError
from ropesearch.model.config import Attention, DType, ModelConfig
from ropesearch.model.install import installed, prove_installable, rotary_table
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from tests import toys

ORIGINAL_LENGTH = 32
TARGET_LENGTH = 128
FACTORS = (1.0, 1.11, 1.7, 2.3, 3.0, 4.0, 4.0, 5.0)
LENGTHS = (20, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, TARGET_LENGTH)


def load(folder: Path, **changes: Any) -> LoadedModel:
    values: dict[str, Any] = {"path": str(folder), "dtype": DType.float32, "device": "cpu"} | changes
    return load_model(ModelConfig(**values))


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("install") / request.param
    return load(toys.write_checkpoint(folder, request.param, max_position_embeddings=ORIGINAL_LENGTH))


def searched(retained_tokens: int = 0, attention_factor: float = 1.17) -> Regime:
    return Regime(
        name="searched",
        max_length=TARGET_LENGTH,
        factors=FACTORS,
        attention_factor=attention_factor,
        retained_tokens=retained_tokens,
    )


def tokens(length: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randint(2, toys.VOCABULARY_TOKENS, (num_rows, length), generator=torch.Generator().manual_seed(length))


def logits(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids, **arguments).logits


def model_with(loaded: LoadedModel, max_position_embeddings: int = TARGET_LENGTH, **rope_parameters: Any) -> Any:
    """A model that transformers builds with other rope parameters, holding the loaded model's weights."""
    values = loaded.model.config.to_dict() | {
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_theta": 10000.0} | rope_parameters,
    }
    config = type(loaded.model.config)(**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.load_state_dict(loaded.model.state_dict())
    return model


def longrope_parameters(regime: Regime) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": list(regime.factors),
        "long_factor": list(regime.factors),
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "factor": regime.max_length / ORIGINAL_LENGTH,
        "attention_factor": regime.attention_factor,
    }


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_those_of_a_longrope_model(loaded: LoadedModel, length: int) -> None:
    regime = searched()
    reference = model_with(loaded, **longrope_parameters(regime))
    unscaled = logits(loaded.model, tokens(length, 2))
    with installed(loaded, regime):
        inside = logits(loaded.model, tokens(length, 2))
    torch.testing.assert_close(inside, logits(reference, tokens(length, 2)), rtol=1e-5, atol=1e-5)
    assert (inside - unscaled).abs().max() > 0.1


@pytest.mark.parametrize(
    ("regime_of", "parameters"),
    [
        pytest.param(methods.linear, {"rope_type": "linear", "factor": 4.0}, id="linear"),
        pytest.param(
            methods.yarn,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
            id="yarn",
        ),
        pytest.param(
            lambda geometry, target_length: methods.llama3(geometry, 4.0, 1.0, 4.0),
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL_LENGTH,
            },
            id="llama3",
        ),
        pytest.param(
            lambda geometry, target_length: methods.dynamic_ntk(geometry, target_length, target_length),
            {"rope_type": "dynamic", "factor": 4.0},
            id="dynamic",
        ),
    ],
)
def test_logits_of_a_method_are_those_of_its_rope_type(
    loaded: LoadedModel, regime_of: Any, parameters: dict[str, Any]
) -> None:
    # The dynamic type measures growth from max_position_embeddings, and the others do not look at it.
    length = ORIGINAL_LENGTH if parameters["rope_type"] == "dynamic" else TARGET_LENGTH
    reference = model_with(loaded, max_position_embeddings=length, **parameters)
    input_ids = tokens(TARGET_LENGTH)
    with installed(loaded, regime_of(loaded.geometry, TARGET_LENGTH)):
        torch.testing.assert_close(logits(loaded.model, input_ids), logits(reference, input_ids), rtol=1e-5, atol=2e-5)


def test_table_is_the_one_in_a_longrope_model_bit_for_bit(loaded: LoadedModel) -> None:
    regime = searched()
    reference = model_with(loaded, **longrope_parameters(regime)).model.rotary_emb
    assert torch.equal(rotary_table(loaded.geometry, regime), reference.inv_freq)
    with installed(loaded, regime):
        assert torch.equal(loaded.model.model.rotary_emb.inv_freq, reference.inv_freq)
        assert loaded.model.model.rotary_emb.attention_scaling == reference.attention_scaling
    identity = methods.identity(loaded.geometry, TARGET_LENGTH)
    assert torch.equal(rotary_table(loaded.geometry, identity), loaded.model.model.rotary_emb.inv_freq)


def expected_rows(positions: np.ndarray, regime: Regime) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of LongRoPE's Eq. 3 with n-hat, float64, shape (*positions.shape, 16), written out pair by pair."""
    cos, sin = np.empty((2, *positions.shape, 16))
    for index, position in np.ndenumerate(positions):
        retained = position < regime.retained_tokens
        for pair in range(8):
            factor = 1.0 if retained else regime.factors[pair]
            angle = position * 10000.0 ** (-2 * pair / 16) / factor
            magnitude = 1.0 if retained else regime.attention_factor
            for channel in (pair, pair + 8):
                cos[(*index, channel)] = magnitude * np.cos(angle)
                sin[(*index, channel)] = magnitude * np.sin(angle)
    return cos, sin


@pytest.mark.parametrize("retained_tokens", [0, 1, 12, TARGET_LENGTH])
def test_retained_tokens_keep_their_rows(loaded: LoadedModel, retained_tokens: int) -> None:
    regime = searched(retained_tokens)
    # Absolute positions: a whole sequence, a chunk that starts late, and rows of a batch that differ.
    for positions in (np.arange(TARGET_LENGTH)[None], np.arange(8, 20)[None], np.array([[0, 11, 12], [13, 5, 100]])):
        with installed(loaded, regime):
            cos, sin = loaded.model.model.rotary_emb(torch.zeros(1), position_ids=torch.tensor(positions))
        expected_cos, expected_sin = expected_rows(positions, regime)
        np.testing.assert_allclose(cos.numpy(), expected_cos, rtol=0, atol=2e-5)
        np.testing.assert_allclose(sin.numpy(), expected_sin, rtol=0, atol=2e-5)


class HandBuiltRotary(nn.Module):
    """A rotary module that knows nothing of transformers' tables: it answers with the float64 formula."""

    def __init__(self, regime: Regime) -> None:
        super().__init__()
        self.regime = regime

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(rows).to(x.dtype) for rows in expected_rows(position_ids.numpy(), self.regime))


@pytest.mark.parametrize("retained_tokens", [0, 5, 40])
def test_retained_tokens_through_the_logits(loaded: LoadedModel, retained_tokens: int) -> None:
    regime = searched(retained_tokens)
    reference = model_with(loaded, rope_type="default")
    reference.model.rotary_emb = HandBuiltRotary(regime)
    input_ids = tokens(60, 2)
    with installed(loaded, regime):
        inside = logits(loaded.model, input_ids)
    torch.testing.assert_close(inside, logits(reference, input_ids), rtol=1e-4, atol=1e-4)
    # The first retained_tokens positions see unscaled positions only; the next one does not.
    unscaled = logits(loaded.model, input_ids)
    changed = (inside - unscaled).abs().amax(dim=(0, 2)) > 1e-4
    assert not changed[:retained_tokens].any()
    assert changed[max(retained_tokens, 1) :].all()


@pytest.mark.parametrize("retained_tokens", [0, 12])
def test_chunks_with_a_cache_agree_with_one_pass(loaded: LoadedModel, retained_tokens: int) -> None:
    input_ids = tokens(TARGET_LENGTH)
    with installed(loaded, searched(retained_tokens)), torch.no_grad():
        whole = loaded.model(input_ids=input_ids).logits
        # Named past_key_values before transformers 5.24.
        name = "cache" if "cache" in signature(type(loaded.model).forward).parameters else "past_key_values"
        cache, parts = None, []
        for chunk in input_ids.split([8, 20, 20, 80], dim=1):
            answer = loaded.model(input_ids=chunk, use_cache=True, **{name: cache})
            cache = getattr(answer, name)
            parts.append(answer.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-4)


def state_of(loaded: LoadedModel) -> dict[str, Any]:
    rotary = loaded.model.model.rotary_emb
    return {name: value for name, value in vars(rotary).items() if name != "_buffers"} | {
        "inv_freq": rotary.inv_freq,
        "table": rotary.inv_freq.clone(),
        "hooks": len(rotary._forward_hooks),
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert after["inv_freq"] is before["inv_freq"]
    assert torch.equal(after["table"], before["table"])
    for name in ("attention_scaling", "rope_type", "hooks", "_forward_hooks_with_kwargs"):
        assert after[name] == before[name]


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_restores_bit_for_bit(loaded: LoadedModel, fails: bool) -> None:
    input_ids = tokens(50)
    state, before = state_of(loaded), logits(loaded.model, input_ids)
    if fails:
        with pytest.raises(KeyboardInterrupt), installed(loaded, searched(retained_tokens=4)):
            raise KeyboardInterrupt
    else:
        with installed(loaded, searched(retained_tokens=4)):
            assert not torch.equal(logits(loaded.model, input_ids), before)
    assert_same_state(state, state_of(loaded))
    assert torch.equal(logits(loaded.model, input_ids), before)


def test_unscaled_regime_is_the_checkpoint_itself(loaded: LoadedModel) -> None:
    input_ids = tokens(50)
    before = logits(loaded.model, input_ids)
    with installed(loaded, methods.identity(loaded.geometry, TARGET_LENGTH)):
        assert torch.equal(logits(loaded.model, input_ids), before)


def test_nesting_is_refused_and_leaves_the_outer_regime(toy_loaded: LoadedModel) -> None:
    regime = methods.linear(toy_loaded.geometry, 256)
    with installed(toy_loaded, regime):
        with pytest.raises(RuntimeError, match="already installed"), installed(toy_loaded, regime):
            pass
        assert torch.equal(toy_loaded.model.model.rotary_emb.inv_freq, rotary_table(toy_loaded.geometry, regime))


def test_wrong_number_of_factors_is_refused(toy_loaded: LoadedModel) -> None:
    state = state_of(toy_loaded)
    for factors in ((2.0,), (2.0,) * 16):
        regime = Regime(name="x", max_length=128, factors=factors)
        with pytest.raises(InputError, match="each of the 8 pairs"), installed(toy_loaded, regime):
            pass
    assert_same_state(state, state_of(toy_loaded))


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16])
def test_half_precision_models_keep_float32_tables(toy_folder: Path, dtype: DType) -> None:
    loaded = load(toy_folder, dtype=dtype)
    assert loaded.dtype == dtype.value
    rotary = loaded.model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    regime = Regime(name="x", max_length=2**17, factors=FACTORS, attention_factor=1.17, retained_tokens=4)
    with installed(loaded, regime):
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, rotary_table(loaded.geometry, regime))
        positions = np.array([[0, 3, 4, 999, 2**17 - 1]])
        cos, _ = rotary(torch.zeros(1, dtype=loaded.model.dtype), position_ids=torch.tensor(positions))
    # Angles of 131,071 radians in bfloat16 would be off by whole turns: only the last rounding is to half precision.
    assert cos.dtype == loaded.model.dtype
    np.testing.assert_allclose(cos.float().numpy(), expected_rows(positions, regime)[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("attention", [Attention.sdpa, Attention.eager])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_proof_passes(toy_folder: Path, attention: Attention, dtype: DType) -> None:
    loaded = load(toy_folder, attention=attention, dtype=dtype)
    assert loaded.attention == attention.value
    state = state_of(loaded)
    prove_installable(loaded)
    assert_same_state(state, state_of(loaded))


def test_proof_fails_where_the_forward_pass_ignores_the_rotary_module(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *rest, **more: (query, key))
    with pytest.raises(InputError, match="'llama': changing a regime's factors does not change the model's logits"):
        prove_installable(toy_loaded)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("change", [100.0, 1e6, 1e30])
def test_ruined_weights_are_not_taken_for_an_unknown_kind_of_model(
    architecture: str, change: float, tmp_path: Path
) -> None:
    """Weights as steps of far too high a rate leave them: attention saturates, then all logits are zero, then NaN."""
    loaded = load(toys.write_checkpoint(tmp_path / "toy", architecture))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(change * torch.sign(torch.randn(parameter.shape, generator=generator)))
    with pytest.raises(InputError, match="these are ruined, as by a training with too high a learning rate") as refusal:
        prove_installable(loaded)
    assert "kind of model" not in str(refusal.value) and "model.dtype" not in str(refusal.value)


def test_install_fails_where_the_module_answers_from_elsewhere(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary = toy_loaded.model.model.rotary_emb
    remembered = rotary.inv_freq.clone()

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.cat([position_ids[..., None] * remembered] * 2, dim=-1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    monkeypatch.setattr(rotary, "forward", forward)
    state = state_of(toy_loaded)
    regime = methods.linear(toy_loaded.geometry, 256)
    with pytest.raises(InputError, match="does not answer with the cos and sin"), installed(toy_loaded, regime):
        pytest.fail("a regime that is not in force was let through")
    assert_same_state(state, state_of(toy_loaded))


def test_proof_fails_where_leaving_does_not_restore(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def growing(module: Any, args: Any, output: Any) -> Any:
        seen.append(1)
        return output * (1 + len(seen) / 1000)

    handle = toy_loaded.model.lm_head.register_forward_hook(growing)
    try:
        with pytest.raises(InputError, match="does not restore the logits bit for bit"):
            prove_installable(toy_loaded)
    finally:
        handle.remove()
