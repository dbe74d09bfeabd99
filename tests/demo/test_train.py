"""Training gives the same bytes for the same seed, also when it was stopped in between."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import torch

from ropesearch.demo import train as training
from ropesearch.demo.corpus import Corpus, Document
from ropesearch.demo.train import learning_rate, main, train, write_model, write_texts
from ropesearch.errors import InputError

SEARCH = Path(str(resources.files("ropesearch.demo") / "texts" / "search"))


@pytest.fixture(autouse=True)
def saved_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """State is saved after every step; torch's settings are put back."""
    monkeypatch.setattr(training, "SAVE_STEPS", 1)
    num_threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def small_corpus() -> Corpus:
    documents = [Document(path.stem, path.read_text(encoding="utf-8")) for path in sorted(SEARCH.glob("*.txt"))]
    return Corpus(tuple(documents), {"test": (Document("one", "A text.\n"),)})


def model_bytes(corpus: Corpus, out: Path, seed: int) -> dict[str, bytes]:
    write_model(out, *train(corpus, out, seed, num_steps=2))
    return {path.name: path.read_bytes() for path in sorted((out / "model").iterdir())}


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(small_corpus, tmp_path):
    first, again, other = (
        model_bytes(small_corpus, tmp_path / name, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert first == again
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert first.keys() == names
    assert {name for name in names if first[name] != other[name]} == {"model.safetensors"}


def test_a_stopped_run_goes_on_to_the_same_bytes(small_corpus, tmp_path, monkeypatch):
    whole = model_bytes(small_corpus, tmp_path / "whole", 7)
    save_state = training._save_state

    def save_and_stop(*arguments: object) -> None:
        save_state(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "_save_state", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(small_corpus, tmp_path / "stopped", 7, num_steps=2)
    assert model_bytes(small_corpus, tmp_path / "stopped", 7) == whole


def test_another_run_s_state_is_refused(small_corpus, tmp_path):
    train(small_corpus, tmp_path, 7, num_steps=1)
    with pytest.raises(InputError, match="belongs to the run"):
        train(small_corpus, tmp_path, 8, num_steps=1)


def test_learning_rate_warms_up_and_falls_to_zero():
    warm, peak = training.NUM_WARMUP_STEPS, training.LEARNING_RATE
    assert learning_rate(0, 3000) == pytest.approx(peak / warm)
    assert learning_rate(1500, 3000) == pytest.approx(peak / 2)
    assert learning_rate(3000, 3000) == pytest.approx(0.0, abs=1e-18)


def test_texts_are_written_by_split_and_name(small_corpus, tmp_path):
    write_texts(tmp_path, small_corpus)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [tmp_path / "texts" / "test" / "one.txt"]
    assert written[0].read_bytes() == b"A text.\n"


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--num-steps", "0"]])
def test_bad_arguments_end_in_one_message(arguments, tmp_path, capsys):
    assert main([str(tmp_path), *arguments]) == 2
    assert "expected --seed >= 0 and --num-steps >= 1" in capsys.readouterr().err
