import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing guards against power loss, which no test causes, and most of a test's time would go there."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
