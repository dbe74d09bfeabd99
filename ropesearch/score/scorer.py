"""Nats and tokens of windows under the table that is installed right now, in bounded memory.

One window a forward pass, so no window's score depends on another. The hidden states come from the base model; the
output head runs over pieces of them, of a fixed number of bytes or few tokens, so no array of tokens x vocabulary ever
exists. With chunks, a window goes through the model piece by piece with a key-value cache, and only the
hidden states of the piece under way exist. What is computed equals transformers' ForCausalLMLoss (loss/loss_utils.py).
"""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from ropesearch.data.windows import check_vocabulary
from ropesearch.errors import InputError, ScoringError
from ropesearch.model.config import ModelConfig
from ropesearch.score.cache import new_cache
from ropesearch.score.config import ScoringConfig
from ropesearch.score.forward import (
    hidden_states_of,
    is_out_of_memory,
    logits_of,
    num_head_rows,
    on_input_device,
    vocabulary_tokens,
)
from ropesearch.score.score import Score

if TYPE_CHECKING:
    from ropesearch.data.windows import Windows
    from ropesearch.model.load import LoadedModel

# Where memory runs out, chunks are halved down to this.
_SMALLEST_CHUNK_TOKENS = 256
_NUM_PROBE_TOKENS = 32

_log = logging.getLogger(__name__)


def score_windows(
    loaded: "LoadedModel",
    windows: "Windows",
    config: ScoringConfig,
    on_window: Callable[[int], None] | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    only: int | None = None,
) -> Score:
    """Score `windows` under whatever table is installed; `on_window(index)` is called when a window is done. With
    `only`, the score is that of this one window.

    Scored are the positions start .. stop - 1 of `spans`, which become edges of blocks beside the equal ones; without,
    those that `config` says. The rest of a window does not influence them, and what follows the last of them does not
    go through the model. Of a window that ends in an answer only that is scored, and whether it is the model's choice.

    Position 0 of a window is never scored: nothing predicts it. The logits are float32 in the loss whatever the model's
    dtype; nats are summed in float64. Raises InputError for a configuration or token ids that do not fit, ScoringError
    for nats that are not finite and when memory does not suffice for the smallest chunks.
    """
    length_tokens = windows.length_tokens
    config.check(length_tokens)
    check_vocabulary(windows, vocabulary_tokens(loaded.model))
    edges = block_edges(length_tokens, config.num_blocks)
    if spans is None:
        spans = [(0 if config.last_tokens is None else length_tokens - config.last_tokens, length_tokens)]
    else:
        edges = np.union1d(edges, np.array(spans, dtype=np.int64))
    blocks = [slice(start, stop) for start, stop in pairwise(edges.tolist())]
    indices = range(windows.num_windows) if only is None else [only]
    nats = np.zeros((len(indices), len(blocks)), dtype=np.float64)
    tokens = np.zeros(nats.shape, dtype=np.int64)
    answered: list[bool | None] = []
    chunk_tokens = length_tokens if config.chunk_tokens is None else min(config.chunk_tokens, length_tokens)
    for row, index in enumerate(indices):
        answer_start = windows.answer_start(index)
        scored = _scored_positions(length_tokens, [(answer_start, length_tokens)] if answer_start else spans)
        first_scored = int(np.argmax(scored))
        token_ids = torch.from_numpy(windows.token_ids[index, : len(scored)].astype(np.int64))
        outcome, chunk_tokens = _in_memory(
            loaded.model, token_ids, first_scored, chunk_tokens, config.offload_cache, bool(answer_start)
        )
        _check_finite(outcome.nats, index, windows.documents[index], first_scored, edges)
        position_nats = np.concatenate([np.zeros(first_scored), outcome.nats])
        for place, block in enumerate(blocks):
            nats[row, place] = position_nats[block][scored[block]].sum()
            tokens[row, place] = scored[block].sum()
        answered.append(outcome.all_chosen)
        if on_window is not None:
            on_window(index)
    return Score(nats=nats, tokens=tokens, block_edges=edges, answered=answered if any(windows.answer_starts) else ())


