import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropesearch.search.ownership import claimed
from ropesearch.search.presence import Presence, read_signs, working
from ropesearch.stopping import Stopped

HOLD = """
import sys, time
from pathlib import Path
from ropesearch.search.presence import working
with working(Path(sys.argv[1]), 600) as presence:
    print(presence.id, flush=True)
    time.sleep(60)
"""
LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def __call__(self) -> float:
        return self.now_seconds


def elsewhere(presence: Presence) -> Presence:
    """The same worker, as if on another machine."""
    presence.show(boot="another")
    return presence


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., Presence]:
    def made(lease_seconds: float = LEASE_SECONDS) -> Presence:
        (tmp_path / "workers").mkdir(exist_ok=True)
        presence = Presence(tmp_path, lease_seconds, "cpu", clock)
        presence.beat()
        return presence

    return made


def watch(observer: Presence, clock: Clock, num_beats: int, other: Presence | None = None) -> None:
    for _ in range(num_beats):
        clock.now_seconds += BEAT_SECONDS
        if other is not None:
            other.beat()
        observer.beat()


def test_a_worker_elsewhere_is_dead_after_a_lease_without_a_change(make: Callable[..., Presence], clock: Clock) -> None:
    one, other = make(), elsewhere(make())
    other.beat()
    one.beat()
    watch(one, clock, 20, other)
    assert one.is_alive(other.id)
    watch(one, clock, 5)
    assert one.is_alive(other.id)
    watch(one, clock, 1)
    assert not one.is_alive(other.id)
    other.beat()
    assert one.is_alive(other.id)


def test_the_longer_of_two_leases_counts(make: Callable[..., Presence], clock: Clock) -> None:
    one, other = make(), elsewhere(make(10 * LEASE_SECONDS))
    other.beat()
    one.beat()
    watch(one, clock, 59)
    assert one.is_alive(other.id)
    watch(one, clock, 1)
    assert not one.is_alive(other.id)


def test_who_did_not_look_has_not_seen_silence(make: Callable[..., Presence], clock: Clock) -> None:
    one, other = make(), elsewhere(make())
    other.beat()
    one.beat()
    clock.now_seconds += 100 * LEASE_SECONDS  # suspended
    assert one.is_alive(other.id)
    watch(one, clock, 4)
    assert one.is_alive(other.id)
    watch(one, clock, 1)
    assert not one.is_alive(other.id)


def test_times_of_files_do_not_matter(make: Callable[..., Presence], clock: Clock, tmp_path: Path) -> None:
    one, other = make(), elsewhere(make())
    other.beat()
    os.utime(tmp_path / "workers" / f"{other.id}.json", (0, 0))
    watch(one, clock, 3)
    assert one.is_alive(other.id)


def test_a_worker_that_ended_is_dead_at_once_and_says_why(make: Callable[..., Presence], tmp_path: Path) -> None:
    one, other = make(), elsewhere(make())
    other.end("SIGTERM")
    assert not one.is_alive(other.id)
    signs = {sign["worker"]: sign for sign in read_signs(tmp_path)}
    assert (signs[other.id]["state"], signs[other.id]["because"]) == ("ended", "SIGTERM")
    assert signs[one.id]["state"] == "working"


def test_a_worker_never_takes_itself_for_dead(make: Callable[..., Presence], clock: Clock) -> None:
    one = make()
    clock.now_seconds += 100 * LEASE_SECONDS
    assert one.is_alive(one.id)


def test_a_worker_that_left_no_sign_is_dead(make: Callable[..., Presence]) -> None:
    assert not make().is_alive("unknown")


def test_a_hung_worker_of_this_machine_is_dead_after_the_lease(
    make: Callable[..., Presence], clock: Clock, tmp_path: Path
) -> None:
    one, other = make(), make()
    with claimed(tmp_path / "workers" / f"{other.id}.lock") as held:
        other.show(has_lock=held)
        other.beat()
        one.beat()
        watch(one, clock, 5)
        assert one.is_alive(other.id)
        watch(one, clock, 1)
        assert not one.is_alive(other.id)


def test_a_suspended_worker_that_was_buried_comes_back_to_life(
    make: Callable[..., Presence], clock: Clock, tmp_path: Path
) -> None:
    one, other = make(), make()
    with claimed(tmp_path / "workers" / f"{other.id}.lock") as held:
        other.show(has_lock=held)
        other.beat()
        one.beat()
        watch(one, clock, 6)
        assert not one.is_alive(other.id)
        one.bury(other.id)
        assert not one.is_alive(other.id)
        other.beat()
        assert one.is_alive(other.id)
        watch(one, clock, 20, other)
        assert one.is_alive(other.id)


def test_a_killed_worker_of_this_machine_is_dead_at_once_and_is_buried(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = process.stdout.readline().strip()
    with working(tmp_path, 600) as presence:
        try:
            assert presence.is_alive(worker)
            process.send_signal(signal.SIGSTOP)
            assert presence.is_alive(worker)
        finally:
            process.kill()
            process.communicate()
        assert not presence.is_alive(worker)
        presence.bury(worker)
    signs = {sign["worker"]: sign["because"] for sign in read_signs(tmp_path)}
    assert signs == {worker: "lost", presence.id: "done"}
    assert [path.suffix for path in (tmp_path / "workers").iterdir()] == [".json"] * 2


@pytest.mark.parametrize(
    ("error", "because"),
    [(Stopped("SIGUSR2"), "SIGUSR2"), (KeyboardInterrupt(), "SIGINT"), (ValueError("no"), "error")],
)
def test_a_worker_ends_with_its_block(error: BaseException, because: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), working(tmp_path, 600):
        raise error
    (sign,) = read_signs(tmp_path)
    assert (sign["state"], sign["because"]) == ("ended", because)
    assert not list((tmp_path / "workers").glob("*.lock"))


def test_a_sign_says_what_the_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with working(tmp_path, 600, "cuda:1") as presence:
        presence.show(phase="search windows", fraction=0.25, trial=7)
        presence.beat()
        (sign,) = read_signs(tmp_path)
    assert sign["has_lock"]
    assert {key: sign[key] for key in ("slurm_job", "device", "phase", "fraction", "trial", "process", "beats")} == {
        "slurm_job": "12_3",
        "device": "cuda:1",
        "phase": "search windows",
        "fraction": 0.25,
        "trial": 7,
        "process": os.getpid(),
        "beats": 3,
    }


def test_a_sign_that_cannot_be_written_or_read_ends_nothing(make: Callable[..., Presence], tmp_path: Path) -> None:
    one, other = make(), make()
    path = tmp_path / "workers" / f"{other.id}.json"
    path.write_bytes(b"[1]")
    assert one.is_alive(other.id)
    assert [sign["worker"] for sign in read_signs(tmp_path)] == [one.id]
    path.write_text(json.dumps({"state": "ended"}))
    assert not one.is_alive(other.id)
    for each in (tmp_path / "workers").iterdir():
        each.unlink()
    (tmp_path / "workers").rmdir()
    (tmp_path / "workers").write_text("")
    one.beat()
    assert read_signs(tmp_path) == []
