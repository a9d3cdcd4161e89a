# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that several tests look at."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration import runs
from tests.integration.runs import Finished

WANDB = """
enable_tensorboard = true
enable_wandb = true
wandb_project = "low-rank tests"
wandb_run_name = "tiny"
wandb_group = "integration"
wandb_tags = ["cola", "two ranks"]

[profiling]
enable_profiling = true
profile_freq = 5
"""


@dataclass
class Run:
    folder: Path
    config: Path
    done: Finished


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """CoLA on 2 ranks with everything on, truly started as a user does, from another folder."""
    base = tmp_path_factory.mktemp("finished")
    config = runs.write_config(
        base / "dump", "llama_cola", steps=99, interval=4, validation_freq=4, extra=WANDB
    )
    done = runs.run(
        [runs.ROOT / "run_llama_train.sh", "--training.steps=6"],
        cwd=base,
        PYTHON=sys.executable,
        CONFIG_FILE=config.name,
        NGPU="2",
        LOG_RANK="1",
    )
    assert done.status == 0, done.everything
    return Run(base / "dump", config, done)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """SVD on 2 ranks from start to end, by torchrun without the launcher."""
    base = tmp_path_factory.mktemp("undisturbed")
    config = runs.write_config(base / "dump")
    train = ["-m", "torchtitan_lr.train", f"--job.config_file={config}"]
    done = runs.run([*runs.TORCHRUN, *train])
    assert done.status == 0, done.everything
    return Run(base / "dump", config, done)
