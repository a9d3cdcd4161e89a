# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs of models with lanes: every layout trains like one process, and goes on in another."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_tsr_training import LAYOUTS as TSR_LAYOUTS
from tests.distributed.test_tsr_training import TSR
from tests.distributed.training import train
from tests.support.parity_runs import (
    BF16,
    EXACT,
    LAYOUTS,
    ROUNDING,
    bf16_references,
    flavor,
    largest_difference,
    rounding_excess,
    schedule,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.hf.loading import build_model_args, load_model, read_run_config
from torchtitan_lr.inference.completion import generate

CAAT = ["--model.name=llama_full", "--caat.lanes=4", "--caat.sync_fraction=0.5"]
HYBRID = ["--model.name=llama_cola", *CAAT[1:], "--parallelism.tp_plan=btp_caat"]
TP2, TP4 = LAYOUTS["fsdp2_tp2"][1], LAYOUTS["tp4"][1]
PP2_TP2, PP2_FSDP2 = LAYOUTS["pp2_tp2"][1], LAYOUTS["fsdp2_pp2"][1]
REPLICATE2_ACCUMULATE2 = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
    "--training.local_batch_size=2",
]
VALIDATED = ["--validation.enable", "--validation.steps=1", "--validation.seq_len=16"]
COMPILE = ["--compile.enable", "--compile.backend=eager"]
SAVED = ["--checkpoint.enable", "--checkpoint.interval=1"]


@pytest.fixture(scope="module")
def reference(one_rank: RankPool) -> Any:
    @cache
    def run(*model: str) -> dict[str, Any]:
        return one_rank.run(train, [*model, *LAYOUTS["dp1"][1], *VALIDATED])[0]

    return lambda model: run(*model)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (CAAT, [*TP4, *VALIDATED]),
        (CAAT, [*TP2, "--parallelism.disable_loss_parallel"]),
        (CAAT, [*TP2, *REPLICATE2_ACCUMULATE2]),
        (CAAT, PP2_TP2),
        (CAAT, [*PP2_TP2, *schedule("ZBVZeroBubble")]),
        (CAAT, PP2_FSDP2),
        (CAAT, [*TP2, "--activation_checkpoint.mode=full"]),
        (CAAT, [*PP2_TP2, "--activation_checkpoint.mode=selective"]),
        (CAAT, [*TP4, *COMPILE, *VALIDATED]),
        (HYBRID, [*TP4, *VALIDATED]),
        (HYBRID, [*TP2, "--activation_checkpoint.mode=low_rank"]),
        (HYBRID, PP2_TP2),
    ],
    ids=lambda value: "-".join(option.split(".")[-1] for option in value),
)
def test_layout_equals_one_process(
    model: list[str], options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model, *options])[0]
    expected = reference([*model, *flavor(options)])
    assert largest_difference(run, expected) < EXACT
    if "--validation.enable" in options:
        assert run["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)


def test_other_lanes_are_another_model(one_rank: RankPool, reference: Any) -> None:
    """The control: differences between models are far above the tolerance."""
    fewer = one_rank.run(train, [*CAAT, "--caat.lanes=2", *LAYOUTS["dp1"][1]])[0]
    assert largest_difference(fewer, reference(CAAT)) > 1e-3


def test_mixed_precision_is_the_same_regime(four_ranks: RankPool, one_rank: RankPool) -> None:
    references = bf16_references(one_rank, [*CAAT, *LAYOUTS["dp1"][1]], train)
    for options in (TP4, [*TP2, "--caat.backward_sum=activation"]):
        run = four_ranks.run(train, [*CAAT, *BF16, *options])[0]
        assert rounding_excess(run, references) < ROUNDING, options


def test_tsr_adam_trains_lanes(four_ranks: RankPool, one_rank: RankPool) -> None:
    """An optimizer that reads the weights' placements."""
    run = four_ranks.run(train, [*CAAT, *TSR, *TSR_LAYOUTS["tp2xdp2"]])[0]
    alone = one_rank.run(train, [*CAAT, *TSR, *LAYOUTS["dp1"][1]])[0]
    assert largest_difference(run, alone) < EXACT


def test_a_checkpoint_moves_between_degrees(
    four_ranks: RankPool, one_rank: RankPool, reference: Any
) -> None:
    """TP4 -> TP2 with FSDP2 -> one process -> TP2 with a pipeline, stopped by a signal each."""
    steps = ["--training.steps=4"]
    options = [*CAAT, *SAVED, *steps]
    folder = four_ranks.run(train, [*options, *TP4], "sigterm@1")[0]["dump_folder"]
    assert four_ranks.run(train, [*options, *TP2], "sigterm@2", folder)[0]["step"] == 2
    alone = [*options, *LAYOUTS["dp1"][1]]
    assert one_rank.run(train, alone, "sigterm@3", folder)[0]["step"] == 3
    run = four_ranks.run(train, [*options, *PP2_TP2], "", folder)[0]
    assert run["step"] == 4
    assert largest_difference(run, reference([*CAAT, *steps])) < EXACT
    check_sampling(Path(folder) / "checkpoint/step-4", run["parameters"])


def check_sampling(step_dir: Path, weights: dict[str, Any]) -> None:
    """One process samples from what ranks have trained, with all of its lanes."""
    model = load_model(step_dir, build_model_args(read_run_config(step_dir)))
    assert (model.model_args.lanes, model.model_args.sync_fraction) == (4, 0.5)
    for name, parameter in model.named_parameters():
        # The run computed in fp64; the model is read in the precision that the file records.
        expected = torch.from_numpy(weights[name]).to(parameter.dtype)
        assert torch.equal(parameter, expected), name
    tokens = generate(model, torch.tensor([[5, 6, 7]]), 4, 0.0, 0, 0)
    assert tokens.shape == (1, 7)
    with torch.no_grad():  # greedy: each is the likeliest after those before it
        assert torch.equal(model(tokens)[:, 2:-1].argmax(-1), tokens[:, 3:])


@pytest.mark.parametrize("how", ["resume", "weights"])
def test_a_checkpoint_of_other_lanes_is_refused(
    how: str, one_rank: RankPool, tmp_path_factory: Any
) -> None:
    base = tmp_path_factory.getbasetemp() / "lanes"
    one = [*CAAT, *LAYOUTS["dp1"][1], *SAVED, "--training.steps=1", "--lr_scheduler.warmup_steps=0"]
    if not base.exists():  # once for both cases
        one_rank.run(train, one, "", str(base))
    load, folder = [], str(base)
    if how == "weights":
        folder = ""
        load = [
            f"--checkpoint.initial_load_path={base}/checkpoint/step-1",
            "--checkpoint.initial_load_model_only",
        ]
    (error,) = one_rank.errors(train, [*one, "--caat.lanes=2", *load], "", folder)
    assert "ConfigError: caat.lanes: got 2, expected 4" in error
