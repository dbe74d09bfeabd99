"""Training gives the same bytes for the same seed, also when it was stopped in between."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from ropesearch.data.config import CorpusConfig
from ropesearch.data.documents import read_documents
from ropesearch.demo import train as training
from ropesearch.demo.corpus import Corpus, Document
from ropesearch.demo.rows import COPYING, MIXTURE
from ropesearch.demo.train import PHASES, Phase, main, train, write_model, write_texts
from ropesearch.errors import InputError

# Two steps before copying heads are added, then one with them.
SHORT_PHASES = (
    Phase(2, MIXTURE, peak=1e-3, num_warmup_steps=1, falls=False, copying_heads=False),
    Phase(1, COPYING, peak=1e-3, num_warmup_steps=1, falls=False, copying_heads=True),
)
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
    write_model(out, *train(corpus, out, seed, SHORT_PHASES))
    return {path.name: path.read_bytes() for path in sorted((out / "model").iterdir())}


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(small_corpus, tmp_path):
    first, again, other = (
        model_bytes(small_corpus, tmp_path / name, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert first == again
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert first.keys() == names
    assert {name for name in names if first[name] != other[name]} == {"model.safetensors"}


def test_a_run_stopped_at_every_step_goes_on_to_the_same_bytes(small_corpus, tmp_path, monkeypatch):
    whole = model_bytes(small_corpus, tmp_path / "whole", 7)
    save = training.State.save
    stopped_at = []

    def save_and_stop(state: training.State, phase: int, step: int, *arguments: Any) -> None:
        save(state, phase, step, *arguments)
        stopped_at.append((phase, step))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.State, "save", save_and_stop)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                train(small_corpus, tmp_path / "stopped", 7, SHORT_PHASES)
    assert stopped_at == [(0, 1), (0, 2), (1, 1)]
    assert model_bytes(small_corpus, tmp_path / "stopped", 7) == whole


def test_later_phases_may_be_added_to_a_finished_run(small_corpus, tmp_path):
    whole = model_bytes(small_corpus, tmp_path / "whole", 7)
    train(small_corpus, tmp_path / "parts", 7, SHORT_PHASES[:1])
    assert model_bytes(small_corpus, tmp_path / "parts", 7) == whole


def test_another_run_s_state_is_refused(small_corpus, tmp_path):
    train(small_corpus, tmp_path, 7, SHORT_PHASES[:1])
    for seed, phases in ((8, SHORT_PHASES[:1]), (7, SHORT_PHASES[1:])):
        with pytest.raises(InputError, match="belongs to the run"):
            train(small_corpus, tmp_path, seed, phases)


def test_learning_rate_warms_up_and_falls_to_zero_or_stays():
    falling, staying = PHASES[0], PHASES[1]
    assert falling.falls and not staying.falls
    assert falling.learning_rate(0) == pytest.approx(3e-3 / falling.num_warmup_steps)
    assert falling.learning_rate(600) == pytest.approx(1.5e-3)  # half of 1,200 steps
    assert falling.learning_rate(falling.num_steps) == pytest.approx(0.0, abs=1e-18)
    assert staying.learning_rate(staying.num_warmup_steps // 2 - 1) == pytest.approx(5e-4)
    assert staying.learning_rate(staying.num_steps - 1) == 1e-3


def test_texts_are_written_by_split_and_name(small_corpus, tmp_path):
    play, *addresses = small_corpus.training  # as if the first were none
    write_texts(tmp_path, small_corpus, [Document("one", "A longer text.\n"), *addresses])
    written = {path.relative_to(tmp_path / "texts").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"test/one.txt", "training/addresses.parquet"}
    assert (tmp_path / "texts" / "test" / "one.txt").read_bytes() == b"A text.\n"
    config = CorpusConfig(path=str(tmp_path / "texts" / "training" / "addresses.parquet"))
    assert [document.text for document in read_documents(config)] == [each.text for each in addresses]
    assert play.text not in {each.text for each in addresses}


def test_a_bad_seed_ends_in_one_message(tmp_path, capsys):
    assert main([str(tmp_path), "--seed", "-1"]) == 2
    assert "expected --seed >= 0" in capsys.readouterr().err
