"""Search rotary position factors so that a language model reads further than it was trained to."""

from importlib.metadata import version
from typing import Any

__version__ = version("ropesearch")

__all__ = ["__version__", "load", "search"]


def __getattr__(name: str) -> Any:
    """`ropesearch.load` and `ropesearch.search`, imported when first asked for (they need torch and transformers)."""
    if name == "load":
        from ropesearch.artifact.load import load

        return load
    if name == "search":
        from ropesearch.pipeline import search

        return search
    raise AttributeError(f"module 'ropesearch' has no attribute {name!r}")
