"""A journal damaged anywhere: named with its line and a remedy that works, or, at a torn tail, gone on with."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ropesearch.errors import InputError
from ropesearch.search.journal import Journal
from ropesearch.search.storage import JOURNAL_NAME
from tests.search.analytic import evaluate, run
from tests.search.test_worker import contents

NUM_TRIALS = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished search of a few trials."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, NUM_TRIALS)
    return folder


def operations(path: Path) -> list[dict[str, Any]]:
    return list(Journal(path).read_logs(0))


def damages(lines: list[bytes]) -> Iterator[tuple[str, int, bytes]]:
    """What was done, the number of lines before it, and the content that is left: for each line each kind of damage."""

    def joined(*parts: Any) -> bytes:
        return b"".join(b"".join(part) if isinstance(part, list) else part for part in parts)

    for index, line in enumerate(lines):
        before, after = lines[:index], lines[index + 1 :]
        changed: list[tuple[str, bytes | list[bytes]]] = [
            ("an empty line", b"\n"),
            ("cut in half", line[: len(line) // 2]),
            ("cut in half, with an end", line[: len(line) // 2] + b"\n"),
            ("without its end", line[:-1]),
            ("zeros", bytes(len(line))),
            ("zeros, with an end", bytes(len(line) - 1) + b"\n"),
            ("zeros inserted", bytes(512) + line),
            ("garbage inserted", b"\xff\xfe\r\n" + line),
            ("doubled", line + line),
            ("a line of the beginning inserted", lines[0] + line),
            ("plain Optuna's", line[: -len(',"check":"0123456789abcdef"}\n')] + b"}\n"),
        ]
        if after:
            changed += [("dropped", b"")]
            yield "swapped with the next", index, joined(before, after[0], line, after[1:])
        for place in range(0, len(line) - 1, 19):
            for bit in (0, 5):
                flipped = line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1 :]
                changed.append((f"bit {bit} of byte {place} flipped", flipped))
        for kind, content in changed:
            yield kind, index, joined(before, content, after)


def rewrite(path: Path, content: bytes) -> None:
    """Other content in the same file; much faster than a file that is cut and written."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(content)
        file.truncate()


def check_refused_or_torn(path: Path, num_whole: int, expected: list[dict[str, Any]]) -> bool:
    """Whether the damage is refused; what is not refused holds exactly the lines before it."""
    content = path.read_bytes()
    try:
        found = operations(path)
    except InputError as error:
        text = str(error)
        assert text.startswith(f"{path}: line ") and ("keep the" in text or "another run folder" in text)
        assert path.read_bytes() == content
        return True
    assert b"\n" not in content[sum(map(len, content.splitlines(keepends=True)[:num_whole])) :]
    assert found == expected[:num_whole]
    return False


def test_every_damage_to_every_line_is_refused_or_a_torn_tail(whole: Path, tmp_path: Path) -> None:
    lines = (whole / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    expected = operations(whole / JOURNAL_NAME)
    path = tmp_path / JOURNAL_NAME
    num_damages, torn = 0, set()
    for kind, index, content in damages(lines):
        rewrite(path, content)
        appended = kind in ("zeros inserted", "garbage inserted", "doubled") and index == len(lines) - 1
        try:
            refused = check_refused_or_torn(path, index + (kind == "doubled" and appended), expected)
        except AssertionError as error:
            raise AssertionError(f"line {index + 1} of {len(lines)}: {kind}") from error
        num_damages += 1
        if not refused:
            torn.add((kind, index))
    assert num_damages > 20 * len(lines)
    assert torn == {(kind, len(lines) - 1) for kind in ("cut in half", "without its end", "zeros")}


@pytest.mark.slow
def test_every_single_bit_is_guarded(whole: Path, tmp_path: Path) -> None:
    content = (whole / JOURNAL_NAME).read_bytes()
    expected = operations(whole / JOURNAL_NAME)
    path = tmp_path / JOURNAL_NAME
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        rewrite(path, bytes(damaged))
        refused = check_refused_or_torn(path, content.count(b"\n", 0, place), expected)
        assert refused or place == len(content) - 1


def test_a_damage_while_a_search_runs_ends_it_before_it_writes_more(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    calls = []

    def damaging(score: Callable[..., Any]) -> Callable[..., Any]:
        def scored(*arguments: Any) -> Any:
            calls.append(path.read_bytes())
            if len(calls) == 4:
                # What this worker has read already is not read again; what another one appends, damaged, is.
                path.write_bytes(calls[-1] + b'{"op_code":8,"worker_id":"w","trial_id":0,"user_attr":{"score":1}}\n')
            return score(*arguments)

        return scored

    with pytest.raises(InputError, match=r"line \d+ is not what"):
        run(tmp_path, NUM_TRIALS, score=damaging(evaluate))
    assert len(calls) == 4 and path.read_bytes().startswith(calls[-1])
    assert len(path.read_bytes().splitlines()) == len(calls[-1].splitlines()) + 1


def remedy_of(error: InputError) -> str:
    """The shell command at the end of the message."""
    return str(error).rpartition(": ")[2]


def check_remedy(whole: Path, folder: Path, index: int) -> None:
    lines = (whole / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    folder.mkdir()
    path = folder / JOURNAL_NAME
    path.write_bytes(b"".join([*lines[:index], lines[index].replace(b"op_code", b"op_c0de"), *lines[index + 1 :]]))
    with pytest.raises(InputError) as caught:
        run(folder, NUM_TRIALS)
    assert f"{path}: line {index + 1} " in str(caught.value)
    subprocess.run(["sh", "-c", remedy_of(caught.value)], check=True)
    assert path.read_bytes() == b"".join(lines[:index])
    run(folder, NUM_TRIALS)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize("index", [1, 9, -1])
def test_the_remedy_in_the_message_goes_on_to_the_same_study(whole: Path, tmp_path: Path, index: int) -> None:
    num_lines = len((whole / JOURNAL_NAME).read_bytes().splitlines())
    check_remedy(whole, tmp_path / "it's here", index % num_lines)


@pytest.mark.slow
def test_the_remedy_works_at_every_line(whole: Path, tmp_path: Path) -> None:
    for index in range(1, len((whole / JOURNAL_NAME).read_bytes().splitlines())):
        check_remedy(whole, tmp_path / str(index), index)
