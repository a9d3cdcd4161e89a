# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``python -m torchtitan_lr NAME`` and ``torchrun -m torchtitan_lr NAME``: see `commands.main`."""

import sys

from torchtitan_lr.commands.interrupts import own_process


def main() -> int:
    """Run a subcommand as this process; return the exit status."""
    own_process()
    # Late: a signal during the imports finds its handler.
    from torchtitan_lr.commands.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
