"""The processes of one fine-tuning: who this one is, and what all of them agree on."""

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from accelerate import PartialState

from ropesearch.errors import InputError
from ropesearch.model.devices import device_of

# Others wait while the first process prepares the texts. Who has died is known to torchrun, whatever this is.
_PATIENCE = timedelta(days=2)
# What asks accelerate for ways to train that this loop has not.
_NOT_FOLLOWED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed keeps weights and moments in a format of its own, of pickles",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM has models of its own",
    "PARALLELISM_CONFIG_CP_SIZE": (
        "context parallelism shards a sequence, and torch's has neither masks between documents nor a CPU version"
    ),
    "PARALLELISM_CONFIG_SP_SIZE": "sequence parallelism is DeepSpeed's",
}


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those that `torchrun` (or a scheduler with the same variables) has started; alone without."""

    rank: int
    num_processes: int
    device: torch.device

    @classmethod
    def joined(cls, device: str) -> "Processes":
        """Meet the others: over NCCL on GPUs, each process its own, else over gloo. `device` as in ModelConfig.

        All but the first say nothing from here on. Raises InputError where accelerate is asked,
        by its variables, for a way to train that is not followed.
        """
        for name, reason in _NOT_FOLLOWED.items():
            if os.environ.get(name, "false").lower() not in ("", "false", "0", "1", "no"):
                raise InputError(
                    f"{name}={os.environ[name]}: expected processes that share the work by rows and shard the weights "
                    f"(FSDP2), got another way, which is not followed: {reason}; start with torchrun alone"
                )
        wants_cpu = device == "cpu" or not torch.cuda.is_available()
        state: Any = PartialState(cpu=wants_cpu, timeout=_PATIENCE)
        alone = state.num_processes == 1
        own = device_of(device) if alone else state.device
        if state.process_index:
            logging.getLogger("ropesearch").addHandler(logging.NullHandler())
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return cls(state.process_index, state.num_processes, own)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.num_processes == 1

    def wait_for_all(self) -> None:
        """Return when every process is here."""
        if not self.is_alone:
            torch.distributed.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in some process; the same answer in all."""
        return bool(self.summed(torch.tensor([float(flag)], dtype=torch.float64))[0])

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over processes, on the CPU, of float64 values of the same shape in each."""
        if self.is_alone:
            return values.cpu()
        total = values.to(self.device if self.device.type == "cuda" else "cpu", copy=True)
        torch.distributed.all_reduce(total)
        return total.cpu()
