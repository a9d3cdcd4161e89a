# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The machine of a measurement, as JSON: ``python -m torchtitan_lr.scaling.machine``.

It is a process of its own, because looking at a GPU creates a context that takes its memory.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


def describe() -> dict[str, Any]:
    """Return the devices, the versions and the commit of this machine.

    Returns:
        ``device`` (name, None without a GPU), ``devices``, ``memory_gib`` of one device,
        ``capability``, ``driver``, ``cuda``, ``torch``, ``torchtitan``, ``triton``, ``python``,
        ``cpu``, ``cores``, ``load`` (one-minute average) and ``commit``.
    """
    import torch

    found: dict[str, Any] = {"device": None, "devices": 0, "memory_gib": None, "capability": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"], found["devices"] = properties.name, torch.cuda.device_count()
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | {
        "driver": _said(*smi).partition("\n")[0] or None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "torchtitan": _version("torchtitan"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
    }


def commit() -> str:
    """Return the checked-out commit, with ``-dirty`` after changes; ``unknown`` without git."""
    name = _said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not name:
        return "unknown"
    changed = _said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{name}-dirty" if changed else name


def _said(*command: str) -> str:
    """Return the output of a command, empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print(json.dumps(describe()))
    sys.exit(0)
