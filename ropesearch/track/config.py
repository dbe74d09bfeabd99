"""Where a search or a fine-tuning is tracked besides its run folder. Standard library only."""

import configparser
import importlib.metadata
import netrc
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from ropesearch.errors import InputError
from ropesearch.settings import setting

_OWN_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # which of them is the default depends on wandb's version


class TrackMode(Enum):
    """How Weights & Biases is reached.

    `auto`: online where there is a key, unless WANDB_MODE says offline or disabled; otherwise offline. `online`: always
    online. `offline`: only files in the run folder, for `wandb sync`.
    """

    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass(kw_only=True)
class TrackConfig:
    """Base of the ways to track a job."""

    def check(self) -> None:
        """Raise InputError where it cannot be tracked like this."""


@dataclass(kw_only=True)
class NoTracking(TrackConfig):
    """The run folder is all there is."""


@dataclass(kw_only=True)
class WandbTracking(TrackConfig):
    """Weights & Biases. Server and key are found as `wandb` itself finds them."""

    mode: TrackMode = setting(
        TrackMode.auto, "auto = online where there is a key (WANDB_API_KEY or netrc), else offline, for `wandb sync`"
    )
    project: str = setting("ropesearch", "project that the runs belong to; WANDB_ENTITY says whose")

    def __post_init__(self) -> None:
        if not self.project or set(self.project) & set("/\\#?%:") or len(self.project) > 128:
            raise InputError(
                f"project: expected a name of 1 to 128 characters without / \\ # ? % :, got {self.project!r}"
            )

    def check(self) -> None:
        """Raise InputError where wandb is not installed, or online is asked and there is no key."""
        try:
            importlib.metadata.version("wandb")
        except importlib.metadata.PackageNotFoundError:
            raise InputError(
                "track: expected wandb to be installed, got none; install it with `pip install ropesearch[wandb]`, "
                "or leave track=wandb out"
            ) from None
        if self.mode is TrackMode.online and not has_key():
            raise InputError(
                f"track.mode: expected a key for {server() or 'Weights & Biases'} with online, got none; set "
                "WANDB_API_KEY, log in with `wandb login`, or give track.mode=offline"
            )

    @property
    def online(self) -> bool:
        """Whether a server is to be reached."""
        if self.mode is TrackMode.auto:
            return has_key() and os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
        return self.mode is TrackMode.online


TRACKERS: dict[str, type[TrackConfig]] = {"none": NoTracking, "wandb": WandbTracking}


def server() -> str | None:
    """The URL of the server: WANDB_BASE_URL, else what `wandb login --host` has kept, else None for W&B's own."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    kept = configparser.ConfigParser(interpolation=None)
    try:
        kept.read(Path(folder) / "settings", encoding="utf-8")
    except (OSError, ValueError, configparser.Error):
        kept.clear()
    return os.environ.get("WANDB_BASE_URL") or kept.get("default", "base_url", fallback=None)


def has_key() -> bool:
    """Whether there is something to log in with: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or the server in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    found = server()
    hosts = _OWN_HOSTS if found is None else (urlsplit(found).netloc,)
    given = os.environ.get("NETRC")
    for name in [given] if given else ["~/.netrc", "~/_netrc"]:
        try:
            return any(map(netrc.netrc(os.path.expanduser(name)).authenticators, hosts))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, netrc.NetrcParseError):
            break
    return False
