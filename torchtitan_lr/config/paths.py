# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Paths that a user gives: of any file, and of a shipped configuration by its name alone."""

import difflib
import os
import re
from pathlib import Path, PurePath

from torchtitan_lr.errors import ConfigError

FOLDER = "train_configs"

SHIPPED = (Path(__file__).resolve().parents[1] / FOLDER).resolve()
"""The shipped configurations: the repository's folder, through the link in a checkout, copied in an
installed package."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def user_path(path: str, key: str) -> Path:
    """Expand ``~`` and ``${NAME}``, which shells do not in a file; refuse what no path can be."""
    filled = path
    for name in _VARIABLE.findall(path):
        value = os.environ.get(name, "")
        if not value:
            raise ConfigError(key, path, f"a path whose variable {name} is set in the environment")
        filled = filled.replace(f"${{{name}}}", value)
    try:
        expanded = Path(filled).expanduser()
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # also no such home; a null character
        why = error.strerror if isinstance(error, OSError) else error
        short = path if len(path) <= 200 else f"{path[:100]}...{path[-20:]}"
        raise ConfigError(key, short, f"a path to use here ({why})") from error
    return expanded


def expanded(path: str, key: str) -> str:
    """Return a path as `user_path` does, and as it is written if nothing in it is expanded."""
    return str(user_path(path, key)) if path.startswith("~") or _VARIABLE.search(path) else path


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path of a folder leads out of it by links.

    In the Hugging Face Hub's cache, ``snapshots/COMMIT`` holds links into ``blobs`` beside it.
    """
    target, root = path.resolve(), folder.resolve()
    if target.is_relative_to(root):
        return False
    return target.parent.name != "blobs" or not root.is_relative_to(target.parents[1] / "snapshots")


def shipped_configs() -> dict[str, Path]:
    """Return the TOML files of ``train_configs`` by name, such as ``debug_cola``, sorted."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def find_config(text: str) -> str:
    """Return the path of a TOML file, of the shipped file of that name, or ``text`` without any."""
    text = expanded(text, "CONFIG")
    return text if os.path.isfile(text) else shipped_config(text) or text


def shipped_config(text: str) -> str | None:
    """Return the path of a shipped file, such as ``debug_cola`` or ``base/cola``; None without."""
    name = PurePath(text.removesuffix(".toml"))
    if name.parts[:1] == (FOLDER,):
        name = name.relative_to(FOLDER)
    path = str(SHIPPED / f"{name}.toml")
    here = name.parent in (PurePath(), PurePath("base"))
    return path if here and os.path.isfile(path) else None


def shown_config(path: str) -> str:
    """Return how a configuration's file is shown: a shipped one below ``train_configs``."""
    place = Path(path).resolve()
    if place.is_relative_to(SHIPPED):
        return str(FOLDER / place.relative_to(SHIPPED))
    return path


def near_configs(text: str) -> str:
    """Return up to three shipped names close to a wrong one, separated by commas; may be empty."""
    stem = PurePath(text).name.removesuffix(".toml")
    return ", ".join(difflib.get_close_matches(stem, shipped_configs(), 3))
