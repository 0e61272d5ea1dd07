"""The errors that a user can cause. The command line prints their sentence and leaves with exit code 2."""

import difflib
from collections.abc import Iterable

INTERRUPTED = 130  # the exit code after Ctrl-C


class UserError(Exception):
    """Something the user gave is wrong; the message names the value and the remedy."""


class ConfigError(UserError, ValueError):
    """A recipe, a `--set` or an argument that cannot be used."""


class DataError(UserError):
    """A source, a prepared data set or a tokenizer that cannot be used."""


class CalmWarning(UserWarning):
    """Something that works, but seldom does what one wants."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name: the nearest known one, if any is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
