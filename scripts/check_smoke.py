# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Judges the smoke run: ``python scripts/check_smoke.py DUMP_FOLDER``; exit status 0 or 1."""

import json
import math
import sys
from pathlib import Path

# A model that knows nothing of the 4096 tokens; an untrained one starts a little above it.
UNIFORM_LOSS = math.log(4096)


def problems(summary: dict[str, object], steps: int = 20) -> list[str]:
    """Lists what is wrong with the ``summary.json`` of a smoke run (losses in nats a token)."""
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


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"usage: check_smoke.py DUMP_FOLDER\n\n{__doc__}")
        sys.exit(0)
    if len(sys.argv) != 2:
        print("check_smoke.py: expected one argument, the run's dump folder", file=sys.stderr)
        sys.exit(2)
    try:
        wrong = problems(json.loads((Path(sys.argv[1]) / "summary.json").read_text()))
    except (OSError, ValueError) as error:
        wrong = [f"no summary to judge ({error})"]
    for line in wrong:
        print(f"error: smoke: {line}", file=sys.stderr)
    if not wrong:
        print("smoke passed")
    sys.exit(bool(wrong))
