"""Two accelerators that are not there: tensors keep their values on the CPU and say that they are somewhere else.

Within `pretended()` a tensor is where it was put, `cuda:0` or `cuda:1`, and what is computed of tensors in different
places raises what torch raises there; so a spread model can be run, and a tensor that nobody moved is found.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.utils.checkpoint
from accelerate.utils import get_balanced_memory
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
_CPU = torch.device("cpu")
_DEVICE_GET = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class _Pretended(TorchFunctionMode):
    """Answers every call into torch; the place of a tensor is an attribute of it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if function is torch.device:
            return _as_device(*args, **kwargs)
        if function == _DEVICE_GET:
            return place_of(args[0])
        if function is torch.Tensor.backward:  # layers are computed again in it, where this has to be in force
            with self:
                engine = torch.autograd.Variable._execution_engine
                return engine.run_backward(args, (kwargs["gradient"],), False, False, (), accumulate_grad=True)
        moves = function in (torch.Tensor.to, torch.Tensor.cpu)
        place = _moved_to(function, *args, **kwargs) if moves else _computed_on(function, args, kwargs)
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        if moves:
            args = (args[0], *(_CPU if type(each) is int else each for each in args[1:]))
        answer = function(*args, **kwargs)
        if moves and answer is args[0] and place != place_of(answer):
            answer = answer.clone()
        if function.__name__ != "__set__":
            tree_map_only(torch.Tensor, lambda tensor: put(tensor, place), answer)
        return answer


def _moved_to(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.device:
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            return place_of(each)
        if isinstance(each, torch.device | str) or type(each) is int:
            return _as_device(each)
    return _CPU if function is torch.Tensor.cpu else place_of(tensor)


def _computed_on(function: Any, args: Any, kwargs: Any) -> torch.device:
    name = function.__name__
    if kwargs.get("device") is not None:
        return _as_device(kwargs["device"])
    if name in ("copy_", "__setitem__", "__set__"):
        return place_of(args[0])
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    # As torch, let single numbers and indices of the CPU pass.
    free = [place_of(each) == _CPU and (each.dim() == 0 or name == "__getitem__") for each in tensors]
    places = {place_of(each) for each, is_free in zip(tensors, free, strict=True) if not is_free}
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors on the same device, got {sorted(map(str, places))} in {name}")
    return next(iter(places), _CPU)


def place_of(tensor: Any) -> torch.device:
    """Where a tensor says that it is."""
    place: torch.device = tensor.__dict__.get("place", _CPU)
    return place


def put(tensor: torch.Tensor, place: torch.device) -> None:
    """Have a tensor say that it is at `place`."""
    tensor.place = place  # type: ignore[attr-defined]


@contextlib.contextmanager
def pretended(memory_bytes: int = 1 << 30) -> Iterator[None]:
    """Within the block there are two accelerators, each with so much memory."""
    # What autograd has saved comes back as other objects, which do not say where they are.
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    properties = SimpleNamespace(total_memory=memory_bytes)
    with (
        mock.patch.dict(checks, default=checks["none"]),
        mock.patch("torch.cuda.get_device_properties", lambda device: properties),
        _Pretended(),
    ):
        yield


def spread(model: Any) -> Any:
    """The model over both accelerators as accelerate balances it, with the hooks that transformers has it put on; to be
    used within `pretended()`.
    """
    whole = list(model._no_split_modules)
    memory = get_balanced_memory(model, {0: 10**9, 1: 10**9}, no_split_module_classes=whole)
    device_map = accelerate.infer_auto_device_map(model, memory, whole)
    for name, place in device_map.items():
        part = functools.reduce(getattr, name.split("."), model)
        for tensor in [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]:
            put(tensor, _as_device(place))
    accelerate.dispatch_model(model, device_map, skip_keys=model._skip_keys_device_placement)
    return model


def _as_device(what: Any, index: int | None = None) -> torch.device:
    if isinstance(what, int):
        return torch.device("cuda", what)
    return torch.device(what) if index is None else torch.device(what, index)


def _on_cpu(what: Any) -> Any:
    return _CPU if isinstance(what, torch.device) else "cpu" if isinstance(what, str) and "cuda" in what else what
