"""No corruption of a written folder passes `ropesearch verify` or `ropesearch.load`, hangs or leaves a traceback."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ropesearch import cli
from ropesearch.artifact.load import read_bound
from ropesearch.errors import BindingError, InputError
from tests import toys
from tests.artifact import examples
from tests.fuzz.mutations import (
    BYTE_KINDS,
    JSON_KINDS,
    PLACE_KINDS,
    damaged_bytes,
    damaged_json,
    put_in_place_of,
    same_json,
)

INDEX = "model.safetensors.index.json"
SETTINGS = ("rope_config.json", "config.json", "generation_config.json", "tokenizer_config.json")
TEXT_FILES = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "merges.txt", "tokenization_x.py")
KINDS = ("portable", "retained", "sharded", "tied", "two")
QUICK = "levels=[digest,table]"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written folders of every kind, each with all that decides how text is read, and one of another checkpoint."""
    result = {}
    for name in (*KINDS, "other"):
        root = tmp_path_factory.mktemp(name)
        source = toys.write_checkpoint(
            root / "source",
            "qwen3" if name == "tied" else "llama",
            seed=name == "other",
            tie_word_embeddings=name == "tied",
        )
        if name == "sharded":
            (source / "model.safetensors").unlink()
            toys.toy_model().save_pretrained(source, max_shard_size="60KB")
        for text_file in TEXT_FILES:
            (source / text_file).parent.mkdir(exist_ok=True)
            (source / text_file).write_text(f"# {text_file} of {name}\n")
        (source / "README.md").write_text("a model card")
        architecture = json.loads((source / "config.json").read_text())["model_type"]
        changes = dict(examples.FINE_TUNED) if name == "two" else {}
        rope_config = examples.bound_rope_config(
            source, architecture, retained_tokens=3 * (name == "retained"), **changes
        )
        examples.write_checkpoint_folder(source, root / "written", rope_config, allow_unportable=True)
        assert verify(root / "written") == (0, "")
        result[name] = root / "written"
    return result