def _scored_positions(length_tokens: int, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each position up to the last scored one is scored; position 0 never is."""
    scored = np.zeros(length_tokens, dtype=np.bool_)
    for start, stop in spans:
        scored[start:stop] = True
    scored[0] = False
    return scored[: max(stop for _, stop in spans)]


def block_edges(length_tokens: int, num_blocks: int) -> NDArray[np.int64]:
    """Edges of equal position blocks, int64, shape (num_blocks + 1,): block b is [edges[b], edges[b + 1])."""
    return np.arange(num_blocks + 1, dtype=np.int64) * length_tokens // num_blocks


def forward_equivalent_tokens(windows: "Windows", spans: Sequence[tuple[int, int]] | None = None) -> int:
    """What scoring `windows` (and of those without an answer, `spans`) once costs, in tokens through the model."""
    length_tokens = windows.length_tokens
    last = length_tokens if spans is None else max(stop for _, stop in spans)
    return sum(length_tokens if windows.answer_start(index) else last for index in range(windows.num_windows))


def scoring_identity(
    model: ModelConfig, windows: "Windows", config: ScoringConfig, spans: Sequence[tuple[int, int]] | None = None
) -> dict[str, Any]:
    """All that a score depends on besides regime and weights, as JSON values: equal identities, comparable scores."""
    return {
        "dtype": model.dtype.name,
        "attention": model.attention.name,
        "chunk_tokens": config.chunk_tokens,
        "last_tokens": config.last_tokens,
        "num_blocks": config.num_blocks,
        **({} if spans is None else {"spans": [list(span) for span in spans]}),
        "length_tokens": windows.length_tokens,
        "windows": windows.fingerprint,
    }


def prove_scorer(loaded: "LoadedModel", offload_cache: bool = False) -> None:
    """Raise InputError unless this module's way to the logits gives the model's own, whole and chunked, on a probe.

    Models may scale or cap logits after the output head. What the config says of it is followed (`logits_scaling`,
    `logit_scale`, `lm_head_multiplier`, `final_logit_softcapping`); whatever else a model does is refused here, by
    name, instead of being scored wrongly.
    """
    model = loaded.model
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    token_ids = (torch.arange(_NUM_PROBE_TOKENS) * 7919 + 1) % vocabulary_tokens(model)
    with torch.inference_mode():
        expected = model(input_ids=on_input_device(model, token_ids), use_cache=False).logits[0]
        own = logits_of(model, hidden_states_of(model, token_ids, None)).to(expected.device)
        if own.shape != expected.shape:
            raise InputError(
                f"model: expected logits of shape {tuple(expected.shape)} from the output head of {name}, got "
                f"{tuple(own.shape)}; this architecture is not supported"
            )
        tolerance = 8 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        difference = float((own.float() - expected.float()).abs().max())
        if not difference <= tolerance:
            raise InputError(
                f"model: expected the output head of {name} to give its logits, but they differ by {difference:.3g}: "
                "the model changes its logits afterwards in a way that is not followed here; it is not supported"
            )
        cache = new_cache(model, offload_cache)
        halves = token_ids[: _NUM_PROBE_TOKENS // 2], token_ids[_NUM_PROBE_TOKENS // 2 :]
        pieces = [logits_of(model, hidden_states_of(model, half, cache)) for half in halves]
        difference = float((torch.cat(pieces).to(expected.device).float() - expected.float()).abs().max())
        # Other shapes, other order of sums, through all layers: far above rounding, far below a wrong position or mask.
        tolerance = 1e4 * torch.finfo(torch.float32).eps if expected.dtype == torch.float32 else 0.1
        if not difference <= tolerance * float(expected.abs().max()):
            raise InputError(
                f"model: expected {name} to give the same logits in two chunks with a key-value cache as in one, but "
                f"they differ by {difference:.3g}; this architecture is not supported"
            )


class _Outcome(NamedTuple):
    """The nats of a window's tokens from the first scored one on, float64, and whether each of these tokens was the
    model's most likely one (None where that was not asked)."""

    nats: NDArray[np.float64]
    all_chosen: bool | None


def _in_memory(
    model: Any, token_ids: torch.Tensor, first_scored: int, chunk_tokens: int, offload_cache: bool, with_choices: bool
) -> tuple[_Outcome, int]:
    """The outcome of one window and the chunk it was computed with: `chunk_tokens`, or less where memory runs out."""
    tried = []
    while True:
        outcome, problem = _attempt(model, token_ids, first_scored, chunk_tokens, offload_cache, with_choices)
        if outcome is not None:
            return outcome, chunk_tokens
        tried.append(chunk_tokens)
        if chunk_tokens <= _SMALLEST_CHUNK_TOKENS:
            raise ScoringError(f"out of memory with chunks of {', '.join(map(str, tried))} tokens: {problem}")
        chunk_tokens = max(chunk_tokens // 2, _SMALLEST_CHUNK_TOKENS)
        _log.warning("out of memory with chunks of %d tokens: %d are tried", tried[-1], chunk_tokens)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _attempt(
    model: Any, token_ids: torch.Tensor, first_scored: int, chunk_tokens: int, offload_cache: bool, with_choices: bool
) -> tuple[_Outcome | None, str]:
    # A function of its own: when it returns, the failed attempt's tensors are no longer held by the exception.
    try:
        return _window_outcome(model, token_ids, first_scored, chunk_tokens, offload_cache, with_choices), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).strip().partition("\n")[0] or type(error).__name__


def _window_outcome(
    model: Any, token_ids: torch.Tensor, first_scored: int, chunk_tokens: int, offload_cache: bool, with_choices: bool
) -> _Outcome:
    """What comes of the tokens at first_scored .. length - 1 of one window, from int64 token ids of shape (length,)."""
    num_tokens = len(token_ids)
    cache = new_cache(model, offload_cache) if chunk_tokens < num_tokens else None
    pieces, chosen = [], []
    with torch.inference_mode():
        # The last token, which predicts nothing here, goes through the model all the same: products in low precision
        # depend on the shape, and so these are the hidden states that the model's own loss is made from.
        for start in range(0, num_tokens, chunk_tokens):
            stop = min(start + chunk_tokens, num_tokens)
            hidden_states = hidden_states_of(model, token_ids[start:stop], cache)
            first, last = (
                max(first_scored, start + 1),
                min(stop, num_tokens - 1),
            )  # what this chunk predicts and is scored
            if first <= last:
                targets = token_ids[first : last + 1]
                predicting = hidden_states[first - 1 - start : last - start]
                pieces.append(_head_nats(model, predicting, targets))
                if with_choices:
                    chosen.append(bool(torch.equal(logits_of(model, predicting).argmax(dim=-1).cpu(), targets)))
            del hidden_states
        nats = torch.cat(pieces).to(device="cpu", dtype=torch.float64).numpy()
        return _Outcome(nats, all(chosen) if with_choices else None)


def _head_nats(model: Any, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats of `targets` (num_tokens,) given `hidden_states` (num_tokens, hidden): float32, shape (num_tokens,)."""
    num_rows, num_loss_rows = num_head_rows(model, hidden_states.device)
    # Made at once: small results between the large pieces would keep the heap from shrinking.
    nats = torch.empty(len(targets), dtype=torch.float32, device=hidden_states.device)
    for start in range(0, len(targets), num_rows):
        logits = logits_of(model, hidden_states[start : start + num_rows])
        wanted = targets[start : start + num_rows].to(logits.device)
        for first in range(0, len(logits), num_loss_rows):
            rows = slice(first, first + num_loss_rows)
            loss = cross_entropy(logits[rows].float(), wanted[rows], reduction="none")
            nats[start + first : start + first + len(loss)] = loss
        del logits  # before the next piece's are made
    return nats


def _check_finite(
    nats: NDArray[np.float64], window: int, document: str, first_scored: int, edges: NDArray[np.int64]
) -> None:
    bad = np.flatnonzero(~np.isfinite(nats))
    if not bad.size:
        return
    position = first_scored + int(bad[0])
    block = int(np.searchsorted(edges, position, side="right")) - 1
    raise ScoringError(
        f"window {window} (document {document!r}): the nats are not finite from position block {block} on (tokens "
        f"{edges[block]} to {edges[block + 1] - 1}; {bad.size} of {nats.size} scored tokens, the first at {position}: "
        f"{nats[bad[0]]})"
    )
