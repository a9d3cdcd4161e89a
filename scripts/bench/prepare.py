# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time `prepare` beside the tokenizer library alone, and watch its memory.

The library encodes the same documents in lists, in one process on one core, and then in one process
per core at once. `prepare` reads them from a .jsonl file and writes shards. Both are repeated in
turn, and the best of each counts: other work on the machine only makes them slower. Seconds of CPU
are of all processes, and say what reading, decoding and writing add to the library's own work.

    python -m scripts.bench.prepare
    python -m scripts.bench.prepare --gigabytes 1 --repeat 1 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table

DOCUMENT = 3000
"""Characters of a document, about those of a web page."""

MIB = 1 << 20


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time both; print the table or its JSON."""
    options = _parse(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = options.workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "text.jsonl")
        _write(path, int(options.gigabytes * 1e9))
        report: dict[str, dict[str, float]] = {}
        for turn in range(options.repeat):
            runs = {
                "library, 1 process": _side(_library, path, options.tokenizer, 1),
                f"library, {cores} processes": _side(_library, path, options.tokenizer, cores),
                f"prepare, {cores} workers": _side(
                    _prepare, path, options.tokenizer, cores, Path(folder, f"out{turn}")
                ),
            }
            for name, found in runs.items():
                best = report.get(name, found)
                report[name] = max(found, best, key=lambda run: run["tokens_per_s"])
    one, many, ours = report.values()
    ours["of_cores_times_one"] = ours["tokens_per_s"] / (cores * one["tokens_per_s"])
    ours["of_as_many_processes"] = ours["tokens_per_s"] / many["tokens_per_s"]
    ours["of_library_per_cpu_s"] = ours["tokens_per_cpu_s"] / one["tokens_per_cpu_s"]
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    names = list(dict.fromkeys(name for found in report.values() for name in found))
    rows = [
        [key, *(f"{run[key]:,.4g}" if key in run else "" for run in report.values())]
        for key in names
    ]
    print(text_table(["", *report], rows))
    return 0


def _write(path: Path, size: int) -> None:
    """Write so many bytes of documents of the shipped corpus, no two alike."""
    from torchtitan_lr.data.sources import CPYTHON, Reader, Source

    whole = list(Reader(Source(CPYTHON)).texts())
    parts = [text[i : i + DOCUMENT] for text in whole for i in range(0, len(text), DOCUMENT)]
    with path.open("w", encoding="utf-8") as file:
        for number, part in enumerate(cycle(parts)):
            file.write(json.dumps({"text": f"{number} {part}"}) + "\n")
            if file.tell() > size:
                return


def _documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line)["text"] for line in file)


def _side(function: Any, *arguments: Any) -> dict[str, float]:
    """Call a function in a process of its own, and return what it measured."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=function, args=(there, *arguments))
    child.start()
    there.close()
    found: dict[str, float] = here.recv()
    child.join()
    return found


def _tokenizer(folder: str) -> Any:
    from torchtitan_lr.data.tokenizer import build_tokenizer

    return build_tokenizer(SimpleNamespace(model=SimpleNamespace(hf_assets_path=folder)))


def _library(pipe: Any, path: Path, folder: str, processes: int) -> None:
    """Encode a sample in several processes at once with the library alone."""
    rust = _tokenizer(folder).tokenizer
    sample = list(islice(_documents(path), 5000))  # 15 MB
    batches = [sample[i : i + 350] for i in range(0, len(sample), 350)]  # 1 MiB, as a piece
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    barrier = context.Barrier(processes)

    def encode() -> None:
        barrier.wait()
        started, used = time.perf_counter(), time.process_time()
        tokens = sum(len(e) for batch in batches for e in rust.encode_batch_fast(batch))
        results.put((tokens, time.perf_counter() - started, time.process_time() - used))

    children = [context.Process(target=encode) for _ in range(processes)]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    rate = sum(tokens / seconds for tokens, seconds, _ in found)
    per_cpu = sum(tokens for tokens, _, _ in found) / sum(used for _, _, used in found)
    pipe.send({"tokens_per_s": rate, "tokens_per_cpu_s": per_cpu})


def _prepare(pipe: Any, path: Path, folder: str, workers: int, out: Path) -> None:
    """Prepare the file; note the memory of the largest process now and then."""
    from torchtitan_lr.data.sources import Reader, Source
    from torchtitan_lr.data.tokenize import tokenize

    tokenizer = _tokenizer(folder)
    memory: list[tuple[float, float]] = []

    def report(documents: int, tokens: int, share: float | None) -> None:
        children = [
            int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ]
        memory.append((share or 0, max(map(_resident, [os.getpid(), *children]))))

    before = _cpu_seconds()  # the imports of torch are no part of it
    started = time.perf_counter()
    reader = Reader(Source("local", (str(path),)))
    corpus = tokenize([reader], tokenizer, out, key="--out", workers=workers, report=report)
    seconds = time.perf_counter() - started
    own, all_of_them = (after - then for after, then in zip(_cpu_seconds(), before, strict=True))
    tokens = corpus.tokens() + corpus.tokens(held_out=True)
    early = max(peak for share, peak in memory if share <= 0.25)
    late = max(peak for share, peak in memory if share > 0.25)
    pipe.send(
        {
            "tokens_per_s": tokens / seconds,
            "tokens_per_cpu_s": tokens / all_of_them,
            "tokens": tokens,
            "seconds": seconds,
            "own_cpu_s": own,
            "peak_mib_first_quarter": early / MIB,
            "peak_mib_later": late / MIB,
        }
    )


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of this process, and with its ended children."""
    own, children = (
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return own, own + children


def _resident(pid: int) -> int:
    """Return the memory of a process in bytes, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--tokenizer", default="torchtitan_lr/data/assets/bpe4k", help="its folder")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="size of the .jsonl file")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    parser.add_argument("--repeat", type=int, default=3, help="times that each is measured")
    parser.add_argument("--folder", help="where to write (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
