"""A tiny random model of any causal language model that transformers has, from its default config made small."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import toys

ORIGINAL_LENGTH = 32
NUM_LAYERS = 4
NUM_HEADS = 4
HEAD_DIM = 16

# What a tiny model has in place of a config's widths and counts, by the names that transformers' configs use for them.
_SMALL: tuple[tuple[int, str], ...] = (
    (1, """
        n_group topk_group num_expert_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups
        moe_layer_start_index o_groups num_kv_shared_layers num_codebooks num_nextn_predict_layers
    """),
    (2, """
        num_key_value_heads num_kv_heads kv_n_heads num_experts_per_tok num_experts_per_token moe_k moe_topk
        index_n_heads linear_num_key_heads swa_num_key_value_heads hc_sinkhorn_iters top_k_experts
    """),
    (NUM_HEADS, """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads num_experts
        num_local_experts n_routed_experts moe_num_experts
    """),
    (NUM_LAYERS, """
        num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers
    """),
    (8, """
        qk_rope_head_dim rotary_dim mamba_n_heads hidden_size_per_layer_input laurel_rank time_step_rank
    """),
    (HEAD_DIM, """
        head_dim v_head_dim qk_nope_head_dim q_lora_rank kv_lora_rank o_lora_rank index_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_d_head swa_head_dim
        dim_head d_kv state_size kv_channels mamba_headdim mamba_dt_rank swa_v_head_dim global_head_dim
        attention_head_dim
    """),
    (24, """
        qk_head_dim
    """),
    (32, """
        max_position_embeddings n_positions n_ctx max_seq_len seq_length model_max_length
        encoder_hash_byte_group_vocab
    """),
    (NUM_HEADS * HEAD_DIM, """
        hidden_size d_model n_embd lru_width embedding_size word_embed_proj_dim intermediate_size
        moe_intermediate_size shared_expert_intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim
        ffn_hidden_size shared_intermediate_size d_ff dff dim_ff d_inner intermediate_size_mlp
        attention_hidden_size shared_experts_intermediate_size cross_attention_hidden_size block_ff_dim
        expert_ffn_hidden_size
    """),
    (128, """
        mamba_d_ssm
    """),
    (toys.VOCABULARY_TOKENS, """
        vocab_size vocab_size_per_layer_input unpadded_vocab_size
    """),
)  # fmt: skip
_VALUE_OF = {name: value for value, names in _SMALL for name in names.split()}
_TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "decoder_start_token_id": 0, "sep_token_id": 1}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_PLAIN_BY_LAYER_TYPE = {
    "full_attention": {**_PLAIN, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {**_PLAIN, "partial_rotary_factor": 0.5},
}
_HYBRID_LAYERS = ["conv", "full_attention", "conv", "full_attention"]
# What default configs leave out or contradict, what small widths contradict, and, since published as scaled models, the
# plain table (apertus, cwm, gpt_oss, ministral3), by model type.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": _PLAIN},
    "apertus1p5_text": {"rope_parameters": _PLAIN},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": _PLAIN_BY_LAYER_TYPE},
    "cwm": {"rope_parameters": _PLAIN},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_head": HEAD_DIM},
    "gpt_neox": {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}},
    "gpt_oss": {"rope_parameters": {**_PLAIN, "rope_theta": 150000.0}},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "lfm2_moe": {"layer_types": _HYBRID_LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "mimo_v2_flash": {"rope_parameters": _PLAIN_BY_LAYER_TYPE},
    "ministral": {"head_dim": HEAD_DIM},
    "ministral3": {
        "rope_parameters": {**_PLAIN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": ORIGINAL_LENGTH}
    },
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": HEAD_DIM},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        "use_mem_rope": True,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
_DROPPED = ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path", "id2label", "label2id")


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The default config of a model type with its widths and counts made small; `overrides` go to its text part."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = _smaller(CONFIG_MAPPING[model_type]().to_dict())
    nested = [key for key in ("text_config", "llm_config") if isinstance(values.get(key), dict)]
    place = values[nested[0]] if nested else values
    place.update({"initializer_range": 0.1, "tie_word_embeddings": False} | _OVERRIDES.get(model_type, {}) | overrides)
    return CONFIG_MAPPING[model_type](**values)


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A random float32 model in eval mode. Every weight is moved from what it starts at, so that none hides a layer."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def write_tiny_model(folder: Path, model_type: str, **overrides: Any) -> Path:
    """Write a tiny random model of this type as a checkpoint folder with the toys' tokenizer."""
    tiny_model(tiny_config(model_type, **overrides)).save_pretrained(folder)
    toys.toy_tokenizer().save_pretrained(folder)
    return folder


def causal_model_types() -> list[str]:
    """Every model type that AutoModelForCausalLM of the installed transformers knows, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _smaller(values: dict[str, Any]) -> dict[str, Any]:
    layers = _kept_layers(values)
    result = {}
    for key, value in values.items():
        if key in _DROPPED:
            continue
        if key in _TOKEN_IDS:
            result[key] = None if value is None else _TOKEN_IDS[key]
        elif isinstance(value, dict) and layers and value and all(str(name).isdigit() for name in value):
            result[key] = {
                place: _smaller(value[name])
                for place, index in enumerate(layers[1])
                for name in value
                if int(name) == index
            }
        elif isinstance(value, dict):
            result[key] = _smaller(value) if key.endswith("config") else value
        elif key == "num_key_value_heads" and value == values.get("num_attention_heads"):
            result[key] = NUM_HEADS
        elif key == "head_dim" and value == values.get("qk_rope_head_dim", 0):  # latent attention: the rotated part
            result[key] = _VALUE_OF["qk_rope_head_dim"]
        elif key in _VALUE_OF and isinstance(value, int) and not isinstance(value, bool):
            result[key] = min(value, _VALUE_OF[key]) if value >= 0 else value
        elif isinstance(value, list | tuple) and layers and len(value) == layers[0]:
            result[key] = [value[index] for index in layers[1]]
        else:
            result[key] = value
    if layers:
        result |= {key: len(layers[1]) for key in _LAYER_COUNTS if key in values}
    return result


def _kept_layers(values: dict[str, Any]) -> tuple[int, list[int]] | None:
    """The number of layers, and those that are kept: the first ones, and of every kind of layer at least one."""
    counts = [values[key] for key in _LAYER_COUNTS if isinstance(values.get(key), int)]
    if not counts:
        return None
    lists = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == counts[0]]
    kinds = [tuple(repr(each[index]) for each in lists) for index in range(counts[0])]
    first_of_kind = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]][:NUM_LAYERS]
    others: Iterator[int] = (index for index in range(counts[0]) if index not in first_of_kind)
    return counts[0], sorted([*first_of_kind, *itertools.islice(others, NUM_LAYERS - len(first_of_kind))])
