"""The config.json of an extended checkpoint: its regime, or two, said so that every loader computes the same tables."""

import math
from collections.abc import Mapping
from typing import Any

from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime

# Their config classes have a top-level original_max_position_embeddings, with a default that overrides the nested one.
_TOP_LEVEL_ORIGINAL = ("phi3", "phi4_multimodal", "phimoe")
# Families whose config classes of transformers 4.57 admit two or three keys in rope_scaling, and one that knows none.
_SCALING_REFUSED_BY_4 = ("hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2", "phi3", "phi4_multimodal")
_SCALING_IGNORED_BY_4 = ("nemotron",)
# Their config classes reckon head_dim and let nobody set it.
_HEAD_DIM_RECKONED = ("falcon",)
# The keys of a rope_parameters that say how a table is scaled; what else a family keeps there (mrope_section) stays.
_SCALING_KEYS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "short_factor", "long_factor",
    "attention_factor", "short_mscale", "long_mscale", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor", "alpha",
)  # fmt: skip
# Ministral 3 scales queries by position, from this key and its original_max_position_embeddings.
_POSITION_SCALE = "llama_4_scaling_beta"
# Their config classes, of transformers 4.57 and 5, apply rope_scaling to full attention alone.
_SCALING_OF_FULL_ATTENTION = ("gemma3_text", "gemma3n_text", "olmo3")
# PhiMoE's forward pass reckons its table from short_factor at every length.
_ONE_LIST = ("phimoe",)
# Top-level keys of transformers 4.57 for the theta of windowed layers.
_WINDOWED_THETA = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq"}
# Model types whose config classes have names of their own for partial_rotary_factor and rope_theta.
_OWN_NAMES = ("gpt_neox", "gpt_neox_japanese")


def described_regimes(source: Mapping[str, Any], rope_config: RopeConfig) -> tuple[Regime, Regime] | None:
    """The regimes that `extended_config` writes: for sequences up to the first one's max_length, and for longer ones.

    Of one regime it is both. None is where no config.json can hold them: three regimes or more, retained tokens, and
    two regimes in a family that uses one list only, or whose position-dependent scale of queries (Ministral 3) is bound
    to another original_max_position_embeddings than the threshold.
    """
    regimes = rope_config.regimes
    if len(regimes) > 2 or any(regime.retained_tokens for regime in regimes):
        return None
    short, long = regimes[0], regimes[-1]
    if len(regimes) == 2:
        bound = _kept_by_position_scale(_parameters(source)).values()
        if rope_config.geometry.model_type in _ONE_LIST or any(length != short.max_length for length in bound):
            return None
    return short, long


