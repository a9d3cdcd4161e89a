# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The element-wise kernels of the codecs compute the same when compiled, once for all seeds."""

import shutil

import pytest
import torch
import torch._dynamo.testing

from torchtitan_lr.compression.codecs import bitmap, hashing


def kernels(x, mask, row, *salts):
    """The kernels in one graph: their C++ is compiled at once, which takes most of the time."""
    found = list(hashing._hash_rows.__wrapped__(x, row, *salts))
    for bits in (1, 4):
        packed = bitmap._pack.__wrapped__(mask, bits)
        found += [packed, bitmap._unpack.__wrapped__(packed, mask.shape[-1], bits)]
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_kernels_are_the_same_and_seeds_do_not_recompile():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    function = torch.compile(kernels, dynamic=True, backend=counter)
    mask = torch.rand(3, 1001, generator=torch.Generator().manual_seed(0)) < 0.5
    for size, row, seed in ((1000, 77, 3), (1003, 78, 12345), (64, 9, 2**31), (70, 5, 2**32 - 1)):
        x = torch.arange(size) * 4_000_000 % 2**32
        found = function(x, mask, row, seed, seed ^ 5, 17)
        expected = kernels(x, mask, row, seed, seed ^ 5, 17)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(found[3], mask) and torch.equal(found[5], mask)
    assert counter.frame_count == 1


def test_a_compiled_function_runs_compiled_inside_fsdps_hooks():
    """FSDP2 calls a communicator from a frame that Dynamo skips; what it calls compiles again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    inner = torch.compile(lambda x: x * 2 + 1, backend=counter)

    @torch._dynamo.disable(recursive=True)
    def hook(x):
        return inner(x)

    assert torch.equal(hook(torch.ones(3)), torch.full((3,), 3.0))
    assert counter.frame_count == 1
