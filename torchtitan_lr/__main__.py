# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``python -m torchtitan_lr NAME`` and ``torchrun -m torchtitan_lr NAME``: see `commands.main`."""

import sys

from torchtitan_lr.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
