"""Tables that a user brings, against the lists in the files and transformers' own functions."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ropesearch.artifact.schema import content_digest
from ropesearch.artifact.tables import read_tables, table_of
from ropesearch.errors import InputError
from ropesearch.rope import methods
from ropesearch.rope.regime import Regime
from tests.artifact import examples

GEOMETRY = examples.toy_geometry()
TARGET_LENGTH = examples.TARGET_LENGTH
FACTORS = (1.0, 1.01, 1.37, 2.0, 2.93, 3.6, 4.4, 4.81)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def table(content: bytes | str) -> Regime:
    encoded = content if isinstance(content, bytes) else content.encode()
    return table_of(encoded, "tables: x", "x", GEOMETRY, TARGET_LENGTH)


def lines(*numbers: float) -> str:
    return "".join(f"{number}\n" for number in numbers)


class TestCsv:
    @pytest.mark.parametrize(
        "text",
        [
            lines(*FACTORS),
            "\ufeff" + lines(*FACTORS).replace("\n", "\r\n") + "\n\n",
            "\n".join(f"{factor:.18e}" for factor in FACTORS),  # as numpy.savetxt writes it
            ",".join(map(str, FACTORS)) + "\n",
            (", ".join(map(str, FACTORS)) + "\n") * 3,  # a row for each of three layers
        ],
        ids=["lines", "windows", "savetxt", "row", "layers"],
    )
    def test_one_factor_for_each_pair(self, text: str) -> None:
        assert table(text) == Regime(
            name="x",
            max_length=TARGET_LENGTH,
            factors=FACTORS,
            # LongRoPE's released code at a ratio of 4 from 64 tokens.
            attention_factor=math.sqrt(1 + math.log(4) / math.log(64)),
        )

    def test_two_lines_more_are_the_bounds_of_dim_piece_mono(self) -> None:
        assert table(lines(0, 0, *FACTORS)).factors == FACTORS
        assert table(lines(1.0, 6.0, *FACTORS)).factors == FACTORS

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "expected 8 factors, one for each pair of the checkpoint, got 0"),
            (
                lines(*FACTORS[:7]),
                "expected 8 factors, one for each pair of the checkpoint, got 7; use a table of a mod",
            ),
            (lines(*FACTORS, *FACTORS), "got 16"),
            (lines(*FACTORS, 4.9, 5.0), "begin with two pairs from 0 to 7 in order, got 10 that begin with 1 and 1.01"),
            (lines(5, 2, *FACTORS), "begin with 5 and 2"),
            (lines(2, 8, *FACTORS), "begin with 2 and 8"),
            (lines(1.0, 0.99, *FACTORS[2:]), "finite factors of at least 1, got 0.99 at pair 1"),
            (lines(*FACTORS[:7], math.inf), "finite factors of at least 1, got inf at pair 7"),
            (lines(*FACTORS[:7], math.nan), "finite factors of at least 1, got nan at pair 7"),
            (lines(*FACTORS[:7]) + "1e999", "finite factors of at least 1, got inf at pair 7"),
            (lines(*FACTORS[:7]) + "-3", "got -3.0 at pair 7"),
            (
                "factor\n" + lines(*FACTORS),
                "expected JSON or one factor a line, got 'factor' in line 1; correct that line",
            ),
            ("1_0\n" + lines(*FACTORS[1:]), "got '1_0'"),
            ("1,2\n1,3\n", "expected one table for all layers, got rows that differ"),
            ("1,2\n3\n", "rows that differ"),
            (b"\xff\xfe\x00", "bytes that are no text"),
        ],
    )
    def test_what_is_refused(self, text: str | bytes, message: str) -> None:
        with pytest.raises(InputError, match=rf"^tables: x: .*{message}"):
            table(text)


class TestConfigJson:
    @pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
    def test_any_rope_type_as_transformers_computes_it(self, key: str) -> None:
        original = {"original_max_position_embeddings": 64}
        llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for scaling, expected in (
            (None, methods.identity(GEOMETRY, TARGET_LENGTH)),
            ({"rope_type": "linear", "factor": 4.0}, methods.linear(GEOMETRY, TARGET_LENGTH)),
            ({"rope_type": "yarn", "factor": 4.0, **original}, methods.yarn(GEOMETRY, TARGET_LENGTH)),
            ({"rope_type": "dynamic", "factor": 4.0}, methods.dynamic_ntk(GEOMETRY, TARGET_LENGTH, TARGET_LENGTH)),
            (llama3 | original, methods.llama3(GEOMETRY, 4.0, 1.0, 4.0)),
        ):
            rope = {} if scaling is None else {key: scaling | {"rope_theta": 10000.0}}
            found = table(json.dumps(CONFIG | rope))
            assert found.factors == pytest.approx(expected.factors, rel=1e-5)
            assert found.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)
            assert (found.name, found.max_length) == ("x", TARGET_LENGTH)

    def test_the_long_list_of_longrope(self) -> None:
        scaling = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": list(FACTORS),
            "original_max_position_embeddings": 64,
            "attention_factor": 1.19,
        }
        found = table(json.dumps(CONFIG | {"max_position_embeddings": 256, "rope_parameters": scaling}))
        assert (found.factors, found.attention_factor) == (FACTORS, 1.19)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"head_dim": 32},
                "expected a table for rotary_dim = 16, as the checkpoint has, got one for rotary_dim = 32",
            ),
            ({"rope_theta": 5e5}, r"expected a table for rope_theta = 10000.0, .* got one for rope_theta = 500000.0"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factors of at least 1, got 0.5"),
            ({"rope_scaling": {"rope_type": "su"}}, "rope_type 'su'"),
            ({"model_type": "gpt2", "n_head": 2, "n_embd": 32}, "expected a model with rotary"),
            ({"model_type": "unheard-of"}, "config.json .model type 'unheard-of'. is not usable"),
            ({"model_type": 3}, "expected a model_type, got none"),
            ({"quantization_config": {"bits": 4}}, "quantised"),
        ],
    )
    def test_what_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=rf"^tables: x: .*{message}") as caught:
            table(json.dumps(CONFIG | changes))
        assert "ropesearch-" not in str(caught.value)  # no temporary folder


class TestRopeConfigJson:
    def test_its_last_regime(self) -> None:
        short = Regime(name="short", max_length=64, factors=(1.0,) * 8)
        regime = Regime(
            name="searched", max_length=TARGET_LENGTH, factors=FACTORS, attention_factor=1.137, retained_tokens=4
        )
        rope_config = examples.rope_config(regimes=(short, regime))
        found = table(json.dumps(rope_config.to_json()))
        assert (found.factors, found.attention_factor, found.retained_tokens) == (FACTORS, 1.137, 4)
        assert found.name == "x"
        shorter = table_of(json.dumps(rope_config.to_json()).encode(), "tables: x", "x", GEOMETRY, 100)
        assert shorter.max_length == 100

    def test_of_another_geometry(self) -> None:
        value = examples.rope_config().to_json()
        value["geometry"]["rope_theta"] = 20000.0
        value["content_digest"] = content_digest(value)
        with pytest.raises(
            InputError, match=r"expected a table for rope_theta = 10000.0.*got one for rope_theta = 20000"
        ):
            table(json.dumps(value))

    def test_that_is_malformed(self) -> None:
        value = examples.rope_config().to_json()
        value["regimes"][0]["factors"][2] = 0.5
        with pytest.raises(InputError, match=r"^tables: x: rope_config.json: \$.regimes\[0\].factors\[2\]"):
            table(json.dumps(value))

    def test_other_json(self) -> None:
        with pytest.raises(InputError, match="got a JSON object with factors"):
            table('{"factors": [1, 2]}')
        with pytest.raises(InputError, match="expected strict JSON"):
            table("{")


def check(content: bytes) -> None:
    """The reader's promise for any bytes."""
    try:
        found = table(content)
    except InputError as error:
        assert str(error).startswith("tables: x: ")
    else:
        assert len(found.factors) == 8 and all(1 <= factor < math.inf for factor in found.factors)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_an_input_error(content: bytes) -> None:
    check(content)


