# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Codecs on any device, bit for bit what plain numpy makes of the same rows.

The entries are whole numbers whose sums stay below 2²⁴: added up in any order, by atomics too, they
are exact in fp32. Magnitudes of a row differ, so that the largest ones are the same everywhere.
"""

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.codecs import exchange_in_process
from torchtitan_lr.compression import sketch
from torchtitan_lr.compression.codecs import SparseCodec, failure_block, kept_entries, left_over
from torchtitan_lr.compression.sketch import (
    HASH_ROWS,
    SketchCodec,
    cells_and_signs,
    insert,
    peel,
    sketch_row,
    smallest_theta,
)

W, M, SEED = 3, 1501, 7
C = 4
THETA = smallest_theta(C, W)
TOO_DENSE = 0.6
"""A θ at which most entries do not peel."""


def rows() -> np.ndarray:
    """Gradients (rank, owner, entry)."""
    random = np.random.default_rng(0)
    magnitudes = random.permuted(np.tile(np.arange(M), (W, W, 1)), axis=-1)
    return (magnitudes * random.choice([-1, 1], magnitudes.shape)).astype(np.float32)


def kept(x: np.ndarray, theta: float) -> np.ndarray:
    """Which entries (..., m) are among the largest k."""
    order = np.argsort(-np.abs(x), axis=-1)[..., : kept_entries(M, theta)]
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, order, True, -1)
    return mask


def packed(mask: np.ndarray) -> np.ndarray:
    """An index, the first entry in the lowest bit."""
    return np.packbits(mask, axis=-1, bitorder="little")


def hashed(entry: int, row: int) -> Iterator[tuple[int, int]]:
    """Cells and signs of one entry: MurmurHash3's finalizer in Python's integers."""
    for r in range(HASH_ROWS):
        h = (entry * 0x9E3779B1 + zlib.crc32(f"{SEED}:{r}".encode())) % 2**32
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        h ^= h >> 16
        yield h * row // 2**32 + r * row, -1 if h % 2 else 1


def sketched(x: np.ndarray, row: int) -> np.ndarray:
    """The count sketch of one row (m,)."""
    cells = np.zeros(HASH_ROWS * row, np.float32)
    for entry in x.nonzero()[0]:
        for cell, sign in hashed(int(entry), row):
            cells[cell] += sign * x[entry]
    return cells


def same(found: Tensor, expected: np.ndarray) -> bool:
    return torch.equal(found.cpu(), torch.from_numpy(np.ascontiguousarray(expected)))


def test_hashes(device: torch.device) -> None:
    entries = [0, 1, 2, 1000, 2**31, 2**32 - 1]
    cells, negative = cells_and_signs(torch.tensor(entries, device=device), 131, SEED)
    for i, entry in enumerate(entries):
        expected = list(hashed(entry, 131))
        found = zip(cells[:, i].tolist(), negative[:, i].tolist(), strict=True)
        assert [(cell, -1 if sign else 1) for cell, sign in found] == expected


def test_sparse(device: torch.device) -> None:
    x, theta = rows(), 0.9
    mask = kept(x, theta)
    codec = SparseCodec(W, theta=theta)
    messages = [codec.encode(torch.from_numpy(own.copy()).to(device), SEED) for own in x]
    for message, own, chosen in zip(messages, x, mask, strict=True):
        assert same(message.swapped["index"], packed(chosen))
        assert same(message.swapped["values"], own[chosen].reshape(W, -1))
        owed = left_over(torch.from_numpy(own.copy()).to(device), message, None)
        assert same(owed, np.where(chosen, 0, own))
    for owner, received in enumerate(exchange_in_process(messages)):
        total = codec.decode(received, M, SEED).total
        assert same(total, np.where(mask, x, 0)[:, owner].sum(0, dtype=np.float32))


def test_sketch(device: torch.device) -> None:
    x = rows()
    sent = np.where(kept(x, THETA), x, 0)
    # An exact index leaves zeros out, of which each row has one; they are never among the largest.
    codec = SketchCodec(W, C, THETA)
    messages = [codec.encode(torch.from_numpy(own.copy()).to(device), SEED) for own in x]
    row = sketch_row(M, C)
    for message, own in zip(messages, sent, strict=True):
        assert same(message.swapped["index"], packed(own != 0))
        assert same(message.summed["sketch"], np.stack([sketched(part, row) for part in own]))
    for owner, received in enumerate(exchange_in_process(messages)):
        decoded = codec.decode(received, M, SEED)
        assert decoded.counts["unpeeled"] == 0 and not decoded.failed.any()
        assert decoded.counts["indexed"] == np.count_nonzero(sent[:, owner].any(0))
        assert same(decoded.total, sent[:, owner].sum(0, dtype=np.float32))


def test_what_does_not_peel(device: torch.device) -> None:
    """Failed blocks are those of the stuck entries: none of it is sent, all of it stays owed."""
    x = rows()
    mask = kept(x, TOO_DENSE)
    sent = np.where(mask, x, 0)
    codec = SketchCodec(W, C, TOO_DENSE)
    messages = [codec.encode(torch.from_numpy(own.copy()).to(device), SEED) for own in x]
    decoded = [codec.decode(r, M, SEED) for r in exchange_in_process(messages)]
    block = failure_block(M)
    failed = np.stack([stuck_blocks(sent[:, owner].any(0), block) for owner in range(W)])
    assert failed.mean() > 0.1
    spread = failed.repeat(block, -1)[:, :M]
    for owner, one in enumerate(decoded):
        assert same(one.failed, packed(failed[owner]))
        total = sent[:, owner].sum(0, dtype=np.float32)
        assert same(one.total, np.where(spread[owner], 0, total))
    failures = torch.stack([one.failed for one in decoded])
    for own, message, chosen in zip(x, messages, mask, strict=True):
        owed = left_over(torch.from_numpy(own.copy()).to(device), message, failures)
        assert same(owed, np.where(chosen & ~spread, 0, own))


def stuck_blocks(unknown: np.ndarray, block: int) -> np.ndarray:
    """Peel cell by cell; return which blocks of entries hold one that remains."""
    left = {
        int(entry): list(hashed(int(entry), sketch_row(M, C))) for entry in unknown.nonzero()[0]
    }
    while True:
        cells = [cell for places in left.values() for cell, _ in places]
        load = np.bincount(cells, minlength=1)
        alone = [e for e, places in left.items() if any(load[cell] == 1 for cell, _ in places)]
        if not alone:
            break
        for entry in alone:
            del left[entry]
    blocks = np.zeros(-(-M // block), bool)
    blocks[[entry // block for entry in left]] = True
    return blocks


@pytest.mark.parametrize("hosts", [("cpu", "cuda"), ()])
@pytest.mark.parametrize("theta", [THETA, TOO_DENSE])
def test_peeling_loops(
    theta: float, hosts: tuple[str, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both loops run on both devices; they read off the same entries."""
    monkeypatch.setattr(sketch, "HOSTS", hosts)
    entries = np.sort(np.random.default_rng(1).choice(M, kept_entries(M, theta), replace=False))
    values = (np.arange(len(entries)) + 1).astype(np.float32)
    unknown = torch.from_numpy(entries).to(device)
    content = insert(
        unknown[None], torch.from_numpy(values).to(device)[None], sketch_row(M, C), SEED
    )
    filled = torch.nn.functional.pad(unknown, (0, 5), value=M)
    found, stuck = peel(content[0], filled, M, SEED, 24)
    marked = np.zeros(M, bool)
    marked[entries] = True
    expected = stuck_blocks(marked, 1)[entries]
    assert expected.any() == (theta == TOO_DENSE) and not expected.all()
    assert same(stuck, np.append(expected, [False] * 5))
    assert same(found[:-5], np.where(expected, 0, values))
