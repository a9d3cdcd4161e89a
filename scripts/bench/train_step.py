# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Time the trainer's own steps on one GPU, with and without captured passes, rows in turns.

    python -m scripts.bench.train_step --parts start ratio --out outputs/train_step.json
    python -m scripts.bench.train_step --device cpu --small        # a rehearsal without a GPU

The parts, all compiled, bf16 with fp32 weights and fused AdamW, on random tokens:

    equal  32 x 256 tokens, with deterministic kernels: losses of twelve steps of CoLA with and
           without captured passes, which must be equal in every bit
    start  32 x 256 tokens: both kinds of step of CoLA and full rank in turns, and the host's
           milliseconds in each part of a step
    ratio  8 x 1,024 tokens, captured: full rank and CoLA in turns; then CoLA's kernels
    wide   24 x 1,024 tokens, captured: full rank and CoLA in turns
    short  2 x 1,024 tokens, both kinds of step: CoLA, full rank, and CoLA with each optimizer

Every row is printed, and written to --out, as it ends.

Exit status: 0 if losses are equal, 1 if not, 2 for invalid arguments.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.bench.gpu import _kernels
from scripts.bench.harness import machine
from tests.gpu.trainers import trainer_on
from tests.oracle.flops import flops_per_token
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.device import peak_flops
from torchtitan_lr.training import trainer as trainer_module
from torchtitan_lr.training.trainer import Trainer

Row = dict[str, Any]

WARM_UP = 4
"""Steps before a timed one: the compilation, and the capture in the third."""


