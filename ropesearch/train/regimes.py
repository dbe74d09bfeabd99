"""One regime for each micro-batch, put in force by name, and the proof that packed documents do not see each other."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ropesearch.errors import InputError
from ropesearch.model.install import installed
from ropesearch.model.load import LoadedModel
from ropesearch.rope.regime import Regime
from ropesearch.score.forward import vocabulary_tokens
from ropesearch.train.loss import RowLoss

_NUM_PROBE_TOKENS = 24


class RegimeSwitch:
    """Puts the regime that a micro-batch names in force around its forward and backward pass.

    Nothing is told from positions or lengths: a packed row is longer than its documents, and a shard of a long row is
    shorter than the row.
    """

    def __init__(self, loaded: LoadedModel, regimes: Mapping[str, Regime]) -> None:
        self._loaded = loaded
        self._regimes = dict(regimes)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Within the block the model uses the named regime; its tables are float32 and proven, see `installed`."""
        with installed(self._loaded, self._regimes[name]):
            yield


def prove_documents_apart(loaded: LoadedModel, loss: RowLoss) -> None:
    """Raise InputError unless, in a packed row, the predictions for a document are those for it alone, whatever the
    document before it holds, and unless in a whole row they do depend on what comes before.

    The probe goes through `loss` itself, so what is proven is what training uses, with this attention implementation.
    """
    vocabulary = vocabulary_tokens(loaded.model)
    first, other, second = (
        (torch.arange(_NUM_PROBE_TOKENS) * step + step) % vocabulary for step in (7919, 104729, 1299709)
    )
    positions = torch.arange(_NUM_PROBE_TOKENS)

    def states(*documents: torch.Tensor, packed: bool = True) -> torch.Tensor:
        """Of the last document's tokens but its first."""
        token_ids = torch.cat(documents)[None].to(loaded.device)
        numbers = positions.repeat(len(documents)) if packed else torch.arange(token_ids.shape[1])
        is_scored = torch.zeros(token_ids.shape, dtype=torch.bool)
        is_scored[0, -_NUM_PROBE_TOKENS + 1 :] = True
        with torch.no_grad():
            found, _ = loss.predicting(token_ids, numbers[None].to(loaded.device), is_scored)
        return found.float()

    alone, packed = states(second), states(first, second)
    tolerance = (1e-4 if loaded.dtype == "float32" else 5e-2) * float(alone.abs().max())
    where = f"model type {loaded.geometry.model_type!r} with attention {loaded.attention!r}"
    for what, found in (("a document in a packed row", packed), ("the same after another one", states(other, second))):
        difference = float((found - alone).abs().max())
        if not difference <= tolerance:
            raise InputError(
                f"{where}: expected {what} to be read as it is alone, but its hidden states differ by "
                f"{difference:.3g}: documents of a row see each other; give another attention, or "
                "mixture.shares=[0,1] for long rows alone"
            )
    before = [states(document, second, packed=False) for document in (first, other)]
    if torch.equal(*before):
        raise InputError(f"{where}: a token does not depend on what was before it in its row; nothing long is learnt")
