# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The one exception a user's mistake becomes: a single line that names the key."""


class ConfigError(ValueError):
    """A setting that cannot work, told in one line: which key, what it got, what would work.

    Args:
        key: The TOML key in dotted form, e.g. ``training.steps``, or what else was wrong
            (``--config-file``, a path).
        got: The offending value.
        want: What would work, as a phrase: ``an integer such as 1000``.
    """

    def __init__(self, key: str, got: object, want: str) -> None:
        self.key = key
        self.got = got
        self.want = want
        super().__init__(" ".join(f"{key}: got {got!r}, expected {want}".split()))


class DataError(ConfigError):
    """Text that cannot be read: ``got`` is the file and, where there are lines, the line."""
