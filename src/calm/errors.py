"""The errors that a user can cause. The command line prints their sentence and leaves with exit code 2."""


class UserError(Exception):
    """Something the user gave is wrong; the message names the value and the remedy."""


class ConfigError(UserError):
    """A recipe, or a `--set`, that cannot be used."""


class DataError(UserError):
    """A source, a prepared data set or a tokenizer that cannot be used."""
