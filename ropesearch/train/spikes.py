"""Noticing a loss that jumps."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

_NUM_RECENT = 50
_LEAST_RECENT = 10
_NUM_DEVIATIONS = 6.0
_LEAST_JUMP_NATS = 0.2
_EARLY_JUMP_NATS = 2.0  # while so few steps say little of how losses spread: more than documents differ by


class SpikeWatch:
    """Says when a step's loss is far above those before it. Nothing else is done about it: the step's gradient is
    clipped as all are, and the next states show whether the training recovers."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)

    def seen(self, step: int, loss: float) -> str | None:
        """Take note of a step's loss in nats per token; a sentence where it is a spike, else None."""
        said = None
        if self._recent:
            middle = statistics.median(self._recent)
            least = _LEAST_JUMP_NATS if len(self._recent) >= _LEAST_RECENT else _EARLY_JUMP_NATS
            jump = max(_NUM_DEVIATIONS * statistics.pstdev(self._recent), least)
            if loss > middle + jump:
                said = (
                    f"step {step}: a loss of {loss:.3f} nats per token, far above the {middle:.3f} of the steps "
                    "before; where it stays up, begin again with a lower training.peak_learning_rate"
                )
        self._recent.append(loss)
        return said

    def recall(self, event: Mapping[str, Any]) -> None:
        """Take note of a step of an earlier process, from its line of metrics."""
        for wanted in ("long", "short"):
            buckets = [bucket for bucket, name in event["regimes"].items() if name == wanted]
            tokens = sum(event["tokens"][bucket] for bucket in buckets)
            if tokens:
                self._recent.append(sum(event["nats"][bucket] for bucket in buckets) / tokens)
                return
