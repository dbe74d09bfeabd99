"""The oldest transformers of the range: the tests of everything that touches transformers pass there as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

OLDEST = "5.16.1"
PARTS = ("rope", "model", "score", "artifact", "evaluate")


@pytest.mark.slow
@pytest.mark.skipif(
    runs.other_transformers(OLDEST) is None, reason=f"{runs.OTHER_TRANSFORMERS} names no folder with {OLDEST}"
)
def test_the_oldest_transformers_passes_the_tests() -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(runs.other_transformers(OLDEST))}
    version = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() == OLDEST
    done = subprocess.run(
        [*command, *(str(tests / part) for part in PARTS)],
        env=environment, capture_output=True, text=True, cwd=tests.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
