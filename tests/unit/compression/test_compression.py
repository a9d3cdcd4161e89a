# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch

from tests.support.codecs import reduce_in_process
from torchtitan_lr.compression.codecs import SketchCodec, codec_bits, unit_codec
from torchtitan_lr.compression.peeling import (
    load_limit,
    peels,
    sketch_row,
    smallest_theta,
    unit_load,
)
from torchtitan_lr.compression.sizes import (
    LEVELS,
    CodecSizes,
    candidates,
    kept_entries,
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


@pytest.mark.parametrize("level", LEVELS)
def test_our_bits_per_parameter(level):
    c, theta = LEVELS[level]
    assert sum(codec_bits(CodecSizes("sketch", c, theta)).values()) == 1 + 32 / c
    assert sum(codec_bits(CodecSizes("sparse", c, theta)).values()) == 1 + 32 * (1 - theta)
    assert sum(codec_bits(CodecSizes("dense")).values()) == 32


@pytest.mark.parametrize("codec", ["sketch", "sparse"])
@pytest.mark.parametrize("level", LEVELS)
def test_exact_bytes_are_the_bits_where_sizes_divide(codec, level):
    c, theta = LEVELS[level]
    ranks, m = 4, 96_000
    kind = CodecSizes(codec, c, theta)
    rows = reduce_scatter_traffic(Exchange(ranks, m), kind, "block 0")
    verdict = [row for row in rows if row.op == "all_gather"]
    size = {"index": 1, "gradient": 4}
    total = sum(size[row.role] * row.elements for row in rows if row not in verdict)
    assert 8 * total == pytest.approx(sum(codec_bits(kind).values()) * ranks * m, rel=1e-12)
    assert [row.elements for row in verdict] == (
        [] if codec == "sparse" else [ranks * verdict_bytes(m)]
    )


@pytest.mark.parametrize("codec", ["sketch", "sparse"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("replicas", [2, 4])
def test_exact_bytes_of_an_all_reduce_are_its_bits(codec, level, replicas):
    """What replicas get back is part of it: bitmap and values, or all of the sum."""
    kind, shard = CodecSizes(codec, *LEVELS[level]), 960_000 * replicas
    unit = replicated(shard, 0, replicas, kind)
    rows = all_reduce_traffic(unit, kind, "block 0")
    size = {"index": 1, "gradient": 4}
    total = 8 * sum(size[row.role] * row.elements for row in rows)
    bits = sum(codec_bits(kind, replicas).values())
    verdicts = 8 * replicas * verdict_bytes(unit.compressed) if codec == "sketch" else 0
    assert total - verdicts == pytest.approx(bits * shard, rel=1e-6)
    assert bits > sum(codec_bits(kind).values()) + 1


@pytest.mark.parametrize(
    ("ranks", "level", "holds"),
    [
        (2, "2x", True),
        (2, "4x", False),  # 0.76
        (2, "10x", True),
        (4, "2x", False),
        (4, "4x", False),
        (4, "10x", True),
        (8, "2x", False),
        (8, "4x", False),
        (8, "10x", False),
    ],
)
def test_where_the_published_levels_peel(ranks, level, holds):
    c, theta = LEVELS[level]
    assert peels(c, theta, ranks) is holds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64, 512])
@pytest.mark.parametrize("c", [0.5, 0.75, 0.76, 1, 2, 4, 10, 100])
def test_the_smallest_theta_passes_and_none_below_it(c, ranks):
    theta = smallest_theta(c, ranks)
    assert 0 <= theta < 1 and peels(c, theta, ranks)
    if theta:
        below = 1 - theta + 1.01e-4 if theta < 0.999 else 1.12 * (1 - theta)
        assert not peels(c, 1 - below, ranks)
    assert theta == round(theta, 4 if theta < 0.998 else 12)


def test_known_smallest_thetas():
    assert smallest_theta(2, 2) == 0.7906
    assert smallest_theta(4, 2) == 0.9014
    assert smallest_theta(10, 8) == 0.9904
    # √(1 − 0.75/3) = 0.86602 and (1 − 0.75/10)^(1/4) = 0.98070, rounded up
    assert smallest_theta(3, 2) == 0.8661
    assert smallest_theta(10, 4) == 0.9807


def unpeeled(m, codec, ranks, trials=4):
    """Share of the sent entries that owners cannot decode, of random gradients."""
    generator = torch.Generator().manual_seed(m)
    stuck = indexed = 0.0
    for seed in range(trials):
        rows = torch.randn(ranks, ranks, m, generator=generator)
        counts = reduce_in_process(SketchCodec(ranks, codec.c, codec.theta), rows, seed)[2]
        stuck += sum(float(own["unpeeled"]) for own in counts)
        indexed += sum(float(own["indexed"]) for own in counts)
    return stuck / indexed


AUTO8 = CodecSizes("sketch", 10, smallest_theta(10, 8))
"""Just peels on eight ranks, where a unit is large."""


def test_whole_entries_and_cells_decide():
    """Of 16 entries each of 8 ranks sends one, not .15, to 3 cells, not 1.6."""
    assert peels(AUTO8.c, AUTO8.theta, 8)
    assert unit_load(16, AUTO8.c, AUTO8.theta, 8) == pytest.approx(16 * (1 - (15 / 16) ** 8) / 3)
    assert unit_load(10**6, AUTO8.c, AUTO8.theta, 8) == pytest.approx(
        10 * (1 - 0.9904**8), rel=1e-3
    )
    assert unit_codec(AUTO8, 10**6, 8, False) == AUTO8
    for small in (1, 16, 64):
        assert unit_codec(AUTO8, small, 8, False) == CodecSizes("dense")
    # Of an all-reduced shard each rank owns one part.
    assert unit_codec(AUTO8, 64 * 8, 8, True) == CodecSizes("dense")
    assert unit_codec(AUTO8, 2500, 8, False) == AUTO8
    assert unit_codec(AUTO8, 2500, 8, True) == CodecSizes("dense")
    sparse = CodecSizes("sparse", 1, 0.99)
    assert unit_codec(sparse, 16, 8, False) == sparse
    assert can_be_decoded(sparse, 16, 8) and can_be_decoded(AUTO8, 2500, 8)
    assert not any(can_be_decoded(AUTO8, small, 8) for small in (1, 16, 64))


def test_small_units_do_not_peel_where_large_ones_do():
    """What the check is for: the same codec, by the size of the unit."""
    assert unpeeled(16, AUTO8, 8) > 0.9 and unpeeled(64, AUTO8, 8) > 0.4
    assert unpeeled(2500, AUTO8, 8, trials=1) < 0.06


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("c", [2, 4, 10])
def test_accepted_units_peel(c, ranks):
    """Each of these sketches is the smallest that is accepted at its sparsity."""
    for theta in (smallest_theta(c, ranks), 1 - (1 - smallest_theta(c, ranks)) / 2):
        codec = CodecSizes("sketch", c, theta)
        accepted = [m for m in range(8, 6000, 8) if unit_codec(codec, m, ranks, False) == codec]
        m = accepted[0]
        assert unit_load(m, c, theta, ranks) <= load_limit(m, c) <= 0.75
        # 4 to 9% in the mean of many trials, of which a small sketch needs more to show it.
        assert unpeeled(m, codec, ranks, trials=4 if m > 100 else 40) < 0.15


@pytest.mark.parametrize("entries", [kept_entries, sent_entries], ids=["codec", "formula"])
def test_counts_are_exact_where_floating_point_is_not(entries):
    assert entries(10, 0.9) == 1
    assert entries(1000, 0.8) == 200
    assert entries(8000, 0.9875) == 100
    assert entries(5, 0.9875) == 1
    assert entries(7, 0.0) == 7
    assert entries(300, 0.81) == 57  # 0.81·300 is 243.00000000000003
    assert entries(1000, 0.9875) == 12  # 987.5 are left out at least


def test_known_sizes_of_a_row():
    assert candidates(4, 100, 0.8) == 80 and candidates(8, 100, 0.8) == 100
    assert returned_entries(4, 100, 0.8) == 80 and returned_entries(8, 100, 0.8) == 100
    assert sketch_row(3001, 10) == 101 and sketch_row(1, 10) == 1
    assert sketch_cells(3001, 10) == 303 and sketch_cells(1, 10) == 3
