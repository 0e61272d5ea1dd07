"""The errors that a user can cause. The command line prints their sentence and leaves with exit code 2."""


class UserError(Exception):
    """Something the user gave is wrong; the message names the value and the remedy."""


class ConfigError(UserError, ValueError):
    """A recipe, a `--set` or an argument that cannot be used."""


class DataError(UserError):
    """A source, a prepared data set or a tokenizer that cannot be used."""


class CalmWarning(UserWarning):
    """Something that works, but seldom does what one wants."""
