# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check that CPU ranks fit in their machine's memory, by the estimate of `costs.memory`.

A machine that has too little slows down, and then its kernel kills any process.
"""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import llama_args, model_shapes

COMPILED = 1.5  # share that a compiled block may save; the estimate counts blocks as uncompiled

_GIB = 2**30

_CGROUPS = Path("/sys/fs/cgroup")

BARE = 0.3 * _GIB  # bytes of a rank before it builds its model: the interpreter and torch


def check_memory(config: Any, world_size: int, device_type: str) -> None:
    """Refuse a run on the CPU that needs more memory than its machine has, by the estimate."""
    args, training = llama_args(config), config.training
    if device_type != "cpu" or not training.check_memory or args is None:
        return
    ranks = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE") or world_size))
    if config.comm.mode == "fake_backend":  # one process
        ranks = 1
    memory = machine_memory() * (COMPILED if config.compile.enable else 1) - ranks * BARE
    # Far more than any rank needs, for the many runs that need not be rehearsed, which takes
    # seconds: in fp32, weights four times, and of each token 60 activations as wide as the stream
    # in each block and three rows of logits.
    degree = config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len * ranks / degree
    by_token = 60 * args.n_layers * max(args.dim, args.ffn_dim) + 3 * args.vocab_size
    weights = sum(map(math.prod, model_shapes(args).values()))
    masks = 0.0  # documents have one (b, s/C, s), which the estimate leaves out
    if training.mask_documents:
        pairs = training.seq_len**2 / config.parallelism.context_parallel_degree
        masks = 4 * ranks * training.local_batch_size * pairs
    if 4 * (4 * weights * ranks + tokens * by_token) + masks < memory:
        return
    needed = _needed(config, world_size, ranks) + masks
    if needed > memory:
        want = f"less, or a smaller model or training.seq_len: {ranks} ranks need "
        want += f"{(needed + ranks * BARE) / _GIB:,.1f} GiB, this machine has "
        want += f"{machine_memory() / _GIB:,.1f}; training.check_memory = false starts anyway"
        raise ConfigError("training.local_batch_size", training.local_batch_size, want)


def _needed(config: Any, world_size: int, ranks: int) -> float:
    """Return the bytes that a machine's ranks need at their peak."""
    # Late: few runs need it.
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.memory import rank_memory
    from torchtitan_lr.costs.rehearsal import rehearse_run

    run = read_run(config, world_size)
    rehearsal = rehearse_run(run, on_gpu=False)
    peaks = [rank_memory(run, pp_rank, rehearsal)["peak"] for pp_rank in range(run.pp)]
    return ranks * sum(peaks) / run.pp


def machine_memory() -> int:
    """Return the bytes of memory that this process and others of its machine or container have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups: list[str] = []
    with suppress(OSError):  # Linux's: lines such as `0::/a/b`, before version 2 `4:memory:/a/b`
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    for line in groups:
        _, kind, group = line.split(":", 2)
        root, name = _CGROUPS / kind, "memory.limit_in_bytes" if kind else "memory.max"
        place = root / group.lstrip("/")
        for folder in (place, *place.parents):
            with suppress(OSError, ValueError):  # no limit; "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)
