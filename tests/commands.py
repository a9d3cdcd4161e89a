# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Subcommands of ``torchtitan-lr``, called in this process."""

from pathlib import Path
from typing import Any

from torchtitan_lr.commands.main import main

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["torch", "torchtitan", "triton", "sympy", "datasets", "pyarrow", "pandas", "tiktoken"]
HEAVY += ["transformers", "matplotlib", "wandb", "tensorboard", "safetensors"]
"""Modules that cost a second or more, which a light command does not load."""


class Command:
    """A subcommand by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def main(self, argv: list[str]) -> int:
        return main([self.name, *argv])

    def ask(self, capsys: Any, *argv: Any) -> tuple[Any, str, str]:
        """Run it on the text of each argument; return its status, stdout and stderr."""
        try:
            status: Any = self.main([str(part) for part in argv])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    def refusal(self, capsys: Any, *argv: Any) -> str:
        """Return the one line that a refused command prints."""
        capsys.readouterr()
        status, out, err = self.ask(capsys, *argv)
        assert (status, out) == (2, "") and err.count("\n") == 1, err
        return err
