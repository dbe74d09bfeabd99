"""The exceptions a user can meet. Each message says what was expected, what was found, and what to do about it."""


class RopesearchError(Exception):
    """Base of every error that is meant for the user; `exit_code` is what the command line ends with."""

    exit_code = 70


class InputError(RopesearchError):
    """What the user gave (a key, a file, a model, a corpus) cannot be used."""

    exit_code = 2


class UnreachableError(RopesearchError):
    """A server that the work depends on does not answer: the same command goes on when it does, as after a stop."""

    exit_code = 75


class BindingError(RopesearchError):
    """A rope_config.json and the checkpoint it is used with do not belong together."""

    exit_code = 1


class TrainingError(RopesearchError):
    """A training cannot go on: its loss is not finite, or memory does not suffice. What was saved before stays."""

    exit_code = 3


class NothingScoredError(RopesearchError):
    """No candidate of a search could be scored."""

    exit_code = 3


class ScoringError(RopesearchError):
    """One candidate could not be scored (out of memory, not a number). A search records it as a failed trial."""


def in_one_line(error: BaseException) -> str:
    """Kind and text of another library's error, for a message of ours."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
