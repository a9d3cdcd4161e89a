#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Accept this package on one GPU: does everything run, how fast, and in how much memory?

    python scripts/check/gpu_acceptance.py                   # all parts, at most 25 minutes
    python scripts/check/gpu_acceptance.py --only speed tsr  # some parts; keeps the others' results
    python scripts/check/gpu_acceptance.py --missing         # only what has not passed yet
    python scripts/check/gpu_acceptance.py --tiny            # a rehearsal on the CPU

Needs no network. Every command runs in a process of its own with a time limit; a part that cannot
run is skipped with its reason. The results are written after each part: OUT/gpu_acceptance.md and
OUT/gpu_acceptance.json, with the machine, the versions, the commit and the command of each part.
Results of earlier calls are kept if machine, versions, commit and size are the same.

Exit status: 0 nothing failed, 1 a part failed, 2 invalid arguments.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from scripts.bench.acceptance import Job, run_job, run_part
from scripts.bench.acceptance_page import as_markdown
from scripts.bench.acceptance_parts import FULL, TINY, Scale, Site, make_parts
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("main", "smoke", "tests", "speed", "memory", "tsr", "block", "peers")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the parts and write the report; return the exit status."""
    options = _parse(argv)
    scale = TINY if options.tiny else FULL
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as work:
        if options.list:
            parts = make_parts(Site(FULL, {"devices": 1}, ROOT, Path(work)))
            rows = [[p.name, str(len(p.jobs)), p.title] for p in parts]
            print(text_table(["part", "commands", "title"], rows, left=3))
            return 0
        machine = _machine(scale, deadline)
        machine["commit"] = options.commit or machine["commit"]
        report = _earlier(options.out, machine, scale)
        for part in make_parts(Site(scale, machine, ROOT, Path(work))):
            if part.name not in options.only:
                continue
            print(f"{part.name}: {part.title} ...", file=sys.stderr, flush=True)
            before = report["parts"].get(part.name, {"jobs": []})["jobs"] * options.missing
            known = {job["name"]: job for job in before if job["status"] == "passed"}
            result = run_part(part, ROOT, deadline, known)
            report["parts"][part.name] = result
            for job in result["jobs"]:
                job["command"] = job["command"].replace(work, "outputs")
                reason = f": {job['reason']}" if job["reason"] else ""
                print(f"  {job['name']} {job['status']}, {job['seconds']:.0f} s{reason}")
            _write(report, options.out)
    print(f"written: {options.out}/gpu_acceptance.md and .json")
    jobs = [job for part in report["parts"].values() for job in part["jobs"]]
    return int(any(job["status"] == "failed" for job in jobs))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder of the results")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), help="parts to run"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run only what did not pass in an earlier call"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="limit of all parts together")
    parser.add_argument("--commit", help="the commit, where there is no git")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    options = parser.parse_args(argv)
    parser.check_at_least(options, minutes=0)
    return options


def _machine(scale: Scale, deadline: float) -> dict[str, Any]:
    """Return the machine, and the requirements of pyproject.toml that it lacks as ``missing``."""
    command = [sys.executable, "-m", "torchtitan_lr.scaling.machine"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if scale.device == "cpu" else {}
    found = run_job(Job("machine", command, json.loads, 120, hidden), ROOT, deadline)
    if found["status"] != "passed":
        raise SystemExit(f"error: the machine cannot be described: {found['reason']}")
    check = [sys.executable, "scripts/check_env.py"]
    missing = subprocess.run(check, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    values: dict[str, Any] = found["values"]
    return values | {"missing": missing or None}


def _earlier(out: Path, machine: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Return the report to complete: that of an earlier call on this machine, or a new one."""
    new = {"scale": scale.name, "machine": machine, "parts": {}}
    new["date"] = f"{datetime.now():%Y-%m-%d}"
    path = out / "gpu_acceptance.json"
    if not path.is_file():
        return new
    old: dict[str, Any] = json.loads(path.read_text())
    same = all(old["machine"].get(key) == machine[key] for key in machine if key != "load")
    return old if same and old["scale"] == scale.name and machine["commit"] != "unknown" else new


def _write(report: dict[str, Any], out: Path) -> None:
    """Write both files; the parts in their order, whichever call ran them."""
    parts = {name: report["parts"][name] for name in NAMES if name in report["parts"]}
    report = report | {"parts": parts}
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_acceptance.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "gpu_acceptance.md").write_text(as_markdown(report))


if __name__ == "__main__":
    sys.exit(main())
