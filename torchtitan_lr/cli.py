# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the commands in scripts/ share."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, as all refusals are told, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr and exit.

        Args:
            message: What argparse has to say.
        """
        self.exit(2, f"{self.prog}: {message}\n")
