# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of parameters: the same training in every layout, also where a stage lacks a group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.parity_runs import EXACT, LAYOUTS, largest_difference, model
from tests.support.rank_pool import RankPool

GROUPS = r"""
[optimizer]
weight_decay = 0.5
[[optimizer.groups]]  # not on the last stage
pattern = 'embeddings|layers\.0\..*\.A\.'
lr_multiplier = 3
[[optimizer.groups]]  # not on the first one
pattern = 'layers\.1.*norm|output'
lr_multiplier = 0.25
weight_decay_multiplier = 0
"""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "pp2_tp2") for name in ("AdamW", "TSRAdam", "LoRAMuon")),
        ("LoRAMuon", "fsdp2_tp2"),
        *nightly(("AdamW", "fsdp2_tp2"), ("TSRAdam", "fsdp2_tp2")),
    ],
)
def test_every_layout_has_the_same_groups(
    name: str,
    layout: str,
    reference: Callable[..., dict[str, Any]],
    four_ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tables = Path(tmp_path_factory.getbasetemp()) / "groups.toml"
    tables.write_text(GROUPS)
    options = [*model("cola"), f"--optimizer.name={name}", "--optimizer.tsr_rank=8"]
    options.append("--optimizer.tsr_embedding_rank=8")
    grouped = [*options, f"--job.config_file={tables}"]
    run = four_ranks.run(train, [*grouped, *LAYOUTS[layout][1]])[0]
    assert largest_difference(run, reference(*grouped)) < EXACT
    decay = "--optimizer.weight_decay=0.5"
    assert largest_difference(run, reference(*options, decay)) > 1e-4
