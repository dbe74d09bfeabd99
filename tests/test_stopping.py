"""ropesearch/stopping.py within one process; tests/faults/test_signals.py sends signals to real searches."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from ropesearch.stopping import Stopped, Stopping, asked_by, finishing, raise_if_lost


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    found = Stopping("again")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with found.listening(until_the_end=False):
            yield found
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_raised_with_its_name(number: signal.Signals, stopping: Stopping) -> None:
    with pytest.raises(Stopped) as caught:
        signal.raise_signal(number)
    assert caught.value.signal_name == number.name and stopping.asked
    assert stopping.exit_code == (130 if number is signal.SIGINT else 75)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_what_is_nearly_done_is_finished_first(number: signal.Signals, stopping: Stopping) -> None:
    done = []
    with pytest.raises(Stopped, match=number.name), finishing(lambda: True):
        signal.raise_signal(number)
        done.append("finished")
    assert done == ["finished"] and stopping.exit_code == 75


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_that_comes_twice_is_one(second: signal.Signals, stopping: Stopping) -> None:
    """From the scheduler and from torchrun, while the block goes to its end."""
    done = []
    with pytest.raises(Stopped, match="SIGTERM"), finishing(lambda: True):
        signal.raise_signal(signal.SIGTERM)
        assert asked_by() == "SIGTERM"
        signal.raise_signal(second)
        done.append("finished")
    assert done == ["finished"] and stopping.exit_code == 75


def test_a_stop_that_another_process_was_told_of_is_no_interrupt(stopping: Stopping) -> None:
    stopping.take(Stopped("SIGTERM"))
    assert stopping.exit_code == 75


@pytest.mark.parametrize(("number", "nearly"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)])
def test_what_takes_long_or_nobody_asked_to_wait_for_is_not(
    number: signal.Signals, nearly: bool, stopping: Stopping
) -> None:
    done = []
    with pytest.raises(Stopped), finishing(lambda: nearly):
        signal.raise_signal(number)
        done.append("finished")
    assert done == [] and stopping.asked


def test_behind_the_block_a_signal_is_raised_at_once(stopping: Stopping) -> None:
    with finishing(lambda: True):
        pass
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)


def test_an_error_in_the_block_is_not_hidden_by_the_signal(stopping: Stopping) -> None:
    with pytest.raises(ValueError, match="own"), finishing(lambda: True):
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("own")
    with finishing(lambda: True):  # nor is the signal met again later
        pass
    assert stopping.asked


def test_usr2_is_left_to_who_heeds_it_already() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with Stopping("again").listening(until_the_end=False):
            signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_another_process_of_the_job_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Stopping(None).say()
    assert capsys.readouterr().err == ""
    Stopping("this again").say()
    assert capsys.readouterr().err == "ropesearch: interrupted; go on with: this again\n"


def test_a_stop_that_got_lost_is_raised_again(stopping: Stopping) -> None:
    raise_if_lost()
    with contextlib.suppress(Stopped):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"):
        raise_if_lost()


def test_a_stop_is_not_raised_beyond_its_command() -> None:
    with contextlib.suppress(Stopped), Stopping("again").listening(until_the_end=False):
        signal.raise_signal(signal.SIGINT)
    try:
        raise_if_lost()
    except Stopped:  # a KeyboardInterrupt, which would end the tests
        pytest.fail("a stop of a command that is over was raised again")
