"""Search rotary position factors so that a language model reads further than it was trained to.

`ropesearch.search(job)` runs a search and `ropesearch.load(folder)` loads its result; both import torch when called.
"""

from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ropesearch import search

if TYPE_CHECKING:
    from ropesearch.config import SearchJob
    from ropesearch.report import SearchOutcome

__version__ = version("ropesearch")

__all__ = ["__version__", "load", "search"]


class _SearchPackage(ModuleType):
    """The package ropesearch.search, which can be called: the job and the package of its parts share one name."""

    def __call__(self, job: "SearchJob") -> "SearchOutcome":
        """Run a search job; see `ropesearch.pipeline.search`."""
        from ropesearch import pipeline

        return pipeline.search(job)


search.__class__ = _SearchPackage


def load(folder: Any, **options: Any) -> Any:
    """Model and tokenizer of a folder that ropesearch wrote; see `ropesearch.artifact.load.load`."""
    from ropesearch.artifact.load import load as load_folder

    return load_folder(folder, **options)
