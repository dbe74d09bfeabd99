"""`python -m ropesearch.demo DIR` writes the packaged files and nothing over somebody else's."""

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from ropesearch.demo.__main__ import main, packaged_files, write_demo
from ropesearch.errors import InputError

DEMO = Path(str(resources.files("ropesearch.demo")))


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_writes_model_and_texts_and_is_content_when_they_are_there(tmp_path, capsys):
    packaged = {
        f"{name}/{path}": data for name in ("model", "texts") for path, data in files_below(DEMO / name).items()
    }
    assert {path.as_posix() for path, _ in packaged_files()} == packaged.keys()
    assert "model/model.safetensors" in packaged
    assert sum(path.startswith("texts/") and path.endswith(".txt") for path in packaged) == 64
    folder = tmp_path / "new" / "demo=1, [x]"
    assert main([str(folder)]) == 0
    assert files_below(folder) == packaged
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main([str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written
    assert "wrote" in capsys.readouterr().out


def test_a_different_file_is_refused_before_anything_is_written(tmp_path, capsys):
    mine = tmp_path / "texts" / "test" / "1805-Jefferson-1.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main([str(tmp_path)]) == 2
    assert f"error: {mine} exists and is not the demo's" in capsys.readouterr().err
    assert files_below(tmp_path) == {"texts/test/1805-Jefferson-1.txt": b"mine"}


def test_other_files_in_the_folder_do_not_matter(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_demo(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_demo(tmp_path / "file")


def test_the_command_imports_no_heavy_library(tmp_path):
    code = (
        "import sys; from ropesearch.demo.__main__ import main; main(sys.argv[1:]); "
        "sys.exit(', '.join(sorted({'torch', 'transformers', 'tokenizers'} & sys.modules.keys())) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
