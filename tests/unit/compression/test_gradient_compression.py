# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""HSDP's hook and its stream; the exchange itself is tested on ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.sizes import CodecSizes


@pytest.fixture
def compressor(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group, device = dist.group.WORLD, torch.device("cpu")
    sizes, spans = CodecSizes("sparse"), [Span(100, False)]
    yield Compressor("u", sizes, spans, group, device, all_reduce=True)
    dist.destroy_process_group()


class OnAnAccelerator(torch.Tensor):
    """Says that it is not on the CPU, and notes which streams use it."""

    device = torch.device("cuda")

    def record_stream(self, stream):
        self.streams = [*getattr(self, "streams", []), stream]


def test_the_shard_is_held_for_the_hooks_stream(compressor, monkeypatch):
    """Allocated on the reduce-scatter's stream, it may be dropped before the sum is done."""
    handle = SimpleNamespace(current_stream=lambda: "the hook's stream")
    monkeypatch.setattr(torch, "get_device_module", lambda device: handle)
    shard = torch.arange(100.0).as_subclass(OnAnAccelerator)
    compressor.all_reduce(shard)
    assert shard.streams == ["the hook's stream"]
