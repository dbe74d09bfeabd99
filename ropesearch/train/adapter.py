"""Low-rank adapters (peft): put on before training, merged into the weights that are written."""

from typing import Any

import torch

from ropesearch.seeding import stream
from ropesearch.train.config import TrainingConfig
from ropesearch.train.weights import whole


def add_adapter(model: Any, config: TrainingConfig, seed: int) -> None:
    """Freeze the model and put an adapter on each of its linear layers but the output head, in place.

    The additions begin at zero; the other factor is drawn from the seed.
    """
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules="all-linear")
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(int(stream(seed, "train.adapter").integers(2**62)))
        inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def merged_tensors(model: Any) -> dict[str, Any]:
    """The model's tensors by the names that they had without adapters, each as a function that gives it whole, on the
    CPU, with its addition: W + alpha / rank B A (arXiv 2106.09685, section 4.1).

    Every process has to call the same ones in the same order where weights are sharded.
    """
    tensors: dict[str, Any] = {}
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        owner, _, kind = name.partition(".base_layer.")
        if kind == "weight" and owner in adapted:
            tensors[f"{owner}.weight"] = _sum_of(adapted[owner])
        else:
            plain = name.replace(".base_layer.", ".")
            tensors[plain] = _alone(tensor)
    return tensors


def _alone(tensor: torch.Tensor) -> Any:
    return lambda: whole(tensor)


def _sum_of(module: Any) -> Any:
    def merged() -> torch.Tensor:
        weight = whole(module.base_layer.weight)
        for name, down in module.lora_A.items():
            addition = whole(module.lora_B[name].weight) @ whole(down.weight)
            weight = weight + module.scaling[name] * (addition.T if module.fan_in_fan_out else addition)
        return weight

    return merged
