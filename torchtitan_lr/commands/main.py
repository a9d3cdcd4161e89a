# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The console command ``torchtitan-lr``: every program of ``scripts/``, and the launcher.

A subcommand is a file of ``scripts/``, which the wheel contains too: ``torchtitan-lr estimate`` and
``python scripts/estimate.py`` execute the same file. A new program is a new subcommand. Nothing
here imports torch.
"""

import ast
import difflib
import importlib.util
import runpy
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from torchtitan_lr.commands.parser import OneLineParser, declared_parser, in_one_line, show_names
from torchtitan_lr.config.shipped import shipped_folder
from torchtitan_lr.errors import ConfigError

PROGRAM = "torchtitan-lr"

DESCRIPTION = """Pre-train low-rank LLaMA models.

    torchtitan-lr train debug_cola                 a shipped configuration by its name
    torchtitan-lr train my.toml --training.steps=100
    torchtitan-lr config show cola_60m             the configuration, each key with its origin
    torchtitan-lr COMMAND --help

CONFIG is a TOML file or the name of a shipped one; `torchtitan-lr config list` lists them."""

TRAIN = "train"
"""The subcommand that starts the launcher, as ``./run_llama_train.sh`` does."""

COMPLETION = "completion"
"""The subcommand that prints a completion script."""

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        name: As typed.
        path: The program's file.
    """

    name: str
    path: Path

    def summary(self) -> str:
        """Return the first line of the program's docstring, without its full stop."""
        text = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return text.partition("\n")[0].removesuffix(".")

    def module(self) -> ModuleType:
        """Import the program, which runs nothing."""
        spec = importlib.util.spec_from_file_location(f"{__name__}.{self.path.stem}", self.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def parser(self) -> OneLineParser:
        """Return the parser of the program."""
        return declared_parser(self.module().main)


FIRST = ("estimate", "compare", "sweep", "export", "import", "generate", "evaluate")
"""The order of the subcommands; the others follow by name."""

RENAMED = {
    "import_hf": "import",
    "make_seed_checkpoint": "seed-checkpoint",
    "train_tokenizer": "tokenizer",
}
"""Subcommands that are not called as their program is."""

PARTS = ("check_env", "check_smoke")
"""Programs that are parts of the checkout's shell scripts, not commands."""


def known() -> dict[str, Command]:
    """Return the subcommands besides `TRAIN` and `COMPLETION` by name: one for each program."""
    found = {}
    for path in sorted(shipped_folder("scripts").glob("*.py")):
        if path.stem not in PARTS:
            name = RENAMED.get(path.stem, path.stem.replace("_", "-"))
            found[name] = Command(name, path)
    first = [name for name in FIRST if name in found]
    return {name: found[name] for name in [*first, *sorted(found.keys() - set(first))]}


def summaries() -> dict[str, str]:
    """Return one line on every subcommand, by name, in order."""
    own = {name: command.summary() for name, command in known().items()}
    train = {TRAIN: "Train the model of a TOML file"}
    return train | own | {COMPLETION: "Print a completion script for a shell"}


def front_parser() -> OneLineParser:
    """Return the parser of ``torchtitan-lr``, without the arguments of its subcommands."""
    parser = OneLineParser(prog=PROGRAM, description=DESCRIPTION, usage="%(prog)s COMMAND [...]")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in summaries().items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def version() -> str:
    """Return the versions of this package and of torch, from their metadata."""
    found = []
    for name in ("torchtitan_lr", "torch"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return ", ".join(found)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        The exit status, as of the program.

    Raises:
        SystemExit: Of the program.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        front_parser().parse_args(argv[:1] or ["--help"])
        raise ConfigError("COMMAND", argv[0], "a command of `torchtitan-lr --help`")
    name, *rest = argv
    commands = known()
    if rest and f"{name}-{rest[0]}" in commands:  # `data stats` is `data-stats`
        name = f"{name}-{rest.pop(0)}"
    if name not in (TRAIN, COMPLETION, *commands):
        names = [TRAIN, *commands, COMPLETION]
        near = difflib.get_close_matches(name, names, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError("COMMAND", name, f"one of {', '.join(names)}{hint}")
    show_names(f"{PROGRAM} {name}", shown_names())
    sys.argv[:] = [PROGRAM, *rest]
    if name == COMPLETION:
        return _complete()
    if name == TRAIN:
        runpy.run_module("torchtitan_lr.launch", run_name="__main__")
    else:
        runpy.run_path(str(commands[name].path), run_name="__main__")
    return 0


def shown_names() -> dict[str, str]:
    """Return what the help of the subcommands shows instead of the names of the scripts."""
    names = {f"python scripts/{c.path.name}": f"{PROGRAM} {c.name}" for c in known().values()}
    return names | {"./run_llama_train.sh": f"{PROGRAM} {TRAIN}"}


def _complete() -> int:
    parser = OneLineParser(
        description=f"""Print a completion script for a shell.

    source <({PROGRAM} {COMPLETION} bash)                        bash: also in ~/.bashrc
    {PROGRAM} {COMPLETION} zsh > ~/.zfunc/_torchtitan-lr         zsh: a folder of $fpath

The script knows every subcommand with its options, the keys of the configuration, and the names of
the shipped configurations. Making it takes some seconds; completing starts no program."""
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    options = parser.parse_args()
    from torchtitan_lr.commands.completion import script  # late: it needs torch for the keys

    print(script(options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
