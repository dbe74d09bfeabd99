"""Weights that may be sharded over processes (FSDP2): shard them, have them whole, put whole ones back."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ropesearch.train.processes import Processes


def shard(loss: nn.Module, processes: Processes, dtype: torch.dtype) -> None:
    """Spread weights, gradients and moments over the processes, layer by layer (FSDP2, torch's `fully_shard`).

    Products are computed in `dtype`, sums of gradients in float32. Alone, nothing is changed.
    """
    if processes.is_alone:
        return
    mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in loss.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(loss, mesh=mesh, mp_policy=policy)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU. Every process has to ask for it where it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a tensor, or this process's shard of it, with whole values."""
    with torch.no_grad():
        tensor.copy_(like(tensor, values))


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Whole values sharded, placed and typed as `tensor` is."""
    values = values.to(device=tensor.device, dtype=tensor.dtype)
    if isinstance(tensor, DTensor):
        sharded: Any = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
        return sharded
    return values.clone()
