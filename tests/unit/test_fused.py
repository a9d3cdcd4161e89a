# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The element-wise kernels of the codecs compute the same when compiled, once for all seeds."""

import shutil

import pytest
import torch

from torchtitan_lr.comm.codecs import bitmap, hashing

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")


def compiled(function):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    return torch.compile(function.__wrapped__, dynamic=True, backend=counter), counter


@needs_compiler
def test_hashes_are_the_same_and_seeds_do_not_recompile():
    function, counter = compiled(hashing._hash_rows)
    for size, row, seed in ((1000, 77, 3), (1003, 78, 12345), (64, 9, 2**31), (70, 5, 2**32 - 1)):
        x = torch.arange(size) * 4_000_000 % 2**32
        got = function(x, row, seed, seed ^ 5, 17)
        expected = hashing._hash_rows(x, row, seed, seed ^ 5, 17)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert counter.frame_count == 1


@needs_compiler
@pytest.mark.parametrize("bits", [1, 4])
def test_packing_is_the_same(bits):
    pack, _ = compiled(bitmap._pack)
    mask = torch.rand(3, 1001, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack(mask, bits)
    assert torch.equal(packed, bitmap.pack(mask, bits))
    unpack, _ = compiled(bitmap._unpack)
    assert torch.equal(unpack(packed, 1001, bits), mask)


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
