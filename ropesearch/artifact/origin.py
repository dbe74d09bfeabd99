"""The checkpoint that a job began with, held to while it runs: files may be replaced at any moment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.schema import Checkpoint
from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.strict_json import read_json_object

Loaded = TypeVar("Loaded")
States = Mapping[str, tuple[int, ...]]

_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".safetensors")


def checkpoint_states(folder: Path) -> States:
    """What changes with every change of a checkpoint's files, by name: device, inode, bytes, and times of change."""
    states = {}
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES and path.is_file():
            found = path.stat()
            states[path.name] = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return states


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint folder, what identifies its content, and its files' states from before that was read.

    `config_digest` is the SHA-256 of config.json, which decides with the weights what the model computes.
    """

    folder: Path
    binding: Checkpoint
    config_digest: str
    states: States

    @classmethod
    def read(cls, folder: Path, bind: Callable[[Path], Checkpoint] = checkpoint_binding) -> "Origin":
        """The folder with what `bind` finds in it: by default all bytes of weights and tokenizer are read."""
        states = checkpoint_states(folder)
        return cls(folder, bind(folder), _config_digest(folder), states)

    @property
    def identity(self) -> dict[str, Any]:
        """What a score depends on in the checkpoint, as JSON values."""
        return {"weights": self.binding.digest, "config": self.config_digest}

    def expect_same(self, states: States) -> None:
        """Raise InputError unless the files of `states` are still as they were."""
        now = checkpoint_states(self.folder)
        changed = sorted(name for name, state in states.items() if now.get(name) != state)
        if changed:
            raise InputError(
                f"{self.folder}: {', '.join(changed)} changed while the job was reading it; give the same command "
                "again when nothing writes there any more"
            )

    def loaded_with(self, load: Callable[[], Loaded]) -> Loaded:
        """What `load` makes of the folder. Raises InputError unless that was made of what `binding` identifies."""
        before = checkpoint_states(self.folder)
        if any(before.get(name) != state for name, state in self.states.items()):
            found = checkpoint_binding(self.folder)
            for what, expected, got in (
                ("weights", self.binding.digest, found.digest),
                ("tokenizer", self.binding.tokenizer_digest, found.tokenizer_digest),
                ("config.json", self.config_digest, _config_digest(self.folder)),
            ):
                if expected != got:
                    raise InputError(
                        f"{self.folder}: expected the {what} that the job began with, {expected}, got {got}: they were "
                        "changed since; put them back and give the same command again, or use another run folder"
                    )
        loaded = load()
        self.expect_same(before)
        return loaded


def _config_digest(folder: Path) -> str:
    return "sha256:" + sha256_of_json(read_json_object(folder / "config.json"))
