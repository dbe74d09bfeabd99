"""ropesearch/score/scorer.py against transformers' own loss and a float64 reference from full logits."""

import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ropesearch.data.windows import Windows
from ropesearch.errors import InputError, ScoringError
from ropesearch.model.config import Attention, DType, ModelConfig
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel
from ropesearch.rope.regime import Regime
from ropesearch.score import forward, scorer
from ropesearch.score.config import ScoringConfig
from ropesearch.score.score import Score
from ropesearch.score.scorer import (
    block_edges,
    forward_equivalent_tokens,
    prove_scorer,
    score_windows,
    scoring_identity,
)
from tests import toys

LENGTH = 96
CONFIGS = [
    ScoringConfig(),
    ScoringConfig(num_blocks=1),
    ScoringConfig(num_blocks=7),
    ScoringConfig(chunk_tokens=17),
    ScoringConfig(chunk_tokens=32, last_tokens=40),
    ScoringConfig(chunk_tokens=1, last_tokens=1),
    ScoringConfig(last_tokens=95),
    ScoringConfig(last_tokens=13, num_blocks=5),
]


def random_windows(length_tokens: int = LENGTH, num_windows: int = 3, seed: int = 0) -> Windows:
    token_ids = np.random.default_rng(seed).integers(2, toys.VOCABULARY_TOKENS, (num_windows, length_tokens))
    token_ids[:, 0] = 0
    return Windows(
        split="search",
        length_tokens=length_tokens,
        token_ids=token_ids.astype(np.int32),
        documents=tuple(f"document {index}" for index in range(num_windows)),
        has_bos=True,
    )


def loaded_from(model: Any, base: LoadedModel) -> LoadedModel:
    return dataclasses.replace(base, model=model.eval().requires_grad_(False))


