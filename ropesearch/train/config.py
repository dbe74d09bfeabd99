"""How a checkpoint is fine-tuned. Standard library only."""

import importlib.metadata
import math
from dataclasses import dataclass
from enum import Enum

from ropesearch.errors import InputError
from ropesearch.settings import setting

_MOST_RANK = 1024
_MOST = 1e6  # of what has no limit by itself


class Adapter(Enum):
    """What is trained: all weights, or low-rank additions to the linear layers that are merged into them at the end."""

    none = "none"
    lora = "lora"


class Precision(Enum):
    """What matrix products are computed in; weights, moments and tables are float32 in any case."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(Enum):
    """How the learning rate falls to zero after the warm-up."""

    cosine = "cosine"
    linear = "linear"


@dataclass(kw_only=True)
class TrainingConfig:
    """Steps, optimizer and memory of a fine-tuning. Raises InputError for values out of range.

    Rate, schedule and rows a step are LongRoPE2's (arXiv 2502.20082); AdamW with betas 0.9 and 0.95, no weight decay
    and a clipping at 1 are those of its released training.
    """

    num_steps: int = setting(1000, "optimizer steps")
    num_step_rows: int = setting(64, "rows of target_length tokens in a step, of all processes together")
    peak_learning_rate: float = setting(2e-5, "learning rate after the warm-up")
    num_warmup_steps: int = setting(20, "steps over which the learning rate rises from zero")
    schedule: Schedule = setting(Schedule.cosine, "how the learning rate falls to zero after the warm-up")
    weight_decay: float = setting(0.0, "weight decay of matrices")
    clip_norm: float = setting(1.0, "greatest norm of a step's gradient")
    adapter: Adapter = setting(Adapter.none, "none = all weights; lora = low-rank additions, merged at the end")
    lora_rank: int = setting(16, "rank of the additions, at most 1024, with adapter=lora")
    lora_alpha: int = setting(32, "what the additions are multiplied by, times lora_rank, with adapter=lora")
    precision: Precision = setting(
        Precision.auto, "of matrix products; auto = bfloat16 where the checkpoint is stored in it, else float32"
    )
    checkpoint_activations: bool = setting(True, "compute layers again in the backward pass instead of keeping them")
    distill_weight: float = setting(
        0.0, "weight of the divergence from the base model on short rows (self-distillation); 0 = none"
    )
    save_every_steps: int = setting(100, "steps between states to go on from")
    num_kept_states: int = setting(2, "how many of the last states are kept")
    measure_every_steps: int = setting(100, "steps between measurements of the held-out perplexity, short and long")

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_step_rows", "lora_rank", "save_every_steps", "num_kept_states",
                     "measure_every_steps"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name, most in (("num_warmup_steps", math.inf), ("weight_decay", _MOST), ("distill_weight", _MOST)):
            if not 0 <= getattr(self, name) <= most:
                raise InputError(f"{name}: expected from 0 to {most:g}, got {getattr(self, name)}")
        for name, most in (("peak_learning_rate", 10.0), ("clip_norm", _MOST), ("lora_alpha", _MOST)):
            if not 0 < getattr(self, name) <= most:
                raise InputError(f"{name}: expected above 0 and at most {most:g}, got {getattr(self, name)}")
        if self.lora_rank > _MOST_RANK:
            raise InputError(f"lora_rank: expected at most {_MOST_RANK}, got {self.lora_rank}")
        if self.num_warmup_steps > self.num_steps:
            raise InputError(
                f"num_warmup_steps: expected at most training.num_steps = {self.num_steps}, got "
                f"{self.num_warmup_steps}; give a lower training.num_warmup_steps too"
            )

    def check(self) -> None:
        """Raise InputError where what is asked for is not installed."""
        if self.adapter is Adapter.lora:
            try:
                importlib.metadata.version("peft")
            except importlib.metadata.PackageNotFoundError:
                raise InputError(
                    "training.adapter: expected peft to be installed for lora, got none; install it with "
                    "`pip install ropesearch[lora]`, or leave training.adapter out"
                ) from None

    def learning_rate(self, step: int) -> float:
        """Of the step counted from 0: transformers' get_cosine_schedule_with_warmup or its linear one
        (optimization.py), shifted by half a step so that neither the first nor the last has a rate of zero."""
        place = step + 0.5
        if place < self.num_warmup_steps:
            return self.peak_learning_rate * place / self.num_warmup_steps
        progress = (place - self.num_warmup_steps) / max(self.num_steps - self.num_warmup_steps, 1)
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule is Schedule.cosine else 1.0 - progress
        return self.peak_learning_rate * left