class Rank:
    """One trainer on random tokens, of which each step has the same ones in every trainer.

    Args:
        options: The command line's.
        shape: Sequences of a step, and the tokens of each.
        *arguments: Of the configuration.
    """

    def __init__(
        self, options: argparse.Namespace, shape: tuple[int, int], *arguments: str
    ) -> None:
        self.device, self.stack = options.device, ExitStack()
        flavor, dtype = "1B_boost", "bfloat16"
        if options.small:
            flavor, shape, dtype = "debug", (2, 32), "float32"
        batch, self.seq_len = shape
        self.tokens = batch * self.seq_len
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        given = [
            f"--model.flavor={flavor}",
            f"--training.mixed_precision_param={dtype}",
            f"--training.seq_len={self.seq_len}",
            f"--training.local_batch_size={batch}",
            f"--training.global_batch_size={batch}",
            "--training.steps=100000",
            "--metrics.log_freq=100000",
            "--optimizer.lr=1e-4",
            "--optimizer.implementation=fused",
            *arguments,
        ]
        if not options.small:
            given.append("--compile.enable")
        self.trainer: Trainer = self.stack.enter_context(
            trainer_on(self.device, folder, patch, *given)
        )
        self.trainer.step = 1  # the first step is logged
        self.batches = self._random(batch)
        self.losses: list[float] = []
        self.eager = False
        self.host: dict[str, list[float]] = defaultdict(list)
        trainer, backward = self.trainer, self.trainer.backward
        patch.setattr(trainer, "backward", lambda data, eager: backward(data, eager or self.eager))
        owners: dict[str, Any] = {"take": trainer, "backward": trainer}
        owners |= {"finish_sums": trainer.gradients, "read_next": trainer.reader}
        owners |= {"decide": trainer_module, "clip": trainer.gradients}
        owners |= {"apply": trainer, "settle": trainer}
        for part, owner in owners.items():
            patch.setattr(owner, part, partial(self._timed, part, getattr(owner, part)))

    def _random(self, batch: int) -> Iterator[Batch]:
        vocabulary = self.trainer.model_args.vocab_size
        for seed in count():
            generator = torch.Generator().manual_seed(seed % 8)
            tokens = torch.randint(vocabulary, (batch, self.seq_len + 1), generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def _timed(self, part: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        self.host[part].append(1e3 * (time.perf_counter() - begin))
        return result

    def run(self, steps: int, eager: bool = False) -> float:
        """Run steps; return the milliseconds of one."""
        self.eager = eager
        self.host.clear()
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.trainer.step += 1
            self.trainer.train_step(self.batches)
        self._wait()
        return 1e3 * (time.perf_counter() - begin) / steps

    def run_for_losses(self, steps: int) -> list[float]:
        """Run steps; return their losses."""
        losses = []
        for _ in range(steps):
            self.run(1)
            losses.append(self.trainer.loss.item())
        return losses

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def row(self, name: str, milliseconds: list[float]) -> Row:
        """Return what a row says of its milliseconds per step."""
        middle = median(milliseconds)
        row: Row = {"row": name, "tokens": self.tokens, "ms": middle, "of": len(milliseconds)}
        row["least"] = min(milliseconds)
        row["tokens_per_s"] = 1e3 * self.tokens / middle
        if self.device == "cuda":
            flops = flops_per_token(self.trainer.model_args, self.seq_len)
            row["mfu"] = row["tokens_per_s"] * flops / peak_flops(torch.cuda.get_device_name())
        return row

    def close(self) -> None:
        """Free its memory."""
        self.stack.close()
        del self.trainer
        _reset(self.device)


def _reset(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def in_turns(rows: dict[str, tuple[Rank, bool]], turns: int, steps: int) -> Iterator[Row]:
    """Yield a row for each rank and kind of step, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(turns):
        for name, (rank, eager) in rows.items():
            times[name].append(rank.run(steps, eager))
    for name, (rank, _) in rows.items():
        yield rank.row(name, times[name])


def peak(device: str) -> Row:
    """Return the peak memory since the last reset."""
    if device != "cuda":
        return {}
    gib = 2**30
    reserved, used = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {"peak_allocated_gib": used / gib, "peak_reserved_gib": reserved / gib}


ON, OFF = "--training.step_graph=auto", "--training.step_graph=off"
FULL, COLA = "--model.name=llama_full", "--model.name=llama_cola"


def start(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the times of both kinds of step, and of the host in each part of a step."""
    for name, model in (("cola", COLA), ("full", FULL)):
        rank = Rank(options, (32, 256), model, ON)
        rank.run(2)
        yield {"row": f"{name}, memory of eager steps", **peak(options.device)}
        rank.run(2)
        yield {"row": f"{name}, memory with captured ones", **peak(options.device)}
        kinds = {f"{name}, eager": (rank, True), f"{name}, captured": (rank, False)}
        yield from in_turns(kinds, 5, 4)
        for kind, eager in (("eager", True), ("captured", False)):
            rank.run(6, eager)
            host = {part: median(times) for part, times in rank.host.items()}
            yield {"row": f"{name}, {kind}: the host's ms", **host}
        rank.close()


def ratio(options: argparse.Namespace) -> Iterator[Row]:
    """Yield captured steps of full rank and CoLA in turns."""
    shape = (8, 1024)
    full, cola = Rank(options, shape, FULL, ON), Rank(options, shape, COLA, ON)
    for rank in (full, cola):
        rank.run(WARM_UP)
    yield from in_turns({"full": (full, False), "cola": (cola, False)}, 8, 4)
    full.close()
    yield from _kernels(partial(cola.run, 1), options.device, 40)
    cola.close()


def wide(options: argparse.Namespace) -> Iterator[Row]:
    """Yield captured steps of full rank and CoLA, in turns."""
    full, cola = Rank(options, (24, 1024), FULL, ON), Rank(options, (24, 1024), COLA, ON)
    for rank in (full, cola):
        rank.run(WARM_UP)
    yield from in_turns({"full": (full, False), "cola": (cola, False)}, 5, 2)
    for rank in (full, cola):
        rank.close()


def short(options: argparse.Namespace) -> Iterator[Row]:
    """Yield both kinds of step with few tokens, of families and optimizers."""
    for name in ("full", "AdamW", "Muon", "Spectron", "LoRAMuon", "TSRAdam"):
        model = [FULL] if name == "full" else [COLA, f"--optimizer.name={name}"]
        if name not in ("full", "AdamW"):
            model.append("--optimizer.implementation=foreach")
        if name == "TSRAdam" and options.small:
            model += ["--optimizer.tsr_rank=8", "--optimizer.tsr_embedding_rank=8"]
        rank = Rank(options, (2, 1024), *model, ON)
        rank.run(WARM_UP)
        kinds = {f"{name}, eager": (rank, True), f"{name}, captured": (rank, False)}
        yield from in_turns(kinds, 5, 4)
        yield {"row": f"{name}: host ms", **{k: median(v) for k, v in rank.host.items()}}
        rank.close()


def equal(options: argparse.Namespace) -> Iterator[Row]:
    """Yield whether captured losses are the eager ones, with deterministic kernels.

    The backward of flash attention otherwise adds in another order at each call.
    """
    found, same = [], ("--debug.deterministic", "--debug.deterministic_warn_only")
    for kind in (OFF, ON):
        rank = Rank(options, (32, 256), COLA, kind, *same)
        begin = time.perf_counter()
        found.append(rank.run_for_losses(12))
        row = {"row": kind, "seconds": time.perf_counter() - begin, **peak(options.device)}
        yield {**row, "losses": [loss.hex() for loss in found[-1]]}
        rank.close()
    yield {"row": "equal", "holds": found[0] == found[1]}


# `equal` is last: what makes kernels deterministic is the process's.
PARTS = {part.__name__: part for part in (start, ratio, wide, short, equal)}


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the rows, and write the JSON; return the exit status."""
    parser = OneLineParser(prog="scripts.bench.train_step", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run")
    parser.add_argument("--small", action="store_true", help="tiny models: a rehearsal")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which")
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "cpu: there is no CUDA device here")
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    report: dict[str, Any] = {"machine": machine(options.device), "parts": {}}
    for part in (name for name in PARTS if name in options.parts):
        rows = report["parts"][part] = []
        for row in PARTS[part](options):
            rows.append(row)
            print(
                "   ",
                *(
                    f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}"
                    for k, v in row.items()
                    if k != "losses"
                ),
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    holds = [row.get("holds", True) for rows in report["parts"].values() for row in rows]
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
