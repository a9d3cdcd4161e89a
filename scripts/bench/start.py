# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure what the start of a run costs rank 0, in worlds of many ranks.

    python -m scripts.bench.start [--ranks 8,64,1024] [CONFIG] [--section.key=value ...]

CPU seconds to the first step, in parts, with torch's fake backend, whose collectives cost nothing.
What grows with the ranks is torch's: the meshes, of which every rank makes the groups of all ranks;
``parallelize``, as FSDP2 cuts every parameter into the pieces of all ranks; DCP's plan of the plans
of all, on rank 0; and its table of contents, which a rank that resumes searches. The last two
columns are the sums over ranks in a later step outside its passes, and the messages one after
another that they take in a ring.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

CONFIG = "debug_cola"
SMALL = [
    *("--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=3"),
    *("--comm.mode=fake_backend", "--validation.no_enable", "--metrics.no_enable_tensorboard"),
    *("--checkpoint.no_enable", "--metrics.no_enable_wandb", "--metrics.no_comm_ledger"),
]


def first_step(ranks: int, arguments: list[str]) -> dict[str, float]:
    """Return the CPU seconds of rank 0's parts up to and with its first step."""
    os.environ |= {"NGPU": str(ranks), "RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.default_planner import (
        DefaultLoadPlanner,
        DefaultSavePlanner,
        create_default_global_save_plan,
    )

    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checkpoints.folders import METADATA
    from torchtitan_lr.checkpoints.safe_metadata import read_metadata
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.titan.device import bind_device
    from torchtitan_lr.titan.specs import REGISTERED_SPECS
    from torchtitan_lr.training.trainer import Trainer

    bind_device()
    parts: dict[str, float] = {}

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any, **keys: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*values, **keys)
            finally:
                parts[part] = parts.get(part, 0.0) + time.process_time() - begin

        return wrapped

    class TimedTrainer(Trainer):
        def init_distributed(self) -> Any:
            dims = timed("process group", super().init_distributed)()
            timed("mesh", dims.build_mesh)()
            return dims

    with tempfile.TemporaryDirectory() as folder:
        config = build_job_config([*arguments, *SMALL, f"--job.dump_folder={folder}"])
        check_job_config(config, ranks, "cpu")  # prepares the corpus, for all runs after this one
        timed("checks", check_job_config)(config, ranks, "cpu")
        specs = REGISTERED_SPECS
        spec: Any = specs[config.model.name]
        specs[config.model.name] = replace(
            spec,
            model_cls=timed("meta build", spec.model_cls),
            build_dataloader_fn=timed("data", spec.build_dataloader_fn),
            parallelize_fn=timed("parallelize", spec.parallelize_fn),
        )
        begin = time.process_time()
        trainer = TimedTrainer(config)
        inside = sum(seconds for name, seconds in parts.items() if name != "checks")
        parts["rest of the trainer"] = time.process_time() - begin - inside
        trainer.step = 1
        batches = iter(trainer.dataloader)
        timed("first step", trainer.train_step)(batches)
        trainer.step = 2  # not logged
        with trainer.new_ledger() as ledger:
            trainer.train_step(batches)
        rows = [row for row in ledger.rows() if row["scope"] == "step"]
        sums = sum(row["calls"] for row in rows if row["op"] == "all_reduce")
        states = {f"model.{name}": p for name, p in trainer.model_parts[0].state_dict().items()}
        planner = DefaultSavePlanner()
        planner.set_up_planner(states, is_coordinator=True)
        plan = timed("save: own plan", planner.create_local_plan)()
        plans = [of_rank(plan, rank) for rank in range(ranks)]
        merge = timed("save: plan of all, rank 0", create_default_global_save_plan)
        _, contents = merge(plans)
        place = vars(filesystem)["_StorageInfo"]("__0_0.distcp", 0, 0)
        where = {item.index: place for each in plans for item in each.items}
        table = pickle.dumps(replace(contents, storage_data=where))
        (Path(folder) / METADATA).write_bytes(table)
        timed("resume: table of contents", read_metadata)(folder)
        loader = DefaultLoadPlanner()
        loader.set_up_planner(states, contents, is_coordinator=True)
        timed("resume: own plan", loader.create_local_plan)()
        trainer.close()
    counts = {"MB of the table": len(table) / 1e6, "sums of a step": sums}
    return parts | counts | {"their hops": 2 * (ranks - 1) * sums}


def of_rank(plan: Any, rank: int) -> Any:
    """Return the plan of another rank: its shards are others along the first dimension."""
    items = []
    for item in plan.items:
        if item.type.name == "SHARD":
            chunk = item.tensor_data.chunk
            offsets = type(chunk.sizes)((rank * chunk.sizes[0], *chunk.offsets[1:]))
            data = replace(item.tensor_data, chunk=replace(chunk, offsets=offsets))
            item = replace(item, tensor_data=data, index=replace(item.index, offset=offsets))
        items.append(item)
    return replace(plan, items=items)


def main() -> None:
    """Print a line for each world."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default=CONFIG)
    parser.add_argument("--ranks", default="8,64,1024")
    args, overrides = parser.parse_known_intermixed_args()
    worlds = [int(ranks) for ranks in args.ranks.split(",")]
    if len(worlds) > 1:
        # A process for each world: torch has one process group of all ranks.
        for ranks in worlds:
            command = [sys.executable, "-m", "scripts.bench.start", args.config]
            subprocess.run([*command, f"--ranks={ranks}", *overrides], check=True)
        return
    (ranks,) = worlds
    found = {"ranks": ranks, **first_step(ranks, [f"--job.config_file={args.config}", *overrides])}
    print(" | ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