def extended_config(source: Mapping[str, Any], rope_config: RopeConfig) -> dict[str, Any]:
    """`source`, a config.json, changed so that loading it puts `rope_config`'s regimes in force.

    Regimes that it cannot hold (`described_regimes`) leave it describing the unscaled model.

    The source is edited as JSON, its other keys untouched, rather than saved by transformers 5, which drops
    `rope_scaling` and `rope_theta`. What is written, and why:

    - `rope_parameters` (the schema of transformers 5) and the same dict as `rope_scaling`, with `rope_theta` beside it:
      transformers 4.57 and several engines know only these, and with `rope_parameters` alone they silently run an
      unscaled table of theta 10,000. Where both are present transformers 5 takes `rope_scaling`; they are equal.
    - Of one regime, `short_factor` equal to `long_factor`: loaders that switch tables do so in the middle of a
      sequence, and keys already cached keep the other table's angles. Equal lists make every switch void, and they also
      make void that 4.57 sets the threshold at max_position_embeddings unless the top-level key below exists.
    - `attention_factor` as a number (transformers 4.57 and 5 take it as it is), and `short_mscale`, `long_mscale` equal
      to it: vLLM and SGLang multiply by these and ignore attention_factor. `factor` is target_length / original_length.
    - `original_max_position_embeddings` inside the dicts (transformers 5 and SGLang read it there), not at top level:
      there vLLM would take it for the greatest length to serve by default. Where the source has the top-level key, or
      its model class gives it a default (the Phi-3 family), it is written with the same value, since transformers 5
      lets it win; vLLM then needs `--max-model-len`.
    - Of two regimes, each its own list and its own mscale, and the threshold between them, the short one's max_length,
      as original_max_position_embeddings inside the dicts and at top level, without which 4.57 would keep to the short
      list. `attention_factor` is the long one's, as transformers has one. See `ropesearch.artifact.limits`.
    - `rope_config_fingerprint`, so that neither file can be changed without the other noticing.
    - `head_dim`, since model classes that leave it None fail to build longrope; `type` beside `rope_type` for readers
      of the older name; `max_position_embeddings` = target_length.
    - `partial_rotary_factor`, where a head is rotated in part or the source has the key, inside the dicts and at top
      level, and as `rotary_pct` (`rotary_emb_base` for theta) where the family calls it so (GPT-NeoX). transformers
      makes the table's length from head_dim times this factor, whatever the family's unscaled table does.
    - With one table for each layer type, `rope_parameters` holds the regime for the rescaled types and the plain table
      for the others, as the schema of transformers 5 has it. `rope_scaling` is written only where the family's config
      class applies it to full attention alone (Gemma 3, OLMo 3), with `rope_local_base_freq` beside `rope_theta` for
      Gemma 3; other families would apply it to every layer, so they get none. There, of one regime,
      original_max_position_embeddings is target_length: transformers 5.16 fails in the second forward pass beyond it
      (an unbound variable in modeling_rope_utils.py, mended since), and with equal lists the threshold means nothing.

    Where loaders differ still, see `ropesearch.artifact.limits`. Engines that recompute the attention factor from
    target_length / original_length (TensorRT-LLM, ExLlama, MLX) agree only when it is
    sqrt(1 + ln ratio / ln original_length).

    Raises InputError when the source is of another model type.
    """
    geometry = rope_config.geometry
    if source.get("model_type") != geometry.model_type:
        raise InputError(
            f"config.json: expected model_type {geometry.model_type!r}, as in rope_config.json, "
            f"got {source.get('model_type')!r}"
        )
    fingerprint = {"rope_config_fingerprint": rope_config.fingerprint}
    regimes = described_regimes(source, rope_config)
    if regimes is None:
        return {**source, **fingerprint}
    return regime_config(source, geometry, *regimes, rope_config.target_length) | fingerprint


def regime_config(
    source: Mapping[str, Any], geometry: Geometry, short: Regime, long: Regime, target_length: int
) -> dict[str, Any]:
    """`source`, a config.json, changed so that loading it puts `short` in force up to its max_length and `long` beyond;
    one and the same regime is in force at all lengths. See `extended_config`.
    """
    is_one = short == long
    table: dict[str, Any] = {
        "rope_type": "longrope",
        "type": "longrope",
        "rope_theta": geometry.rope_theta,
        "factor": geometry.ratio(target_length),
        "original_max_position_embeddings": geometry.original_length if is_one else short.max_length,
        "short_factor": list(short.factors),
        "long_factor": list(long.factors),
        "attention_factor": long.attention_factor,
        "short_mscale": short.attention_factor,
        "long_mscale": long.attention_factor,
        **_partial(source, geometry),
    }
    threshold = table["original_max_position_embeddings"]
    changes = {"max_position_embeddings": target_length, **_geometry_keys(source, geometry)}
    if not is_one or "original_max_position_embeddings" in source or geometry.model_type in _TOP_LEVEL_ORIGINAL:
        changes["original_max_position_embeddings"] = threshold
    if is_one and geometry.layer_types is not None:
        table["original_max_position_embeddings"] = target_length
    # The threshold of equal lists is void, so the key can keep saying what the source's says.
    table |= _kept_by_position_scale(_parameters(source))
    result = {**source, **changes, **_by_layer_type(source, geometry, table)}
    result.pop("rope_scaling", None)
    if geometry.layer_types is None:
        result["rope_scaling"] = dict(result["rope_parameters"])
    elif geometry.model_type in _SCALING_OF_FULL_ATTENTION:
        result["rope_scaling"] = dict(table)
    return result


