# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time FSDP2 with A (r, d_in) split along d_in beside A split along r and its momentum gathered.

A spectral optimizer needs one of the two. FSDP2 copies weights and gradients once more where it
does not split the first dimension. Timed is a forward and backward pass of a model of the shape
``--flavor`` on few tokens, in fp32 and with 64 words, so that FSDP2's part is large. A rank's
processor time, that of gloo's threads included, depends less on the machine's load than wall time.

    torchrun --nproc_per_node 2 -m scripts.bench.split_factors
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scripts.bench.harness import machine
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.compat.collectives import all_gather
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.data_parallel import split_outside_rank, sum_gradients


def main(argv: list[str] | None = None) -> int:
    """Time the three; rank 0 prints a table."""
    options = _parse(argv)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    by_rows, by_columns = (_model(options.flavor, ranks, columns) for columns in (False, True))
    momenta = [local_part(p) for n, p in by_rows.named_parameters() if n.endswith("A.weight")]
    step, gather = _passes(by_rows, options.tokens), _gather(momenta, ranks)

    def step_and_gather() -> None:
        step()
        gather()

    calls = {
        "along r": step,
        "along d_in": _passes(by_columns, options.tokens),
        "along r, momenta gathered": step_and_gather,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.turns + 1):
        for name, call in calls.items():
            seconds[name].append(_processor_seconds(call))
    if dist.get_rank() == 0:
        print(_as_text({"ranks": ranks, **machine()}, seconds))
    dist.destroy_process_group()
    return 0


def _model(flavor: str, ranks: int, columns: bool) -> LlamaModel:
    """Build a model whose blocks are FSDP2's units."""
    model = LlamaModel(replace(FLAVORS["cola"][flavor], vocab_size=64))
    model.init_weights()
    mesh = init_device_mesh("cpu", (ranks,))
    choose = split_outside_rank(model, ranks) if columns else None
    for unit in (*model.get_submodule("layers").children(), model):
        fully_shard(unit, mesh=mesh, shard_placement_fn=choose)
    sum_gradients(model)
    return model


def _passes(model: LlamaModel, count: int) -> Callable[[], None]:
    tokens = torch.zeros(1, count, dtype=torch.long)

    def call() -> None:
        model(tokens, targets=tokens).backward()
        model.zero_grad()

    return call


def _gather(parts: list[Tensor], ranks: int) -> Callable[[], None]:
    """Return a call that makes every matrix whole from its rows, by one collective."""
    own = torch.empty(sum(part.numel() for part in parts))
    all_parts = torch.empty(ranks, own.numel())
    whole = [part.new_empty(ranks, *part.shape) for part in parts]
    sizes = [part.numel() for part in parts]

    def call() -> None:
        torch.cat([part.flatten() for part in parts], out=own)
        all_gather(all_parts.view(-1), own)
        for matrix, rows in zip(whole, all_parts.split(sizes, dim=1), strict=True):
            matrix.copy_(rows.view_as(matrix))

    return torch.no_grad()(call)


def _processor_seconds(call: Callable[[], None]) -> float:
    dist.barrier()
    start = time.process_time()
    call()
    return time.process_time() - start


def _as_text(what: dict[str, Any], seconds: dict[str, list[float]]) -> str:
    lines, first = [], next(iter(seconds.values()))
    for name, found in seconds.items():
        # The first turn allocates.
        more = [1e3 * (a - b) for a, b in zip(found[1:], first[1:], strict=True)]
        low, _, high = quantiles(more, n=4)
        cells = [name, f"{1e3 * median(found[1:]):.0f}", f"{median(more):.0f}"]
        lines.append([*cells, f"{low:.0f} to {high:.0f}"])
    return f"{what}\n" + text_table(("A is split", "ms", "more ms", "quartiles"), lines)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--flavor", default="60M", help="shape of the model")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a pass")
    parser.add_argument("--turns", type=int, default=15, help="measurements of each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
