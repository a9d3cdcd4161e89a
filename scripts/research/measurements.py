# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Repeat a measurement of docs/results.md, and keep what its calls printed.

    python -m scripts.research.measurements slow_link      calls its command three times

Timings need a machine without other work. What every call printed is added to
scripts/research/measurements/NAME.json, with its command, commit and torch. Without a name it lists
what scripts/research/results.sh knows.

Exit status: 0; 1 a call failed; 2 invalid arguments.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.research import finished_runs
from scripts.research.finished_runs import versions, versions_text
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError, RunFailedError, one_of

FOLDER = Path(__file__).parent / "measurements"

Rows = dict[str, dict[str, float]]
"""Numbers by row and column of a table."""


@dataclass(frozen=True)
class Measurement:
    """A command that prints JSON.

    Args:
        command: Its arguments after ``python -m``, as one writes them in a shell.
        rows: Reads a table's numbers from what one call printed.
    """

    command: str
    rows: Callable[[Any], Rows]


def compared(result: Any) -> Rows:
    """Read the rows of `torchtitan-lr compare --json`."""
    rows = {}
    for row in result:
        rows[row["run"]] = {
            "s per step": row["seconds"],
            "MB per step": row["comm_bytes"] / 1e6,
            "peak GiB": row["peak_memory_gib"],
        }
    return rows


def over_a_link(result: Any) -> Rows:
    """Read the methods of `scripts.research.slow_link`."""
    rows = {}
    for method, found in result.items():
        if isinstance(found, dict) and "bytes_per_step" in found:
            sent = found["bytes_per_step"] / 1e6
            rows[method] = {"s per step": found["seconds"], "MB per step": sent}
    return rows


MEASUREMENTS = {
    "compare_60m": Measurement(
        "torchtitan_lr compare cola_60m --plans btp,vanilla,full --warmup 1 --steps 4 --json"
        " --out outputs/compare_60m --training.dataset=cpython --training.local_batch_size=2"
        " --training.global_batch_size=2"
        " --training.mixed_precision_param=float32 --activation_checkpoint.mode=none"
        " --parallelism.tensor_parallel_degree=4",
        compared,
    ),
    "slow_link": Measurement("scripts.research.slow_link --steps 51", over_a_link),
    "slow_link_tagc": Measurement(
        "scripts.research.slow_link --methods FSDP 'TAGC sketch' 'TAGC sparse' --steps 51",
        over_a_link,
    ),
}


def stored_calls(name: str) -> list[dict[str, Any]]:
    """Return the stored calls, each with its ``result``; empty if there are none."""
    path = FOLDER / f"{name}.json"
    calls: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return calls


def call(name: str) -> None:
    """Call a measurement once, and store what it printed.

    Raises:
        RunFailedError: The call failed, or measured nothing on this machine.
    """
    measurement = MEASUREMENTS[name]
    command = [sys.executable, "-m", *shlex.split(measurement.command)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunFailedError(f"error: {name} ended with status {done.returncode}")
    try:
        result = json.loads(done.stdout)
    except ValueError as error:  # such as a machine that does not permit network namespaces
        raise RunFailedError(f"error: {name} measured nothing: {done.stdout.strip()}") from error
    calls = stored_calls(name)
    calls.append({"command": measurement.command, **versions(), "result": result})
    FOLDER.mkdir(exist_ok=True)
    text = ",\n".join(json.dumps(stored) for stored in calls)
    (FOLDER / f"{name}.json").write_text(f"[\n{text}\n]\n")


def section(name: str) -> str:
    """Return the table of a measurement, and where it comes from; every cell has all calls."""
    calls = stored_calls(name)
    tables = [MEASUREMENTS[name].rows(stored["result"]) for stored in calls]
    header = ["", *next(iter(tables[0].values()))]
    lines = []
    for label in tables[0]:
        cells = []
        for column in header[1:]:
            values = [table[label][column] for table in tables]
            low, high = f"{min(values):.2f}", f"{max(values):.2f}"
            cells.append(low if low == high else f"{low} to {high}")
        lines.append([label, *cells])
    origin = f"{len(calls)} calls, lowest to highest; {versions_text(calls)}"
    origin += f"; `scripts/research/results.sh {name}`."
    return f"{markdown_table(header, lines)}\n\n{origin}"


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """List the measurements, or call one; return the exit status."""
    parser = OneLineParser(prog="scripts.research.measurements", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="what to measure")
    parser.add_argument("--calls", type=int, default=3, help="how often to measure")
    options: argparse.Namespace = parser.parse_args(argv)
    check_at_least(options, calls=1)
    experiments = sorted(path.stem for path in finished_runs.FOLDER.glob("*.toml"))
    if not options.name:
        print("\n".join([*experiments, *MEASUREMENTS]))
        return 0
    if options.name not in MEASUREMENTS:
        want = one_of([*experiments, *MEASUREMENTS], options.name)
        raise ConfigError("NAME", options.name, want)
    for _ in range(options.calls):
        call(options.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
