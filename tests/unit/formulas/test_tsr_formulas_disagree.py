# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam's sizes and the formulas that check them are two statements: a wrong size is noticed.

Rank 0 of four trains here with a fake process group; what it sends is compared with the formulas,
first as it is and then with one size of the optimizer off by one.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchtitan_lr
from tests.distributed.tsr_cases import BASE
from tests.distributed.tsr_ledger_cases import MESHES, expected, measure
from torchtitan_lr.formulas import tsr_traffic as traffic
from torchtitan_lr.optim.tsr import selection, sizes, stack, synchronize

SHAPES = {
    "tok_embeddings.weight": (64, 48),
    "layers.0.attention.wq.weight": (48, 48),
    "layers.0.attention.wk.weight": (49, 47),
    "layers.0.feed_forward.w1.weight": (80, 48),
    "layers.0.ffn_norm.weight": (48,),
    "output.weight": (64, 48),
}
SKETCH = replace(BASE, rank=4, refresh="sketch")
AUTO = replace(BASE, refresh="auto", exclude=("tok_embeddings.weight",))
SKETCHES = (64 + 48) * 5 + ((48 + 48) + (49 + 47) + (80 + 48)) * 5
"""Elements of Y and B of all four matrices at r = 4 and p = 1."""


@pytest.fixture(scope="module", autouse=True)
def four_fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def agree(layout, settings):
    return measure(layout, settings, SHAPES) == expected(settings, MESHES[layout], SHAPES)


def wider(*args):
    return sizes.sketch_width(*args) + 1


def narrower(*args):
    return sizes.sketch_width(*args) - 1


def rounded_down(size, ranks):
    for count in ranks:
        size //= count
    return size


def one_more_row(size, ranks):
    return sizes.largest_block(size, ranks) + 1


def dense_if_less(rows, columns, width, q, refresh):
    return sizes.refresh_is_dense(rows, columns, width, q, refresh) and (
        refresh == "dense" or rows * columns < (1 + q) * (rows + columns) * width
    )


def one_iteration_less(rows, columns, width, q, refresh):
    return sizes.refresh_is_dense(rows, columns, width, q - 1, refresh)


def fuller(lengths, limit):
    return sizes.split_buckets(lengths, limit + 1)


def emptier(lengths, limit):
    return sizes.split_buckets(lengths, limit - 1)


AUTO_8, AUTO_12 = replace(AUTO, rank=7), replace(AUTO, rank=11)
"""Sketches of 8 and 12 columns.

At 12, 49 · 47 is one less than 2(49 + 47) · 12, and 48 · 48 equals 2(48 + 48) · 12. At 8, the
larger half of wk's rows is 25: 25 · 47 > 2(25 + 47) · 8, but 24 · 47 < 2(24 + 47) · 8.
"""

ONLY_WQ = replace(AUTO_12, include=("*.wq.weight",), exclude=())
EVEN_CORES = replace(SKETCH, overlap_buckets=2)
"""Four cores of 16 elements in buckets of 32."""

UNEVEN_CORES = replace(EVEN_CORES, rank=2, embedding_rank=1)
"""Cores of 1, 4, 4 and 4 elements in buckets of 7; 8 would hold two of 4."""

WRONG = {
    "wider sketch": (selection, "sketch_width", wider, "replicate4", SKETCH),
    "narrower sketch": (selection, "sketch_width", narrower, "hsdp2x2", SKETCH),
    "block rounded down": (stack, "largest_block", rounded_down, "hsdp2x2", AUTO_8),
    "block one larger": (stack, "largest_block", one_more_row, "replicate4", AUTO_12),
    "dense only if less": (stack, "refresh_is_dense", dense_if_less, "replicate4", ONLY_WQ),
    "no iteration": (stack, "refresh_is_dense", one_iteration_less, "replicate4", AUTO_12),
    "emptier buckets": (synchronize, "split_buckets", emptier, "replicate4", EVEN_CORES),
    "fuller buckets": (synchronize, "split_buckets", fuller, "replicate4", UNEVEN_CORES),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_size_that_is_off_by_one(case, monkeypatch):
    module, name, wrong, layout, settings = WRONG[case]
    assert agree(layout, settings)
    monkeypatch.setattr(module, name, wrong)
    assert not agree(layout, settings)


@pytest.mark.parametrize("kind", ["gradients", "sketches"])
def test_a_bucket_that_is_off_by_one(kind, monkeypatch):
    """Buckets small enough for these shapes: full to the last element."""
    limit = {"gradients": 64 * 48 + 48, "sketches": SKETCHES}[kind]
    if kind == "sketches":
        assert limit < 64 * 48  # the head's gradient travels alone
    monkeypatch.setattr(traffic, "BUCKET_ELEMENTS", limit)
    monkeypatch.setattr(synchronize, "BUCKET_ELEMENTS", limit)
    assert agree("replicate4", SKETCH)
    monkeypatch.setattr(synchronize, "BUCKET_ELEMENTS", limit - 1)
    assert not agree("replicate4", SKETCH)


def test_a_sketch_that_is_off_by_one(monkeypatch):
    """A round of refreshes holds as many sketches as fit into a bucket."""
    monkeypatch.setattr(traffic, "BUCKET_ELEMENTS", SKETCHES)
    monkeypatch.setattr(synchronize, "BUCKET_ELEMENTS", SKETCHES)
    size = stack.MatrixStack.sketch_size
    monkeypatch.setattr(stack.MatrixStack, "sketch_size", lambda *args: size(*args) + 1)
    assert not agree("replicate4", SKETCH)


def test_both_statements_are_equal():
    assert sizes.BUCKET_ELEMENTS == traffic.BUCKET_ELEMENTS
    for m, n, r, p in product((1, 4, 9), (3, 5, 40), (1, 3), (0, 2, 5)):
        assert sizes.sketch_width(m, n, r, p) == traffic.sketch_width((m, n), r, p)
    for size, ranks in product(range(30), [(), (2,), (4,), (2, 3), (3, 2), (4, 2, 3)]):
        assert sizes.largest_block(size, ranks) == traffic.padded_block(size, ranks)
    for m, n, k, q in product((15, 16, 17), (15, 16, 17), range(1, 10), range(3)):
        for refresh in ("auto", "sketch", "dense"):
            step = traffic.TSRStep(q, refresh)
            found = sizes.refresh_is_dense(m, n, k, q, refresh)
            assert found == traffic.refresh_is_dense(m, n, k, step)
    for lengths in product((0, 1, 3, 6, 9), repeat=4):
        for limit in range(8):
            assert sizes.split_buckets(lengths, limit) == traffic.bucket_runs(lengths, limit)
    assert sizes.split_buckets([], 6) == []


def test_neither_imports_the_other():
    package = Path(torchtitan_lr.__file__).parent
    optimizer = sorted((package / "optim/tsr").glob("*.py"))
    assert len(optimizer) > 5
    assert not any("torchtitan_lr.formulas" in path.read_text() for path in optimizer)
    for name in ("tsr.py", "tsr_traffic.py"):
        assert "torchtitan_lr.optim" not in (package / "formulas" / name).read_text()
