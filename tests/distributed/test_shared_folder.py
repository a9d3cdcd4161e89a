# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Each rank writes its own part; machines that mount one folder differently save and load it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.distributed.training import train
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints import saving
from torchtitan_lr.checkpoints.saving import verified

RANKS_PER_MACHINE = 2


OPTIONS = [
    "--model.name=llama_cola",
    "--training.local_batch_size=2",
    "--training.steps=2",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
]


def train_on_machines(dump: str, mounts: list[str], *options: str) -> dict[str, Any]:
    """Train with machines of two ranks, each with its own path of the checkpoints' folder."""
    wrote: list[str] = []
    files = saving._SummingFileSystem
    create = files.create_stream

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if mode == "wb":
            wrote.append(Path(path).name)
        return create(self, path, mode)

    folder = f"--checkpoint.folder={mounts[dist.get_rank() // RANKS_PER_MACHINE]}"
    with patch.object(files, "create_stream", create_stream):
        return {**train([*OPTIONS, folder, *options], "", dump), "wrote": wrote}


Runs = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The checkpoints' folder, a run that saves steps 1 and 2, and one that resumes step 2."""
    root = tmp_path_factory.mktemp("storage")
    (root / "checkpoints").mkdir()
    for machine in range(2):
        (root / f"mount{machine}").symlink_to(root / "checkpoints")
    mounts = [f"{root}/mount{machine}" for machine in range(2)]
    first = four_ranks.run(train_on_machines, str(root / "dump"), mounts)
    again = four_ranks.run(train_on_machines, str(root / "dump"), mounts, "--training.steps=3")
    return root / "checkpoints", first, again


def test_each_rank_writes_its_own_part(runs: Runs) -> None:
    folder, first, _ = runs
    for rank, run in enumerate(first):
        contents = [".metadata.tmp"] if rank == 0 else []
        assert run["wrote"] == [f"__{rank}_0.distcp", *contents] * 2
    sizes = [(folder / f"step-2/__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.2 * min(sizes)


def test_machines_with_other_paths_share_a_folder(runs: Runs, four_ranks: RankPool) -> None:
    folder, first, again = runs
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2", "step-3"}
    assert verified(folder / "step-3").finite
    undisturbed = four_ranks.run(train, [*OPTIONS, "--training.steps=3"])
    assert again[0]["losses"] == undisturbed[0]["losses"]
    assert again[0]["losses"][:2] == first[0]["losses"]
