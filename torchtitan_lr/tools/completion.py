# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Completion scripts of ``torchtitan-lr`` for shells, which shtab makes from the whole parser."""

import argparse
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import shtab

from torchtitan_lr.config.build import config_class
from torchtitan_lr.config.shipped import shipped_configs
from torchtitan_lr.tools.cli import OneLineParser
from torchtitan_lr.tools.commands import (
    COMPLETION,
    PROGRAM,
    SHELLS,
    TRAIN,
    known,
    summaries,
    version,
)

CONFIGS = ("config", "configs")
"""Arguments that are TOML files, by their attributes."""

FILES = ("checkpoint", "hardware", "in_dir", "out", "path", "prompts", "text", "work")
"""Arguments that are files or folders, by their attributes."""

_FUNCTION = "torchtitan_lr_configs"


def script(shell: str) -> str:
    """Return the completion script for a shell.

    Args:
        shell: One of `SHELLS`.
    """
    return str(shtab.complete(whole_parser(), shell=shell, preamble=_preamble()))


def whole_parser() -> OneLineParser:
    """Return the parser of ``torchtitan-lr`` with the arguments of all its subcommands.

    A subcommand that takes overrides has an option for every key of the configuration.
    """
    parser = OneLineParser(prog=PROGRAM)
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(metavar="COMMAND")
    keys = list(_keys(config_class()))
    summary = summaries()
    for name, declared in _declared().items():
        for action in declared.arguments:
            _mark(action)
        added = commands.add_parser(
            name, parents=[declared], add_help=False, help=summary[name], prog=f"{PROGRAM} {name}"
        )
        if declared.takes_overrides:
            _add_keys(added, keys)
    return parser


def _declared() -> dict[str, OneLineParser]:
    train = OneLineParser(prog=f"{PROGRAM} {TRAIN}")
    train.add_argument("config", metavar="CONFIG", nargs="?", help="a TOML file or a shipped name")
    train.takes_overrides = True
    completion = OneLineParser(prog=f"{PROGRAM} {COMPLETION}")
    completion.add_argument("shell", choices=SHELLS)
    programs = {name: command.parser() for name, command in known().items()}
    return {TRAIN: train} | programs | {COMPLETION: completion}


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key below a section with its type."""
    for option in fields(section):
        if is_dataclass(option.type):
            yield from _keys(option.type, f"{prefix}{option.name}.")
        else:
            yield prefix + option.name, option.type


def _add_keys(parser: argparse.ArgumentParser, keys: list[tuple[str, Any]]) -> None:
    for key, kind in keys:
        parser.add_argument(f"--{key}")
        if kind is bool:
            section, _, name = key.rpartition(".")
            parser.add_argument(f"--{section}.no_{name}", action="store_true")


def _mark(action: Any) -> None:
    """Say what completes an argument's value; shtab reads the attribute ``complete``."""
    if action.dest in CONFIGS:
        action.complete = shtab.FILE | dict.fromkeys(("bash", "zsh"), _FUNCTION)
    elif action.dest in FILES and not action.choices:
        action.complete = shtab.FILE


def _preamble() -> Any:
    """Return the shell functions that complete CONFIG: shipped names and files."""
    names = " ".join(shipped_configs())
    bash = f'''{_FUNCTION}() {{
  compgen -W "{names}" -- "$1"
  compgen -f -X '!*.toml' -- "$1"
  compgen -d -S / -- "$1"
}}'''
    zsh = f"""{_FUNCTION}() {{
  compadd -- {names}
  _files -g '*.toml'
}}"""
    return {"bash": bash, "zsh": zsh}
