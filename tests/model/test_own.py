"""The table that a checkpoint has by itself, against models that transformers loads from the same folder."""

import copy
import dataclasses
import math
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ropesearch.errors import InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, prove_installable, rotary_table
from ropesearch.model.load import LoadedModel, load_model, read_geometry
from ropesearch.model.own import OwnTable
from ropesearch.model.rotary import find_tables
from ropesearch.rope import methods
from ropesearch.rope.geometry import Geometry, LayerRope
from ropesearch.rope.regime import Regime
from tests import toys

ORIGINAL_LENGTH = 32
TARGET_LENGTH = 128
LENGTHS = (1, 20, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, TARGET_LENGTH)
SHORT = [1.0, 1.0, 1.03, 1.1, 1.2, 1.2, 1.3, 1.4]
LONG = [1.0, 1.11, 1.7, 2.3, 3.0, 4.0, 4.0, 5.0]
ORIGINAL = {"original_max_position_embeddings": ORIGINAL_LENGTH}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.1},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0, **ORIGINAL},
}
CASES = [(architecture, rope_type) for architecture in ("llama", "qwen2") for rope_type in SCALED]
CASES += [("phi3", "longrope")]


def write(folder: Path, architecture: str, rope_type: str, **changes: Any) -> Path:
    # The dynamic type measures growth from max_position_embeddings.
    longest = ORIGINAL_LENGTH if rope_type == "dynamic" else TARGET_LENGTH
    parameters = {"rope_theta": 10000.0} | SCALED[rope_type] | changes
    top_level = ORIGINAL if architecture == "phi3" else {}
    return toys.write_checkpoint(
        folder, architecture, max_position_embeddings=longest, rope_parameters=parameters, **top_level
    )


def load(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(folder), dtype=DType.float32, device="cpu", original_length=ORIGINAL_LENGTH))


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("own") / "model", *request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module", params=["dynamic", "longrope"])
def varying(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write(tmp_path_factory.mktemp("varying") / "model", "llama", request.param))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(2, toys.VOCABULARY_TOKENS, (1, length), generator=torch.Generator().manual_seed(length))


def logits(model: Any, length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(length), use_cache=False).logits


@pytest.mark.parametrize("length", LENGTHS)
def test_own_regime_is_the_model_that_transformers_loads_bit_for_bit(
    folder: Path, loaded: LoadedModel, length: int
) -> None:
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for parameter in fresh.parameters():  # sums depend on how memory is aligned: as load_model does
        parameter.data = parameter.data.clone()
    with installed(loaded, loaded.own.regime_at(length)):
        assert torch.equal(logits(loaded.model, length), logits(fresh, length))


@pytest.mark.parametrize("length", LENGTHS)
def test_own_regime_says_the_whole_table(loaded: LoadedModel, length: int) -> None:
    """Shipped as factors, read by nothing but the factors: the same logits up to float32 rounding."""
    regime = loaded.own.regime_at(length)
    table, attention_factor = loaded.own.table_at(length)
    np.testing.assert_allclose(rotary_table(loaded.geometry, regime).numpy(), table.numpy(), rtol=5e-7)
    assert regime.attention_factor == attention_factor
    assert (regime.name, regime.max_length, regime.retained_tokens) == ("unscaled", length, 0)
    assert loaded.own.is_own(regime)


def geometry_of(head_dim: int = 16, original_length: int = ORIGINAL_LENGTH, rope_theta: float = 1e4) -> Geometry:
    return Geometry(
        model_type="llama",
        head_dim=head_dim,
        rotary_dim=head_dim,
        original_length=original_length,
        rope_theta=rope_theta,
    )


def own_of(parameters: dict[str, Any], max_position_embeddings: int = TARGET_LENGTH, **geometry: Any) -> OwnTable:
    values = geometry_of(**geometry)
    config = LlamaConfig(
        head_dim=values.head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_theta": values.rope_theta} | parameters,
    )
    return OwnTable(values, config)


def test_the_table_of_llama_3_1() -> None:
    """Meta's formula (apply_scaling in llama-models, model.py) in float64, and its values at head_dim 128."""
    own = own_of(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        max_position_embeddings=131072,
        head_dim=128,
        original_length=8192,
        rope_theta=5e5,
    )
    regime = own.regime_at(131072)
    expected = []
    for pair in range(64):
        frequency = 5e5 ** (-pair / 64)
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < 8192 / 4.0:
            expected.append(1.0)
        elif wavelength > 8192 / 1.0:
            expected.append(8.0)
        else:
            expected.append(frequency / ((1 - smooth) * frequency / 8.0 + smooth * frequency))
    np.testing.assert_allclose(regime.factors, expected, rtol=1e-5)
    assert regime.factors[:29] == (1.0,) * 29
    assert regime.factors[29:35] == pytest.approx((1.20748, 1.55341, 2.02631, 2.69453, 3.68425, 5.25733), abs=1e-5)
    assert regime.factors[35:] == (8.0,) * 29
    assert (regime.attention_factor, own.varies, own.is_scaled) == (1.0, False, True)


