"""Fixtures shared by all tests. Nothing here imports torch before a test asks for a model."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import toys

if TYPE_CHECKING:
    from ropesearch.model.load import LoadedModel

# Before the libraries read them: no network, and no threads that fight over the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Started in the background, a shell has the tests ignore Ctrl-C, and with them every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines on shared machines, and the same examples in every run.
settings.register_profile("ropesearch", deadline=None, derandomize=True)
settings.load_profile("ropesearch")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was captured goes between processes as UTF-8, and may hold lone surrogates."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Llama's checkpoint folder (original_length 64 tokens, 8 pairs). Shared: do not write into it."""
    return toys.write_checkpoint(tmp_path_factory.mktemp("toy") / "llama")


@pytest.fixture(scope="session")
def toy_loaded(toy_folder: Path) -> "LoadedModel":
    """The toy Llama of `toy_folder`, loaded in float32 on the CPU. Shared: leave it as you found it."""
    from ropesearch.model.config import DType, ModelConfig
    from ropesearch.model.load import load_model

    return load_model(ModelConfig(path=str(toy_folder), dtype=DType.float32, device="cpu"))
