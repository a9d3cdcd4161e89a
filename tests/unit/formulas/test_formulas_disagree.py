# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whatever decides what is sent is broken on purpose: the comparison with the formulas fails.

Every size is compared twice: as it is, where nothing may differ, and off by one, where something
must. Gradient exchanges run here as one rank of a group that does not exist: its collectives do
nothing, and the ledger counts them.
"""

import sys
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.oracle.compression import bits_per_entry, large_sketch_peels, least_theta
from torchtitan_lr.compression import fsdp, peeling
from torchtitan_lr.compression.codecs import CODECS as CODEC_CLASSES
from torchtitan_lr.compression.codecs import bitmap, codec_bits, unit_codec
from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.fsdp import CompressedAllReduce, CompressedReduceScatter
from torchtitan_lr.compression.peeling import (
    HASH_ROWS,
    load_limit,
    sketch_row,
    smallest_theta,
    unit_load,
)
from torchtitan_lr.compression.settings import CompressionSettings
from torchtitan_lr.compression.sizes import (
    LEVELS,
    CodecSizes,
    candidates,
    exchange_unit,
    kept_entries,
    packed_bytes,
    sent_bytes,
    spreads_packed,
    verdict_block,
)
from torchtitan_lr.formulas.compression import (
    Exchange,
    all_reduce_traffic,
    can_be_decoded,
    reduce_scatter_traffic,
    replicated,
    returned_entries,
    sent_entries,
    sketch_cells,
    verdict_bytes,
)
from torchtitan_lr.formulas.memory import sharded
from torchtitan_lr.ledger.comparison import compare, differences
from torchtitan_lr.ledger.ledger import CommLedger

RANKS = 4
COMPRESSED, DENSE = 3000, 7
"""Entries of a destination; a verdict has blocks of 3, and of 4 it would be shorter."""

CODECS = {
    "dense": CodecSizes("dense"),
    "sparse": CodecSizes("sparse", 1, 0.9),
    "sketch": CodecSizes("sketch", 10, 0.9875),
    "sum1": CodecSizes("sketch", 10, 0.9875, "sum1"),
    "sum4": CodecSizes("sketch", 10, 0.9875, "sum4"),
}


@pytest.fixture(scope="module")
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def compared(codec, all_reduce, group):
    """Where ledger and formulas differ in one exchange; and how wrong `bytes_saved` is."""
    entries = COMPRESSED * RANKS if all_reduce else COMPRESSED
    spans = [Span(entries, True), Span(DENSE, False)]
    device = torch.device("cpu")
    own = Compressor("unit", codec, spans, group, device, all_reduce=all_reduce)
    gradients = torch.ones(entries + DENSE)
    ledger = CommLedger([], {group.group_name: "fsdp"})
    with ledger:
        if all_reduce:
            CompressedAllReduce(own)(gradients)
        else:
            rows = gradients.repeat(RANKS)
            CompressedReduceScatter(own)(gradients, rows, group, dist.ReduceOp.SUM)
    if all_reduce:
        exchange = replicated(entries, DENSE, RANKS, codec)
        expected = all_reduce_traffic(exchange, codec, "step", "fsdp")
    else:
        expected = reduce_scatter_traffic(Exchange(RANKS, entries, DENSE), codec, "step", "fsdp")
    expected = [replace(row, pass_="optimizer") for row in expected]  # outside of any model
    dtypes = {"gradient": "float32", "index": "uint8"}
    table = compare(ledger.rows(), expected, dtypes, unknown_scopes=())
    assert any(row["calls"] for row in table)
    whole = 4 * (entries + DENSE) * (1 if all_reduce else RANKS)
    saved = whole - sum(row["bytes"] for row in table)
    return differences(table), own.bytes_saved() - saved


@pytest.mark.parametrize("all_reduce", [False, True])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_an_exchange_is_what_the_formulas_say(codec, all_reduce, four_ranks):
    assert compared(codec, all_reduce, four_ranks) == ([], 0)


def replace_everywhere(monkeypatch, original, wrong):
    """Put a function in place of another one wherever the compression has its name."""
    found = [
        module
        for name, module in sys.modules.items()
        if name.startswith("torchtitan_lr.compression")
        and getattr(module, original.__name__, None) is original
    ]
    assert found
    for module in found:
        monkeypatch.setattr(module, original.__name__, wrong)


def one_more(function):
    return lambda *args: function(*args) + 1


def one_byte_more(mask, bits=1):
    return pad(PACK(mask, bits), (0, 1))


def one_row_entry_more(*args):
    unit = exchange_unit(*args)
    return replace(unit, compressed=unit.compressed + 1)


PACK = bitmap.pack
SENT = {
    "kept entries": (kept_entries, one_more(kept_entries), "sparse", False),
    "kept entries, returned": (kept_entries, one_more(kept_entries), "sparse", True),
    "row of the sketch": (sketch_row, one_more(sketch_row), "sketch", False),
    "bitmap": (bitmap.pack, one_byte_more, "sparse", False),
    "index": (bitmap.pack, one_byte_more, "sum4", False),
    "bitmap, returned": (bitmap.pack, one_byte_more, "sketch", True),
    "verdict": (verdict_block, one_more(verdict_block), "sketch", False),
    "unit": (exchange_unit, one_row_entry_more, "sparse", True),
    "candidates": (candidates, one_more(candidates), "sketch", True),
    "form of the return": (spreads_packed, lambda *_: False, "sketch", True),
}


@pytest.mark.parametrize(("size", "wrong", "codec", "all_reduce"), SENT.values(), ids=SENT)
def test_a_wrong_size_on_the_wire_is_noticed(
    size, wrong, codec, all_reduce, four_ranks, monkeypatch
):
    replace_everywhere(monkeypatch, size, wrong)
    assert compared(CODECS[codec], all_reduce, four_ranks)[0]


SAVED = [
    *(("sparse", part) for part in ("index", "values")),
    *((codec, part) for codec in ("sketch", "sum4") for part in ("index", "sketch", "verdict")),
    ("dense", "values"),
]


@pytest.mark.parametrize(("codec", "part"), SAVED)
def test_a_wrong_metric_of_bytes_is_noticed(codec, part, four_ranks, monkeypatch):
    """Only the metric is wrong here, not what is sent."""
    kind = CODEC_CLASSES[CODECS[codec].name]
    right = kind.message_bytes

    def wrong(self, m):
        parts = right(self, m)
        return parts | {part: parts[part] + 1}

    monkeypatch.setattr(kind, "message_bytes", wrong)
    wrong_rows, error = compared(CODECS[codec], False, four_ranks)
    assert wrong_rows == [] and error == -RANKS


def test_a_wrong_sum_of_bytes_is_noticed(four_ranks, monkeypatch):
    monkeypatch.setattr("torchtitan_lr.compression.compressor.sent_bytes", one_more(sent_bytes))
    wrong_rows, error = compared(CODECS["dense"], False, four_ranks)
    assert wrong_rows == [] and error != 0


def unequal_bits():
    """Codecs whose bits per parameter are not the formulas', by FSDP or by HSDP."""
    levels = [(c, theta) for c, theta in LEVELS.values()]
    sketches = [
        CodecSizes("sketch", c, theta, index) for c, theta in levels for index in ("exact", "sum4")
    ]
    sparse = [CodecSizes("sparse", 1, theta) for theta in (0.4, *(theta for _, theta in levels))]
    return [
        (codec, replicas)
        for codec in (CodecSizes("dense"), *sparse, *sketches)
        for replicas in (0, 2, 4)
        if sum(codec_bits(codec, replicas).values())
        != pytest.approx(bits_per_entry(codec, replicas or 4, replicas > 0), rel=1e-6)
    ]


