# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What ``compare`` would run, and its refusals; tests/integration has whole runs."""

import pytest

from tests.commands import Command
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.main import parser_of
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.scaling.compare import COUNTED, points_of

compare = Command("compare")

CONFIG = "train_configs/debug_cola.toml"
LOW_RANK = "--activation_checkpoint.mode=low_rank"


def configs_of(*arguments):
    """The configuration of every point by name, checked for 4 ranks."""
    found = {}
    for point in points_of(parser_of("compare").parse_args(list(arguments))):
        own = f"--job.dump_folder=o/{point.name}"  # as the command gives it
        given = [f"--job.config_file={point.config}", *point.arguments, own]
        found[point.name] = build_job_config(given)
        check_job_config(found[point.name], 4, "cpu")
        assert point.settings["checkpointing"] == found[point.name].activation_checkpoint.mode
    return found


def test_each_run_is_timed_and_then_counted():
    configs = configs_of(CONFIG, "--steps=3", "--low_rank.rank=16", "--out=o/costs")
    names = ["full", "vanilla", "btp"]
    assert list(configs) == [name + suffix for name in names for suffix in ("", COUNTED)]
    for name, config in configs.items():
        counted = name.endswith(COUNTED)
        assert config.training.steps == (2 if counted else 5)  # two of warm-up, three timed
        assert config.metrics.comm_ledger == counted
        assert config.metrics.log_freq == 1 and not config.checkpoint.enable
        assert config.metrics.wandb_group == "costs"
        assert config.low_rank.rank == (0 if name.startswith("full") else 16)


def test_plans_that_are_compared_share_a_mode_of_checkpointing():
    modes = {c.activation_checkpoint.mode for c in configs_of(CONFIG, LOW_RANK).values()}
    assert modes == {"full"}
    # Without full rank, all have the configured one.
    configs = configs_of(CONFIG, LOW_RANK, "--plans=vanilla,btp")
    assert {c.activation_checkpoint.mode for c in configs.values()} == {"low_rank"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "CONFIG"),
        ([CONFIG, "--steps=0"], "--steps: got 0, expected at least 1"),
        ([CONFIG, "--warmup=-1"], "--warmup: got -1"),
        ([CONFIG, "--plans=full,btq"], "--plans: got 'btq', expected some of full"),
        ([CONFIG, CONFIG], "expected files of different names"),
        ([CONFIG, "--low_rank.rnk=4"], "low_rank.rnk"),
        ([CONFIG, "--parallelism.tensor_parallel_degree=3"], "tensor_parallel_degree: got 3"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, arguments, expected):
    monkeypatch.setenv("NGPU", "4")
    status, _, err = compare.ask(capsys, *arguments, f"--out={tmp_path}")
    assert status == 2 and expected in err and err.count("\n") == 1
