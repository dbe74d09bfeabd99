"""ropesearch/train/state.py: what is saved comes back bit for bit; damage, full disks and kills cost no older state."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from ropesearch.artifact import weights as weights_module
from ropesearch.errors import InputError
from ropesearch.train import state as state_module
from ropesearch.train.processes import Processes
from ropesearch.train.state import TrainingStates

ALONE = Processes(rank=0, num_processes=1, device=torch.device("cpu"))
IDENTITY = {"weights": "sha256:1", "seed": 0}


def trained(num_steps: int, seed: int = 0) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Two parameters after some steps of AdamW on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "matrix": nn.Parameter(torch.randn(3, 5, generator=generator)),
        "vector": nn.Parameter(torch.randn(4, generator=generator)),
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, betas=(0.9, 0.95))
    step(parameters, optimizer, num_steps)
    return parameters, optimizer


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def states(folder: Path, num_kept: int = 2, **changes: Any) -> TrainingStates:
    return TrainingStates(folder, {**IDENTITY, **changes}, num_kept, ALONE)


def assert_same(one: dict[str, nn.Parameter], other: dict[str, nn.Parameter]) -> None:
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    parameters, optimizer = trained(5)
    states(tmp_path).save(5, parameters, optimizer)
    step(parameters, optimizer, 3)
    others, other_optimizer = trained(0, seed=9)
    assert states(tmp_path).load(others, other_optimizer) == (5, [])
    step(others, other_optimizer, 3)
    assert_same(others, parameters)


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    parameters, optimizer = trained(0)
    before = {name: each.detach().clone() for name, each in parameters.items()}
    assert states(tmp_path / "absent").load(parameters, optimizer) == (0, [])
    assert_same(parameters, before)  # type: ignore[arg-type]
    assert not optimizer.state


def test_large_states_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_FILE_BYTES", 50)
    parameters, optimizer = trained(4)
    states(tmp_path).save(4, parameters, optimizer)
    assert len(list((tmp_path / "step-00000004").glob("*.safetensors"))) > 2
    others, other_optimizer = trained(0, seed=9)
    assert states(tmp_path).load(others, other_optimizer) == (4, [])
    assert_same(others, parameters)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    parameters, optimizer = trained(1)
    for number in (10, 20, 30, 40):
        states(tmp_path, num_kept=2).save(number, parameters, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


@pytest.mark.parametrize("damage", ["bit", "cut", "no description", "half a description"])
def test_of_a_damaged_state_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    for number in (3, 6):
        states(tmp_path).save(number, *trained(number))
    last = tmp_path / "step-00000006"
    tensors, description = last / "tensors-00001.safetensors", last / "state.json"
    content = tensors.read_bytes()
    if damage == "bit":
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        tensors.write_bytes(content[:-7])
    elif damage == "no description":
        description.unlink()
    else:
        description.write_text(description.read_text()[:20])
    parameters, optimizer = trained(0, seed=9)
    assert states(tmp_path).load(parameters, optimizer) == (3, [last])
    assert_same(parameters, trained(3)[0])
    states(tmp_path, num_kept=1).save(5, *trained(5))  # stopped before the step of the damaged one
    assert states(tmp_path).load(*trained(0, seed=9)) == (5, [last])
    states(tmp_path, num_kept=1).save(6, *trained(6))
    others, other_optimizer = trained(0, seed=9)
    assert states(tmp_path).load(others, other_optimizer) == (6, [])
    assert_same(others, trained(6)[0])


def test_a_state_of_another_training_is_refused(tmp_path: Path) -> None:
    states(tmp_path).save(3, *trained(3))
    with pytest.raises(InputError, match="expected the state of this training, got one with other seed; give another"):
        states(tmp_path, seed=1).load(*trained(0))


def test_a_full_disk_costs_no_older_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states(tmp_path).save(3, *trained(3))

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights_module, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        states(tmp_path, num_kept=1).save(6, *trained(6))
    assert refusal.value.errno == errno.ENOSPC and "step-00000006" in refusal.value.filename
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    parameters, optimizer = trained(0, seed=9)
    assert states(tmp_path).load(parameters, optimizer) == (3, [])


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    states(tmp_path).save(3, *trained(3))
    before = (tmp_path / "step-00000003" / "state.json").stat().st_mtime_ns
    states(tmp_path).save(3, *trained(3))
    assert (tmp_path / "step-00000003" / "state.json").stat().st_mtime_ns == before
