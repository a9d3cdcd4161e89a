# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A pipeline trains like one process: losses, gradient norms and parameters (fp64).

All families, degrees and schedules are here, with plans, data parallelism, checkpointing and
compilation, though not every combination; ``test_parity_matrix.py`` has them all.
"""

import re
from typing import Any

import pytest

from tests.distributed.training import SPOILT, train
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    DEEP,
    EXACT,
    LAYOUTS,
    degrees,
    flavor,
    largest_difference,
    model,
    schedule,
    trained_weights,
)
from tests.support.rank_pool import RankPool

# Sequences of another length than in training.
VALIDATED = ["--validation.enable", "--validation.steps=2", "--validation.seq_len=8"]
VALIDATED += ["--validation.first_step"]

PP4, PP2_TP2, PP2_FSDP2 = (LAYOUTS[name][1] for name in ("pp4", "pp2_tp2", "fsdp2_pp2"))
REPLICATE2 = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
]
LOW_RANK = ["--activation_checkpoint.mode=low_rank"]
FULL = ["--activation_checkpoint.mode=full"]
COMPILE = ["--compile.enable", "--compile.backend=eager"]
ZBV, INTERLEAVED = schedule("ZBVZeroBubble"), schedule("Interleaved1F1B")


@pytest.fixture(scope="module")
def weights(one_rank: RankPool) -> str:
    """A checkpoint of LaX; weights of another seed, so that those not loaded are noticed."""
    return trained_weights(one_rank, [*model("lax"), *DEEP, *LAYOUTS["dp1"][1]])


@pytest.mark.parametrize("layout", ["pp4", *nightly("pp2_tp2"), "fsdp2_pp2"])
def test_layouts_from_the_weights_of_one_process(
    layout: str, weights: str, four_ranks: RankPool, reference: Any
) -> None:
    seed = ["--checkpoint.enable", f"--checkpoint.initial_load_path={weights}"]
    ranks, options = LAYOUTS[layout]
    assert ranks == 4
    run = four_ranks.run(train, [*model("lax"), *options, *DEEP, *seed])[0]
    assert largest_difference(run, reference(*model("lax"), *DEEP, *seed)) < EXACT
    assert largest_difference(run, reference(*model("lax"), *DEEP)) > 1e-3


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("full", [*PP2_FSDP2, *INTERLEAVED]),
        *nightly(("svd", [*PP2_TP2, *schedule("GPipe")])),
        ("cola", PP4),
        *nightly(("lax", [*PP2_TP2, *ZBV])),
        *nightly(("cola", [*PP2_FSDP2, *ZBV])),
        *nightly(("full", [*PP2_TP2, *ZBV])),
        *nightly(("lax", [*PP2_TP2, "--parallelism.tp_comm=sequence"])),
        *nightly(("lax", [*PP2_TP2, "--parallelism.tp_plan=vanilla", *ZBV])),
        *nightly(
            ("lax", [*PP2_TP2, "--parallelism.tp_plan=vanilla_replicated", *INTERLEAVED]),
        ),
        *nightly(("lax", [*PP2_TP2, "--parallelism.no_tp_grouping", "--parallelism.tp_norm=sync"])),
        ("cola", [*PP2_TP2, "--parallelism.tp_comm=sequence"]),
        *nightly(("lax", [*PP2_TP2, *LOW_RANK])),
        *nightly(("cola", [*PP2_FSDP2, *FULL, *INTERLEAVED])),
        *nightly(("cola", [*PP2_TP2, *COMPILE, *LOW_RANK, *INTERLEAVED])),
        ("lax", [*degrees(pipeline=2, local_batch=2), *REPLICATE2]),
        *nightly(("cola", [*PP2_FSDP2, "--parallelism.fsdp_reshard_after_forward=always"])),
        *nightly(("lax", [*PP2_TP2, "--parallelism.pipeline_parallel_microbatch_size=1"])),
        ("lax", [*PP2_TP2, "--low_rank.lax_gate=scalar", *ZBV]),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(o.split(".")[-1] for o in value)
    ),
)
def test_layout_equals_one_process(
    family: str, options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *options])[0]
    gated = [option for option in options if "lax_gate" in option]
    expected = reference(*model(family), *flavor(options), *gated)
    assert largest_difference(run, expected) < EXACT


@pytest.mark.parametrize(
    "options",
    [
        # HSDP, with accumulation
        [
            *(*degrees(pipeline=2, local_batch=1), *schedule("GPipe")),
            "--parallelism.data_parallel_replicate_degree=2",
        ],
        # FSDP2 with tensor parallelism
        [*degrees(tensor=2, pipeline=2, local_batch=4), *ZBV],
    ],
    ids=["hsdp", "fsdp_tp"],
)
def test_three_dimensions(options: list[str], eight_ranks: RankPool, reference: Any) -> None:
    run = eight_ranks.run(train, [*model("lax"), *options])[0]
    assert largest_difference(run, reference(*model("lax"), *flavor(options))) < EXACT


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        *((3, "1F1B"), (4, "Interleaved1F1B"), (3, "ZBVZeroBubble")),
        *nightly((4, "1F1B"), (3, "Interleaved1F1B"), (4, "ZBVZeroBubble")),
    ],
)
def test_validation_is_exact(
    batch: int, name: str, two_ranks: RankPool, one_rank: RankPool
) -> None:
    options = [*model("lax"), *VALIDATED, "--training.steps=2"]
    options += [f"--validation.local_batch_size={batch}"]
    microbatches = ["--parallelism.pipeline_parallel_microbatch_size=2"]
    runs = two_ranks.run(train, [*options, *degrees(pipeline=2), *microbatches, *schedule(name)])
    expected = one_rank.run(train, [*options, *degrees(), *flavor(schedule(name))])[0]
    assert len(expected["val_losses"]) == 2
    # Rank 0 writes, whichever rank has the last stage; every rank knows the result.
    assert runs[0]["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)
    assert {run["last_val_loss"] for run in runs} == {runs[0]["val_losses"][-1]}


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("nan@2", r"loss of rank 1 is not finite"),
        ("nan_gradient@2", rf"gradient norm is nan \(rank 1: {re.escape(SPOILT)}\)"),
    ],
)
def test_what_is_not_finite_stops_every_stage(fault: str, what: str, two_ranks: RankPool) -> None:
    options = [*model("cola"), *degrees(pipeline=2)]
    for error in two_ranks.errors(train, options, fault):
        assert re.search(f"NonFiniteError: step 2: {what}", error)


def test_validation_leaves_sharded_stages_as_they_were(
    four_ranks: RankPool, one_rank: RankPool
) -> None:
    """Validation after every step, with weights gathered in between."""
    options = [*model("cola"), *VALIDATED, "--training.steps=3", "--validation.freq=1"]
    sharded = [*LAYOUTS["fsdp2_pp2"][1], *schedule("Interleaved1F1B")]
    sharded.append("--validation.local_batch_size=4")
    run = four_ranks.run(train, [*options, *sharded])[0]
    alone = [*options, *degrees(), *flavor(sharded), "--validation.local_batch_size=8"]
    expected = one_rank.run(train, alone)[0]
    assert len(expected["val_losses"]) == 3
    assert run["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)
    assert largest_difference(run, expected) < EXACT