def test_wrong_bits_per_parameter_are_noticed(monkeypatch):
    assert unequal_bits() == []
    for kind in CODEC_CLASSES.values():
        for part in kind.build(CodecSizes(kind.name, 10, 0.9), 4).bits():
            right = kind.bits
            with monkeypatch.context() as patch:
                patch.setattr(
                    kind, "bits", lambda own, r=right, p=part: (b := r(own)) | {p: b[p] + 1e-3}
                )
                assert {codec.name for codec, _ in unequal_bits()} == {kind.name}


LOADS = [(c, ranks) for c in (0.5, 0.75, 0.76, 2, 3.3, 10, 100) for ranks in (1, 2, 3, 8, 64, 512)]


def unequal_limits():
    """Sketches that one side accepts and the other does not, and the least θ likewise."""
    thetas = (0.0, 0.5, 0.8, 0.9, 0.95, 0.9807, 0.9806, 0.9875, 0.9904, 0.9903)
    return [
        (c, ranks)
        for c, ranks in LOADS
        if peeling.smallest_theta(c, ranks) != least_theta(c, ranks)
        or any(
            peeling.peels(c, theta, ranks) != large_sketch_peels(c, theta, ranks)
            for theta in (*thetas, least_theta(c, ranks), least_theta(c, ranks) - 1e-4)
            if theta >= 0
        )
    ]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("PEELING_LIMIT", 0.7501),
        ("PEELING_LIMIT", 0.7499),
        ("THETA_STEP", 1e-3),
        ("THETA_STEP", 1e-5),
        ("union_density", lambda ranks, theta: 1 - theta ** (ranks + 1)),
        ("smallest_theta", lambda *args: smallest_theta(*args) + 1e-12),
        ("peels", lambda c, theta, ranks: c * (1 - theta**ranks) < 0.75 - 1e-9),
    ],
)
def test_another_limit_of_peeling_is_noticed(name, wrong, monkeypatch):
    assert unequal_limits() == []
    monkeypatch.setattr(peeling, name, wrong)
    assert unequal_limits()


