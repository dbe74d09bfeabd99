"""ropesearch/settings.py: fields with a meaning, and no list or group that two configs share."""

import dataclasses

from ropesearch.settings import group, setting


@dataclasses.dataclass(kw_only=True)
class Inner:
    number: int = setting(3, "a number")


@dataclasses.dataclass(kw_only=True)
class Outer:
    items: list[int] = setting([1, 2], "some items")
    inner: Inner = group(Inner)


def test_defaults_and_meanings() -> None:
    assert Outer() == Outer(items=[1, 2], inner=Inner(number=3))
    meanings = {
        field.name: field.metadata.get("meaning") for field in [*dataclasses.fields(Inner), *dataclasses.fields(Outer)]
    }
    assert meanings == {"number": "a number", "items": "some items", "inner": None}


def test_lists_and_groups_are_not_shared() -> None:
    one = Outer()
    one.items.append(3)
    one.inner.number = 4
    assert Outer() == Outer(items=[1, 2], inner=Inner(number=3))
