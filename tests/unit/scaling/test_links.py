# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The race of an experiment's methods: bytes, seconds on links, winners."""

import json
import math

import pytest

from scripts.research import finished_runs
from tests.unit.scaling.test_experiment import plan_of, scaling, write
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.links import (
    SECONDS_FILE,
    beaten,
    holm,
    read_seconds,
    verdict,
    wire_share,
)
from torchtitan_lr.scaling.sweep import POINT_FILE

# Both methods are AdamW to the plan; what differs is what their runs have recorded.
RACE = (
    ('["training.local_batch_size=2", "validation.steps=1"]', '["metrics.comm_ledger"]'),
    ("seeds = [0, 1]", "ranks = 2\nseeds = [0, 1, 2]"),
    ("[5e-4, 1e-3, 2e-3]", "[1e-3]"),
    ("[families.cola]", '[families.terse]\nmodel = "llama_full"'),
)
STEPS = 40


def record_runs(plan, sent):
    """Write runs as they end: the loss falls by 0.1 per step, a little later with every seed."""
    for point in plan.main_points(dict.fromkeys(plan.costs, 1e-3)):
        folder, family = plan.work / point.name, point.settings["family"]
        folder.mkdir(parents=True)
        row = {"status": "finished", "val_loss": 5.0, "steps": STEPS}
        record = {"arguments": [point.config, *point.arguments], "row": row}
        (folder / POINT_FILE).write_text(json.dumps(record))
        lines = []
        for step in range(1, STEPS + 1):
            line = {"step": step, "loss_metrics/global_avg_loss": 9 - 0.1 * step}
            line["loss_metrics/global_avg_loss"] += 0.01 * point.settings["seed"]
            line |= {"comm_bytes/fsdp": sent[family], "time_metrics/end_to_end(s)": 0.01}
            lines.append(json.dumps(line) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))


def report(tmp_path, capsys, *options):
    arguments = ["report", write(tmp_path, *RACE), f"--out={tmp_path / 'work'}", *options]
    status = scaling.main(arguments)
    return status, capsys.readouterr()


def test_who_wins_which_link(tmp_path, capsys):
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    status, said = report(tmp_path, capsys, "--links=8,1e6")
    assert status == 0
    # FSDP's ranks send half of what the ledger counts: 40 steps of 1 MB at 1 MB/s, and 0.4 s.
    full, terse = (
        next(line.split("|") for line in said.out.splitlines() if line.startswith(f"| {name} "))
        for name in ("full", "terse")
    )
    assert [float(full[4]), float(terse[4])] == [40.0, 4.0]
    assert float(full[5].split()[0]) == pytest.approx(40.1, abs=0.4)
    assert float(terse[5].split()[0]) == pytest.approx(float(full[5].split()[0]) / 9, rel=0.2)
    assert "- 8 Mbit/s (modelled): terse wins" in said.out
    for name in ("bytes", "seconds"):
        for size in ("a", "b"):
            picture = tmp_path / f"work/links_{name}_llama_full_{size}_0.05.png"
            assert picture.read_bytes()[:4] == b"\x89PNG"
    # On a link that was measured the bytes do not count; equal times have no winner.
    measured = {"8": {"full": 0.5, "terse": 0.5}, "9": {"full": 0.5}}
    (tmp_path / "work" / SECONDS_FILE).write_text(json.dumps(measured))
    _, said = report(tmp_path, capsys, "--links=8,9")
    assert "- 8 Mbit/s (measured): no difference shown between full and terse" in said.out
    assert "- 9 Mbit/s (modelled): terse wins" in said.out  # one of them has not been measured


def test_runs_that_did_not_count_are_refused(tmp_path, capsys):
    assert report(tmp_path, capsys)[0] == 2
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    path = next((tmp_path / "work").glob("terse_a*/metrics.jsonl"))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::2]))
    status, said = report(tmp_path, capsys)
    assert status == 2 and "metrics.log_freq = 1" in said.err and said.err.count("\n") == 1
    for wrong in ("0", "x", "50,50"):
        assert report(tmp_path, capsys, f"--links={wrong}")[0] == 2


def test_stored_runs_have_the_same_race(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    record_runs(plan_of(tmp_path, *RACE), {"full": 2e6, "terse": 2e5})
    before = report(tmp_path, capsys)[1].out
    finished_runs.store("x", tmp_path / "work")
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert finished_runs.restore("x", tmp_path / "work") == 8
    assert report(tmp_path, capsys)[1].out == before


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"8": 1}', '{"8": {"full": "x"}}', '{"8": {"full": 0, "terse": 1}}']
)
def test_seconds_that_are_none_are_refused(text, tmp_path):
    assert read_seconds(tmp_path / SECONDS_FILE) == {}
    (tmp_path / SECONDS_FILE).write_text(text)
    with pytest.raises(ConfigError, match="seconds per step such as"):
        read_seconds(tmp_path / SECONDS_FILE)


def test_a_method_that_alone_reaches_the_loss_has_won_no_test():
    assert verdict({}, "full") == "full alone reaches the loss"
    assert verdict({"terse": 0.01}, "full") == "full wins"
    assert verdict({"terse": None}, "full") == "no difference shown between full and terse"


def test_holm_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
    assert found == {"a": 0.04, "c": 0.09, "b": 0.09, "d": None}


def test_shares_of_a_ring():
    assert wire_share("dp_replicate", 4, 1) == 1.5 and wire_share("fsdp", 1, 4) == 0.75
    with pytest.raises(ValueError, match="dp_replicate, fsdp"):
        wire_share("tp", 1, 1)


def test_times_that_differ_by_less_than_they_are_known_are_no_winner():
    """Whole steps of one length: seeds often have one ratio, whose spread is 0."""
    slower = {"a": {0: 50.0, 1: 50.0, 2: 50.0}, "b": {0: 50.5, 1: 50.5, 2: 50.5}}
    assert beaten(slower, "a")["b"] > 0.05
    twice = slower | {"b": {0: 100.0, 1: 100.0, 2: 100.0}}
    assert beaten(twice, "a")["b"] < 0.001
    # By hand: logs .1, .2, .3 have t = 2 · 3^(1/2), two-sided p of 2 degrees of freedom .0742.
    noisy = {"a": dict.fromkeys(range(3), 1.0)}
    noisy["b"] = {seed: math.exp((seed + 1) / 10) for seed in range(3)}
    assert beaten(noisy, "a")["b"] == pytest.approx(0.0742, abs=1e-4)