def reference_nats(model: Any, windows: Windows) -> NDArray[np.float64]:
    """Nats of every token, float64, 0 for position 0: log-softmax in float64 of the model's full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(windows.token_ids.astype(np.int64)), use_cache=False).logits
    rows = logits.float().double().numpy()[:, :-1]
    top = rows.max(axis=2, keepdims=True)
    log_sums = np.log(np.exp(rows - top).sum(axis=2)) + top[..., 0]
    chosen = np.take_along_axis(rows, windows.token_ids[:, 1:, None].astype(np.int64), axis=2)[..., 0]
    return np.pad(log_sums - chosen, ((0, 0), (1, 0)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_blocks_equal_the_float64_reference(toy_loaded: LoadedModel, config: ScoringConfig) -> None:
    windows = random_windows()
    score = score_windows(toy_loaded, windows, config)
    nats = reference_nats(toy_loaded.model, windows)
    first_scored = 1 if config.last_tokens is None else LENGTH - config.last_tokens
    for window in range(windows.num_windows):
        for block in range(config.num_blocks):
            positions = [
                p for p in range(first_scored, LENGTH) if score.block_edges[block] <= p < score.block_edges[block + 1]
            ]
            assert score.tokens[window, block] == len(positions)
            expected = sum(nats[window, p] for p in positions)
            assert score.nats[window, block] == pytest.approx(expected, abs=1e-5 * max(1, len(positions)))
    assert score.total_tokens == windows.num_windows * (LENGTH - first_scored)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("config", [ScoringConfig(), ScoringConfig(chunk_tokens=40)], ids=str)
def test_equals_transformers_loss(toy_loaded: LoadedModel, architecture: str, config: ScoringConfig) -> None:
    loaded = loaded_from(toys.toy_model(architecture, seed=3), toy_loaded)
    windows = random_windows(num_windows=1)
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    with torch.no_grad():
        loss = float(loaded.model(input_ids=input_ids, labels=input_ids).loss)
    assert score_windows(loaded, windows, config).nats_per_token == pytest.approx(loss, abs=1e-5)


def test_equals_transformers_loss_with_masked_labels(toy_loaded: LoadedModel) -> None:
    windows = random_windows(num_windows=1)
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    labels = input_ids.clone()
    labels[:, :-25] = -100
    with torch.no_grad():
        loss = float(toy_loaded.model(input_ids=input_ids, labels=labels).loss)
    score = score_windows(toy_loaded, windows, ScoringConfig(last_tokens=25))
    assert score.total_tokens == 25
    assert score.nats_per_token == pytest.approx(loss, abs=1e-5)


def test_bfloat16_logits_are_raised_to_float32_first(toy_loaded: LoadedModel) -> None:
    loaded = loaded_from(toys.toy_model(seed=5).to(torch.bfloat16), toy_loaded)
    windows = random_windows(num_windows=2)
    score = score_windows(loaded, windows, ScoringConfig())
    # One window a forward, as in scoring: bfloat16 products depend on the shape.
    expected = [
        reference_nats(loaded.model, Windows("search", LENGTH, windows.token_ids[[index]], ("a",), True)).sum()
        for index in range(2)
    ]
    np.testing.assert_allclose(score.window_nats / score.window_tokens, np.array(expected) / 95, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [None, 24])
def test_the_installed_regime_is_what_is_scored(toy_loaded: LoadedModel, chunk_tokens: int | None) -> None:
    windows = random_windows()
    regime = Regime(
        name="r", max_length=LENGTH, factors=tuple(np.linspace(1, 2, 8)), attention_factor=1.2, retained_tokens=5
    )
    config = ScoringConfig(chunk_tokens=chunk_tokens)
    with installed(toy_loaded, regime):
        inside = score_windows(toy_loaded, windows, config)
        expected = reference_nats(toy_loaded.model, windows)
    np.testing.assert_allclose(inside.window_nats, expected.sum(axis=1), atol=1e-5 * LENGTH)
    outside = reference_nats(toy_loaded.model, windows).sum(axis=1)
    assert (np.abs(inside.window_nats - outside) > 1e-3 * LENGTH).all()


def test_a_window_is_scored_alone(toy_loaded: LoadedModel) -> None:
    windows = random_windows(num_windows=3)
    together = score_windows(toy_loaded, windows, ScoringConfig())
    alone = Windows("search", LENGTH, windows.token_ids[1:2], windows.documents[1:2], True)
    np.testing.assert_array_equal(score_windows(toy_loaded, alone, ScoringConfig()).nats[0], together.nats[1])
    each = [score_windows(toy_loaded, windows, ScoringConfig(), only=index) for index in range(3)]
    assert Score.joined(each).to_json() == together.to_json()
    assert each[2].nats.tolist() == together.nats[2:].tolist()


def test_block_edges_are_equal_parts() -> None:
    assert block_edges(2048, 8).tolist() == [0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048]
    assert block_edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert block_edges(2, 2).tolist() == [0, 1, 2]


def test_windows_are_reported_in_order(toy_loaded: LoadedModel) -> None:
    done: list[int] = []
    score_windows(toy_loaded, random_windows(), ScoringConfig(), done.append)
    assert done == [0, 1, 2]


class Spy:
    """Records the shapes that scaled_dot_product_attention and the output head are called with."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attention: list[tuple[int, int, bool, int]] = []  # queries, keys, is_causal, elements of the mask
        self.head_rows: list[int] = []
        plain = torch.nn.functional.scaled_dot_product_attention

        def spied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **keywords: Any) -> torch.Tensor:
            mask = keywords.get("attn_mask")
            num_mask = 0 if mask is None else mask.numel()
            self.attention.append((query.shape[2], key.shape[2], keywords["is_causal"], num_mask))
            return plain(query, key, value, **keywords)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
        head = model.get_output_embeddings()
        self.handle = head.register_forward_hook(lambda module, args, output: self.head_rows.append(output.shape[0]))