NUMBERS = st.one_of(st.integers(-2, 70), st.floats(), st.floats(1, 80))


@given(st.lists(NUMBERS, min_size=7, max_size=11), st.sampled_from(["\n", ",", "\r\n", ", "]))
def test_any_numbers_are_a_table_or_an_input_error(numbers: list[float], separator: str) -> None:
    check(separator.join(map(repr, numbers)).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", 7])},
    optional={
        "rope_theta": st.just(10000.0) | JSON,
        "factor": st.floats(1, 40) | JSON,
        "low_freq_factor": JSON,
        "high_freq_factor": JSON,
        "short_factor": st.lists(NUMBERS, min_size=8, max_size=8) | JSON,
        "long_factor": st.lists(NUMBERS, min_size=8, max_size=8) | JSON,
        "original_max_position_embeddings": st.just(64) | JSON,
        "attention_factor": JSON,
        "beta_fast": JSON,
        "partial_rotary_factor": JSON,
    },
)


@example({"rope_type": "default", "partial_rotary_factor": [None]}, {})
@example({"rope_type": "default", "partial_rotary_factor": 1e308}, {})
@given(ROPE | JSON, st.dictionaries(st.sampled_from(list(CONFIG)[1:]), JSON, max_size=1))
def test_any_config_is_a_table_or_an_input_error(rope: Any, changes: dict[str, Any]) -> None:
    check(json.dumps(CONFIG | changes | {"rope_scaling": rope}).encode())


