# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The estimated size of a checkpoint, against one that the trainer wrote."""

import math

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.commands import ROOT, Command
from tests.unit.tiny_trainer import tiny_trainer
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.held_memory import STEP_BYTES
from torchtitan_lr.costs.rank_memory import checkpoint_bytes

DEBUG = ROOT / "train_configs" / "debug_tagc.toml"


def test_against_a_checkpoint(tmp_path):
    options = ["--checkpoint.enable", "--training.steps=1", "--lr_scheduler.warmup_steps=1"]
    with tiny_trainer(tmp_path, *options) as trainer:
        trainer.train()
        estimate = checkpoint_bytes(read_run(trainer.job_config, 1))
    folder = tmp_path / "checkpoint" / "step-1"
    found = {"weights": 0, "optimizer": 0}
    counters = 0
    for name, entry in read_metadata(str(folder)).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            size = math.prod(entry.size) * entry.properties.dtype.itemsize
            part = "optimizer" if name.startswith("optimizer.") else "weights"
            counters += STEP_BYTES * name.endswith(".step")
            found[part] += 0 if name.endswith(".step") else size
    assert found["weights"] == estimate["weights"]
    # `tiny_trainer` turns the parameters into fp64 before the optimizer makes its moments, and
    # after the checkpoint manager took the fp32 ones.
    assert counters > 0 and found["optimizer"] == 2 * (estimate["optimizer"] - counters)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 0 < stored - sum(found.values()) < 2**20  # a table per file, the position in the data


def test_residuals_of_all_ranks(capsys):
    """TAGC: every rank has its own residual of each compressed unit, nothing else grows."""
    command = [str(DEBUG), "--plans=full"]
    runs = [read_run(build_job_config([f"--job.config_file={DEBUG}"]), world) for world in (2, 4)]
    small, large = map(checkpoint_bytes, runs)
    assert small["residuals"] > 0 and large["residuals"] == pytest.approx(
        2 * small["residuals"], rel=0.01
    )
    assert {k: small[k] for k in ("weights", "optimizer")} == {
        k: large[k] for k in ("weights", "optimizer")
    }
    script = Command("estimate")
    assert script.main([*command, "--world=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (size,) = (line for line in lines if line.startswith("checkpoint (GiB, all ranks)"))
    total = sum(small.values())
    assert float(size.split()[4]) == pytest.approx(total / 2**30, rel=1e-3)
