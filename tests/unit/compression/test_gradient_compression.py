# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""HSDP's hook and its stream, and that a run without compression reads no private field of FSDP2.

The exchange itself is tested on ranks.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims

from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.fsdp import CompressedAllReduce, compressor_of, compressors_of
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.parallel.data_parallel import (
    apply_data_parallel,
    fsdp_modules,
    synchronize_gradients,
)
from torchtitan_lr.training.device import bind_device


@pytest.fixture
def hook(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group, device = dist.group.WORLD, torch.device("cpu")
    sizes, spans = CodecSizes("dense"), [Span(100, True)]
    yield CompressedAllReduce(Compressor("u", sizes, spans, group, device, all_reduce=True))
    dist.destroy_process_group()


class OnAnAccelerator(torch.Tensor):
    """Says that it is not on the CPU, and notes which streams use it."""

    device = torch.device("cuda")

    def record_stream(self, stream):
        self.streams = [*getattr(self, "streams", []), stream]


def test_the_shard_is_held_for_the_hooks_stream(hook, monkeypatch):
    """Allocated on the reduce-scatter's stream, it may be dropped before the sum is done."""
    handle = SimpleNamespace(current_stream=lambda: "the hook's stream")
    monkeypatch.setattr(torch, "get_device_module", lambda device: handle)
    shard = torch.arange(100.0).as_subclass(OnAnAccelerator)
    hook(shard)
    assert shard.streams == ["the hook's stream"]


def test_a_cpu_has_no_streams(hook):
    shard = torch.arange(100.0)
    hook(shard)
    assert torch.equal(shard, torch.arange(100.0))  # the sum of one rank


@pytest.fixture
def two_shards():
    bind_device()
    with fake_process_group(2):
        yield ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)


@pytest.fixture
def closed_units(monkeypatch):
    """FSDP2's units whose private state only torch itself may read."""
    state_of = FSDPModule._get_fsdp_state

    def refuse(unit):
        reader = sys._getframe(1).f_globals["__name__"]
        if reader.partition(".")[0] == "torchtitan_lr":
            raise PermissionError(f"{reader} reads a private field of FSDP2")
        return state_of(unit)

    monkeypatch.setattr(FSDPModule, "_get_fsdp_state", refuse)


def test_a_run_without_compression_reads_no_private_field_of_fsdp(two_shards, closed_units):
    """As the trainer does it: wrapping, micro-batches, and the search for residuals."""
    model = build_tiny("cola")
    apply_data_parallel(model, two_shards, build_job_config([]))
    assert len(fsdp_modules([model])) == 6  # embedding, three blocks, head, root
    ids = tokens(model.model_args)
    for last in (False, True):
        synchronize_gradients([model], last)
        model(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert compressors_of([model]) == []


def test_compression_reads_them_once(two_shards, closed_units):
    """The control: laying out a unit's buffer needs them."""
    config = build_job_config(["--grad_compression.codec=dense"])
    with pytest.raises(PermissionError, match=r"torchtitan_lr\.compat\.fsdp reads"):
        apply_data_parallel(build_tiny("cola"), two_shards, config)


def test_every_unit_is_known_by_its_compressor(two_shards):
    model = build_tiny("cola")
    apply_data_parallel(model, two_shards, build_job_config(["--grad_compression.codec=dense"]))
    units = fsdp_modules([model])
    assert len({id(compressor_of(unit)) for unit in units}) == len(units)
    assert compressor_of(model.layers["0"]).name == "layers.0"
    assert compressor_of(model.layers["0"].ffn_norm) is None
