# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""HSDP's hook on a stream of its own: the shard's memory is not given away before it is done."""

import pytest
import torch
import torch.distributed as dist

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compression.codecs import SparseCodec, kept_entries
from torchtitan_lr.compression.compressor import Compressor

SIZE = 2**22
CYCLES = 2**33
"""Four seconds or so of a busy stream: far longer than it takes to allocate once."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compressed", [False, True])
def test_the_shards_memory_is_not_reused_before_the_sum_is_done(
    compressed: bool, one_rank: Ranks
) -> None:
    group, codec = dist.group.WORLD, SparseCodec(1, theta=0.9)
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    spans = [(SIZE, compressed)]
    # The first call of a process compiles, and the first use of a kernel loads it, for which CUDA
    # may wait for all streams: every kernel used below has run before the stream is busy.
    warm = Compressor("warm", codec, spans, group, device, all_reduce=True).all_reduce
    warmed = torch.ones(SIZE, device=device)
    warm(warmed)
    del warmed, warm
    torch.zeros(SIZE, device=device).bfloat16().count_nonzero()
    torch.cuda.synchronize()
    hook = Compressor("unit", codec, spans, group, device, all_reduce=True).all_reduce
    scatters, reduces = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(scatters):
        shard = torch.ones(SIZE, device=device)
    reduces.wait_stream(scatters)
    with torch.cuda.stream(reduces):
        torch.cuda._sleep(CYCLES)
        slept = reduces.record_event()
        hook(shard)
        stored = shard.bfloat16()
    place = shard.data_ptr()
    del shard  # as FSDP2 does after the cast
    with torch.cuda.stream(scatters):
        following = torch.zeros(SIZE, device=device)
    assert not slept.query(), "the host took too long to tell"
    assert following.data_ptr() != place
    torch.cuda.synchronize()
    assert stored.count_nonzero() == (kept_entries(SIZE, codec.theta) if compressed else SIZE)