def verify(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code of the command, and what it says is wrong. A command that hangs is ended with an error."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(60)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["verify", str(folder), *(words or (QUICK,))])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert code in (0, 1, 2), err.getvalue()
    assert "Traceback" not in err.getvalue() and (code == 2) == (err.getvalue() != "")
    wrong = [line for line in out.getvalue().splitlines() if line.startswith("FAIL")]
    assert bool(wrong) == (code == 1)
    return code, "\n".join(wrong) + err.getvalue()


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError("the command hangs")


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(shutil.copytree(folder, Path(name) / "folder", symlinks=True))


def expect(folder: Path, original: Path, is_same: bool, where: str, *words: str) -> None:
    """The folder passes exactly if it is the same; else the message names the place, and nothing loads it."""
    code, message = verify(folder, *words)
    assert (code == 0) == is_same, (code, message)
    if not is_same:
        assert where in message or where.partition(".")[0] in message, message
    if code == 0:
        assert read_bound(folder) == read_bound(original)
    else:
        with pytest.raises((BindingError, InputError)):
            read_bound(folder)


def strict(content: bytes) -> Any:
    """The JSON value of a text; None where it is no strict JSON object."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    try:
        value = json.loads(content.decode(), parse_constant=refuse, object_pairs_hook=once)
        if "Infinity" in json.dumps(value):
            return None
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tensors(path: Path) -> dict[str, Any] | None:
    """Names, dtypes, shapes and bytes of a safetensors file as its own library reads them; None where it refuses."""
    try:
        with safetensors.safe_open(path, "np") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            if (file.metadata() or {}).get("format", "pt") not in ("pt", "tf", "flax", "mlx", "np"):
                return None
        return {name: (dtypes[name], array.shape, array.tobytes()) for name, array in load_file(path).items()}
    except (safetensors.SafetensorError, UnicodeError, ValueError, KeyError, TypeError):
        return None


def damage(data: st.DataObject, folders: dict[str, Path], *words: str) -> None:
    """Damage one file of one folder, and expect the right answer."""
    kind = data.draw(st.sampled_from(KINDS))
    original = folders[kind]
    weights = sorted(path.name for path in original.glob("*.safetensors"))
    names = [*SETTINGS, *SETTINGS, *SETTINGS, *weights, "tokenizer.json", *TEXT_FILES, "README.md"]
    name = data.draw(st.sampled_from([*names, *([INDEX] if kind == "sharded" else [])]))
    is_json = name in (*SETTINGS, INDEX)
    how = data.draw(st.sampled_from([*BYTE_KINDS, *PLACE_KINDS, "another", *(JSON_KINDS * 3 if is_json else ())]))
    with copied(original) as folder:
        path = folder / name
        before = path.read_bytes()
        if how in PLACE_KINDS:
            put_in_place_of(path, how, folders["other"] / "config.json")
            gone = how == "missing" or (how == "folder" and name not in (*SETTINGS, *weights, INDEX))
            expect(folder, original, name == "README.md" and (gone or "another" in how), name, *words)
            return
        if how == "another":
            there = folders["other"] / (name if (folders["other"] / name).exists() else "model.safetensors")
            shutil.copyfile(there, path)
        elif how in JSON_KINDS:
            path.write_bytes(damaged_json(data, json.loads(before), how))
        else:
            path.write_bytes(damaged_bytes(data, before, how))
        after = path.read_bytes()
        if name == "README.md" or after == before:
            is_same = True
        elif name in SETTINGS:
            value = strict(after)
            is_same = value is not None and same_json(value, json.loads(before))
        elif name == INDEX:
            value = strict(after)
            is_same = value is not None and same_json(value.get("weight_map"), json.loads(before)["weight_map"])
        elif name in weights:
            found = tensors(path)
            is_same = found is not None and found == tensors(original / name)
        else:
            is_same = False
        expect(folder, original, is_same, name, *words)


@settings(max_examples=80)
@given(data=st.data())
def test_no_damage_passes(folders: dict[str, Path], data: st.DataObject) -> None:
    damage(data, folders)


@pytest.mark.slow
@settings(max_examples=600)
@given(data=st.data())
def test_no_damage_passes_a_longer_look(folders: dict[str, Path], data: st.DataObject) -> None:
    damage(data, folders)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_passes_at_any_level(folders: dict[str, Path], data: st.DataObject) -> None:
    levels = data.draw(st.sampled_from(["", "levels=[digest,logits]", "levels=[logits,digest,table]"]))
    damage(data, folders, *([levels] if levels else ["max_logits_tokens=80"]))


@settings(max_examples=25)
@given(data=st.data())
def test_exchanged_tensors_are_found(folders: dict[str, Path], data: st.DataObject) -> None:
    """Two tensors of the same dtype and shape, their bytes exchanged: every file keeps its length."""
    with copied(folders["portable"]) as folder:
        path = folder / "model.safetensors"
        weights = load_file(path)
        pairs = [
            (first, second)
            for first in weights
            for second in weights
            if first < second and weights[first].shape == weights[second].shape
        ]
        first, second = data.draw(st.sampled_from(sorted(pairs)))
        same = weights[first].tobytes() == weights[second].tobytes()  # norms are all ones
        weights[first], weights[second] = weights[second], weights[first]
        save_file(weights, path, metadata={"format": "pt"})
        expect(folder, folders["portable"], same, "model.safetensors")


@settings(max_examples=15)
@given(data=st.data())
def test_weights_dealt_to_other_files_are_the_same(folders: dict[str, Path], data: st.DataObject) -> None:
    with copied(folders[data.draw(st.sampled_from(["portable", "retained", "tied"]))]) as folder:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        random.Random(data.draw(st.integers(0, 99))).shuffle(names)
        num_shards = data.draw(st.integers(1, 5))
        shards = {
            f"model-{index:05}-of-{num_shards:05}.safetensors": names[index::num_shards] for index in range(num_shards)
        }
        for shard, keys in shards.items():
            save_file({key: weights[key] for key in keys}, folder / shard, metadata={"format": "pt"})
        weight_map = {key: shard for shard, keys in shards.items() for key in keys}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        code, message = verify(folder, QUICK if data.draw(st.integers(0, 4)) else "max_logits_tokens=80")
        assert (code, message) == (0, "")


@pytest.mark.parametrize("name", ["adapter_config.json", "added_tokens.json", "vocab.json", "generation_config.json"])
def test_a_file_that_was_not_there_is_found(folders: dict[str, Path], name: str) -> None:
    with copied(folders["portable"]) as folder:
        if name == "generation_config.json":
            (folder / name).write_text((folder / name).read_text().replace("}", ', "x": 1}'))
        else:
            (folder / name).write_text("{}")
        expect(folder, folders["portable"], False, name)


def test_files_that_may_not_be_read_are_the_users_error(folders: dict[str, Path]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    for name in (*SETTINGS, "model.safetensors", "tokenizer.json"):
        with copied(folders["portable"]) as folder:
            (folder / name).chmod(0)
            assert verify(folder)[0] == 2
