# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An imported model trains on: under a plan, with TSR-Adam, from the dense model's own loss."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import train
from tests.support.parity_runs import EXACT, LAYOUTS, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.hf.export import export_hf
from torchtitan_lr.hf.import_hf import import_folder
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel

ASSETS = Path("torchtitan_lr/data/assets/bpe4k")
TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=4", "--optimizer.tsr_embedding_rank=8"]


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: Any) -> Path:
    """An export of a dense model in fp64 that is no longer a fresh one."""
    model = LlamaModel(FLAVORS["full"]["parity"])
    model.init_weights()
    generator = torch.Generator().manual_seed(11)
    for parameter in model.double().parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.1 * noise
    folder: Path = tmp_path_factory.mktemp("dense")
    export_hf(model.model_args, model.state_dict(), folder)
    return folder


def imported(folder: Path, out: Path, family: str | None = None, rank: int | None = None) -> Any:
    """Import the folder; the arguments of a run that starts from it."""
    values: dict[str, Any] = {"calibration": None, "dtype": None, "device": "cpu"}
    values |= {"folder": folder, "out": out, "family": family, "rank": rank}
    made = import_folder(
        Namespace(tokenizer=ASSETS, calibration_tokens=1, text_column="text", **values)
    )
    return [
        f"--model.name={made['model']}",
        f"--model.flavor={out}/model_args.json",
        f"--model.hf_assets_path={made['tokenizer']}",
        "--checkpoint.enable",
        "--checkpoint.interval=1000",
        f"--checkpoint.initial_load_path={made['checkpoint']}",
        "--training.no_shuffle",  # batches on which three steps are seen to learn
    ]


@pytest.fixture(scope="module")
def dense_run(dense_folder: Path, one_rank: RankPool, tmp_path_factory: Any) -> dict[str, Any]:
    options = imported(dense_folder, tmp_path_factory.mktemp("full") / "out")
    run: dict[str, Any] = one_rank.run(train, [*options, *LAYOUTS["dp1"][1]])[0]
    return run


@pytest.fixture(scope="module")
def whole(dense_folder: Path, tmp_path_factory: Any) -> list[str]:
    """Factors of the dense model's full rank: the same function."""
    options: list[str] = imported(dense_folder, tmp_path_factory.mktemp("svd") / "o", "svd", 64)
    return options


def test_btp_goes_on_from_the_imported_model(
    whole: list[str], dense_run: dict[str, Any], one_rank: RankPool, two_ranks: RankPool
) -> None:
    reference = one_rank.run(train, [*whole, *LAYOUTS["dp1"][1]])[0]
    assert abs(reference["losses"][0] / dense_run["losses"][0] - 1) < EXACT
    assert reference["losses"] != dense_run["losses"]  # the second step's gradient is another one
    run = two_ranks.run(train, [*whole, *LAYOUTS["tp2"][1], "--parallelism.tp_plan=btp"])[0]
    assert largest_difference(run, reference) < EXACT
