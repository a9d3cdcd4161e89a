# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the runs below a folder, and compare their curves.

    python scripts/runs.py outputs
    python scripts/runs.py outputs/a outputs/b --plot curves.png

A run is a dump folder, with job_config.json or metrics.jsonl. Its state is "running" (a process
holds its run.lock), "finished", "stopped" (by a signal, after a checkpoint) or "failed", and why.
The losses are the last ones, in nats per token.

Exit status: 0 success, 1 there is no run, 2 invalid arguments.
"""

import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.commands.runs import as_json, as_text, describe, find_runs, plot
from torchtitan_lr.errors import ConfigError


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the list and draw the picture; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, default=[Path("outputs")])
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="losses of all listed runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    if options.plot is not None and options.plot.suffix != ".png":
        raise ConfigError("--plot", str(options.plot), "a name that ends in .png")
    runs = [describe(folder) for folder in find_runs(options.paths)]
    if not runs:
        print("error: there is no run below " + ", ".join(map(str, options.paths)), file=sys.stderr)
        return 1
    if options.plot is not None:
        plot(runs, options.plot)
    print(as_json(runs) if options.json else as_text(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
