"""The wheel, unpacked far from the checkout: it finds its Hydra files, its schema and the demo."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_stands_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in ("py.typed", "conf/search.yaml", "artifact/rope_config.schema.json", "demo/model/model.safetensors"):
        assert (installed / "ropesearch" / name).is_file()
    assert not (installed / "tests").exists()

    def run(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert "space.factor_step=0.01" in run("ropesearch.cli", "search", "--help")
    # Composing the job reads conf/; the next thing that is wrong is the model.
    assert "model.path" in run("ropesearch.cli", "search", "nowhere/at/all", "corpus.path=x", "target_length=64")
    assert "wrote" in run("ropesearch.demo", str(tmp_path / "demo"))
    where = run("ropesearch.cli", "--version")
    assert where.startswith("ropesearch ")
