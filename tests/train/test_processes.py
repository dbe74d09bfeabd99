"""ropesearch/train/processes.py for one process; tests/test_finetuning.py starts two."""

import pytest
import torch

from ropesearch.errors import InputError
from ropesearch.train.processes import Processes


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_alone_it_is_the_first_and_has_everything_itself() -> None:
    found = Processes.joined("cpu")
    assert (found.rank, found.num_processes, found.device) == (0, 1, torch.device("cpu"))
    assert found.is_first and found.is_alone
    found.wait_for_all()
    assert found.any(True) and not found.any(False)
    values = torch.tensor([1.5, 2.5], dtype=torch.float64)
    assert torch.equal(found.summed(values), values)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed keeps weights and moments in a format of its own"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM has models of its own"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2", "context parallelism shards a sequence"),
        ("PARALLELISM_CONFIG_SP_SIZE", "4", "sequence parallelism is DeepSpeed's"),
    ],
)
def test_other_ways_to_train_are_refused_with_the_reason(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{name}={value}: expected processes that share the work by rows.*{reason}"):
        Processes.joined("cpu")
    monkeypatch.setenv(name, "1" if value.isdigit() else "false")
    Processes.joined("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="'meta'"):
        Processes.joined("meta")