def test_each_type_is_its_method() -> None:
    geometry = geometry_of()
    for rope_type, expected in (
        ("yarn", methods.yarn(geometry, TARGET_LENGTH)),
        ("llama3", methods.llama3(geometry, 8.0, 1.0, 4.0)),
    ):
        regime = own_of(SCALED[rope_type]).regime_at(TARGET_LENGTH)
        np.testing.assert_allclose(regime.factors, expected.factors, rtol=1e-5)
        assert regime.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)
    dynamic = own_of({"rope_type": "dynamic", "factor": 4.0}, ORIGINAL_LENGTH)
    for length in LENGTHS:
        expected = methods.dynamic_ntk(geometry, TARGET_LENGTH, length)
        np.testing.assert_allclose(dynamic.regime_at(length).factors, expected.factors, rtol=1e-5)
    assert own_of(SCALED["linear"]).regime_at(7).factors == (3.0,) * 8
    longrope = own_of(SCALED["longrope"])
    assert longrope.regime_at(ORIGINAL_LENGTH).factors == tuple(SHORT)
    assert longrope.regime_at(ORIGINAL_LENGTH + 1).factors == tuple(LONG)
    assert longrope.regime_at(1).attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))


@pytest.mark.parametrize("rope_type", SCALED)
def test_the_layer_type_that_is_rescaled(rope_type: str) -> None:
    """Gemma 3: one module with a table for each type of layer, of which only the full attention's is scaled."""
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    config = Gemma3TextConfig(
        head_dim=16,
        max_position_embeddings=ORIGINAL_LENGTH if rope_type == "dynamic" else TARGET_LENGTH,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e6} | SCALED[rope_type],
        },
    )
    layers = {
        "sliding_attention": LayerRope(rope_theta=1e4, rescaled=False),
        "full_attention": LayerRope(rope_theta=1e6, rescaled=True),
    }
    geometry = dataclasses.replace(geometry_of(rope_theta=1e6), layer_types=layers)
    own, module = OwnTable(geometry, config), Gemma3RotaryEmbedding(config)
    assert own.rope_type == rope_type and own.to_json()["rope_parameters"] == config.rope_parameters
    own.check(find_tables(module, "gemma3_text"))
    for length in LENGTHS:
        fresh = copy.deepcopy(module)
        fresh(torch.zeros(1), torch.tensor([[length - 1]]), layer_type="full_attention")
        table, attention_factor = own.table_at(length)
        assert torch.equal(table, fresh.full_attention_inv_freq)
        assert attention_factor == fresh.full_attention_attention_scaling
    module.full_attention_inv_freq[2] *= 1.01
    module.full_attention_original_inv_freq[2] *= 1.01
    with pytest.raises(InputError, match="the built model's table for 1 tokens"):
        own.check(find_tables(module, "gemma3_text"))


def test_a_plain_checkpoint_is_the_identity(toy_loaded: LoadedModel) -> None:
    own = toy_loaded.own
    assert own.regime_at(256) == methods.identity(toy_loaded.geometry, 256)
    assert (own.is_scaled, own.varies) == (False, False)
    assert torch.equal(own.table_at(1)[0], toy_loaded.model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(("rope_type", "expected"), [("longrope", True), ("dynamic", True), ("yarn", False)])
def test_what_varies(rope_type: str, expected: bool) -> None:
    own = own_of(SCALED[rope_type])
    assert own.varies is expected
    assert not own_of(SCALED["longrope"] | {"short_factor": LONG}).varies


def test_rounding_below_one_is_one() -> None:
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    factors = [below, *SHORT[1:]]
    assert below < 1
    own = own_of(SCALED["longrope"] | {"short_factor": factors})
    assert own.regime_at(1).factors[0] == 1.0


def state_of(loaded: LoadedModel) -> dict[str, Any]:
    """What decides a rotary module's answers: every attribute, and the values of its tables."""
    rotary = loaded.model.model.rotary_emb
    buffers = {name: buffer.clone().tolist() for name, buffer in rotary.named_buffers()}
    plain = {name: value for name, value in vars(rotary).items() if isinstance(value, int | float | str)}
    return {"buffers": buffers, "plain": plain, "hooks": len(rotary._forward_hooks), "table": rotary.inv_freq}


def searched(retained_tokens: int = 0) -> Regime:
    return Regime(
        name="searched",
        max_length=TARGET_LENGTH,
        factors=(1.0, 1.2, 2.5, 3.0, 3.3, 4.0, 4.4, 4.8),
        attention_factor=1.17,
        retained_tokens=retained_tokens,
    )


def test_an_installed_table_is_not_overwritten_and_leaves_no_trace(folder: Path, loaded: LoadedModel) -> None:
    regime, state = searched(), state_of(loaded)
    values = loaded.model.config.to_dict() | {
        "max_position_embeddings": TARGET_LENGTH,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": list(regime.factors),
            "long_factor": list(regime.factors),
            "attention_factor": regime.attention_factor,
            "factor": 4.0,
            **ORIGINAL,
        },
    }
    reference = AutoModelForCausalLM.from_config(type(loaded.model.config)(**values), attn_implementation="sdpa").eval()
    reference.load_state_dict(loaded.model.state_dict())
    with installed(loaded, regime):
        for length in (TARGET_LENGTH, 20, ORIGINAL_LENGTH + 1, 20):
            torch.testing.assert_close(logits(loaded.model, length), logits(reference, length), rtol=1e-5, atol=1e-5)
    after = state_of(loaded)
    assert after["table"] is state["table"]
    assert {**after, "table": None} == {**state, "table": None}
    # What it does by itself afterwards is what a fresh model does, on both sides of the switch.
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    again = copy.deepcopy(loaded.model)
    for length in (20, TARGET_LENGTH, 20):
        assert torch.equal(logits(again, length), logits(fresh, length))


