# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The shipped configurations: the repository's ``train_configs/``, which a link names here too."""

import difflib
import os
from pathlib import Path, PurePath

FOLDER = "train_configs"

SHIPPED = (Path(__file__).resolve().parents[1] / FOLDER).resolve()
"""The folder, through the link in a checkout, copied in an installed package."""


def shipped_configs() -> dict[str, Path]:
    """Return the TOML files of ``train_configs`` by name, such as ``debug_cola``, sorted."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def find_config(text: str) -> str:
    """Find a TOML file: the path itself, else the shipped file of that name.

    Args:
        text: A path, or the name of a shipped file: ``debug_cola``, ``debug_cola.toml`` or
            ``train_configs/debug_cola.toml``.

    Returns:
        The path of the file; ``text`` if there is none.
    """
    if os.path.isfile(text):
        return text
    shipped = shipped_configs().get(_name_of(text))
    return text if shipped is None else str(shipped)


def near_configs(text: str) -> str:
    """Return up to three shipped names close to a wrong one, separated by commas; may be empty."""
    stem = PurePath(text).name.removesuffix(".toml")
    return ", ".join(difflib.get_close_matches(stem, shipped_configs(), 3))


def _name_of(text: str) -> str:
    """Return the shipped name that a text may stand for; empty for another path."""
    path = PurePath(text)
    here = path.parent in (PurePath(), PurePath(FOLDER))
    return path.name.removesuffix(".toml") if here else ""
