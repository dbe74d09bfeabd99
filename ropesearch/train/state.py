"""The states that a fine-tuning goes on from: folders of safetensors and one JSON file, each written in one step."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ropesearch import files
from ropesearch.artifact.weights import save_tensors
from ropesearch.errors import InputError
from ropesearch.train.processes import Processes
from ropesearch.train.weights import like, put, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE_BYTES = 4 << 30  # about so much is in memory at once
_STATE = "state.json"


class TrainingStates:
    """The folders FOLDER/step-N, of which the last few are kept.

    A state is whole or not there: it is built beside its place, flushed and renamed, and older ones are removed only
    after that. What it holds depends on no process: weights are whole, so another number of processes can go on.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], num_kept: int, processes: Processes) -> None:
        self._folder = folder
        self._identity = dict(identity)
        self._num_kept = num_kept
        self._processes = processes

    def save(self, step: int, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Write the state after `step` steps, by the first process; all have to call it.

        Raises:
            OSError: the disk is full, or refuses, with the path; older states stay as they are.
        """
        place = self._folder / f"step-{step:08d}"
        if self._processes.is_first:
            with files.naming(place):
                if self._content(place) is None:
                    if place.exists():  # damaged: an earlier one was gone on from
                        files.remove_folder(place)
                    with files.folder_beside(place) as stage:
                        names = self._write(stage, parameters, optimizer)
                        digests = {name: files.sha256_of_file(stage / name) for name in names}
                        content = {"step": step, "identity": self._identity, "files": digests}
                        files.write_json(stage / _STATE, content)
                for _, old in [each for each in self._found() if each[0] <= step][: -self._num_kept]:
                    files.remove_folder(old)
        else:
            for _ in _tensors(parameters, optimizer):
                pass
        self._processes.wait_for_all()

    def load(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[int, list[Path]]:
        """Put the last whole state in force; returns after how many steps it was written, 0 where there is none, and
        the later ones that are damaged.

        Raises:
            InputError: a state is of another training.
        """
        damaged = []
        for step, place in reversed(self._found()):
            content = self._content(place)
            if content is None:
                damaged.append(place)
                continue
            if content["identity"] != self._identity:
                differing = [key for key in self._identity if content["identity"].get(key) != self._identity[key]]
                raise InputError(
                    f"{place}: expected the state of this training, got one with other {', '.join(differing) or 'keys'}"
                    "; give another run folder with run="
                )
            tensors = {name: place / file for file in content["files"] for name in _names(place / file)}

            def read(name: str, tensors: Mapping[str, Path] = tensors) -> torch.Tensor:
                with safe_open(tensors[name], framework="pt") as file:
                    return file.get_tensor(name)

            for name, parameter in parameters.items():
                put(parameter, read(name))
                moments = {kind: like(parameter, read(f"{name}/{kind}")) for kind in _MOMENTS}
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
            return step, damaged
        return 0, damaged

    def _found(self) -> list[tuple[int, Path]]:
        places = self._folder.glob("step-*") if self._folder.is_dir() else ()
        return sorted((int(place.name.removeprefix("step-")), place) for place in places)

    def _write(
        self, stage: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> list[str]:
        names: list[str] = []
        held: dict[str, torch.Tensor] = {}

        def write() -> None:
            names.append(f"tensors-{len(names) + 1:05d}.safetensors")
            save_tensors(held, stage / names[-1])
            held.clear()

        for name, tensor in _tensors(parameters, optimizer):
            held[name] = tensor.contiguous()
            if sum(each.nbytes for each in held.values()) >= _FILE_BYTES:
                write()
        if held:
            write()
        return names

    @staticmethod
    def _content(place: Path) -> Any:
        """What a state's JSON file says; None where a file is damaged or missing, so that an older state is taken."""
        try:
            content = json.loads((place / _STATE).read_bytes())
            intact = all(files.sha256_of_file(place / name) == digest for name, digest in content["files"].items())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return content if intact else None


def _tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and moments by name, whole, one after the other; in every process the same."""
    for name, parameter in parameters.items():
        yield name, whole(parameter)
        moments = optimizer.state.get(parameter, {})
        for kind in _MOMENTS:
            yield f"{name}/{kind}", whole(moments[kind]) if kind in moments else torch.zeros(parameter.shape)


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
