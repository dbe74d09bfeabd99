"""Where a model's weights are put: on one device, or its layers over all accelerators of this machine.

Spread, the layers are put one after the other on the devices in turn, and run so too: the devices wait for each other,
and what they have together is the memory. Each keeps the keys and values of its own layers. The hooks of accelerate
(hooks.py, AlignDevicesHook) move what goes from one to the next. Tensor parallelism, in which all devices work at once,
would need a process for each and a plan for the architecture, and sums in another order.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import nn

from ropesearch.errors import InputError

# The device of a model that is too large for one.
BALANCED = "balanced"


def device_arguments(name: str) -> dict[str, Any]:
    """What from_pretrained is to be told so that the model comes to be where the key `device` says.

    Raises InputError for a device that is not available, and to spread a model, for fewer than two accelerators.
    """
    if name == BALANCED:
        memory = {device: size for device, size in get_max_memory().items() if device != "cpu"}
        if len(memory) < 2:
            raise InputError(
                "device: expected two or more accelerators in sight to spread a model over, got "
                f"{len(memory) or 'none'}; give one device, or auto, or more of them (CUDA_VISIBLE_DEVICES; on Slurm "
                "launcher.gres=gpu:2)"
            )
        # The CPU is left out: what has no place goes nowhere, and is told by `check_placed`.
        return {"device_map": BALANCED, "max_memory": memory}
    return {"device_map": {"": device_of(name)}}


def check_placed(model: Any, name: str) -> None:
    """Raise InputError for a model some of whose layers had no place on the accelerators."""
    placed: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    left = [part or "all" for part, device in placed.items() if str(device) in ("cpu", "disk")]
    if name == BALANCED and left:
        raise InputError(
            "device: expected room for all weights on the accelerators in sight, got none for "
            f"{', '.join(left[:3])}{f' and {len(left) - 3} more' if len(left) > 3 else ''}; give more of them, or "
            "model.dtype=bfloat16 where the weights are float32"
        )


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that hold weights, in the order of the layers."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def in_words(devices: Iterable[torch.device]) -> str:
    """Devices by name."""
    return ", ".join(map(str, devices))


def device_of(name: str) -> torch.device:
    """The device that a name stands for, auto the first GPU or the CPU. InputError where it is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    expected = f"device: expected a torch device that is here, such as cpu, cuda or cuda:1, got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError as error:  # with a list of all kinds that torch can be built for
        raise InputError(f"{expected}; give another, or auto") from error
    if device.type == "meta":
        raise InputError(f"{expected}, which holds no data; give another, or auto")
    try:
        torch.empty(1, device=device)
    # torch built without CUDA says so with an AssertionError, without other kinds with whatever comes first.
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError(f"{expected} ({reason}); give another, or auto") from error
    return device
