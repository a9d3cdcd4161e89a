# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Paths as users write them."""

from pathlib import Path

from torchtitan_lr.errors import ConfigError


def user_path(path: str, key: str) -> Path:
    """Expand ``~`` and make sure that the file system takes the path; it need not exist.

    Args:
        path: What the user wrote.
        key: The TOML key to name in errors.

    Returns:
        The expanded path.

    Raises:
        ConfigError: An unknown user's home, a name that is too long, a folder one may not enter.
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
