"""ropesearch/track/config.py: which server, whether there is a key, and what is refused before any work."""

import importlib.metadata
from pathlib import Path

import pytest

from ropesearch.errors import InputError
from ropesearch.track.config import NoTracking, TrackMode, WandbTracking, has_key, server

NAMES = (
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_MODE",
    "NETRC",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and nothing of wandb in the environment."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_settings(home: Path, url: str) -> None:
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text(f"[default]\nbase_url = {url}\n")


def test_the_server_is_that_of_the_environment_or_of_the_last_login(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server() is None
    write_settings(home, "https://kept.example")
    assert server() == "https://kept.example"
    monkeypatch.setenv("WANDB_BASE_URL", "https://given.example")
    assert server() == "https://given.example"


@pytest.mark.parametrize("text", ["no section", "[default]\nproject = a\n", "[default\n", "\x00", "\udcff"])
def test_a_settings_file_that_says_nothing_is_passed_over(home: Path, text: str) -> None:
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_bytes(text.encode(errors="surrogateescape"))
    assert server() is None


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_a_key_may_be_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_key()
    monkeypatch.setenv(name, "x")
    assert has_key()


def test_a_key_may_be_in_netrc_if_it_is_the_servers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_key()
    write_settings(home, "https://own.example:8080")
    assert not has_key()
    (home / "other").write_text("machine own.example:8080\n  login user\n  password secret\n")
    monkeypatch.setenv("NETRC", str(home / "other"))
    assert has_key()


@pytest.mark.parametrize("text", ["machine", "machine a b c", "\udcff"])
def test_a_netrc_that_cannot_be_read_holds_no_key(home: Path, text: str) -> None:
    (home / ".netrc").write_bytes(text.encode(errors="surrogateescape"))
    assert not has_key()


def test_auto_is_online_where_there_is_a_key_unless_wandb_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not WandbTracking().online
    assert WandbTracking(mode=TrackMode.online).online and not WandbTracking(mode=TrackMode.offline).online
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert WandbTracking().online and not WandbTracking(mode=TrackMode.offline).online
    for mode, online in (("online", True), ("offline", False), ("disabled", False), ("dryrun", False)):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert WandbTracking().online is online
        assert WandbTracking(mode=TrackMode.online).online


def test_what_cannot_be_tracked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for tracking in (WandbTracking(), WandbTracking(mode=TrackMode.offline), NoTracking()):
        tracking.check()
    with pytest.raises(InputError, match=r"^track.mode: expected a key for Weights & Biases with online, got none;"):
        WandbTracking(mode=TrackMode.online).check()
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.example")
    with pytest.raises(InputError, match=r"a key for https://own\.example with online, got none; set WANDB_API_KEY"):
        WandbTracking(mode=TrackMode.online).check()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    WandbTracking(mode=TrackMode.online).check()


def test_wandb_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        assert name == "wandb"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    NoTracking().check()
    with pytest.raises(InputError, match=r"got none; install it with `pip install ropesearch\[wandb\]`, or leave"):
        WandbTracking().check()


@pytest.mark.parametrize("project", ["", "a/b", "a#b", "a:b", "x" * 129])
def test_projects_that_wandb_would_refuse_are_refused(project: str) -> None:
    with pytest.raises(InputError, match=r"^project: expected a name of 1 to 128 characters without"):
        WandbTracking(project=project)
