"""Training rows hold what they promise, and the loss counts what can be known."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ropesearch.data.needles import NUM_ANSWER_WORDS, WORDS
from ropesearch.demo.rows import ANSWER_WEIGHT, MIXTURE, ROW_TOKENS, Mixture, RowMaker
from ropesearch.demo.tokenizer import NUM_SPECIAL
from ropesearch.seeding import stream

DEMO = Path(str(resources.files("ropesearch.demo")))
PROSE = Mixture(4, 64, 0.0, 0.0, 0.0, 0.0)
ONE = Mixture(64, ROW_TOKENS, 1.0, 0.0, 0.0, 0.0)
SEVERAL = Mixture(64, ROW_TOKENS, 0.0, 1.0, 0.0, 0.0)
WORD_REPETITION = Mixture(64, 128, 0.0, 0.0, 1.0, 1.0)
OTHER_REPETITION = Mixture(64, 128, 0.0, 0.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def documents(tokenizer) -> list[np.ndarray]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((DEMO / "texts" / "search").glob("*.txt"))[:3]]
    return [np.array(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


@pytest.fixture(scope="module")
def maker(tokenizer, documents) -> RowMaker:
    return RowMaker(tokenizer, documents, tokenizer.bos_token_id, NUM_SPECIAL)


def test_every_word_is_one_token(tokenizer):
    assert {len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in WORDS} == {1}


@pytest.mark.parametrize("mixture", [MIXTURE, PROSE])
def test_batches_have_the_mixture_s_shape_and_depend_on_the_stream_only(maker, tokenizer, mixture):
    a, b = (maker.batch(mixture, stream(1, "tests.rows", 4)) for _ in range(2))
    assert a.input_ids.shape == a.weights.shape == (mixture.num_rows, mixture.row_tokens)
    assert (a.input_ids[:, 0] == tokenizer.bos_token_id).all()
    np.testing.assert_array_equal(a.input_ids, b.input_ids)
    np.testing.assert_array_equal(a.weights, b.weights)


def test_prose_rows_are_runs_of_one_document(maker, documents):
    rows = maker.batch(PROSE, stream(2, "tests.rows"))
    assert (rows.weights == 1.0).all()
    text = "|".join(" ".join(map(str, document)) for document in documents)
    assert all(" ".join(map(str, row[1:])) in text for row in rows.input_ids)


@pytest.mark.parametrize("mixture", [ONE, SEVERAL])
def test_answers_are_stated_once_before_and_only_the_second_time_counts(maker, tokenizer, mixture):
    rows = maker.batch(mixture, stream(3, "tests.rows"))
    num_asked = []
    for ids, weights in zip(rows.input_ids, rows.weights, strict=True):
        answers = np.flatnonzero(weights == ANSWER_WEIGHT).reshape(-1, NUM_ANSWER_WORDS)
        num_asked.append(len(answers))
        for answer in answers:
            asked = ids[[answer[0] - 1, *answer]].tolist()  # the key, then its answer
            places = [i for i in range(len(ids)) if ids[i : i + 1 + NUM_ANSWER_WORDS].tolist() == asked]
            assert places[-1] == answer[0] - 1
            assert (weights[places[0] + 1 : places[0] + 1 + NUM_ANSWER_WORDS] == 0.0).all()
            assert len(places) >= 2
    assert min(num_asked) >= 1
    assert max(num_asked) == (1 if mixture is ONE else 6)


@pytest.mark.parametrize("mixture", [WORD_REPETITION, OTHER_REPETITION])
def test_what_counts_in_repetition_can_be_known_from_the_row(maker, mixture):
    rows = maker.batch(mixture, stream(4, "tests.rows"))
    num_periodic = 0
    for ids, weights in zip(rows.input_ids, rows.weights, strict=True):
        first = int(np.argmax(weights != 0.0))
        if first == 0:  # prose again after other prose
            assert any(
                ids[1 : 1 + n].tolist() == ids[len(ids) - n :].tolist() for n in range(16, mixture.row_tokens // 2)
            )
            continue
        num_periodic += 1
        period = first - 2
        np.testing.assert_array_equal(ids[1 + period :], ids[1:-period])
    assert num_periodic == mixture.num_rows if mixture.words else 10 < num_periodic < 54
