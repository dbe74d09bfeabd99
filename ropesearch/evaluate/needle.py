"""What a regime is worth on needles: how well the answer at a window's end is known, and how often it is right."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ropesearch.errors import InputError
from ropesearch.score.score import Score, perplexity

if TYPE_CHECKING:
    from ropesearch.data.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleEvaluation:
    """One row: a method's nats and tokens of the answers of one split's needle windows of `length` tokens.

    An answer is right where each of its tokens is the model's most likely one, which is where greedy decoding gives it.
    Windows are in the order of the split. Fields are those of an entry of rope_config.json's "evaluation".
    """

    measure: ClassVar[str] = "needle"

    method: str
    split: str
    length: int
    nats: float
    tokens: int
    num_right: int
    window_nats: tuple[float, ...]
    window_tokens: tuple[int, ...]
    window_right: tuple[bool, ...]

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens)."""
        return perplexity(self.nats, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, with its measure."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"method": values.pop("method"), "measure": self.measure, **values}


def needle_row(score: Score, windows: "Windows", method: str) -> NeedleEvaluation:
    """The row of a score of needle windows. Raises InputError where a window has no answer."""
    right = [answered for answered in score.answered if answered is not None]
    if len(right) != windows.num_windows:
        raise InputError(f"needles: expected an answer in each of {windows.num_windows} windows, got {len(right)}")
    return NeedleEvaluation(
        method=method,
        split=windows.split,
        length=windows.length_tokens,
        nats=score.total_nats,
        tokens=score.total_tokens,
        num_right=sum(right),
        window_nats=tuple(score.window_nats.tolist()),
        window_tokens=tuple(score.window_tokens.tolist()),
        window_right=tuple(right),
    )
