"""The config.json of an extended checkpoint: one regime, said so that every loader computes the same table."""

from collections.abc import Mapping
from typing import Any

from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry

# Their config classes have a top-level original_max_position_embeddings, with a default that overrides the nested one.
_TOP_LEVEL_ORIGINAL = ("phi3", "phi4_multimodal", "phimoe")


def extended_config(source: Mapping[str, Any], rope_config: RopeConfig) -> dict[str, Any]:
    """`source`, a config.json, changed so that loading it puts `rope_config`'s one regime in force at all lengths.

    A regime that it cannot express (`RopeConfig.not_portable`) leaves it describing the unscaled model.

    The source is edited as JSON, its other keys untouched, rather than saved by transformers 5, which drops
    `rope_scaling` and `rope_theta`. What is written, and why:

    - `rope_parameters` (the schema of transformers 5) and the same dict as `rope_scaling`, with `rope_theta` beside it:
      transformers 4.57 and several engines know only these, and with `rope_parameters` alone they silently run an
      unscaled table of theta 10,000. Where both are present transformers 5 takes `rope_scaling`; they are equal.
    - `short_factor` equal to `long_factor`: loaders that switch tables at original_length do so in the middle of a
      sequence, and keys already cached keep the other table's angles. Equal lists make every switch void, and they also
      make void that 4.57 sets the threshold at max_position_embeddings unless the top-level key below exists.
    - `attention_factor` as a number (transformers 4.57 and 5 take it as it is), and `short_mscale`, `long_mscale` equal
      to it: vLLM and SGLang multiply by these and ignore attention_factor. `factor` is target_length / original_length.
    - `original_max_position_embeddings` inside the dicts (transformers 5 and SGLang read it there), not at top level:
      there vLLM would take it for the greatest length to serve by default. Where the source has the top-level key, or
      its model class gives it a default (the Phi-3 family), it is written with the same value, since transformers 5
      lets it win; vLLM then needs `--max-model-len`.
    - `rope_config_fingerprint`, so that neither file can be changed without the other noticing.
    - `head_dim`, since model classes that leave it None fail to build longrope; `type` beside `rope_type` for readers
      of the older name; `max_position_embeddings` = target_length, which is what the one table serves.

    Where loaders differ still: the Phi-3 config class of transformers 4.57 refuses, with an error, a `rope_scaling` of
    more than three keys. Engines that recompute the attention factor from target_length / original_length
    (TensorRT-LLM, ExLlama, MLX) agree only when it is sqrt(1 + ln ratio / ln original_length).

    Raises InputError when the source is of another model type, or its layers differ in their tables.
    """
    geometry = rope_config.geometry
    if source.get("model_type") != geometry.model_type:
        raise InputError(
            f"config.json: expected model_type {geometry.model_type!r}, as in rope_config.json, "
            f"got {source.get('model_type')!r}"
        )
    if geometry.layer_types is not None:
        raise InputError(
            f"model type {geometry.model_type!r}: expected one table for all layers, got one for each kind of layer; "
            "writing such a config.json is not supported"
        )
    source = {**source, "rope_config_fingerprint": rope_config.fingerprint}
    if rope_config.not_portable:
        return source
    regime = rope_config.regimes[-1]
    table: dict[str, Any] = {
        "rope_type": "longrope",
        "type": "longrope",
        "rope_theta": geometry.rope_theta,
        "factor": geometry.ratio(rope_config.target_length),
        "original_max_position_embeddings": geometry.original_length,
        "short_factor": list(regime.factors),
        "long_factor": list(regime.factors),
        "attention_factor": regime.attention_factor,
        "short_mscale": regime.attention_factor,
        "long_mscale": regime.attention_factor,
    }
    changes: dict[str, Any] = {
        "head_dim": geometry.head_dim,
        "max_position_embeddings": rope_config.target_length,
        "rope_theta": geometry.rope_theta,
    }
    if geometry.rotary_dim != geometry.head_dim:
        partial = geometry.rotary_dim / geometry.head_dim
        table["partial_rotary_factor"] = partial
        changes["partial_rotary_factor"] = partial
    if "original_max_position_embeddings" in source or geometry.model_type in _TOP_LEVEL_ORIGINAL:
        changes["original_max_position_embeddings"] = geometry.original_length
    return {**source, **changes, "rope_parameters": table, "rope_scaling": dict(table)}


def extended_tokenizer_config(source: Mapping[str, Any], target_length: int) -> dict[str, Any]:
    """`source`, a tokenizer_config.json, with `model_max_length` raised to target_length tokens where it is lower.

    vLLM caps the length it serves at this value.
    """
    limit = source.get("model_max_length")
    if isinstance(limit, int | float) and limit < target_length:
        return {**source, "model_max_length": target_length}
    return dict(source)


def unscaled_config(
    source: Mapping[str, Any], geometry: Geometry, own_scaling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`source`, a config.json with or without a regime, changed to what loads the checkpoint's own table.

    That is the plain table to original_length where `own_scaling` (of RopeConfig) is None.
    """
    if own_scaling is not None:
        return _with_own_scaling(source, geometry, own_scaling)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": geometry.rope_theta}
    if geometry.rotary_dim != geometry.head_dim:
        parameters["partial_rotary_factor"] = geometry.rotary_dim / geometry.head_dim
    result = {
        **source,
        "head_dim": geometry.head_dim,
        "max_position_embeddings": geometry.original_length,
        "rope_theta": geometry.rope_theta,
        "rope_parameters": parameters,
    }
    result.pop("rope_scaling", None)
    return result


def _with_own_scaling(source: Mapping[str, Any], geometry: Geometry, own_scaling: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(own_scaling["rope_parameters"])
    result = {
        **source,
        "head_dim": geometry.head_dim,
        "max_position_embeddings": own_scaling["max_position_embeddings"],
        "rope_theta": geometry.rope_theta,
        "rope_parameters": parameters,
    }
    result.pop("rope_scaling", None)
    original = parameters.get("original_max_position_embeddings")
    if original is not None and (
        "original_max_position_embeddings" in source or geometry.model_type in _TOP_LEVEL_ORIGINAL
    ):
        result["original_max_position_embeddings"] = original  # there it wins over the one in the parameters
    return result
