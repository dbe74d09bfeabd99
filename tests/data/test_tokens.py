from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropesearch.data import tokens as tokens_module
from ropesearch.data.tokens import TokenReader, all_tokens, all_tokens_of_each, first_tokens, tokenizer_digest
from ropesearch.errors import InputError
from tests.data.conftest import prose, train_tokenizer

PIECES = st.one_of(
    st.text(min_size=1, max_size=20),
    st.sampled_from([" ", "\n\n", "    ", "the quick", "</s>", "1234567890", "e\u0301", "\U0001f469\u200d\U0001f680"]),
)


class Recorder:
    """Passes texts on and keeps their lengths."""

    def __init__(self, tokenizer: Any) -> None:
        self.lengths: list[int] = []
        self.backend_tokenizer = tokenizer.backend_tokenizer
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids


class DigitsFromTheRight:
    """Groups digits by threes counted from the end, as some tokenizers do: a cut moves every group before it."""

    def encode(self, text: str, **_: Any) -> list[int]:
        start = len(text) % 3
        return [int(text[max(0, i) : i + 3]) for i in range(start - 3 if start else 0, len(text), 3)]


def whole(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return ids


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=30),
    num_tokens=st.integers(1, 300),
    length=st.integers(1, 30_000),
    apart=st.sampled_from([1, 11, 67, 4099]),
)
def test_equal_to_the_beginning_of_all_tokens(
    tokenizer: Any, pieces: list[str], num_tokens: int, length: int, apart: int
) -> None:
    piece = "".join(pieces)
    text = (piece * (length // len(piece) + 1))[:length]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_CHARACTERS_PER_TOKEN", 1)  # so that cuts come near the last token taken
        patch.setattr(tokens_module, "_APART_CHARACTERS", apart)
        tokens = first_tokens(tokenizer, text, num_tokens)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == whole(tokenizer, text)[:num_tokens]


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=5))
def test_several_texts_at_once_have_the_tokens_of_each(tokenizer: Any, texts: list[str]) -> None:
    """Spellings of special tokens among them, which are text."""
    tokens = all_tokens_of_each(tokenizer, texts)
    assert all(each.dtype == np.int32 for each in tokens)
    assert [each.tolist() for each in tokens] == [whole(tokenizer, text) for text in texts]
    assert [all_tokens(tokenizer, text).tolist() for text in texts] == [each.tolist() for each in tokens]
    assert not {token for each in tokens for token in each.tolist()} & {0, 1}


def test_tokens_that_depend_on_the_end_are_found_out() -> None:
    digits = "".join(str(i % 10) for i in range(30_001))
    assert first_tokens(DigitsFromTheRight(), digits, 100).tolist() == [
        0,
        *(DigitsFromTheRight().encode(digits)[1:100]),
    ]


def test_only_the_beginning_of_a_long_line_is_tokenised(tokenizer: Any) -> None:
    recorder = Recorder(tokenizer)
    text = prose(0, 1000) * 400
    assert first_tokens(recorder, text, 500).tolist() == whole(tokenizer, text[:20_000])[:500]
    assert len(text) > 1_000_000 and sum(recorder.lengths) < 25_000


def test_long_tokens_take_a_longer_prefix(tokenizer: Any) -> None:
    recorder = Recorder(tokenizer)
    text = "<s>" + " " * 20_000 + prose(1, 20_000)  # two cuts inside the run of spaces would not agree on its end
    assert first_tokens(recorder, text, 300).tolist() == whole(tokenizer, text)[:300]


def test_no_warning_for_texts_beyond_the_tokenizers_own_length(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "model_max_length", 8)
    assert len(first_tokens(tokenizer, prose(0, 100), 50)) == 50
    assert not caplog.records


def test_digest_sees_every_change_of_the_pipeline(tokenizer: Any) -> None:
    from tokenizers import normalizers

    other = train_tokenizer("<s>")
    assert tokenizer_digest(other) == tokenizer_digest(tokenizer)
    other.backend_tokenizer.enable_truncation(5)
    assert tokenizer_digest(other) == tokenizer_digest(tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)
    assert tokenizer_digest(DigitsFromTheRight()) is None


def test_cached_tokens_are_not_made_again(tokenizer: Any, tmp_path: Path) -> None:
    text = prose(2, 300)
    first = TokenReader(tokenizer, tmp_path).first_tokens(text, 200)
    recorder = Recorder(tokenizer)
    recorder.__class__ = type(type(tokenizer).__name__, (Recorder,), {})
    again = TokenReader(recorder, tmp_path)
    assert again.first_tokens(text, 200).tolist() == first.tolist()
    assert again.first_tokens(text, 50).tolist() == first[:50].tolist()
    assert recorder.lengths == []
    assert again.first_tokens(text, 250).tolist() == whole(tokenizer, text)[:250]  # longer than what is kept
    assert len(recorder.lengths) == 1
    assert again.first_tokens(text, 100_000).tolist() == whole(tokenizer, text)
    assert again.first_tokens(text, 100_001).tolist() == whole(tokenizer, text)  # known to be complete
    assert len(recorder.lengths) == 2
    assert again.first_tokens(text + " more", 50).tolist() == whole(tokenizer, text)[:50]
    assert len(recorder.lengths) == 3


def test_tokenizers_do_not_share_entries(tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers import normalizers

    other = train_tokenizer("<s>")
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    text = "THE QUICK BROWN FOX"
    TokenReader(tokenizer, tmp_path).first_tokens(text, 3)
    assert TokenReader(other, tmp_path).first_tokens(text, 3).tolist() == whole(tokenizer, text.lower())[:3]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_entry_is_made_anew(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    text = prose(3, 100)
    expected = whole(tokenizer, text)[:60]
    reader = TokenReader(tokenizer, folder)
    reader.first_tokens(text, 60)
    reader.first_tokens(prose(4, 100), 60)
    for path in data.draw(st.sampled_from([[0], [1], [0, 1]])):
        victim = sorted(p for p in folder.rglob("*") if p.is_file())[path]
        content = victim.read_bytes()
        kind = data.draw(st.sampled_from(["flip", "cut", "junk", "gone"]))
        at = data.draw(st.integers(0, len(content) - 1))
        if kind == "flip":
            victim.write_bytes(content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :])
        elif kind == "cut":
            victim.write_bytes(content[:at])
        elif kind == "junk":
            victim.write_bytes(data.draw(st.binary(max_size=200)))
        else:
            victim.unlink()
    for seed in (3, 4):
        assert reader.first_tokens(prose(seed, 100), 60).tolist() == whole(tokenizer, prose(seed, 100))[:60]
    assert reader.first_tokens(text, 60).tolist() == expected
    assert TokenReader(tokenizer, folder).first_tokens(text, 60).tolist() == expected


def test_entry_of_another_text_is_not_believed(tokenizer: Any, tmp_path: Path) -> None:
    reader = TokenReader(tokenizer, tmp_path)
    for seed in (3, 4):
        reader.first_tokens(prose(seed, 100), 60)
    first, second = (sorted(tmp_path.rglob(f"*.{suffix}")) for suffix in ("npy", "json"))
    for one, other in (first, second):
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    assert reader.first_tokens(prose(3, 100), 60).tolist() == whole(tokenizer, prose(3, 100))[:60]


def test_cache_folder_that_is_a_file_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("here")
    with pytest.raises(InputError, match="expected a cache folder"):
        TokenReader(tokenizer, tmp_path / "cache").first_tokens("text", 1)
