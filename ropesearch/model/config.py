"""Which model to load, and how."""

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """The type that weights are held in; `auto` is the checkpoint's own. Rotary tables are float32 whatever it is."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(Enum):
    """The attention implementation of transformers to use."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


@dataclass(kw_only=True)
class ModelConfig:
    """A checkpoint and how to load it."""

    # checkpoint folder (config.json, model*.safetensors, tokenizer files) or hub id
    path: str = ""
    # branch, tag or commit; only for a hub id; none: the default branch
    revision: str | None = None
    # type that weights are held in
    dtype: DType = DType.auto
    # torch device such as "cpu" or "cuda:0"; "auto": the first GPU if there is one, else the CPU
    device: str = "auto"
    # attention implementation
    attention: Attention = Attention.sdpa
    # run Python code that ships with the checkpoint
    trust_remote_code: bool = False
    # length the model was trained to, in tokens; none: the checkpoint's max_position_embeddings
    original_length: int | None = None
