# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every data-parallel layout trains like one process with the same global batch (fp64)."""

from typing import Any

import pytest

from tests.distributed.data_layouts import LAYOUTS
from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    EXACT,
    largest_difference,
    model,
)
from tests.support.rank_pool import RankPool

# Data parallelism wraps whole blocks, whatever is in them: the family with the most inputs a block
# meets every layout, each other family two.
PAIRS = [
    *(("lax", layout) for layout in LAYOUTS if layout.endswith("accumulate2")),
    *nightly(*(("lax", layout) for layout in LAYOUTS if not layout.endswith("accumulate2"))),
    ("full", "replicate4"),
    ("svd", "fsdp4"),
    *nightly(("full", "fsdp4_accumulate2"), ("svd", "hsdp2x2_accumulate2")),
    *nightly(("cola", "replicate4_accumulate2")),
    ("cola", "hsdp2x2"),
]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_layout_equals_one_process(
    family: str, layout: str, four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *LAYOUTS[layout]])[0]
    assert largest_difference(run, reference(*model(family))) < EXACT


@pytest.mark.parametrize("family", ["full", "lax"])
def test_accumulation_on_one_process(family: str, one_rank: RankPool, reference: Any) -> None:
    run = one_rank.run(train, [*model(family), "--training.local_batch_size=2"])[0]
    assert largest_difference(run, reference(*model(family))) < EXACT
