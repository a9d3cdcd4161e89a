# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The element-wise kernels of the codecs compute the same when compiled, once for all seeds."""

from collections import Counter

import numpy as np
import torch
import torch._dynamo.testing

from torchtitan_lr.compression import codecs


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
