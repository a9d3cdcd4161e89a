# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

BASE = [
    "--job.config_file=train_configs/debug_full.toml",
    "--training.local_batch_size=1",
    "--grad_compression.codec=sketch",
]
CUSTOM = "--grad_compression.level=custom"


def check(*argv, world=4):
    config = build_job_config([*BASE, *argv])
    check_job_config(config, world, "cpu")
    return config


def refusal(*argv, world=4):
    with pytest.raises(ConfigError) as info:
        check(*argv, world=world)
    text = str(info.value)
    assert "\n" not in text
    return text


REFUSALS = [
    (["codec=gzip"], "codec: got 'gzip'", "'none', 'sparse', 'sketch'"),
    (["theta=1"], "theta: got 1.0", "[0, 1)"),
    (["min_size=99999999"], "min_size: got 99999999", "the size of some tensor"),
]


@pytest.mark.parametrize(("options", "got", "want"), REFUSALS, ids=lambda value: str(value))
def test_refusals_name_key_value_and_what_works(options, got, want):
    text = refusal(*[f"--grad_compression.{option}" for option in options])
    assert text.startswith(f"grad_compression.{got}, expected ")
    assert want in text


@pytest.mark.parametrize(
    ("world", "options", "least"),
    [
        (2, ["level=4x"], 0.9014),
        (8, ["level=10x"], 0.9904),
        (4, ["level=custom", "c=4", "theta=0.9"], 0.9495),
    ],
)
def test_a_sketch_that_would_not_peel_names_the_smallest_theta(world, options, least):
    argv = [f"--grad_compression.{option}" for option in options]
    text = refusal(*argv, world=world)
    assert f"a theta of at least {least} (" in text and "does not peel" in text
    check(*argv, "--grad_compression.auto", world=world)
    c = {"2x": 2, "4x": 4, "10x": 10}.get(options[0].partition("=")[2], 4)
    at = [CUSTOM, f"--grad_compression.c={c}"]
    check(*at, f"--grad_compression.theta={least}", world=world)
    refusal(*at, f"--grad_compression.theta={least - 0.0001:.4f}", world=world)


@pytest.mark.parametrize(("world", "options"), [(4, ["level=10x"]), (1, [])])
def test_no_false_refusals(world, options):
    check(*[f"--grad_compression.{option}" for option in options], world=world)


def test_layouts():
    replicate = "--parallelism.data_parallel_replicate_degree="
    # The two hosts of HSDP exchange, not its four shards.
    check("--grad_compression.level=2x", replicate + "2", world=8)
    text = refusal(replicate + "4", world=4)
    assert text.startswith("grad_compression.codec: got 'sketch', expected 'none' unless FSDP")


def test_another_optimizer_is_refused():
    config = build_job_config(BASE)
    config.optimizer.name = "TSRAdam"
    from torchtitan_lr.checks.compression import check_grad_compression

    with pytest.raises(ConfigError, match=r"'none' with optimizer\.name = 'TSRAdam'"):
        check_grad_compression(config, 4, "cpu")
    config.optimizer.name = "Adam"
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(ConfigError, match="'none' with pipeline_parallel_degree > 1"):
        check_grad_compression(config, 4, "cpu")
