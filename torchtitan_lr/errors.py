# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The exceptions for a user's mistakes: a one-line message that names the TOML key."""

from __future__ import annotations


class ConfigError(ValueError):
    """Invalid setting; the message names the key, the value and the expected values on one line.

    Args:
        key: The TOML key in dotted form, e.g. ``training.steps``, or the name of another input
            (``--config-file``, a path).
        got: The invalid value.
        want: The expected values, as a phrase: ``an integer such as 1000``.
    """

    def __init__(self, key: str, got: object, want: str) -> None:
        self.key = key
        self.got = got
        self.want = want
        super().__init__(" ".join(f"{key}: got {got!r}, expected {want}".split()))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """Pickle by the arguments: a process of a pool raises it in its parent."""
        return type(self), (self.key, self.got, self.want)


def require(ok: object, key: str, got: object, want: str) -> None:
    """Raise a ConfigError unless ``ok``."""
    if not ok:
        raise ConfigError(key, got, want)


class DataError(ConfigError):
    """Unreadable training text; ``got`` is the file, with the line number for line formats."""


class RunFailedError(RuntimeError):
    """A run ended with an error; the message is one line."""
