# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Check the results of the smoke run: ``python scripts/check_smoke.py DUMP_FOLDER``.

Exit status: 0 passed, 1 failed, 2 invalid arguments.
"""

import json
import math
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser

# Loss of uniform predictions over 4096 tokens; an untrained model starts slightly above it.
UNIFORM_LOSS = math.log(4096)


def problems(summary: dict[str, object], steps: int = 20) -> list[str]:
    """Return the errors in the ``summary.json`` of a smoke run (losses in nats per token)."""
    found = []
    if summary.get("steps") != steps:
        found.append(f"steps is {summary.get('steps')}, expected {steps}")
    for key in ("train_loss", "val_loss"):
        loss = summary.get(key)
        if not isinstance(loss, float) or not math.isfinite(loss):
            found.append(f"{key} is {loss}, expected a finite number")
        elif loss >= UNIFORM_LOSS:
            found.append(f"{key} is {loss:.3f}, expected below ln(4096) = {UNIFORM_LOSS:.3f}")
    for key in ("checkpoint", "curve"):
        path = summary.get(key)
        if not isinstance(path, str) or not Path(path).exists():
            found.append(f"{key} is {path}, expected an existing path")
    return found


def main(argv: list[str] | None = None) -> int:
    """Print one line per error; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("dump_folder", metavar="DUMP_FOLDER", type=Path, help="of the smoke run")
    options = parser.parse_args(argv)
    try:
        wrong = problems(json.loads((options.dump_folder / "summary.json").read_text()))
    except (OSError, ValueError) as error:
        wrong = [f"no summary to check ({error})"]
    for line in wrong:
        print(f"error: smoke: {line}", file=sys.stderr)
    if not wrong:
        print("smoke passed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
