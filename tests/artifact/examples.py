"""A searched regime for the toy checkpoints, and folders written with it."""

import dataclasses
from pathlib import Path
from typing import Any

from ropesearch.artifact.config import WeightsMode
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.schema import Checkpoint, CheckpointFile, RopeConfig
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from tests import toys

TARGET_LENGTH = 4 * toys.ORIGINAL_LENGTH
REGIME = Regime(
    name="searched",
    max_length=TARGET_LENGTH,
    factors=(1.0, 1.01, 1.37, 2.0, 2.93, 3.6, 4.4, 4.81),
    attention_factor=1.137,
)
# What fine-tuning makes of it: the plain table for short sequences, the searched one for long ones.
SHORT = Regime(name="short", max_length=toys.ORIGINAL_LENGTH, factors=(1.0,) * 8)
LONG = dataclasses.replace(REGIME, name="long")
TWO = (SHORT, LONG)
SEARCH = {
    "optimizer": "evolution",
    "space": {"name": "longrope", "factor_step": 0.01},
    "objective": "perplexity",
    "seed": 7,
    "num_trials": 12,
    "num_forward_equivalent_tokens": 49152,
    "data_fingerprint": "0" * 64,
}
EVALUATION = [
    {
        "method": "searched",
        "measure": "perplexity",
        "split": "held_out",
        "length": TARGET_LENGTH,
        "nats": 1234.5,
        "tokens": 4080,
    }
]
CHECKPOINT = Checkpoint(
    digest="sha256:" + "1" * 64,
    num_tensors=21,
    num_parameters=35_104,
    tokenizer_digest="sha256:" + "2" * 64,
    config={"model_type": "llama", "max_position_embeddings": toys.ORIGINAL_LENGTH, "rms_norm_eps": 1e-6},
    files=(CheckpointFile(name="model.safetensors", num_bytes=142_000, sha256="3" * 64),),
)


FINE_TUNED = {"regimes": TWO, "base_checkpoint": CHECKPOINT, "training": {"num_steps": 3, "losses": [2.5, 2.25]}}


def toy_geometry(architecture: str = "llama") -> Geometry:
    """The geometry of the toys, as written down in tests/toys.py."""
    return Geometry(
        model_type=architecture, head_dim=16, rotary_dim=16, original_length=toys.ORIGINAL_LENGTH, rope_theta=10000.0
    )


def rope_config(**changes: Any) -> RopeConfig:
    """A rope_config.json of the toy Llama; its digests are made up unless `checkpoint` is given."""
    values: dict[str, Any] = {
        "target_length": TARGET_LENGTH,
        "geometry": toy_geometry(),
        "regimes": (REGIME,),
        "checkpoint": CHECKPOINT,
        "search": SEARCH,
        "evaluation": EVALUATION,
        "versions": {"ropesearch": "0.1.0", "torch": "2.13.0"},
    }
    return RopeConfig(**(values | changes))


def bound_rope_config(
    source: Path, architecture: str = "llama", *, retained_tokens: int = 0, **changes: Any
) -> RopeConfig:
    """A rope_config.json bound to the checkpoint in `source`."""
    regime = dataclasses.replace(REGIME, retained_tokens=retained_tokens)
    values: dict[str, Any] = {
        "geometry": toy_geometry(architecture),
        "checkpoint": checkpoint_binding(source),
        "regimes": (regime,),
    }
    return rope_config(**(values | changes))


def write_example(
    folder: Path,
    architecture: str = "llama",
    *,
    weights: WeightsMode = WeightsMode.copy,
    retained_tokens: int = 0,
    regimes: tuple[Regime, ...] = (),
    **overrides: Any,
) -> Path:
    """Write a toy to folder/source and the extended checkpoint to folder/extended; returns the latter."""
    source = toys.write_checkpoint(folder / "source", architecture, **overrides)
    changes = {"regimes": regimes} if regimes else {}
    rope_config = bound_rope_config(source, architecture, retained_tokens=retained_tokens, **changes)
    write_checkpoint_folder(
        source, folder / "extended", rope_config, weights, allow_unportable=bool(rope_config.not_portable)
    )
    return folder / "extended"