def older_loaders(geometry: Geometry) -> str | None:
    """What transformers 4.57 makes of the config.json of `extended_config` where it is not the same table, or None."""
    if geometry.model_type in _SCALING_REFUSED_BY_4:
        return (
            "transformers 4.57 cannot load this config.json: the config class of this family refuses a rope_scaling of "
            "so many keys, and with fewer no loader would learn of the attention factor"
        )
    if geometry.model_type in _SCALING_IGNORED_BY_4:
        return "transformers 4.57 runs another table: its model of this family has no rope_scaling"
    if geometry.layer_types is not None and geometry.model_type not in _SCALING_OF_FULL_ATTENTION:
        return (
            "transformers 4.57 has no key for a table of one layer type in this family: it runs the unscaled model, or "
            "does not know the family"
        )
    return None


def extended_tokenizer_config(source: Mapping[str, Any], target_length: int) -> dict[str, Any]:
    """`source`, a tokenizer_config.json, with `model_max_length` raised to target_length tokens where it is lower.

    vLLM caps the length it serves at this value.
    """
    limit = source.get("model_max_length")
    if isinstance(limit, int | float) and limit < target_length:
        return {**source, "model_max_length": target_length}
    return dict(source)


def _parameters(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope parameters that transformers reads: rope_scaling, their older name, goes first."""
    for value in (source.get("rope_scaling"), source.get("rope_parameters")):
        if isinstance(value, Mapping) and value:
            return value
    return {}


def _by_layer_type(source: Mapping[str, Any], geometry: Geometry, table: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` with `table` for the rescaled layer types, or all layers, and what else the source's hold."""
    if geometry.layer_types is None:
        return {"rope_parameters": {**_own_keys(_parameters(source)), **table}}
    known = source.get("rope_parameters")
    result = dict(known) if isinstance(known, Mapping) else {}
    for name, layer in geometry.layer_types.items():
        own = value if isinstance(value := result.get(name), Mapping) else {}
        plain = {"rope_type": "default", **own, "rope_theta": layer.rope_theta}
        result[name] = {**_own_keys(own), **table} if layer.rescaled else plain
    return {"rope_parameters": result}


def _own_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in parameters.items() if key not in _SCALING_KEYS}
    return own | _kept_by_position_scale(parameters)


def _kept_by_position_scale(parameters: Mapping[str, Any]) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    return {key: parameters[key]} if _POSITION_SCALE in parameters and key in parameters else {}


def _geometry_keys(source: Mapping[str, Any], geometry: Geometry) -> dict[str, Any]:
    """The top-level keys that say head_dim, theta and the part of a head that is rotated, by each family's names."""
    keys: dict[str, Any] = {"rope_theta": geometry.rope_theta, **_partial(source, geometry)}
    if geometry.model_type not in _HEAD_DIM_RECKONED:
        keys["head_dim"] = geometry.head_dim
    if geometry.model_type in _OWN_NAMES:
        keys["rotary_emb_base"] = geometry.rope_theta
        keys["rotary_pct"] = _partial_rotary_factor(geometry)
    if geometry.model_type in _WINDOWED_THETA:
        for layer in (geometry.layer_types or {}).values():
            if not layer.rescaled:
                keys[_WINDOWED_THETA[geometry.model_type]] = layer.rope_theta
    return keys


def _partial(source: Mapping[str, Any], geometry: Geometry) -> dict[str, float]:
    """partial_rotary_factor, where it is not 1 or the source says something of its own."""
    known = _parameters(source)
    dicts = [source, known, *(value for value in known.values() if isinstance(value, Mapping))]
    if geometry.rotary_dim == geometry.head_dim and not any("partial_rotary_factor" in each for each in dicts):
        return {}
    return {"partial_rotary_factor": _partial_rotary_factor(geometry)}


def _partial_rotary_factor(geometry: Geometry) -> float:
    """The least number at hand of which transformers' int(head_dim * number) is rotary_dim."""
    factor = geometry.rotary_dim / geometry.head_dim
    while int(geometry.head_dim * factor) < geometry.rotary_dim:
        factor = math.nextafter(factor, 2.0)
    return factor
