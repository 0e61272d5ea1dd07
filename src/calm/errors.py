"""Errors caused by user input. The command line prints the message and exits with code 2."""

import difflib
import textwrap
from collections.abc import Iterable

INTERRUPTED = 130  # exit code after Ctrl-C


class UserError(Exception):
    """Invalid user input. The message states the value and the remedy."""


class ConfigError(UserError, ValueError):
    """An invalid recipe, `--set` option or argument."""


class DataError(UserError):
    """An invalid source, prepared dataset or tokenizer."""


class CalmWarning(UserWarning):
    """A setting that is valid but rarely intended."""


def one_line(error: BaseException) -> str:
    """The message of another library's error, on one line and not too long."""
    return textwrap.shorten(str(error) or repr(error), 500, placeholder=" …")


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suffix for an error about an unknown name: suggests the closest known name, if any is similar."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""
