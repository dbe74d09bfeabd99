"""Searches that meet in one run folder, and run folders that are links, are shared by links, or are taken away."""

import os
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ropesearch import cli, pipeline
from ropesearch.artifact.schema import RopeConfig
from ropesearch.errors import InputError, RopesearchError
from ropesearch.rope.regime import Regime
from ropesearch.score.score import Score
from ropesearch.search.ownership import exclusive
from ropesearch.search.storage import JOURNAL_NAME
from ropesearch.search.study import open_study
from tests import runs
from tests.faults.operations import leftovers
from tests.search.analytic import evaluate, make_sampler, run
from tests.search.test_worker import contents

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def finished(toy_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(runs.search_words(toy_folder, corpus, folder, 2)) == 0
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "log.txt"
    }


def all_at_once(number: int, work: Any) -> list[BaseException]:
    """Run `work(index)` in that many threads that start together; what they raised."""
    gate, errors = threading.Barrier(number), []

    def worker(index: int) -> None:
        gate.wait()
        try:
            work(index)
        except RopesearchError as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_the_same_search_started_four_times_at_once_scores_each_trial_once(tmp_path: Path) -> None:
    calls: Counter[Any] = Counter()

    def counted(regime: Regime, split: str) -> Score:
        calls[split, regime.factors, regime.attention_factor] += 1
        return evaluate(regime, split)

    assert all_at_once(4, lambda _: run(tmp_path / "run", 12, score=counted)) == []
    assert set(calls.values()) == {1}
    trials = contents(tmp_path / "run")[:-1]
    assert len(trials) == 16 and all(state.is_finished() for _, state, *_ in trials)


def test_of_different_searches_started_at_once_one_has_the_folder(tmp_path: Path) -> None:
    def asked_with(seed: int) -> dict[str, Any]:
        return {"seed": seed, "space": {"factor_step": 0.1 * seed}}

    errors = all_at_once(3, lambda seed: run(tmp_path / "run", 3, seed=seed, fingerprints=asked_with(seed)))
    assert [type(error) for error in errors] == [InputError] * 2
    for error in errors:
        assert "holds a search of something else:\n  seed: " in str(error) and "\n  space.factor_step: " in str(error)
    (seed,) = {0, 1, 2} - {int(str(error).split(" there, ")[1].split(" asked")[0]) for error in errors}
    opened = open_study(tmp_path / "run", asked_with(seed), make_sampler(seed))
    assert len(opened.study.get_trials()) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1"], "  seed: 0 there, 1 asked"),
        (["space.factor_step=0.5"], "  space.factor_step: "),
        (["target_length=100"], f"  target_length: {runs.TARGET_LENGTH} there, 100 asked"),
        (["model.dtype=bfloat16"], "  scoring.search.dtype: "),
    ],
)
def test_another_search_is_refused_and_changes_nothing(
    words: list[str], message: str, finished: Path, toy_folder: Path, corpus: Path, capsys: Captured
) -> None:
    before = files_of(finished)
    asked = runs.search_words(toy_folder, corpus, finished, 2)
    given = {word.partition("=")[0] for word in words}
    assert cli.main([*(word for word in asked if word.partition("=")[0] not in given), *words]) == 2
    assert message in capsys.readouterr().err
    assert files_of(finished) == before


def test_jobs_of_another_kind_and_models_keep_their_folders(
    finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    before = files_of(finished)
    evaluation = ["evaluate", str(finished), f"corpus.path={corpus}", "cache=null", f"run={finished}"]
    counts = [f"corpus.num_{split}_windows=3" for split in ("search", "selection", "held_out")]
    assert cli.main([*evaluation, *counts]) == 2
    expected = (
        f"run: expected a new folder or one of the job evaluate, got {finished}, which holds one of the job search"
    )
    assert expected in capsys.readouterr().err
    model = shutil.copytree(toy_folder, tmp_path / "model")
    assert cli.main(runs.search_words(model, corpus, model, 2)) == 2
    assert "which holds another config.json; give another with run=" in capsys.readouterr().err
    assert files_of(finished) == before and files_of(model) == files_of(toy_folder)


@pytest.mark.slow
def test_a_start_while_another_writes_the_result_waits_and_finds_it_whole(
    finished: Path, toy_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """Also one with a larger budget, which replaces the result: whoever reads, reads a whole one."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoint")
    process = None
    written = pipeline.write_checkpoint_folder

    def slow(*arguments: Any, **keywords: Any) -> Any:
        nonlocal process
        process = runs.started(runs.search_words(toy_folder, corpus, folder, 3))
        return written(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_checkpoint_folder", slow)
        assert cli.main(runs.search_words(toy_folder, corpus, folder, 2)) == 0
    assert process is not None
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert RopeConfig.read(folder).search["num_trials"] == 7
    assert cli.main(["verify", str(folder), "levels=[digest,table]"]) == 0
    assert leftovers(folder) == []


def test_a_run_folder_by_a_link_is_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    run(tmp_path / "run", 2)
    found = contents(tmp_path / "elsewhere")
    assert len(found) == 7
    run(tmp_path / "elsewhere", 3)
    assert contents(tmp_path / "run")[:6] == found[:6]


def test_a_folder_of_hard_links_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    """`cp -al` makes backups: what one search wrote would appear in the other."""
    run(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "backup", copy_function=os.link)
    before = (tmp_path / "backup" / JOURNAL_NAME).read_bytes()
    with pytest.raises(InputError, match=r"with 2 names \(hard links\)") as caught:
        run(tmp_path / "run", 3)
    subprocess.run(["sh", "-c", str(caught.value).rpartition(": ")[2]], check=True)
    run(tmp_path / "run", 3)
    assert len(contents(tmp_path / "run")) == 8
    assert (tmp_path / "backup" / JOURNAL_NAME).read_bytes() == before


@pytest.mark.parametrize("by", ["removal", "renaming", "removal of the journal", "another's start"])
def test_a_run_folder_that_is_taken_away_ends_the_search_and_is_not_made_anew(by: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    calls: list[str] = []

    def scored(regime: Regime, split: str) -> Score:
        calls.append(split)
        if len(calls) == 3:
            if by == "removal of the journal":
                (folder / JOURNAL_NAME).unlink()
            elif by == "renaming":
                folder.rename(tmp_path / "moved")
            else:
                shutil.rmtree(folder)
            if by == "another's start":
                run(folder, 2)
        return evaluate(regime, split)

    with pytest.raises(InputError, match=r"was (removed|replaced by another file) while the search was at work"):
        run(folder, 2, score=scored)
    assert len(calls) == 3
    assert folder.exists() == (by in ("removal of the journal", "another's start"))
    if by == "renaming":
        folder = tmp_path / "moved"
    run(folder, 2)
    assert len(contents(folder)) == 7


def test_the_lock_of_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was removed while the search was at work"), exclusive(tmp_path / "gone"):
        pass
    assert not (tmp_path / "gone").exists()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(InputError, match=r"expected a file system with locks, got one without \(No locks available\)"):
        run(tmp_path, 2)
