"""Which model to load, and how."""

from dataclasses import dataclass
from enum import Enum

from ropesearch.settings import setting


class DType(Enum):
    """The type that weights are held in; `auto` is the checkpoint's own. Rotary tables are float32 whatever it is."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(Enum):
    """The attention implementation of transformers to use; sdpa stands for eager where an architecture has no sdpa."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


@dataclass(kw_only=True)
class ModelConfig:
    """A checkpoint and how to load it."""

    path: str = setting("", "checkpoint folder (config.json, model*.safetensors, tokenizer files) or hub id")
    revision: str | None = setting(None, "branch, tag or commit; only for a hub id; none: the default branch")
    dtype: DType = setting(DType.auto, "type that weights are held in")
    device: str = setting(
        "auto",
        "torch device such as 'cpu' or 'cuda:0'; 'auto': the first GPU if there is one, else the CPU; 'balanced': one "
        "model's layers spread over all GPUs that the process sees, which take turns",
    )
    attention: Attention = setting(Attention.sdpa, "attention implementation")
    trust_remote_code: bool = setting(False, "run Python code that ships with the checkpoint")
    original_length: int | None = setting(
        None,
        "length the model was trained to, in tokens; none: the checkpoint's max_position_embeddings; has to be given "
        "for a checkpoint that is already scaled (Llama 3.1: 8192)",
    )
