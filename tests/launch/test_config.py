import pytest

from ropesearch.errors import InputError
from ropesearch.launch.config import LocalConfig, SlurmConfig


def test_what_slurm_could_take_is_accepted() -> None:
    LocalConfig().check()
    SlurmConfig().check()
    SlurmConfig(minutes=5, gres="gpu:a100:2,tmpfs:10G", constraint="[a|b]&c", memory_gigabytes=0.5).check()


@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint", "gres"])
@pytest.mark.parametrize("text", ["", " ", "a b", "a\nrm x", "a ", "a\x1bb"])
def test_texts_are_single_words(name: str, text: str) -> None:
    """A line break would begin a line of the batch script."""
    with pytest.raises(InputError, match=rf"launcher\.{name}: expected one word without spaces, or null, got "):
        SlurmConfig(**{name: text}).check()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_memory_is_a_number_above_0(value: float) -> None:
    with pytest.raises(InputError, match=r"launcher\.memory_gigabytes: expected a number above 0"):
        SlurmConfig(memory_gigabytes=value).check()
