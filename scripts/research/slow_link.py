# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train on two ranks over a slow link and print the seconds per step of each method.

The link consists of two network namespaces and a veth pair whose ends are limited by a token
bucket. Each namespace has one rank, a process of the trainer: a replica for AdamW and TSR-Adam, a
shard for FSDP and for TAGC's codecs. This needs root and iproute2; if namespaces are not permitted,
the script prints a note and exits with 0.

    python -m scripts.research.slow_link --mbit 200
    python -m scripts.research.slow_link --methods FSDP "TAGC sketch" "TAGC sparse" --exchange 16
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from scripts.research.namespaces import (
    ADDRESSES,
    DEVICE,
    NotPermittedError,
    limit,
    two_machines,
)
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, check_toml
from torchtitan_lr.scaling.experiments import SECONDS, step_records

SENT = ("comm_bytes/dp_replicate", "comm_bytes/fsdp")

ADAMW = ["--optimizer.name=AdamW", "--optimizer.lr=3e-3"]
FSDP = [
    *ADAMW,
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=2",
    "--parallelism.fsdp_reshard_after_forward=never",  # weights are gathered once per step
]
TAGC = [*FSDP, "--grad_compression.level=10x"]
METHODS = {
    "AdamW": ADAMW,
    "TSRAdam": ["--optimizer.name=TSRAdam"],
    "FSDP": FSDP,
    "TAGC sketch": [*TAGC, "--grad_compression.codec=sketch"],
    "TAGC sparse": [*TAGC, "--grad_compression.codec=sparse"],
}


def main(argv: list[str] | None = None) -> int:
    """Set up the link, train with each method, and report."""
    options = _parse(argv)
    # Exit through the `finally` below, because namespaces outlive their process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report: dict[str, Any] = {"mbit_per_s": options.mbit}
    try:
        with slow_link(options.mbit, options.delay_ms) as ends:
            for method in options.methods:
                report[method] = _train(options, method, ends)
            if options.exchange:
                report["exchange"] = _exchange(options, ends)
    except NotPermittedError as error:
        print(f"skipped: {error}")
        return 0
    first, *others = options.methods
    report["speedup"] = {
        method: report[first]["seconds"] / report[method]["seconds"] for method in others
    }
    print(json.dumps(report, indent=2))
    return 0


@contextmanager
def slow_link(mbit: float, delay_ms: float) -> Iterator[list[str]]:
    """Connect two new network namespaces by a rate-limited link.

    Args:
        mbit: Rate in either direction, Mbit/s.
        delay_ms: Delay in either direction, ms.

    Yields:
        The names of the namespaces; they have `ADDRESSES` on `DEVICE`.

    Raises:
        NotPermittedError: The tools are missing or the kernel refuses.
    """
    with two_machines() as names:
        for name in names:
            limit(name, mbit, delay_ms)
        yield names


def _train(options: argparse.Namespace, method: str, ends: list[str]) -> dict[str, float]:
    """Train one rank in each namespace and return rank 0's measurements."""
    arguments = [
        f"--job.config_file={options.config}",
        f"--training.steps={options.steps}",
        f"--lr_scheduler.warmup_steps={options.steps // 10}",
        "--validation.no_enable",
        *METHODS[method],
    ]
    later = train_between(ends, [*arguments, *options.overrides], options.timeout)
    return {
        "seconds": sum(r[SECONDS] for r in later) / len(later),
        "median_seconds": median(r[SECONDS] for r in later),
        "max_seconds": max(r[SECONDS] for r in later),
        "bytes_per_step": sum(r.get(key, 0) for r in later for key in SENT) / len(later),
    }


def train_between(
    ends: list[str], arguments: list[str], timeout: float, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Train one rank in each namespace.

    Args:
        ends: The namespaces.
        arguments: Of the run.
        timeout: Seconds for all of it.
        folder: The run's dump folder; a temporary one by default.

    Returns:
        Rank 0's records of the logged steps without the first fifth, which opens connections.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        program = ["-m", "torchtitan_lr.train", f"--job.dump_folder={folder}"]
        _run(ends, [*program, *arguments], timeout)
        records = step_records(folder)
    return records[len(records) // 5 :]


def _exchange(options: argparse.Namespace, ends: list[str]) -> dict[str, Any]:
    """Time single exchanges by each codec between the namespaces."""
    program = ["-m", "scripts.bench.exchange", f"--megabytes={options.exchange}", "--json"]
    report: dict[str, Any] = json.loads(_run(ends, program, options.timeout))
    return report


def _run(ends: list[str], arguments: list[str], timeout: float) -> str:
    """Run a Python program with one rank in each namespace and return rank 0's output.

    Args:
        ends: The namespaces.
        arguments: Of the program.
        timeout: Seconds for all of it.

    Raises:
        RuntimeError: A rank failed; the message is the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        # Files, not pipes: a pipe would fill up while the script waits for the other rank.
        outputs = [Path(folder) / f"rank{rank}.out" for rank in range(len(ends))]
        logs = [Path(folder) / f"rank{rank}.err" for rank in range(len(ends))]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *arguments],
                env=os.environ | _environment(rank),
                stdout=files.enter_context(outputs[rank].open("w")),
                stderr=files.enter_context(logs[rank].open("w")),
            )
            for rank, name in enumerate(ends)
        ]
        try:
            for process in ranks:
                process.wait(timeout=timeout)
        finally:
            for process in ranks:
                process.kill()
        for process, log in zip(ranks, logs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{' '.join(arguments)}: {log.read_text()[-2000:]}")
        return outputs[0].read_text()


def _environment(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29531",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        default="scripts/research/configs/tsr_curves.toml",
        help="the TOML file of the model",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["AdamW", "TSRAdam"],
        choices=list(METHODS),
        help="methods to time; speed-ups are over the first",
    )
    parser.add_argument(
        "--exchange",
        type=float,
        default=0,
        metavar="MB",
        help="also time an exchange of this size",
    )
    parser.add_argument("--steps", type=int, default=60, help="steps, enough for two refreshes")
    parser.add_argument("--mbit", type=float, default=200, help="rate of the link, Mbit/s")
    parser.add_argument("--delay_ms", type=float, default=0, help="delay of the link, ms")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per method")
    parser.takes_overrides = True
    options = parser.parse_args(argv)
    check_at_least(options, steps=5, delay_ms=0, exchange=0)
    if not options.mbit > 0:
        parser.error(f"--mbit: got {options.mbit}, expected a positive number")
    check_toml(options.config)
    return options


if __name__ == "__main__":
    sys.exit(main())