GRID = [
    (m, CodecSizes("sketch", c, theta), ranks)
    for m in (*range(1, 200), 1023, 1024, 1025, 3000, 10**6 + 1, 12_345_677)
    for c, theta in ((2, 0.8), (2.5, 0.81), (4, 0.9), (10, 0.9875), (3.3, smallest_theta(3.3, 8)))
    for ranks in (2, 4, 8)
]


def unequal_sizes(*, kept=kept_entries, row=sketch_row, block=verdict_block, sent=candidates):
    """Sizes of the codecs' functions that are not the formulas', over units of many sizes."""
    return [
        (m, codec)
        for m, codec, ranks in GRID
        if (
            kept(m, codec.theta),
            HASH_ROWS * row(m, codec.c),
            packed_bytes(-(-m // block(m))),
            sent(ranks, m, codec.theta),
        )
        != (
            sent_entries(m, codec.theta),
            sketch_cells(m, codec.c),
            verdict_bytes(m),
            returned_entries(ranks, m, codec.theta),
        )
    ]


def test_sizes_agree_over_many_units():
    assert unequal_sizes() == []
    for name, function in (("kept", kept_entries), ("row", sketch_row), ("sent", candidates)):
        assert len(unequal_sizes(**{name: one_more(function)})) == len(GRID)
    assert unequal_sizes(block=one_more(verdict_block))


def unequal_decisions():
    return [
        (m, codec)
        for m, codec, ranks in GRID
        for all_reduce in (False, True)
        if (unit_codec(codec, ranks * m if all_reduce else m, ranks, all_reduce) == codec)
        != can_be_decoded(codec, m, ranks)
    ]


@pytest.mark.parametrize("size", [unit_load, load_limit, kept_entries, sketch_row])
def test_a_unit_that_travels_by_another_codec_is_noticed(size, monkeypatch):
    assert unequal_decisions() == []
    replace_everywhere(monkeypatch, size, one_more(size))
    assert unequal_decisions()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("PEELING_LIMIT", 0.74), ("SHARP_LIMIT", 0.8), ("SMALL_SKETCH", 1.1), ("HASH_ROWS", 4)],
)
def test_another_fit_of_small_sketches_is_noticed(name, wrong, monkeypatch):
    monkeypatch.setattr(peeling, name, wrong)
    assert unequal_decisions()


def packed_unit(mesh):
    """Compressed entries of a destination, of a weight that does not divide by the ranks."""
    model = fully_shard(torch.nn.Linear(11, 37, bias=False), mesh=mesh)
    settings = CompressionSettings(CODECS["sparse"], 0.9, RANKS, "all", (), 1, torch.float32, 0)
    fsdp.apply_gradient_compression(model, mesh, settings, all_reduce=False)
    return fsdp.compressor_of(model).unit.compressed


def test_a_unit_that_is_packed_otherwise_is_noticed(four_ranks, monkeypatch):
    """FSDP pads a shard, and the padding is exchanged too."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    assert packed_unit(mesh) == prod(sharded((37, 11), RANKS)) == 10 * 11
    monkeypatch.setattr(fsdp, "_parts", lambda *_: [("weight", 37 * 11 // RANKS)])
    assert packed_unit(mesh) != prod(sharded((37, 11), RANKS))
