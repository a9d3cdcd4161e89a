# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time the training loader alone: tokens/s, and how long a step of a given length waits for data.

Three cases, in turn in every repeat: without a token cache, with an empty one (which is written),
and with a full one. Each is timed with a thread that reads ahead and without. The last column is
tokens per second of CPU time, which other programs on the machine hardly change.

    python -m scripts.bench.loader
    python -m scripts.bench.loader --path 'data/*.jsonl' --assets my_tokenizer --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.titan import logger

if TYPE_CHECKING:
    from torchtitan_lr.data.dataloader import StripeDataLoader

CASES = ("no cache", "empty cache", "full cache")
ENCODE = "encode, one document at a time"

Row = dict[str, float]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time every case; print the table or its JSON."""
    options = _parse(argv)
    level = logger.level
    logger.setLevel("ERROR")
    try:
        report = _report(options)
    finally:
        logger.setLevel(level)
    print(json.dumps(report, indent=2) if options.json else _as_text(report))
    return 0


def _report(options: argparse.Namespace) -> dict[str, object]:
    found: dict[str, list[Row]] = {}
    for _ in range(options.repeats):
        found.setdefault(ENCODE, []).append(_encode(options))
        with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
            _fill(options, full)
            for ahead in (0, options.ahead):
                folders = ("", f"{empty}/{ahead}", full)
                for case, folder in zip(CASES, folders, strict=True):
                    name = f"{case}, {ahead} steps ahead"
                    row = _bench(options, folder, ahead, options.waits)
                    found.setdefault(name, []).append(row)
    rows = {name: _middle(repeats) for name, repeats in found.items()}
    return {
        "tokens_per_step": options.batch * options.seq_len,
        "step_ms": options.step_ms,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


def _middle(repeats: list[Row]) -> Row:
    """Return the medians of the repeats, and the range of the tokens/s."""
    row = {key: median(repeat[key] for repeat in repeats) for key in repeats[0]}
    speeds = [repeat["tokens_per_s"] for repeat in repeats]
    return row | {"slowest": min(speeds), "fastest": max(speeds)}


def _fill(options: argparse.Namespace, cache: str) -> None:
    """Write a cache of all blocks that are read later; the last block of a lane is not written."""
    loader = _loader(options, cache, options.ahead)
    for _ in islice(loader, 2 * (options.steps + options.waits)):
        pass
    loader.close()


def _loader(options: argparse.Namespace, cache: str, ahead: int) -> StripeDataLoader:
    from torchtitan_lr.data.dataloader import build_dataloader

    arguments = [
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.batch}",
        f"--training.token_cache={cache}",
        f"--training.steps_ahead={ahead}",
    ]
    config, tokenizer = _config(options, arguments)
    return build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config)


def _config(options: argparse.Namespace, arguments: list[str]) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer."""
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.data.tokenizer import build_tokenizer

    arguments = [*arguments, f"--model.hf_assets_path={options.assets}"]
    if options.path:
        arguments += ["--training.dataset=local", f"--training.dataset_path={options.path}"]
    config = build_job_config(arguments)
    return config, build_tokenizer(config)


def _bench(options: argparse.Namespace, cache: str, ahead: int, waits: int) -> Row:
    """Return the tokens/s of a loader, and the waits of steps that compute for ``step_ms``."""
    loader = _loader(options, cache, ahead)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in islice(loader, options.steps):
        pass
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    waited = _waits(loader, options.step_ms / 1e3, waits)
    loader.close()
    tokens = options.steps * options.batch * options.seq_len
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu,
        "wait_ms": 1e3 * median(waited),
        "longest_wait_ms": 1e3 * max(waited),
    }


def _waits(loader: StripeDataLoader, step: float, count: int) -> list[float]:
    waited = [0.0] if not count else []
    batches = iter(loader)
    for _ in range(count):
        time.sleep(step)
        start = time.perf_counter()
        next(batches)
        waited.append(time.perf_counter() - start)
    return waited


def _encode(options: argparse.Namespace) -> Row:
    """Return the tokens/s of the tokenizer's own ``encode`` in one thread, without a loader."""
    from torchtitan_lr.data.corpora import training_source

    config, tokenizer = _config(options, [])
    wanted, tokens = options.steps * options.batch * options.seq_len // 4, 0
    start, cpu = time.perf_counter(), time.process_time()
    for text in training_source(config).open():
        tokens += len(tokenizer.encode(text, add_bos=True, add_eos=True))
        if tokens >= wanted:
            break
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    nan = float("nan")
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu,
        "wait_ms": nan,
        "longest_wait_ms": nan,
    }


def _as_text(report: dict[str, object]) -> str:
    rows = report["rows"]
    assert isinstance(rows, dict)
    lines = [
        [
            name,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['slowest']:,.0f}-{row['fastest']:,.0f}",
            f"{row['tokens_per_cpu_s']:,.0f}",
            "" if row["wait_ms"] != row["wait_ms"] else f"{row['wait_ms']:.3f}",
            "" if row["wait_ms"] != row["wait_ms"] else f"{row['longest_wait_ms']:.1f}",
        ]
        for name, row in rows.items()
    ]
    head = ["loader", "tokens/s", "range", "tokens/CPU-s", "wait, ms", "longest"]
    what = f"{report['tokens_per_step']} tokens per step of {report['step_ms']} ms"
    where = f"{report['cores']} cores, load {report['load']:.1f}"
    return f"{text_table(head, lines)}\n{what}; {where}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--path", default="", help="local files; the standard library by default")
    parser.add_argument("--assets", default="torchtitan_lr/data/assets/bpe4k", help="tokenizer")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per row")
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--steps", type=int, default=100, help="steps for the tokens/s")
    parser.add_argument("--waits", type=int, default=15, help="steps for the wait")
    parser.add_argument("--step-ms", type=float, default=160, help="computing time of a step")
    parser.add_argument("--ahead", type=int, default=2, help="training.steps_ahead")
    parser.add_argument("--repeats", type=int, default=3, help="of every case, in turn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    for name in ("seq_len", "batch", "steps", "waits", "repeats", "ahead"):
        if getattr(options, name) < 1:
            got, flag = getattr(options, name), name.replace("_", "-")
            parser.error(f"--{flag}: got {got}, expected at least 1")
    if not options.step_ms >= 0:
        parser.error(f"--step-ms: got {options.step_ms}, expected a number of at least 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