def test_proof_passes(loaded: LoadedModel) -> None:
    state = state_of(loaded)
    prove_installable(loaded)
    assert state_of(loaded)["plain"]["rope_type"] == state["plain"]["rope_type"]


def test_own_regime_holds_one_table_for_a_sequence_in_chunks(varying: LoadedModel) -> None:
    with installed(varying, varying.own.regime_at(TARGET_LENGTH)), torch.no_grad():
        whole = varying.model(input_ids=tokens(TARGET_LENGTH)).logits
        name = "cache" if "cache" in signature(type(varying.model).forward).parameters else "past_key_values"
        cache, parts = None, []
        for chunk in tokens(TARGET_LENGTH).split([8, 20, 100], dim=1):
            answer = varying.model(input_ids=chunk, use_cache=True, **{name: cache})
            cache = getattr(answer, name)
            parts.append(answer.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("retained_tokens", [1, 12, 40, TARGET_LENGTH])
def test_retained_tokens_keep_the_own_rows(loaded: LoadedModel, retained_tokens: int) -> None:
    regime, rotary = searched(retained_tokens), loaded.model.model.rotary_emb
    own = loaded.own.regime_at(TARGET_LENGTH)
    positions = np.arange(TARGET_LENGTH)
    for chunk in (positions, positions[:20], positions[8:20]):
        with installed(loaded, regime):
            cos, sin = rotary(torch.zeros(1), position_ids=torch.tensor(chunk[None]))
        for found, function in ((cos, np.cos), (sin, np.sin)):
            for row, position in enumerate(chunk):
                table = own if position < retained_tokens else regime
                angles = position * 10000.0 ** (-np.arange(8) / 8) / np.array(table.factors)
                expected = table.attention_factor * function(np.concatenate([angles, angles]))
                np.testing.assert_allclose(found[0, row].numpy(), expected, rtol=0, atol=5e-5)


def bad_parameters() -> Iterator[Any]:
    longrope = SCALED["longrope"]
    for name, parameters, message in (
        ("below one", {"rope_type": "linear", "factor": 0.5}, "factors of at least 1, got 0.5 at pair 0"),
        ("nan", longrope | {"long_factor": [float("nan")] * 8}, "JSON can hold"),
        ("zero", longrope | {"short_factor": [1.0] * 7 + [0.0]}, "finite factors of at least 1, got 0.0 at pair 7"),
        ("count", longrope | {"long_factor": [2.0] * 7}, "transformers cannot make a table"),
        ("attention", longrope | {"attention_factor": -1.0}, "attention_factor above 0, got -1.0"),
        ("mscale", SCALED["yarn"] | {"mscale": 1.0, "mscale_all_dim": 0.7}, "mscale_all_dim changes the attention"),
    ):
        yield pytest.param(parameters, message, id=name)


@pytest.mark.parametrize(("parameters", "message"), list(bad_parameters()))
def test_scaling_that_a_regime_cannot_express(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        own_of(parameters).regime_at(TARGET_LENGTH)


def test_a_type_that_is_unknown(toy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((toy_folder / "config.json").read_bytes())
    toys.edit_config(tmp_path, {"rope_parameters": {"type": "su", "rope_theta": 1e4}})
    with pytest.raises(InputError, match=r"rope_type 'su' in config.json: expected one of default, linear"):
        read_geometry(tmp_path, ORIGINAL_LENGTH)


def test_a_model_of_other_pairs_is_refused(toy_loaded: LoadedModel) -> None:
    tables = find_tables(toy_loaded.model, "llama")
    toy_loaded.own.check(tables)
    with pytest.raises(InputError, match=r"expected 16 rotary pairs, the built model has 8 at model.rotary_emb"):
        own_of({"rope_type": "default"}, head_dim=32).check(tables)


def test_a_model_that_builds_another_table_is_refused(varying: LoadedModel) -> None:
    rotary = varying.model.model.rotary_emb
    varying.own.check(find_tables(rotary, "llama"))
    other = copy.deepcopy(rotary)
    other.inv_freq[3] *= 1.001
    other.original_inv_freq[3] *= 1.001
    with pytest.raises(InputError, match="the built model's table for 1 tokens is not what transformers computes"):
        varying.own.check(find_tables(other, "llama"))
    frozen = copy.deepcopy(rotary)
    frozen.rope_type = "default"
    with pytest.raises(InputError, match=f"the built model's table for {ORIGINAL_LENGTH + 1} tokens"):
        varying.own.check(find_tables(frozen, "llama"))
