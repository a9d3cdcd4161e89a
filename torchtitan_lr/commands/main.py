# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command ``torchtitan-lr`` and its subcommands, each a module of this folder.

A subcommand's module has a docstring (its help; the first line is its summary),
``add_arguments(parser)`` and ``run(args)``, which returns the exit status. Importing one loads
neither torch nor torchtitan; ``run`` imports what it needs.
"""

import importlib
import sys
from importlib import metadata
from types import ModuleType

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.errors import ConfigError, one_of

PROGRAM = "torchtitan-lr"

DESCRIPTION = """Pre-train low-rank LLaMA models.

    torchtitan-lr train debug_cola                 a shipped configuration by its name
    torchtitan-lr train my.toml --training.steps=100
    torchtitan-lr config show cola_60m             the configuration, each key with its origin
    torchtitan-lr COMMAND --help

CONFIG is a TOML file or the name of a shipped one; `torchtitan-lr config list` lists them."""

COMMANDS = {
    "train": "train",
    "check": "check",
    "estimate": "estimate",
    "sweep": "sweep",
    "scaling": "scaling",
    "export": "export",
    "import": "import_hf",
    "generate": "generate",
    "evaluate": "evaluate",
    "tokenizer": "tokenizer",
    "prepare": "prepare",
    "runs": "runs",
    "config": "config",
    "measure-comm": "measure_comm",
}
"""The module of each subcommand, in the order of the help."""


def module_of(name: str) -> ModuleType:
    """Import the module of a subcommand."""
    if name not in COMMANDS:
        raise ConfigError("COMMAND", name, one_of(COMMANDS, name))
    return importlib.import_module(f"torchtitan_lr.commands.{COMMANDS[name]}")


def parser_of(name: str) -> OneLineParser:
    """Return the parser of a subcommand with all its arguments."""
    module = module_of(name)
    parser = OneLineParser(prog=f"{PROGRAM} {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return its status, 2 for invalid arguments, 1 for a run that failed."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if not name.startswith("-"):
        status: int = module_of(name).run(parser_of(name).parse_args(rest))
        return status
    parser = OneLineParser(prog=PROGRAM, description=DESCRIPTION, usage="%(prog)s COMMAND [...]")
    versions = [f"{name} {metadata.version(name)}" for name in ("torchtitan_lr", "torch")]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        summary = (module_of(command).__doc__ or "").partition("\n")[0].removesuffix(".")
        commands.add_parser(command, help=summary, add_help=False)
    parser.parse_args([name])
    raise ConfigError("COMMAND", name, f"a command of `{PROGRAM} --help`")
