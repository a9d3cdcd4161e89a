# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Masked documents train the same in every layout as on one rank (fp64)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.documents import masks_of_blocks
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    EXACT,
    LAYOUTS,
    degrees,
    flavor,
    largest_difference,
    model,
    schedule,
)
from tests.support.rank_pool import RankPool

MASKED = "--training.mask_documents"


def recompute(mode: str) -> list[str]:
    return [f"--activation_checkpoint.mode={mode}"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of a few tokens, several in a sequence of 16."""
    path: Path = tmp_path_factory.mktemp("text") / "a.jsonl"
    texts = [f"x{i} = {i * i}" + " + y" * (i % 3) for i in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--training.dataset=local", f"--training.dataset_path={path}"]


LANES = ["--caat.lanes=2", "--caat.sync_fraction=0.5"]
CASES = {
    "pipeline of LaX": ("lax", [*LAYOUTS["pp2_tp2"][1], *schedule("1F1B")], []),
    "BTP by sequence, latents kept": (
        "cola",
        [*degrees(tensor=4), "--parallelism.tp_comm=sequence", *recompute("low_rank")],
        [],
    ),
    "latents of BTP, gathered": (
        "cola",
        [
            *degrees(tensor=2),
            *("--parallelism.context_parallel_degree=2", "--parallelism.cp_gather=latents"),
        ],
        [],
    ),
    "rows that ranks share": (
        "lax",
        [*degrees(), "--parallelism.context_parallel_degree=4"],
        ["--low_rank.lax_gate=scalar"],
    ),
    "sharded pipeline": ("cola", [*LAYOUTS["fsdp2_pp2"][1], *schedule("ZBVZeroBubble")], []),
    "Megatron, all recomputed": ("full", [*LAYOUTS["fsdp2_tp2"][1], *recompute("full")], []),
    "lanes": ("full", [*LAYOUTS["fsdp2_tp2"][1], *recompute("selective")], LANES),
}


def train_in_blocks(arguments: list[str]) -> dict[str, Any]:
    with masks_of_blocks():
        return train(arguments)


BLOCKS = ("pipeline of LaX", "BTP by sequence, latents kept", "latents of BTP, gathered", "lanes")
"""Cases with the masks of GPUs, against references that add a mask to all scores."""


@pytest.mark.parametrize("name", [*list(CASES)[:4], *nightly(*list(CASES)[4:])])
def test_layouts(name: str, four_ranks: RankPool, reference: Any, corpus: list[str]) -> None:
    family, layout, common = CASES[name]
    call = train_in_blocks if name in BLOCKS else train
    run = four_ranks.run(call, [*model(family), *layout, *common, *corpus, MASKED])[0]
    same = [*model(family), *corpus, *flavor(layout), *common]
    assert largest_difference(run, reference(*same, MASKED)) < EXACT
    assert largest_difference(run, reference(*same)) > 1e-3


def test_validation(four_ranks: RankPool, reference: Any, corpus: list[str]) -> None:
    """Through a pipeline of shared rows, with sequences of another length than in training."""
    options = ["--validation.enable", "--validation.steps=2", "--validation.seq_len=12", MASKED]
    layout = [*degrees(pipeline=2), "--parallelism.context_parallel_degree=2"]
    run = four_ranks.run(train, [*model("svd"), *layout, *corpus, *options])[0]
    expected = reference(*model("svd"), *corpus, *options)
    assert run["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)
    plain = reference(*model("svd"), *corpus, *options[:-1])["val_losses"]
    assert run["val_losses"] != pytest.approx(plain, rel=1e-3)
