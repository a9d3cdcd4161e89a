# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time the training loader alone, on prepared tokens that this script writes.

The speed is that of one core: tokens per second of CPU time, and of the clock. The wait is what a
step of a 1B model sees between the end of a step and its next batch: 32 sequences of 256 tokens
(cola_1b) or 8 of 4,096. The start is that of one of 1,024 ranks on a terabyte, whose token files
are sparse: building the loader and reading the first batch, in a new process.

    python -m scripts.bench.loader
    python -m scripts.bench.loader --batch 64 --seq-len 4096 --terabytes 4 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table

if TYPE_CHECKING:
    from torchtitan_lr.data.dataloader import TokenDataLoader

DOCUMENT = 1000
"""Tokens of a document."""

SHARD = 1 << 31
"""Tokens of a shard of the terabyte: 4 GiB, as `prepare` writes them."""

STEPS_OF_1B = {"32 x 256": (32, 256), "8 x 4096": (8, 4096)}
"""Rows of a rank and tokens of a row."""

Row = dict[str, float]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time everything; print the table or its JSON."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        _write(small, options.tokens // 4, 4, sparse=False)
        _write(large, SHARD, max(1, int(options.terabytes * 1e12) // (2 * SHARD)), sparse=True)
        report: dict[str, Row] = {}
        for name, masked in (("text", False), ("documents apart", True)):
            report[name] = _speed(small, options, masked)
        for name, (rows, seq_len) in STEPS_OF_1B.items():
            report[f"wait, {name}"] = _wait(small, rows, seq_len, options)
        # Forked before it is timed, so that imports are those of this process.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            report["start"] = pool.apply(_start, (large, options.seq_len))
        # Each row is in another shard than the one before, and few stay open.
        report["text, a terabyte"] = _speed(large, options, masked=False)
    print(json.dumps(report, indent=2) if options.json else _as_text(report))
    return 0


def _write(folder: Path, tokens: int, shards: int, sparse: bool) -> None:
    """Write shards of random or of no tokens, in documents of `DOCUMENT` tokens."""
    folder.mkdir()
    random = np.random.default_rng(0)
    count = tokens // DOCUMENT
    head = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([8])
    head += np.array([count, count + 1], "<u8").tobytes()
    places = np.arange(count + 1, dtype="<i8")
    index = [np.full(count, DOCUMENT, "<i4"), 2 * DOCUMENT * places[:-1], places]
    for shard in range(shards):
        name = folder / f"train-{shard:05d}"
        if shard and sparse:  # an index of 43 MB, the same for all
            os.link(folder / "train-00000.idx", f"{name}.idx")
        else:
            Path(f"{name}.idx").write_bytes(head + b"".join(part.tobytes() for part in index))
        with open(f"{name}.bin", "wb") as file:
            if sparse:
                file.truncate(2 * count * DOCUMENT)
            else:
                random.integers(0, 1 << 15, count * DOCUMENT, dtype=np.uint16).tofile(file)


def _loader(
    folder: Path, rows: int, seq_len: int, masked: bool = False, ranks: int = 1
) -> TokenDataLoader:
    from torchtitan_lr.data.corpus import Corpus, Rows
    from torchtitan_lr.data.dataloader import TokenDataLoader, TrainingRows

    part = Rows(Corpus.open(folder), seq_len, mask_documents=masked)
    return TokenDataLoader(
        TrainingRows([part], seed=0),
        local_batch_size=rows,
        global_batch_size=rows * ranks,
        dp_world_size=ranks,
        dp_rank=ranks - 1,
    )


def _speed(folder: Path, options: argparse.Namespace, masked: bool) -> Row:
    """Return the tokens per second of one core."""
    batches = iter(_loader(folder, options.batch, options.seq_len, masked))
    next(batches)  # opens the shards
    start, cpu = time.perf_counter(), time.process_time()
    for _ in islice(batches, options.steps):
        pass
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = options.steps * options.batch * options.seq_len
    return {"tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu}


def _wait(folder: Path, rows: int, seq_len: int, options: argparse.Namespace) -> Row:
    """Return the milliseconds that steps wait for their batch."""
    batches, waited, busy = iter(_loader(folder, rows, seq_len)), [], []
    next(batches)
    for _ in range(options.waits):
        time.sleep(options.step_ms / 1e3)
        start, cpu = time.perf_counter(), time.process_time()
        next(batches)
        waited.append(1e3 * (time.perf_counter() - start))
        busy.append(1e3 * (time.process_time() - cpu))
    return {"median_ms": median(waited), "longest_ms": max(waited), "cpu_ms": median(busy)}


def _start(folder: Path, seq_len: int) -> Row:
    """Return what the first batch of one of 1,024 ranks costs."""
    _loader(folder, 1, seq_len)  # imports
    before, files = _resident("RssAnon"), len(os.listdir("/proc/self/fd"))
    start, cpu = time.perf_counter(), time.process_time()
    loader = _loader(folder, 16, seq_len, masked=True, ranks=1024)
    next(iter(loader))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "opened_files": len(os.listdir("/proc/self/fd")) - files,
        "mapped_files": sum(1 for line in open("/proc/self/maps") if str(folder) in line),
        "memory_growth_mb": (_resident("RssAnon") - before) / 1e6,
        "pages_of_files_mb": _resident("RssFile") / 1e6,
    }


def _resident(kind: str) -> int:
    """Return this process's bytes in memory: its own, or pages of files, which all share."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def _as_text(report: dict[str, Row]) -> str:
    lines = [
        [name, key, f"{value:,.3f}" if value < 100 else f"{value:,.0f}"]
        for name, row in report.items()
        for key, value in row.items()
    ]
    load = os.getloadavg()[0]
    return f"{text_table(['case', 'what', ''], lines)}\n{os.cpu_count()} cores, load {load:.1f}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--folder", help="where the files are written; default: the system's")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="of the speed's corpus")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per row")
    parser.add_argument("--batch", type=int, default=512, help="rows per step")
    parser.add_argument("--steps", type=int, default=20, help="steps for the speed")
    parser.add_argument("--waits", type=int, default=30, help="steps for the wait")
    parser.add_argument("--step-ms", type=float, default=100, help="computing time of a step")
    parser.add_argument("--terabytes", type=float, default=1.0, help="size of the start's corpus")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
