# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/scale_out.py``: bytes by link, and the table of time lost."""

import pytest

from tests.scripts import ROOT, load_script
from torchtitan_lr.formulas import faults

script = load_script("papers/scale_out")
SMALL = str(ROOT / "train_configs/cola_60m.toml")


def test_bytes_cross_the_link_of_their_ranks():
    """On 16 GPUs in nodes of 8, tensor parallelism stays inside and data parallelism does not."""
    run = script.run_of("BTP 8, FSDP 128", SMALL, 16)
    inside, across = script.bytes_by_link(run, script.average_rows(run), 8)
    checkpoint, held = script.checkpoint_bytes(run)
    # FSDP gathers the weights (bf16) for forward and backward and reduces the gradients (fp32);
    # a checkpoint has the weights and two moments in fp32: 12 bytes for each parameter.
    gathered = checkpoint / 12 / 8 * (2 + 2 + 4)
    assert inside > 0 and across == pytest.approx(gathered, rel=0.1)
    assert held == pytest.approx(checkpoint / 16, rel=0.02)
    # The control: in larger nodes nothing crosses.
    assert script.bytes_by_link(run, script.average_rows(run), 16) == (inside + across, 0)


def test_residuals_are_every_ranks_own():
    plain = script.checkpoint_bytes(script.run_of("BTP 8, FSDP 128", SMALL, 16))
    state, held = script.checkpoint_bytes(script.run_of("BTP 8, FSDP 128, TAGC 10×", SMALL, 16))
    assert state - plain[0] == 16 * (held - plain[1]) > 0


def test_time_lost():
    plan = script.Plan("a", 0, 0, 1.0, 1.0, 0, checkpoint=100, rank_bytes=10)
    table = script.loss_table([plan], 10_000, 10.0, 5.0, 60, 1.0)
    blocking, behind = (line.split(" | ") for line in table.splitlines()[2:])
    # The copy takes two seconds, of which one runs beside the step; a second of pause comes on top.
    assert blocking[2] == "11.00 s" and behind[2] == "2.00 s"
    best = faults.daly_interval(11, 10_000)
    assert blocking[-2] == f"{best / 60:.1f} min"
    lost = faults.lost_share(600, 11, 60, 10_000)
    assert blocking[3 + script.INTERVALS.index(10)] == f"{100 * lost:.1f} %"
    # Asynchronous saves cost less, but a failure finds the last one unwritten for ten seconds.
    slow = script.loss_table([plan], 10_000, 1.0, 5.0, 60, 1.0).splitlines()[3].split(" | ")
    assert slow[3:5] == ["-", slow[4]] and slow[4] != "-"  # one minute is less than 100 seconds
    assert behind[5] == f"{100 * faults.lost_share(600, 2, 70, 10_000):.1f} %"


@pytest.mark.parametrize("option", ["--hours=0", "--storage=-1", "--world=4"])
def test_refused(option, capsys):
    with pytest.raises(SystemExit) as info:
        script.main([option])
    assert info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