@pytest.fixture
def spy(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    spy = Spy(toy_loaded.model, monkeypatch)
    yield spy
    spy.handle.remove()


def test_a_whole_window_needs_no_mask(toy_loaded: LoadedModel, spy: Spy) -> None:
    score_windows(toy_loaded, random_windows(num_windows=1), ScoringConfig())
    assert spy.attention == [(LENGTH, LENGTH, True, 0)] * 2  # two layers


def test_chunks_need_masks_of_chunk_times_length_at_most(toy_loaded: LoadedModel, spy: Spy) -> None:
    score_windows(toy_loaded, random_windows(num_windows=1), ScoringConfig(chunk_tokens=32, last_tokens=10))
    assert [call[:2] for call in spy.attention[::2]] == [(32, 32), (32, 64), (32, 96)]
    assert max(call[3] for call in spy.attention) <= 32 * LENGTH
    assert spy.head_rows == [10]  # the rows that are not scored never reach the head


def test_logits_stay_within_the_budget(toy_loaded: LoadedModel, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = random_windows(num_windows=1)
    whole = score_windows(toy_loaded, windows, ScoringConfig())
    spy.head_rows.clear()
    monkeypatch.setattr(forward, "_LOGITS_BYTES_CPU", 4 * toys.VOCABULARY_TOKENS * 20 + 3)
    monkeypatch.setattr(forward, "_LOSS_BYTES_CPU", 4 * toys.VOCABULARY_TOKENS * 7 + 3)
    monkeypatch.setattr(forward, "_LEAST_ROWS_CPU", 1)
    pieces = score_windows(toy_loaded, windows, ScoringConfig())
    assert spy.head_rows == [20, 20, 20, 20, 15]
    np.testing.assert_allclose(pieces.nats, whole.nats, rtol=1e-6)
    monkeypatch.setattr(forward, "_LOGITS_BYTES_CPU", 1)
    spy.head_rows.clear()
    score_windows(toy_loaded, windows, ScoringConfig())
    assert spy.head_rows == [1] * 95


def fail_above(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, num_tokens: int, error: Exception) -> list[int]:
    """Let the base model raise `error` for more than num_tokens tokens; returns the lengths it was asked for."""
    base = loaded.model.base_model
    plain: Callable[..., Any] = base.forward
    lengths: list[int] = []

    def forward(*args: Any, **keywords: Any) -> Any:
        lengths.append(keywords["input_ids"].shape[1])
        if lengths[-1] > num_tokens:
            raise error
        return plain(*args, **keywords)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    monkeypatch.setattr(base, "forward", forward)
    return lengths


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_smaller_chunks_are_tried(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    windows = random_windows(num_windows=2)
    whole = score_windows(toy_loaded, windows, ScoringConfig())
    monkeypatch.setattr(scorer, "_SMALLEST_CHUNK_TOKENS", 20)
    lengths = fail_above(monkeypatch, toy_loaded, 30, error)
    with caplog.at_level(logging.WARNING):
        score = score_windows(toy_loaded, windows, ScoringConfig())
    assert lengths == [96, 48, 24, 24, 24, 24, 24, 24, 24, 24]  # the second window begins with what fitted
    np.testing.assert_allclose(score.nats, whole.nats, atol=1e-4)
    assert "out of memory with chunks of 96 tokens: 48 are tried" in caplog.text


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_too_little_memory_is_a_scoring_error(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(scorer, "_SMALLEST_CHUNK_TOKENS", 20)
    lengths = fail_above(monkeypatch, toy_loaded, 0, error)
    with pytest.raises(ScoringError, match="out of memory with chunks of 96, 48, 24, 20 tokens"):
        score_windows(toy_loaded, random_windows(), ScoringConfig())
    assert lengths == [96, 48, 24, 20]


def test_a_real_allocation_that_fails_is_recognised(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(model: Any, token_ids: Any, cache: Any) -> torch.Tensor:
        return torch.empty(1 << 55)

    monkeypatch.setattr(scorer, "hidden_states_of", allocate)
    with pytest.raises(ScoringError, match=r"out of memory with chunks of 96 tokens: .*memory"):
        score_windows(toy_loaded, random_windows(), ScoringConfig())


def test_other_errors_are_not_mistaken_for_memory(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_above(monkeypatch, toy_loaded, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        score_windows(toy_loaded, random_windows(), ScoringConfig())


@pytest.mark.parametrize(("value", "chunk_tokens"), [(float("nan"), None), (float("inf"), 10)])
def test_nats_that_are_not_finite_are_a_scoring_error(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, value: float, chunk_tokens: int | None
) -> None:
    windows = random_windows()
    token_ids = windows.token_ids.copy()
    token_ids[token_ids == 77] = 78
    token_ids[1, 50] = 77
    windows = Windows("search", LENGTH, token_ids, windows.documents, True)
    hidden_states = scorer.hidden_states_of

    def spoiled(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        states = hidden_states(model, ids, cache).clone()
        states[ids == 77] = value
        return states

    monkeypatch.setattr(scorer, "hidden_states_of", spoiled)
    message = r"window 1 \(document 'document 1'\): .* block 4 on \(tokens 48 to 59; 1 of 95 .* the first at 51: "
    with pytest.raises(ScoringError, match=message):
        score_windows(toy_loaded, windows, ScoringConfig(chunk_tokens=chunk_tokens))


def test_weights_that_spoil_everything_are_a_scoring_error(toy_loaded: LoadedModel) -> None:
    model = toys.toy_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("nan")
    with pytest.raises(ScoringError, match=r"window 0 .* block 0 on \(tokens 0 to 11; 95 of 95 .* the first at 1: nan"):
        score_windows(loaded_from(model, toy_loaded), random_windows(), ScoringConfig())


def test_ids_outside_the_vocabulary_are_refused(toy_loaded: LoadedModel) -> None:
    token_ids = np.full((1, LENGTH), toys.VOCABULARY_TOKENS, dtype=np.int32)
    with pytest.raises(InputError, match=f"below {toys.VOCABULARY_TOKENS}"):
        score_windows(toy_loaded, Windows("search", LENGTH, token_ids, ("a",), False), ScoringConfig())


def test_the_configuration_is_checked_against_the_windows(toy_loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match="last_tokens"):
        score_windows(toy_loaded, random_windows(), ScoringConfig(last_tokens=LENGTH))


def test_cost_in_tokens() -> None:
    assert forward_equivalent_tokens(random_windows(num_windows=3)) == 3 * LENGTH


def test_identity_differs_where_scores_may() -> None:
    windows = random_windows()
    model = ModelConfig()
    base = scoring_identity(model, windows, ScoringConfig())
    assert base == {
        "dtype": "auto",
        "attention": "sdpa",
        "chunk_tokens": None,
        "last_tokens": None,
        "num_blocks": 8,
        "length_tokens": LENGTH,
        "windows": windows.fingerprint,
    }
    others = [
        scoring_identity(ModelConfig(dtype=DType.bfloat16), windows, ScoringConfig()),
        scoring_identity(ModelConfig(attention=Attention.eager), windows, ScoringConfig()),
        scoring_identity(model, random_windows(seed=1), ScoringConfig()),
        scoring_identity(model, windows.cut(64), ScoringConfig()),
        *(scoring_identity(model, windows, config) for config in CONFIGS[1:]),
    ]
    assert all(other != base for other in others)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_supported_models_are_proved(toy_loaded: LoadedModel, architecture: str, dtype: torch.dtype) -> None:
    prove_scorer(loaded_from(toys.toy_model(architecture, seed=2).to(dtype), toy_loaded))


def other_model(name: str, **overrides: Any) -> Any:
    import transformers

    values = toys.toy_config().to_dict() | overrides
    for key in ("architectures", "model_type", "transformers_version", "attention_bias", "mlp_bias"):
        values.pop(key, None)
    config = getattr(transformers, f"{name}Config")(**values)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("name", "overrides", "neutral"),
    [
        ("Cohere", {"logit_scale": 0.0625}, {"logit_scale": 1.0}),
        ("Granite", {"logits_scaling": 8.0}, {"logits_scaling": 1.0}),
    ],
)
def test_scaled_logits_are_followed(
    toy_loaded: LoadedModel, name: str, overrides: dict[str, float], neutral: dict[str, float]
) -> None:
    loaded = loaded_from(other_model(name, **overrides), toy_loaded)
    prove_scorer(loaded)
    windows = random_windows(num_windows=2)
    score = score_windows(loaded, windows, ScoringConfig())
    expected = reference_nats(loaded.model, windows).sum()
    assert score.total_nats == pytest.approx(expected, abs=1e-5 * score.total_tokens)
    for key, value in neutral.items():
        setattr(loaded.model.config, key, value)
    assert abs(score_windows(loaded, windows, ScoringConfig()).total_nats - expected) > 1e-3 * score.total_tokens


def test_a_model_that_changes_its_logits_otherwise_is_refused_by_name(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.toy_model("llama", seed=2)
    forward = model.forward

    def doubled(*arguments: Any, **keywords: Any) -> Any:
        answer = forward(*arguments, **keywords)
        answer.logits = answer.logits * 2
        return answer

    monkeypatch.setattr(model, "forward", doubled)
    with pytest.raises(InputError, match=r"LlamaForCausalLM .*model type 'llama'.* not supported"):
        prove_scorer(loaded_from(model, toy_loaded))


def test_capped_logits_are_followed(toy_loaded: LoadedModel) -> None:
    loaded = loaded_from(other_model("Gemma2", final_logit_softcapping=2.0, layer_types=None), toy_loaded)
    prove_scorer(loaded)
    windows = random_windows(num_windows=2)
    score = score_windows(loaded, windows, ScoringConfig())
    expected = reference_nats(loaded.model, windows).sum()
    assert score.total_nats == pytest.approx(expected, abs=1e-5 * score.total_tokens)
    loaded.model.config.final_logit_softcapping = None
    uncapped = score_windows(loaded, windows, ScoringConfig())
    assert abs(uncapped.total_nats - expected) > 1e-2 * score.total_tokens  # the cap was felt


def test_a_model_whose_cache_does_not_work_is_refused(toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = scorer.hidden_states_of
    monkeypatch.setattr(scorer, "hidden_states_of", lambda model, ids, cache: hidden_states(model, ids, None))
    with pytest.raises(InputError, match=r"LlamaForCausalLM .* in two chunks"):
        prove_scorer(toy_loaded)


@pytest.mark.slow
def test_the_benchmark_measures_both_and_ends_what_grows_too_large() -> None:
    from benchmarks import score_cost

    shape = score_cost.Shape(vocabulary_tokens=50, num_layers=1)
    windows = score_cost.random_windows(64, 50)
    loaded = score_cost.random_model(shape)
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    expected = float(loaded.model(input_ids=input_ids, labels=input_ids).loss)
    cell = score_cost.measured(shape, 64, None, 2, score_cost.METHODS, limit_gib=64)
    assert [run.method for run in cell.runs] == ["transformers", "ropesearch", "ropesearch", "transformers"]
    for run in cell.runs:
        assert run.nats_per_token == pytest.approx(expected, abs=1e-5)
        assert run.seconds and run.peak_bytes > run.own_bytes
    assert len(cell.ratios(lambda run: run.seconds)) == 2
    cell = score_cost.measured(shape, 64, None, 3, score_cost.METHODS, limit_gib=0.001)
    assert [(run.method, run.seconds) for run in cell.runs] == [("transformers", None), ("ropesearch", None)]
    assert all(run.peak_bytes > 1 << 20 for run in cell.runs) and not cell.ratios(lambda run: run.seconds)


def needles(answer_starts: tuple[int, ...] = (90, 0, 93, 95), seed: int = 4) -> Windows:
    return dataclasses.replace(random_windows(num_windows=len(answer_starts), seed=seed), answer_starts=answer_starts)


@pytest.mark.parametrize("chunk_tokens", [None, 17, 92])
@pytest.mark.parametrize("spans", [None, [(0, 20), (0, 50)]], ids=["whole", "spans"])
def test_of_answers_the_last_tokens_alone_are_scored(
    toy_loaded: LoadedModel, chunk_tokens: int | None, spans: list[tuple[int, int]] | None
) -> None:
    """Against the float64 reference, token by token: one window is plain text, the others end in answers."""
    windows = needles()
    score = score_windows(toy_loaded, windows, ScoringConfig(chunk_tokens=chunk_tokens, num_blocks=6), spans=spans)
    nats = reference_nats(toy_loaded.model, windows)
    for window, start in enumerate(windows.answer_starts):
        scored = range(start, LENGTH) if start else range(1, LENGTH if spans is None else 50)
        for block, (first, stop) in enumerate(zip(score.block_edges[:-1], score.block_edges[1:], strict=True)):
            places = [place for place in scored if first <= place < stop]
            assert score.tokens[window, block] == len(places)
            assert score.nats[window, block] == pytest.approx(nats[window, places].sum(), abs=2e-5 * (1 + len(places)))
    assert score.window_tokens.tolist() == [6, 95 if spans is None else 49, 3, 1]
    assert score.answered[1] is None and None not in (score.answered[0], *score.answered[2:])


def test_needles_equal_transformers_loss_with_masked_labels(toy_loaded: LoadedModel) -> None:
    windows = needles((90,))
    input_ids = torch.from_numpy(windows.token_ids.astype(np.int64))
    labels = torch.where(torch.arange(LENGTH) < 90, -100, input_ids)
    with torch.no_grad():
        loss = float(toy_loaded.model(input_ids=input_ids, labels=labels).loss)
    assert score_windows(toy_loaded, windows, ScoringConfig()).nats_per_token == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("chunk_tokens", [None, 92, 5])
def test_an_answer_is_right_where_greedy_decoding_gives_it(toy_loaded: LoadedModel, chunk_tokens: int | None) -> None:
    """Answers made by transformers' generate are right; with any one token changed, they are not."""
    prompts = random_windows(num_windows=1, seed=9).token_ids[:, :90]
    with torch.no_grad():
        made = toy_loaded.model.generate(
            torch.from_numpy(prompts.astype(np.int64)), max_new_tokens=6, min_new_tokens=6, do_sample=False,
            pad_token_id=1, suppress_tokens=None,
        ).numpy()  # fmt: skip
    rows = np.repeat(made, 7, axis=0).astype(np.int32)
    for place in range(6):
        rows[1 + place, 90 + place] = (rows[1 + place, 90 + place] + 1) % toys.VOCABULARY_TOKENS
    windows = Windows("search", LENGTH, rows, tuple("abcdefg"), True, answer_starts=(90,) * 7)
    score = score_windows(toy_loaded, windows, ScoringConfig(chunk_tokens=chunk_tokens))
    assert score.answered == (True, *[False] * 6)


def test_what_follows_the_last_scored_token_costs_nothing(
    toy_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    hidden_states = scorer.hidden_states_of

    def counted(model: Any, token_ids: Any, cache: Any) -> Any:
        seen.append(len(token_ids))
        return hidden_states(model, token_ids, cache)

    monkeypatch.setattr(scorer, "hidden_states_of", counted)
    windows = needles()
    score_windows(toy_loaded, windows, ScoringConfig(), spans=[(0, 20), (0, 50)])
    assert seen == [LENGTH, 50, LENGTH, LENGTH]
    assert forward_equivalent_tokens(windows, [(0, 20), (0, 50)]) == 3 * LENGTH + 50
    assert forward_equivalent_tokens(windows) == 4 * LENGTH
