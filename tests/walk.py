"""A model type of transformers, from a tiny random model to the written artefact: does ropesearch serve it rightly?"""

import copy
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from ropesearch.artifact.config import VerifyLevel
from ropesearch.artifact.digest import checkpoint_binding
from ropesearch.artifact.folder import write_checkpoint_folder
from ropesearch.artifact.verify import check_expressible, verify
from ropesearch.errors import InputError
from ropesearch.model.config import DType, ModelConfig
from ropesearch.model.install import installed, prove_installable
from ropesearch.model.load import LoadedModel, load_model
from ropesearch.model.rotary import RotaryTable, find_tables, layout_of, rescaled_tables
from ropesearch.rope.geometry import Geometry
from ropesearch.rope.regime import Regime
from tests import tiny_models, toys
from tests.artifact import examples

TARGET_LENGTH = 4 * tiny_models.ORIGINAL_LENGTH
LENGTHS = (20, tiny_models.ORIGINAL_LENGTH, tiny_models.ORIGINAL_LENGTH + 1, 60)
TOLERANCE = 1e-5
RETAINED_TOKENS = 7
BUILD_ERRORS = (Exception,)  # what transformers raises for a tiny config of a model it was never meant for: anything

WORKS, REFUSED, NOT_BUILT, WRONG = "works", "refused", "cannot be built small", "WRONG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one model type. `reference` says what the logits were compared with, `change` by how much the regime
    moves them, `difference` how far they are from the reference's.
    """

    model_type: str
    state: str
    reason: str = ""
    layout: str = ""
    num_pairs: int = 0
    num_tables: int = 0
    layer_types: tuple[str, ...] = ()
    reference: str = ""
    change: float = 0.0
    difference: float = 0.0


def walk(model_type: str, folder: Path, *, logits_of_two: bool = True) -> Row:
    """Take one model type through all of it, in `folder`, which may be thrown away afterwards; two regimes with their
    logits, or their tables alone, which takes a fraction of the time.
    """
    try:
        model = tiny_models.tiny_model(tiny_models.tiny_config(model_type))
        model.save_pretrained(folder / "source")
        toys.toy_tokenizer().save_pretrained(folder / "source")
    except BUILD_ERRORS as error:
        return Row(model_type=model_type, state=NOT_BUILT, reason=f"{type(error).__name__}: {_short(error)}")
    try:
        loaded = load(folder / "source")
    except InputError as error:
        return Row(model_type=model_type, state=REFUSED, reason=_short(error, folder))
    try:
        unscaled = [logits(loaded.model, length) for length in LENGTHS]
    except BUILD_ERRORS as error:
        return Row(model_type=model_type, state=NOT_BUILT, reason=f"forward pass: {_short(error)}")
    try:
        prove_installable(loaded)
        check_expressible(folder / "source", loaded.geometry, TARGET_LENGTH)
    except InputError as error:
        return Row(model_type=model_type, state=REFUSED, reason=_short(error, folder))

    tables = find_tables(loaded.model, model_type)
    rescaled = rescaled_tables(tables, model_type)
    layout = layout_of(rescaled[0], model_type)
    regime = searched(loaded.geometry)
    with installed(loaded, regime):
        inside = [logits(loaded.model, length) for length in LENGTHS]
    reference, name = reference_of(loaded, regime, layout)
    expected = [reference(length) for length in LENGTHS]
    largest = max(1.0, *(float(rows.abs().max()) for rows in expected))
    difference = max(float((a - b).abs().max()) for a, b in zip(inside, expected, strict=True)) / largest
    change = float((inside[-1] - unscaled[-1]).abs().max()) / largest
    wrong = [
        *([f"logits differ by {difference:.2g} from {name}"] if not difference <= TOLERANCE else []),
        *([f"the regime moves no logit by more than {change:.2g}"] if not change > 100 * TOLERANCE else []),
        *_wrong_retained(loaded, regime, unscaled[-1]),
        *_wrong_artefact(loaded, regime, folder, logits_of_two),
    ]
    return Row(
        model_type=model_type,
        state=WRONG if wrong else WORKS,
        reason="; ".join(wrong),
        layout=layout,
        num_pairs=loaded.geometry.num_pairs,
        num_tables=len(tables),
        layer_types=tuple(sorted(table.layer_type for table in rescaled if table.layer_type)),
        reference=name,
        change=change,
        difference=difference,
    )


def load(folder: Path) -> LoadedModel:
    """The checkpoint in float32 on the CPU."""
    return load_model(
        ModelConfig(path=str(folder), dtype=DType.float32, device="cpu", original_length=tiny_models.ORIGINAL_LENGTH)
    )


def searched(geometry: Geometry, retained_tokens: int = 0) -> Regime:
    """A regime of random factors that grow with the pair, and an attention factor that no loader would reckon."""
    factors = np.sort(np.random.default_rng(geometry.num_pairs).uniform(1, 4, geometry.num_pairs))
    return Regime(
        name="searched",
        max_length=TARGET_LENGTH,
        factors=tuple(float(factor) for factor in factors),
        attention_factor=1.17,
        retained_tokens=retained_tokens,
    )


def logits(model: Any, length: int) -> torch.Tensor:
    """float32 logits, shape (2, length, vocabulary), of the same random tokens for every model."""
    tokens = np.random.default_rng(0).integers(2, toys.VOCABULARY_TOKENS - 16, size=(2, TARGET_LENGTH))
    with torch.no_grad():
        answer: torch.Tensor = model(input_ids=torch.from_numpy(tokens[:, :length]), use_cache=False).logits
    return answer.float()


def reference_of(loaded: LoadedModel, regime: Regime, layout: str) -> tuple[Callable[[int], torch.Tensor], str]:
    """Logits by length of the same weights under the regime, reckoned without `installed`, and where they come from:
    transformers' own longrope model, or, where it cannot build one, a rotary module of float64 formulas.
    """
    try:
        model = longrope_model(loaded, regime)
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)
    except BUILD_ERRORS as error:
        reason = f"float64 formulas; transformers builds no longrope model ({_short(error)[:120]})"
        return lambda length: _logits_by_formula(loaded, regime, layout, length), reason
    # By layer type, transformers 5.16 fails in the second forward pass beyond original_length: a new model for each.
    by_layer_type = loaded.geometry.layer_types is not None
    return (
        lambda length: logits(longrope_model(loaded, regime) if by_layer_type else model, length),
        "longrope of transformers",
    )


def longrope_model(loaded: LoadedModel, regime: Regime) -> Any:
    """A model that transformers builds with rope_type longrope from the same lists, holding the loaded weights.

    Written without the code under test: the parameters of the full-attention layers are changed, and nothing else.
    """
    config = copy.deepcopy(loaded.model.config)
    geometry = loaded.geometry
    longrope = {
        "rope_type": "longrope",
        "short_factor": list(regime.factors),
        "long_factor": list(regime.factors),
        "original_max_position_embeddings": geometry.original_length,
        "factor": regime.max_length / geometry.original_length,
        "attention_factor": regime.attention_factor,
    }
    if loaded.model.config.model_type == "phimoe":
        longrope |= {"short_mscale": regime.attention_factor, "long_mscale": regime.attention_factor}
    if geometry.layer_types is None:
        config.rope_parameters = {**config.rope_parameters, **longrope}
    else:
        config.rope_parameters = {
            name: {**value, **longrope}
            if name in geometry.layer_types and geometry.layer_types[name].rescaled
            else value
            for name, value in config.rope_parameters.items()
        }
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = geometry.original_length
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    model = AutoModelForCausalLM.from_config(config, attn_implementation=loaded.attention).float().eval()
    model.load_state_dict(loaded.model.state_dict())
    return model


def _logits_by_formula(loaded: LoadedModel, regime: Regime, layout: str, length: int) -> torch.Tensor:
    model_type = loaded.geometry.model_type
    with ExitStack() as stack:
        for table in rescaled_tables(find_tables(loaded.model, model_type), model_type):
            stack.enter_context(_answering_by_formula(table, loaded.geometry, regime, layout))
        return logits(loaded.model, length)


@contextmanager
def _answering_by_formula(table: RotaryTable, geometry: Geometry, regime: Regime, layout: str) -> Iterator[None]:
    """The module's forward pass gives Eq. 3 of LongRoPE in float64, whatever its buffers hold."""
    inverse = geometry.rope_theta ** -(2.0 * np.arange(geometry.num_pairs) / geometry.rotary_dim)
    table64 = torch.tensor(inverse / np.asarray(regime.factors))
    own = type(table.module).forward
    is_complex = isinstance(table.answer([0]), torch.Tensor)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        if layer_type != table.layer_type:
            return own(table.module, x, position_ids, layer_type)
        angles = position_ids[..., None].double() * table64
        while angles.ndim > 3:
            angles = angles[0]
        angles = {
            "halves": lambda: torch.cat([angles, angles], dim=-1),
            "neighbours": lambda: angles.repeat_interleave(2, dim=-1),
            "single": lambda: angles,
        }[layout]()
        rows = [(regime.attention_factor * part).to(x.dtype) for part in (angles.cos(), angles.sin())]
        return torch.complex(*rows) if is_complex else tuple(rows)

    table.module.forward = forward
    try:
        yield
    finally:
        del table.module.forward


