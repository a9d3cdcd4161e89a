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

BARE = 0.3 * _GIB  # bytes of a rank before it builds its model: the interpreter and torch

_CGROUPS, _OLD_LIMIT = Path("/sys/fs/cgroup"), "memory.limit_in_bytes"


def check_memory(config: Any, world_size: int, device_type: str) -> None:
    """Refuse a run on the CPU that needs more memory than its machine has, by the estimate."""
    args = llama_args(config)
    if device_type != "cpu" or not config.training.check_memory or args is None:
        return
    ranks = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE") or world_size))
    if config.comm.mode == "fake_backend":  # one process
        ranks = 1
    memory = machine_memory() * (COMPILED if config.compile.enable else 1) - ranks * BARE
    training, section = config.training, config.parallelism
    # Far more than any rank needs, for the many runs that need not be rehearsed, which takes
    # seconds: in fp32, weights four times, and of each token 60 activations as wide as the stream
    # in each block and three rows of logits.
    tokens = training.local_batch_size * training.seq_len * ranks / section.tensor_parallel_degree
    by_token = 60 * args.n_layers * max(args.dim, args.ffn_dim) + 3 * args.vocab_size
    weights = sum(map(math.prod, model_shapes(args).values()))
    masks = ranks * _mask_bytes(config)
    if 4 * (4 * weights * ranks + tokens * by_token) + masks < memory:
        return
    needed, fixed = _needed(config, world_size, ranks)
    needed += masks
    if not training.mask_documents:  # all rows have the same mask
        fixed += masks
    if needed <= memory:
        return
    fits = int(training.local_batch_size * (memory - fixed) / (needed - fixed))
    have = f"the ranks need {(needed + ranks * BARE) / _GIB:,.1f} GiB, this machine has "
    have += f"{machine_memory() / _GIB:,.1f}"
    anyway = "training.check_memory = false starts anyway"
    if fits < 1:
        want = f"a shorter one or a smaller model: {have}, one sequence at a time too; {anyway}"
        raise ConfigError("training.seq_len", training.seq_len, want)
    want = f"at most {fits}, or a shorter training.seq_len: {have}; {anyway}"
    raise ConfigError("training.local_batch_size", training.local_batch_size, want)


def _needed(config: Any, world_size: int, ranks: int) -> tuple[float, float]:
    """Return the bytes that a machine's ranks need at their peak, and those without a batch."""
    # Late: few runs need it.
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.memory import rank_memory
    from torchtitan_lr.costs.rehearsal import rehearse_run

    run = read_run(config, world_size)
    rehearsal = rehearse_run(run, on_gpu=False)
    each = [rank_memory(run, pp_rank, rehearsal) for pp_rank in range(run.pp)]
    share = ranks / run.pp
    fixed = sum(parts["weights"] + parts["optimizer"] + parts["gradients"] for parts in each)
    return share * sum(parts["peak"] for parts in each), share * fixed


def _mask_bytes(config: Any) -> int:
    """Return the bytes of attention's mask on a rank, which the estimate leaves out.

    On a CPU documents have one (b, s/C, s), and the late chunk of a shared row one (s/2C, s), of
    which torch makes a copy in the queries' precision.
    """
    training, degree = config.training, config.parallelism.context_parallel_degree
    itemsize = 2 if training.mixed_precision_param == "bfloat16" else 4
    pairs = training.seq_len**2 // degree
    if training.mask_documents:
        return int(training.local_batch_size * pairs * itemsize)
    return 0 if degree == 1 else int(pairs // 2 * (1 + itemsize))


def machine_memory() -> int:
    """Return the bytes of memory that this process and others of its machine or container have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups: list[str] = []
    with suppress(OSError):  # Linux's: lines such as `0::/a/b`, before version 2 `4:memory:/a/b`
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    for line in groups:
        _, kind, group = line.split(":", 2)
        root, name = (_CGROUPS, "memory.max") if not kind else (_CGROUPS / kind, _OLD_LIMIT)
        place = root / group.lstrip("/")
        for folder in (place, *place.parents):
            with suppress(OSError, ValueError):  # no limit; "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)
