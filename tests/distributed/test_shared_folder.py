# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Each rank writes its own part; machines that mount one folder differently save and load it.

A background save writes what one in the foreground writes, whatever training does meanwhile.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.training import train
from tests.support.parity_runs import EXACT
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints import saving
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import verified
from torchtitan_lr.training.trainer import Trainer

RANKS_PER_MACHINE = 2

SMALL = 4096
"""Bytes: counters, settings and names, which every rank needs, are smaller once written."""

OPTIONS = [
    "--model.name=llama_cola",
    "--training.local_batch_size=2",
    "--training.steps=2",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
]


def train_on_machines(mounts: list[str], *options: str) -> dict[str, Any]:
    """Train with machines of two ranks, each with its own path of the dump folder."""
    opened: list[str] = []
    watching = False
    init_distributed = Trainer.init_distributed

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and arguments[1] in ("r", "rb"):
            path = Path(str(arguments[0]))
            if path.parent.name.startswith("step-") or path.name.startswith("tokenizer"):
                opened.append(path.name)

    def begin(self: Trainer) -> Any:
        nonlocal watching
        watching = True  # the checks, here of rank 0, are over
        return init_distributed(self)

    sys.addaudithook(hook)
    wrote: list[str] = []
    verified: list[str] = []
    loaded: Counter[str] = Counter()
    files = saving._SummingFileSystem
    create, read, total = files.create_stream, FileSystemReader.read_data, saving._sum_of

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if mode == "wb":
            wrote.append(Path(path).name)
        return create(self, path, mode)

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        infos = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        for info in infos.values():
            if info.length > SMALL:
                loaded[info.relative_path] += info.length
        return read(self, plan, planner)

    def sum_of(path: Path) -> list[int]:
        verified.append(path.name)
        return total(path)

    dump = mounts[dist.get_rank() // RANKS_PER_MACHINE]
    with (
        patch.object(files, "create_stream", create_stream),
        patch.object(FileSystemReader, "read_data", read_data),
        patch.object(saving, "_sum_of", sum_of),
        patch.object(Trainer, "init_distributed", begin),
    ):
        run = train([*OPTIONS, *options], "", dump)
    watching = False  # nothing takes the hook away
    return {**run, "wrote": wrote, "verified": verified, "loaded": dict(loaded), "opened": opened}


Runs = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The checkpoints' folder, a run that saves steps 1 and 2, and one that resumes step 2."""
    root = tmp_path_factory.mktemp("storage")
    (root / "dump").mkdir()
    for machine in range(2):
        (root / f"mount{machine}").symlink_to(root / "dump")
    mounts = [f"{root}/mount{machine}" for machine in range(2)]
    first = four_ranks.run(train_on_machines, mounts)
    again = four_ranks.run(train_on_machines, mounts, "--training.steps=3")
    return root / "dump/checkpoint", first, again


def test_each_rank_writes_its_own_part(runs: Runs) -> None:
    folder, first, _ = runs
    for rank, run in enumerate(first):
        contents = [".metadata.tmp"] if rank == 0 else []
        assert run["wrote"] == [f"__{rank}_0.distcp", *contents] * 2
    sizes = [(folder / f"step-2/__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.2 * min(sizes)


def test_machines_with_other_paths_share_a_folder(runs: Runs, reference: Any) -> None:
    folder, first, again = runs
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2", "step-3"}
    assert verified(folder / "step-3").finite
    alone = reference("--model.name=llama_cola", "--training.steps=3")
    assert again[0]["losses"] == pytest.approx(alone["losses"], rel=EXACT)
    assert again[0]["losses"][:2] == first[0]["losses"]


def test_a_machine_reads_its_part_alone(runs: Runs) -> None:
    """What a machine verifies is what it loads: from storage it reads these bytes once."""
    folder, _, again = runs
    for machine in range(2):
        ranks = range(machine * RANKS_PER_MACHINE, (machine + 1) * RANKS_PER_MACHINE)
        own = {f"__{rank}_0.distcp" for rank in ranks}
        assert {name for rank in ranks for name in again[rank]["verified"]} - {".metadata"} == own
        loaded = sum((Counter(again[rank]["loaded"]) for rank in ranks), Counter[str]())
        sizes = {name: (folder / "step-2" / name).stat().st_size for name in own}
        assert loaded.keys() == own
        # And no rank loads what another one of the machine does.
        assert all(0.8 * sizes[name] < loaded[name] < sizes[name] for name in own)


def test_what_all_ranks_need_is_read_by_one(runs: Runs) -> None:
    """Besides its own part, a rank opens the first one's, which has all counters."""
    for rank, run in enumerate(runs[2][1:], 1):
        assert set(run["opened"]) == {"__0_0.distcp", f"__{rank}_0.distcp"}


FULL = ["--model.name=llama_full", "--training.local_batch_size=4", "--training.steps=3"]
# A residual changes during backward, long before the optimizer's step.
FULL += ["--grad_compression.codec=sparse", "--grad_compression.level=10x"]
FULL.append("--training.seq_len=64")
Files = dict[str, dict[str, list[int]]]
"""Size and checksum of what each rank wrote, by step."""


def save_each_step(mode: str) -> Files:
    """Train three steps and save each of them, on every rank."""
    run = train([*OPTIONS, *FULL, f"--checkpoint.async_mode={mode}"])
    found = {}
    for folder in (Path(run["dump_folder"]) / "checkpoint").glob("step-*"):
        record = read_step(folder)
        assert record.finite
        files = record.files.items()
        found[folder.name] = {name: sums for name, sums in files if name != ".metadata"}
    return found


def test_the_files_are_the_same(two_ranks: RankPool) -> None:
    foreground, files = (two_ranks.run(save_each_step, mode)[0] for mode in ("disabled", "async"))
    assert files.keys() == {"step-1", "step-2", "step-3"}
    assert [*files["step-1"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert files == foreground
