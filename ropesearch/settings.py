"""Config fields that carry their meaning, so that `ropesearch JOB --help` and the code say the same thing."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def setting(default: Any, meaning: str) -> Any:
    """A dataclass field with a default and a sentence for the help page (meaning and unit); lists are copied."""
    metadata = {"meaning": meaning}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(schema: type, variants: Mapping[str, type] | None = None) -> Any:
    """A dataclass field that holds another config dataclass, built from its own defaults.

    With `variants` (preset name -> dataclass, `schema` one of them) the preset chooses which; the field's type is their
    common base.
    """
    return dataclasses.field(default_factory=schema, metadata={"variants": variants} if variants else {})
