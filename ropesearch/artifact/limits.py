"""What loaders other than this one do with a written folder where it is not what rope_config.json means."""

from collections.abc import Iterator

from ropesearch.artifact.config_json import described_regimes, older_loaders
from ropesearch.artifact.schema import RopeConfig
from ropesearch.rope.regime import Regime

# Their prepare_inputs_for_generation in transformers drops the cache once a sequence outgrows the short list; 5.16 then
# gives the model the last token alone.
_DROP_THE_CACHE = ("phi3", "phi4_multimodal")


def loader_limits(rope_config: RopeConfig) -> tuple[str, ...]:
    """Sentences on what to expect of other loaders, none where all of them serve the regime as it is meant.

    This is the one place for them: `verify`, the results of the jobs and the README take them from here. What is said
    of transformers is held by tests; engines are described by their source (vLLM 0.33, SGLang 0.5.23, mlx-lm 0.32).
    """
    return tuple(_limits(rope_config))


def _limits(rope_config: RopeConfig) -> Iterator[str]:
    geometry = rope_config.geometry
    regimes = described_regimes(rope_config.checkpoint.config, rope_config)
    if regimes is None:
        yield (
            f"config.json cannot express {', '.join(rope_config.not_portable)}: other loaders see the unscaled model, "
            "ropesearch.load the regime"
        )
        return
    if len(rope_config.regimes) > 1:
        yield from _of_two(*regimes, geometry.model_type)
        if geometry.layer_types is not None:
            yield (
                f"transformers 5.16 fails in the second forward pass beyond {regimes[0].max_length} tokens: its table "
                "by layer type cannot be asked for the long list twice"
            )
    if (older := older_loaders(geometry)) is not None:
        yield older


def _of_two(short: Regime, long: Regime, model_type: str) -> Iterator[str]:
    threshold = short.max_length
    if short.is_same_table(long):
        yield f"vLLM serves {threshold} tokens by default, and more with --max-model-len"
        return
    crossing = (
        "generate() of this family computes them anew there in transformers 5.24, forgets all but the last token in "
        "5.16; a loop of forward passes goes on with the wrong ones"
        if model_type in _DROP_THE_CACHE
        else "what it answers from there on is wrong"
    )
    yield (
        f"plain transformers takes the short table up to {threshold} tokens and the long one beyond, by the last "
        f"position in each forward pass: a sequence that grows across {threshold} tokens keeps cached keys of the "
        f"short table ({crossing}), and one longer sequence, or padding, gives its whole batch the long table"
    )
    if short.attention_factor != long.attention_factor:
        yield (
            f"plain transformers has one attention factor: up to {threshold} tokens it multiplies by the long table's "
            f"{long.attention_factor:g}, not by {short.attention_factor:g}"
        )
    yield (
        f"vLLM keeps to one table from its start: the long one where --max-model-len is above {threshold} (by default "
        f"it serves {threshold} tokens with the short one); SGLang switches all running sequences with the longest "
        "one; MLX always takes the long one"
    )
    yield (
        "every sequence gets the table of its final length from ropesearch.load(folder, length_tokens=prompt and "
        "answer); the long table for all lengths, and every loader, comes from ropesearch export FOLDER to=DEST "
        "single_table=true"
    )
