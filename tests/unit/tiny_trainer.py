# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The real trainer around a model so small that building it takes a tenth of a second."""

import gc
import os
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.corpora import library_listed_once
from tests.unit.tiny import tiny_args
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.prepare import prepare_for_ranks
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.trainer import Trainer

OPTIONS = [
    "--model.name=llama_svd",
    "--model.flavor=debug",
    "--training.dataset=python_stdlib",
    "--training.seq_len=8",
    "--training.local_batch_size=2",
    "--training.dtype=float32",
    "--training.mixed_precision_param=float32",
    "--metrics.log_freq=1",
    "--validation.no_enable",
    "--checkpoint.no_enable",
]

# The tokenizer's vocabulary is what makes the usual models large.
MODEL = tiny_args(
    "svd", dim=16, n_layers=1, n_heads=2, ffn_dim=24, vocab_size=4096, rank_attention=4, rank_ffn=6
)


class OwnTerms(TorchDispatchMode):
    """Fills results of lost messages with this rank's terms: unset memory may hold a NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_reduce_scatter_base_", "alltoall_base_"):
            result, terms = args[:2]
            result.copy_(terms.flatten()[: result.numel()].view_as(result))
        return func(*args, **(kwargs or {}))


@cache
def prepared():
    """Where the usual tokens are: to list their corpus takes longer than to build the model."""
    return prepare_for_ranks(build_job_config(OPTIONS))


@contextmanager
def tiny_trainer(folder, *options, ranks=1, exact=True):
    """Builds a trainer of one rank, in fp64 if exact; or rank 0 of some whose messages get lost."""
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)} | prepared()
    trainer = None
    filled = OwnTerms() if ranks > 1 and torch.__version__ < "2.13" else nullcontext()
    try:
        with (
            filled,
            library_listed_once(),
            patch.dict(os.environ, environment),
            patch.dict(FLAVORS["svd"].data, debug=MODEL),
        ):
            config = build_job_config([*OPTIONS, f"--job.dump_folder={folder}", *options])
            check_job_config(config, ranks, "cpu")
            trainer = Trainer(config)
            if ranks == 1 and exact:
                trainer.model_parts[0].double()
                for adam in trainer.optimizers:
                    for state in adam.state.values():
                        state |= {k: v.double() for k, v in state.items() if k.startswith("exp")}
            yield trainer
    finally:
        if trainer is not None:
            trainer.close()
        dist.destroy_process_group()
        gc.enable()  # torchtitan switches it off


def history(trainer):
    return read_history(Path(trainer.job_config.job.dump_folder) / HISTORY_FILE)


def microbatches(seed=0, valid=(16, 5, 1)):
    """Three micro-batches of two sequences; only so many of their 16 labels count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in valid:
        tokens = torch.randint(4096, (2, 9), generator=generator)
        labels = tokens[:, 1:].clone()
        labels.view(-1)[count:] = IGNORE_INDEX
        batches.append(({"input": tokens[:, :-1].contiguous()}, labels))
    return batches


def parameters(model):
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
