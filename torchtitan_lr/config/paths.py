# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Paths in a user's configuration."""

from pathlib import Path

from torchtitan_lr.errors import ConfigError


def user_path(path: str, key: str) -> Path:
    """Expand ``~`` and check that the file system accepts the path; it may not exist.

    Raises:
        ConfigError: The home of an unknown user, a name that is too long, or a folder without
            access permission.
    """
    try:
        expanded = Path(path).expanduser()
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(key, _short(path), f"a path to use here ({error.strerror})") from error
    except (RuntimeError, ValueError) as error:  # no such home; a null character
        raise ConfigError(key, _short(path), f"a path to use here ({error})") from error
    return expanded


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]}...{path[-20:]}"
