# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step that is not logged is queued without an operator that would make a GPU's host wait."""

from collections import Counter
from itertools import count

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.tiny_trainer import microbatches, tiny_trainer
from torchtitan_lr.compression import sketch
from torchtitan_lr.compression.units import compressors_of

LISTS = {"index", "index_put", "index_put_", "_index_put_impl_"}


# Their result's size, or a number of Python, depends on values.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class Reads(TorchDispatchMode):
    """Counts reads of values, copies that block the host, and all-reduces."""

    def __init__(self, host=(), names=READS):
        super().__init__()
        self.names = names
        self.host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self.found = Counter()
        self.sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reads = name in self.names or self.blocks(name, args, kwargs)
        if reads and args[0].untyped_storage().data_ptr() not in self.host:
            self.found[name] += 1
        self.sums += name.startswith(("allreduce", "all_reduce"))
        return func(*args, **kwargs)

    @staticmethod
    def blocks(name, args, kwargs):
        """Whether an operator copies between devices, and waits."""
        if name == "copy_":
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return waits and args[0].device.type != args[1].device.type
        if name == "_to_copy":
            target = kwargs.get("device") or args[0].device
            return target.type != args[0].device.type and not kwargs.get("non_blocking", False)
        return False


OPTIONS = ["--training.steps=9", "--metrics.log_freq=100", "--lr_scheduler.warmup_steps=1"]
TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=2", "--optimizer.tsr_embedding_rank=2"]
TSR += ["--optimizer.tsr_refresh_interval=50"]
TAGC = ["--grad_compression.codec=sketch", "--grad_compression.level=10x"]
RUNS = {
    "AdamW": ([], 1),
    "Adam": (["--optimizer.name=Adam"], 1),
    "FSDP": ([], 2),
    "Muon, FSDP": (["--optimizer.name=Muon"], 2),
    "TAGC": (TAGC, 2),
    "TAGC sparse": (["--grad_compression.codec=sparse", "--grad_compression.level=10x"], 2),
}


def step(trainer, times=1.0, seed=0, batches=None):
    """One step, with a multiple of the loss; it reads ahead where batches are left."""
    trainer.step += 1
    (model,) = trainer.model_parts
    handle = model.register_forward_hook(lambda *call: call[-1] * times)
    try:
        trainer.train_step(batches or iter(microbatches(seed, valid=(16,))))
    finally:
        handle.remove()


def counted(trainer, names=READS):
    """The reads and the all-reduces of a third step."""
    host = []
    if tsr := getattr(trainer.optimizers, "gradients", None):
        host = [tsr.steps, *(stack.refresh_counts for stack in tsr.stacks)]
    reads = Reads(host, names)
    batches = (batch for seed in count() for batch in microbatches(seed, valid=(16,)))
    for _ in range(2):
        step(trainer, batches=batches)
    with reads:
        step(trainer, batches=batches)
    return reads.found, reads.sums


@pytest.mark.parametrize(("options", "ranks"), RUNS.values(), ids=RUNS)
def test_a_step_reads_nothing_and_sums_once(options, ranks, tmp_path, monkeypatch):
    # As on a GPU; on a CPU peeling stops when nothing is left.
    monkeypatch.setattr(sketch, "HOSTS", ())
    # Messages of the second rank get lost, so that values are anything.
    limit = ["--training.max_skipped_steps=9"]
    with tiny_trainer(tmp_path, *OPTIONS, *limit, *options, ranks=ranks, exact=False) as trainer:
        assert bool(compressors_of(trainer.model_parts)) == ("grad_compression" in str(options))
        found, sums = counted(trainer)
        assert found == {}
        # Norm, finite losses, signals and the next step's counts of all ranks travel together.
        assert sums == (ranks > 1)


@pytest.mark.parametrize(("moments", "replicas"), [("rotate", 1), ("keep", 1), ("rotate", 2)])
def test_a_refresh_reads_nothing_and_copies_no_list(moments, replicas, tmp_path):
    each = [f"--optimizer.tsr_{name}refresh_interval=1" for name in ("", "embedding_")]
    options = [*TSR[:3], *each, f"--optimizer.tsr_moments={moments}"]
    options += [f"--parallelism.data_parallel_replicate_degree={replicas}"]
    # Messages of the second replica get lost, so that values are anything.
    options += ["--training.max_skipped_steps=9"]
    with tiny_trainer(tmp_path, *OPTIONS, *options, ranks=replicas, exact=False) as trainer:
        assert counted(trainer, READS | LISTS)[0] == {}
        stacks = [stack for part in trainer.optimizers for stack in part.stacks]
        assert stacks and all((stack.refresh_counts == 3).all() for stack in stacks)
    # The control.
    with Reads(names=LISTS) as reads:
        stacks[0].U[[0]] = 1.0 + stacks[0].U[[0]]
    assert reads.found.total() == 2
