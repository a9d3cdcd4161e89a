# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The element-wise kernels of the codecs compute the same when compiled, once for all seeds."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from torchtitan_lr.compression import codecs


def kernels(x, mask, row, *salts):
    """The kernels in one graph: their C++ is compiled at once, which takes most of the time."""
    packed = codecs.pack.__wrapped__(mask)
    unpacked = codecs.unpack.__wrapped__(packed, mask.shape[-1])
    return [*codecs._hash_rows.__wrapped__(x, row, *salts), packed, unpacked]


@pytest.mark.nightly
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
        assert torch.equal(found[3], mask)
    assert counter.frame_count == 1


def solve_plainly(cells, negative, content, rounds):
    """Rounds of peeling, entry by entry in fp32; return values and which entries remain."""
    cells, negative, content = cells.numpy(), negative.numpy(), content.numpy().copy()
    values, remains = np.zeros(cells.shape[1], np.float32), np.ones(cells.shape[1], bool)
    for _ in range(rounds):
        load = Counter(cells[:, remains].flatten().tolist())
        found = {}
        for entry in remains.nonzero()[0]:
            lone = [r for r in range(3) if load[int(cells[r, entry])] == 1]
            if lone:
                value = content[cells[lone[0], entry]]
                found[entry] = -value if negative[lone[0], entry] else value
        for entry, value in found.items():
            values[entry], remains[entry] = value, False
            for r in range(3):
                content[cells[r, entry]] -= -value if negative[r, entry] else value
    return values, remains


ROUNDS = 2


def sketched(entries, row, seed):
    """Numbers that round, in a sketch in which some remain after a few rounds."""
    places = torch.arange(entries) * 7
    numbers = torch.randn(1, entries, generator=torch.Generator().manual_seed(seed)).exp()
    content = codecs.insert(places[None], numbers, row, seed)[0]
    unknown = torch.nn.functional.pad(places, (0, 3), value=7 * entries)
    return content, unknown, 7 * entries, seed


def test_rounds_of_peeling_give_the_bits_of_plain_ones():
    """All rounds in one graph, several graphs, or one by one."""
    content, unknown, m, seed = sketched(610, 300, 11)
    cells, negative = codecs.cells_and_signs(unknown[:-3], 300, seed)
    for rounds in (1, ROUNDS, codecs.ROUNDS_PER_GRAPH + 1):
        expected, remaining = solve_plainly(cells, negative, content, rounds)
        values, remains = codecs.peel(content, unknown, m, seed, rounds)
        assert torch.equal(values[:-3], torch.from_numpy(expected))
        assert torch.equal(remains[:-3], torch.from_numpy(remaining))
        assert remaining.any() or rounds > ROUNDS
