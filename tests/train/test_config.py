"""ropesearch/train/config.py: the learning rate against transformers' schedules, and what is refused."""

import importlib.metadata
from typing import Any

import pytest
from transformers import optimization

from ropesearch.errors import InputError
from ropesearch.train.config import Adapter, Schedule, TrainingConfig


@pytest.mark.parametrize("num_warmup_steps", [0, 7, 40])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_rate_is_that_of_transformers_half_a_step_later(schedule: Schedule, num_warmup_steps: int) -> None:
    config = TrainingConfig(num_steps=40, num_warmup_steps=num_warmup_steps, schedule=schedule, peak_learning_rate=3e-4)
    numbers = {"num_warmup_steps": num_warmup_steps, "num_training_steps": 40}
    for step in range(40):
        if schedule is Schedule.cosine:
            expected = optimization._get_cosine_schedule_with_warmup_lr_lambda(step + 0.5, num_cycles=0.5, **numbers)
        else:
            expected = optimization._get_linear_schedule_with_warmup_lr_lambda(step + 0.5, **numbers)
        assert config.learning_rate(step) == pytest.approx(3e-4 * expected, rel=1e-12)
        assert config.learning_rate(step) > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_steps": 0}, "num_steps: expected at least 1, got 0"),
        ({"num_step_rows": -1}, "num_step_rows: expected at least 1, got -1"),
        ({"peak_learning_rate": 0.0}, "peak_learning_rate: expected above 0 and at most 10, got 0.0"),
        ({"clip_norm": float("inf")}, "clip_norm: expected above 0 and at most 1e+06, got inf"),
        ({"peak_learning_rate": 15.0}, "peak_learning_rate: expected above 0 and at most 10, got 15.0"),
        ({"weight_decay": float("nan")}, "weight_decay: expected from 0 to 1e+06, got nan"),
        (
            {"num_steps": 5, "num_warmup_steps": 6},
            "num_warmup_steps: expected at most training.num_steps = 5, got 6; "
            "give a lower training.num_warmup_steps too",
        ),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainingConfig(**values)
    assert str(caught.value) == message


def test_lora_without_peft_is_refused_before_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    TrainingConfig().check()
    with pytest.raises(InputError, match="expected peft to be installed for lora, got none; install it with"):
        TrainingConfig(adapter=Adapter.lora).check()