def _wrong_retained(loaded: LoadedModel, regime: Regime, unscaled: torch.Tensor) -> list[str]:
    """Retained tokens: the first positions see nothing of the regime, the next ones do."""
    with installed(loaded, dataclasses.replace(regime, retained_tokens=RETAINED_TOKENS)):
        inside = logits(loaded.model, LENGTHS[-1])
    moved = (inside - unscaled).abs().amax(dim=(0, 2)) / max(1.0, float(unscaled.abs().max()))
    first, others = float(moved[:RETAINED_TOKENS].max()), float(moved[RETAINED_TOKENS:].max())
    if first <= TOLERANCE < others:
        return []
    return [f"with {RETAINED_TOKENS} retained tokens these move by {first:.2g}, the others by {others:.2g}"]


def _wrong_artefact(loaded: LoadedModel, regime: Regime, folder: Path, logits_of_two: bool) -> list[str]:
    """What a plain from_pretrained of the written folder has otherwise than the installed regime: as the one for all
    lengths, and as the long one beside a short one.
    """
    wrong = []
    plain = Regime(name="short", max_length=loaded.geometry.original_length, factors=(1.0,) * loaded.geometry.num_pairs)
    for place, regimes in (("extended", (regime,)), ("of-two", (plain, regime))):
        rope_config = examples.rope_config(
            target_length=TARGET_LENGTH,
            geometry=loaded.geometry,
            regimes=regimes,
            checkpoint=checkpoint_binding(folder / "source"),
        )
        write_checkpoint_folder(
            folder / "source", folder / place, rope_config, allow_unportable=bool(rope_config.not_portable)
        )
        levels = [VerifyLevel.table, VerifyLevel.logits]
        fails = loaded.geometry.layer_types and transformers.__version__.startswith("5.16.")  # see loader_limits
        if len(regimes) > 1 and (fails or not logits_of_two):
            levels = [VerifyLevel.table]
        try:
            findings = verify(folder / place, levels, device="cpu")
        except InputError as error:
            wrong.append(f"artefact {place}: {_short(error, folder)}")
        else:
            wrong += [f"artefact {place}: {finding.message}" for finding in findings if not finding.ok]
    return wrong


def _short(error: BaseException, folder: Path | None = None) -> str:
    text = " ".join(str(error).split())
    return (text if folder is None else text.replace(str(folder), "FOLDER"))[:300]


def walk_all(folder: Path, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Every model type that AutoModelForCausalLM knows, one after the other; `folder` is emptied in between."""
    rows = []
    for number, model_type in enumerate(tiny_models.causal_model_types()):
        place = folder / str(number)
        rows.append(walk(model_type, place, logits_of_two=False))
        shutil.rmtree(place, ignore_errors=True)
        on_row(rows[-1])
    return rows


def counts(rows: list[Row]) -> dict[str, int]:
    """How many model types there are of each state."""
    ordered = sorted(rows, key=lambda row: row.state)
    return {state: len(list(group)) for state, group in itertools.groupby(ordered, key=lambda row: row.state)}


def to_json(row: Row) -> dict[str, Any]:
    """The row without the figures that depend on the machine: only whether they are within the bounds counts."""
    values = dataclasses.asdict(row)
    return {key: value for key, value in values.items() if key not in ("change", "difference")} | {
        "layer_types": list(row.layer_types)
    }
