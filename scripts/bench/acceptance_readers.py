# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the commands of the acceptance measured, read from their output and files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.acceptance import SkippedError
from torchtitan_lr.scaling.experiments import SECONDS
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.summary import SUMMARY_FILE

TOKENS_PER_S = "throughput/tokens_per_s"
"""Key in ``metrics.jsonl``: tokens per second of all ranks, averaged since the last record."""


def read_run(folder: Path, said: str) -> dict[str, Any]:
    """Return the summary of a run, see `torchtitan_lr.training.summary.build_summary`.

    Args:
        folder: Its dump folder.
        said: Its output; a line on the ranks that the launcher chose becomes ``note``.
    """
    values: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return values | {"note": _chosen(said)}


def read_speed(folder: Path, published: int | None, said: str) -> dict[str, Any]:
    """Return tokens/s, their spread, milliseconds per step, MFU and peak memory of a run.

    Args:
        folder: Its dump folder.
        published: Tokens per second of a paper's run of this setting, if any.
        said: Its output.

    Returns:
        Medians over the logged windows without the first; ``spread`` is the range of tokens/s in
        percent of the median.

    Raises:
        ValueError: There is no second window.
    """
    values = read_run(folder, said)
    windows = [r for r in read_history(folder / HISTORY_FILE) if TOKENS_PER_S in r][1:]
    speeds = [record[TOKENS_PER_S] for record in windows]
    if not speeds:
        raise ValueError(f"{folder / HISTORY_FILE} has one window or none")
    seconds = median(record[SECONDS] for record in windows)
    return {
        "tokens_per_s": median(speeds),
        "spread": 100 * (max(speeds) - min(speeds)) / median(speeds),
        "step_ms": 1e3 * seconds,
        "mfu": values["mfu"],
        "peak_memory_gib": values["peak_memory_gib"],
        "published": published,
    }


def read_smoke(said: str) -> dict[str, Any]:
    """Return the launcher's line on its ranks; the script's own checks decide."""
    if "smoke passed" not in said:
        raise ValueError("'smoke passed' is missing")
    return {"note": _chosen(said)}


def _chosen(said: str) -> str:
    """Return the launcher's line on the ranks and degrees that it chose, if any."""
    found = re.search(r"^(no GPU here|\d+ (GPU|rank)s?\b[^:]*): training .*$", said, re.MULTILINE)
    return found[0] if found else ""


def read_pytest(said: str) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped.

    Raises:
        SkippedError: All tests were skipped.
        ValueError: There is no summary.
    """
    lines = [line for line in said.splitlines() if re.search(r"\bin [\d.]+s\b", line)]
    if not lines:
        raise ValueError("pytest printed no summary")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    found = {name: counts.get(name, 0) for name in ("passed", "failed", "skipped")}
    found["errors"] = counts.get("errors", counts.get("error", 0))
    if found["skipped"] and not found["passed"] + found["failed"] + found["errors"]:
        reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", said, re.MULTILINE)
        raise SkippedError(reasons[0] if reasons else "all tests were skipped")
    return found | {"wrong": lines[-1].strip("= ")}


def read_memory(said: str) -> dict[str, Any]:
    """Return the estimated and the measured peak of ``check_gpu_memory.py --json``."""
    found = json.loads(said)
    estimated, measured = found["estimated"]["peak"], found["measured"]
    error = 100 * (estimated / measured - 1)
    return {
        "estimated_gib": estimated / 2**30,
        "measured_gib": measured / 2**30,
        "error": error,
        "parts_gib": {name: size / 2**30 for name, size in found["estimated"].items()},
        "wrong": f"the estimate is {error:+.1f}% off, more than 10%",
    }


def read_block(said: str) -> dict[str, Any]:
    """Return the table of ``bench_block.py --json``."""
    found = json.loads(said)
    ceiling = found["matmul_tflops"]
    rows = [
        {"variant": name, **row, "of_ceiling": 100 * row["tflops"] / ceiling}
        for name, row in found["variants"].items()
    ]
    headings = {
        "variant": "variant",
        "forward_ms": "forward ms",
        "forward_backward_ms": "forward + backward ms",
        "tflops": "TFLOP/s",
        "of_ceiling": "% of the product's",
        "activation_mib": "activations MiB",
    }
    return {"matmul_tflops": ceiling, "table": {"headings": headings, "rows": rows}}


def read_json(said: str) -> dict[str, Any]:
    """Return all numbers of a nested JSON object, named by their paths, as a table."""
    found = json.loads(said)
    rows = [{"quantity": name, "value": value} for name, value in _numbers(found)]
    headings = {"quantity": "quantity", "value": "value"}
    return {"table": {"headings": headings, "rows": rows}, "raw": found}


def _numbers(found: Any, path: str = "") -> list[tuple[str, float]]:
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(found, dict):
        items = list(found.items())
    elif isinstance(found, list):
        items = list(enumerate(found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        return [(path, found)]
    return [row for key, value in items for row in _numbers(value, f"{path}.{key}".strip("."))]
