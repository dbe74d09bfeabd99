"""The nats of a micro-batch with gradients, in bounded memory."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils.checkpoint import checkpoint

from ropesearch.score.forward import base_of, logits_of, num_head_rows


class RowLoss(nn.Module):
    """A model with its loss in one forward pass, so that what shards the weights has them whole for both.

    The output head runs over pieces of the scored positions, which are computed again in the backward pass: no array of
    tokens x vocabulary ever exists. Documents of a row are told apart by positions that begin again at 0, as
    transformers does (masking_utils.py) where there is neither mask nor cache.
    """

    def __init__(self, model: Any, teacher: "RowLoss | None" = None) -> None:
        super().__init__()
        self.model = model
        self._teacher = (teacher,)  # in a tuple: no part of this module
        # Attention by lengths of documents (flash) wants all of them in one row.
        self._in_one_row = "flash" in str(model.config._attn_implementation)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        is_scored: torch.Tensor,
        with_teacher: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The nats of the scored tokens, summed, and the Kullback-Leibler divergence of these predictions from the
        teacher's, summed over the same places (zero where it is not asked for): float32 scalars.

        All of shape (num_sequences, num_tokens), int64 and bool. A token is predicted at the place before it.
        """
        teacher = self._teacher[0] if with_teacher else None
        predicting, targets = self.predicting(token_ids, position_ids, is_scored)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught, _ = teacher.predicting(token_ids, position_ids, is_scored)
        num_rows, _ = num_head_rows(self.model, predicting.device)
        nats = predicting.new_zeros((), dtype=torch.float32)
        divergence = nats.clone()
        for start in range(0, len(targets), num_rows):
            piece = slice(start, start + num_rows)
            arguments = (predicting[piece], targets[piece], teacher, None if taught is None else taught[piece])
            if len(targets) <= num_rows:  # nothing else is held meanwhile
                some_nats, some_divergence = self._of_piece(*arguments)
            else:
                some_nats, some_divergence = checkpoint(
                    self._of_piece, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            nats, divergence = nats + some_nats, divergence + some_divergence
        if not len(targets):  # weights take part all the same: other processes wait for their gradients
            nats = predicting.float().sum() + 0.0 * self.model.get_output_embeddings().weight.float().sum()
        return nats, divergence

    def predicting(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, is_scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states (num_scored, hidden) that scored tokens are predicted from, and these tokens."""
        if self._in_one_row:
            token_ids, position_ids, is_scored = (each.reshape(1, -1) for each in (token_ids, position_ids, is_scored))
        base = base_of(self.model)
        hidden_states = base(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        wanted = is_scored[:, 1:].to(hidden_states.device)
        if not bool(wanted.any()):
            return hidden_states[0, :0] + 0.0 * hidden_states.sum(), token_ids.new_zeros((0,))
        return hidden_states[:, :-1][wanted], token_ids[:, 1:].to(hidden_states.device)[wanted]

    def _of_piece(
        self,
        hidden_states: torch.Tensor,
        targets: torch.Tensor,
        teacher: "RowLoss | None",
        taught: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits_of(self.model, hidden_states).float()
        nats = cross_entropy(logits, targets, reduction="sum")
        if teacher is None or taught is None:
            return nats, torch.zeros_like(nats)
        with torch.no_grad():
            expected = log_softmax(logits_of(teacher.model, taught).float(), dim=-1)
        divergence = (expected.exp() * (expected - log_softmax(logits, dim=-1))).sum()
        return nats, divergence