@given(st.sampled_from(["geometry", "regimes", "target_length", "search", "schema_version"]), JSON)
def test_any_rope_config_is_a_table_or_an_input_error(key: str, value: Any) -> None:
    changed = examples.rope_config().to_json() | {key: value}
    with contextlib.suppress(ValueError):  # what strict JSON cannot hold has no digest
        changed["content_digest"] = content_digest(changed)
    check(json.dumps(changed).encode())


class TestFiles:
    def read(self, *paths: Path, taken: tuple[str, ...] = ()) -> list[Regime]:
        tables, notes = read_tables([str(path) for path in paths], GEOMETRY, TARGET_LENGTH, taken)
        assert notes == []
        return tables

    def write(self, path: Path, last_factor: float = FACTORS[-1]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines(*FACTORS[:-1], last_factor))
        return path

    def test_names_are_the_files_and_distinct(self, tmp_path: Path) -> None:
        paths = [
            self.write(tmp_path / name, 5.0 + number)
            for number, name in enumerate((
                "mine.csv", "a/mine.csv", "linear.csv", "run-7/rope_config.json", "run-8/checkpoint/config.json",
                "_x y\n.csv", "result_it040.csv",
            ))
        ]  # fmt: skip
        found = self.read(*paths, taken=("linear", "searched"))
        assert [table.name for table in found] == [
            "mine", "mine-2", "linear-2", "run-7", "run-8", "x_y_", "result_it040",
        ]  # fmt: skip

    def test_a_table_that_is_given_twice_is_one(self, tmp_path: Path) -> None:
        """The same factors, whatever the file; the formula's attention factor is a CSV's, another one another table."""
        first, again, other = (self.write(tmp_path / name) for name in ("f8.csv", "a/f8.csv", "b/f8.csv"))
        again.write_text(",".join(map(str, FACTORS)))
        self.write(other, 4.9)
        regime = dataclasses.replace(examples.REGIME, factors=FACTORS, attention_factor=1.25)
        written = tmp_path / "searched.json"
        written.write_text(json.dumps(examples.rope_config(regimes=(regime,)).to_json()))
        paths = [str(path) for path in (first, again, other, written, first)]
        tables, notes = read_tables(paths, GEOMETRY, TARGET_LENGTH, ())
        assert [table.name for table in tables] == ["f8", "f8-2", "searched"]
        assert [table.factors[-1] for table in tables] == [FACTORS[-1], 4.9, FACTORS[-1]]
        assert notes == [f"tables: {path} holds the same table as {first}: one row, f8" for path in (again, first)]

    def test_what_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"^tables: .*none.csv: expected a file with a table, got no such file"):
            self.read(tmp_path / "none.csv")
        with pytest.raises(InputError, match="got a folder; name the file in it"):
            self.read(tmp_path)
        (tmp_path / "large.csv").write_bytes(b"1.0\n" * (1 << 20) + b"\n")
        with pytest.raises(InputError, match="got a larger file"):
            self.read(tmp_path / "large.csv")
