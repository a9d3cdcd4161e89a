#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write the initial weights of a job as a checkpoint of step 0, on one CPU process.

A job started with the same dump folder loads these weights, in any parallel layout and on any
device; weights initialised on another device would differ:

    python scripts/make_seed_checkpoint.py train_configs/debug_cola.toml --job.dump_folder=outputs/a

Other jobs set `checkpoint.initial_load_path` to the checkpoint's folder, which the script prints on
the last line.

Exit status: 0, or 2 for an invalid configuration.
"""

import sys

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.training.seed_checkpoint import make_seed_checkpoint


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Write the checkpoint and print its folder; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    options = parser.parse_with_overrides(argv)
    print(make_seed_checkpoint([f"--job.config_file={options.config}", *options.overrides]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
