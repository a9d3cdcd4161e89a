# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the ledger counts between pipeline stages is what the formula says, to the byte."""

import pytest

from tests.distributed.training import train
from tests.oracle.pipeline import boundary_elements
from tests.support.nightly import nightly
from tests.support.parity_runs import BF16, LAYOUTS, TINY, degrees, model, schedule
from tests.support.rank_pool import RankPool
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.messages import pipeline_traffic
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plans import tp_settings
from torchtitan_lr.parallel.stage_split import layers_before_boundaries

PP2_TP2 = LAYOUTS["pp2_tp2"][1]
SHORT = ["--training.steps=2", "--metrics.comm_ledger"]


def local_stages(pp_rank: int, degree: int, name: str) -> list[int]:
    """Stages of a rank, by torch's rules."""
    if name == "ZBVZeroBubble":
        return [pp_rank, 2 * degree - 1 - pp_rank]
    return [pp_rank, pp_rank + degree] if name == "Interleaved1F1B" else [pp_rank]


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("lax", "1F1B", LAYOUTS["pp4"][1]),
        *nightly(("lax", "1F1B", PP2_TP2)),
        ("lax", "ZBVZeroBubble", [*PP2_TP2, "--parallelism.tp_comm=sequence"]),
        *nightly(("lax", "Interleaved1F1B", [*PP2_TP2, "--parallelism.tp_plan=vanilla"])),
        *nightly(
            ("cola", "GPipe", [*PP2_TP2, "--parallelism.pipeline_parallel_microbatch_size=4"])
        ),
        *nightly(("full", "Interleaved1F1B", [*PP2_TP2, "--parallelism.tp_comm=sequence"])),
        ("cola", "1F1B", [*degrees(pipeline=2, local_batch=2), *BF16]),
    ],
)
def test_messages_of_every_boundary(
    family: str, name: str, options: list[str], four_ranks: RankPool
) -> None:
    arguments = [*model(family), *options, *schedule(name), *SHORT]
    runs = four_ranks.run(train, arguments, "", "", False)
    config = build_job_config([*TINY, *arguments])
    section, training = config.parallelism, config.training
    args = FLAVORS[family][config.model.flavor]
    args.update_from_config(config)
    settings = tp_settings(config, args, section.tensor_parallel_degree)
    boundaries = [
        boundary_elements(
            args, settings, section.tensor_parallel_degree, training.seq_len, blocks_before
        )
        for blocks_before in layers_before_boundaries(config, args.n_layers)
    ]
    assert len(boundaries) > 0
    degree, size = section.pipeline_parallel_degree, section.pipeline_parallel_microbatch_size
    batch_ranks = 4 // degree // section.tensor_parallel_degree
    microbatches = training.global_batch_size // batch_ranks // size
    for rank, run in enumerate(runs):
        messages = [row for row in run["ledger"] if row["scope"].startswith("boundary")]
        local = local_stages(rank // (4 // degree), degree, name)
        expected = pipeline_traffic(boundaries, local, size, microbatches)
        table = compare(messages, expected, {"activation": training.mixed_precision_param})
        assert list(differences(table)) == []
        itemsize = 4 if training.mixed_precision_param == "float32" else 2
        assert all(row["bytes"] == row["elements"] * itemsize for row in table)
        assert {row["mesh_dim"] for row in table} == {"pp"}
        others = [row for row in run["ledger"] if row not in messages]
        assert not any(row["op"] in ("send", "recv") for row in others)
