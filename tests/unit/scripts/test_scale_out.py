# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/scale_out.py``: bytes by link, and the table of time lost."""

import pytest

from tests.scripts import ROOT, load_script
from torchtitan_lr.estimate.hardware import load_hardware
from torchtitan_lr.formulas import faults

script = load_script("papers/scale_out")
SMALL = str(ROOT / "train_configs/cola_60m.toml")


def test_bytes_cross_the_link_of_their_ranks():
    """On 16 GPUs in nodes of 8, tensor parallelism stays inside and data parallelism does not."""
    hardware = load_hardware("h100_400gbit", script.HARDWARE)
    plan = script.plan_layout("BTP 8, FSDP 128", SMALL, 16, hardware)
    assert plan.inside > 0 and plan.across > 0
    # FSDP gathers the weights (bf16) for forward and backward and reduces the gradients (fp32);
    # a checkpoint has the weights and two moments in fp32: 12 bytes for each parameter.
    parameters = plan.checkpoint / 12
    gathered = parameters / 8 * (2 + 2 + 4)
    assert plan.across == pytest.approx(gathered, rel=0.1)
    alone = script.plan_layout("BTP 8, FSDP 128", SMALL, 8, hardware)
    assert alone.across == 0 and alone.inside == pytest.approx(plan.inside)


def test_an_average_step_of_tsr_adam():
    report = {
        "comm_bytes": {"tp": {"all_reduce": 5}, "dp_replicate": {"all_reduce": 7}},
        "tsr_comm_bytes": {
            "ordinary": {"dp_replicate": {"all_reduce": 4}},
            "average": {"dp_replicate": {"all_reduce": 6}},
        },
    }
    found = script.averaged_bytes(report)
    assert found == {"tp": {"all_reduce": 5}, "dp_replicate": {"all_reduce": 9}}


def test_time_lost():
    plan = script.Plan("a", 0, 0, 1.0, 1.0, 0, checkpoint=100, rank_bytes=10)
    table = script.loss_table([plan], 10_000, 10.0, 5.0, 60, 1.0)
    blocking, behind = (line.split(" | ") for line in table.splitlines()[2:])
    assert blocking[2] == "11.00 s" and behind[2] == "3.00 s"
    best = faults.daly_interval(11, 10_000)
    assert blocking[-2] == f"{best / 60:.1f} min"
    lost = faults.lost_share(600, 11, 60, 10_000)
    assert blocking[3 + script.INTERVALS.index(10)] == f"{100 * lost:.1f} %"
    # Asynchronous saves cost less, but a failure finds the last one unwritten for ten seconds.
    assert behind[5] == f"{100 * faults.lost_share(600, 3, 70, 10_000):.1f} %"


@pytest.mark.parametrize("option", ["--hours=0", "--storage=-1", "--world=4"])
def test_refused(option, capsys):
    with pytest.raises(SystemExit) as info:
        script.main([option])
    assert info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
