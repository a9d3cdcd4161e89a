# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The table of several numbers of replicas, from runs with losses that are given."""

import shutil

from scripts.research import finished_runs, result_tables
from torchtitan_lr.experiments.sweep import losses_of
from torchtitan_lr.launch.run_folder import FINISHED

ABOVE = {"AdamW": 0.0, "Spectron": -0.03, "MuLoCo-30": 0.01}
"""How far families end above AdamW; others at 0.03."""

NUMBERS = 210496  # of the model


def finish(name, work):
    """Write a finished run of every point: the middle rate of a grid is best."""
    plan, count = finished_runs.plan_of(name, work), 0
    while len(points := plan.points(plan.searched(losses_of(work)))) > count:
        count = len(points)
        for point in points:
            family, seed = point.settings["family"], point.settings["seed"]
            rates = plan.experiment.families[family].learning_rates
            above = ABOVE.get(family.removeprefix("cola-"), 0.03) + 0.002 * seed * ("Lo" in family)
            worse = 0.1 * (point.settings["learning_rate"] != rates[len(rates) // 2])
            point.row = {"val_loss": 3 + 0.1 * seed + above + worse, "steps": 2040}
            point.save(work, FINISHED)
    return finished_runs.store(name, work)


def test_replicas_share_one_table_with_bytes(tmp_path, monkeypatch):
    for name in result_tables.REPLICAS["outer"]:
        shutil.copy(finished_runs.FOLDER / f"{name}.toml", tmp_path)
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    counts = [finish(name, tmp_path / "runs" / name) for name in result_tables.REPLICAS["outer"]]
    title, table, *answers, note = result_tables.section("outer").split("\n\n")
    assert title.endswith(":[^outer]") and note.startswith(f"[^outer]: {sum(counts)} runs, seeds")
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    rows = {name.removeprefix("cola-"): cells for name, *cells in lines}
    assert rows["MuLoCo-30"][:2] == ["3.112 \u00b1 0.102 (0.01)", "+0.012 [+0.007, +0.017]"]
    assert rows["MuLoCo-30-2bits"][:3] == ["-"] * 3  # of four replicas alone
    # A ring's sum of n bytes over K ranks is 2 (K - 1) / K n of each, a gather of K messages K - 1.
    plain, coded = 4 * NUMBERS / 30, -(-NUMBERS // 128) * (64 + 4) / 30
    for name, size, share in (("MuLoCo-30", plain, 1.5), ("MuLoCo-30-4bits", coded, 3)):
        sizes = [f"{size / 1e3:,.1f}", f"{share * size / 1e3:,.1f}"]
        assert [rows[name][2], rows[name][5]] == sizes
    for answer, replicas in zip(answers, (2, 4), strict=True):
        who = "cola-MuLoCo-30 reaches cola-AdamW's loss + 0.02 with the fewest bytes, "
        assert answer.startswith(f"**{replicas} replicas**: {who}")
        assert answer.endswith(": +0.012 [+0.007, +0.017], by its whole interval.")


def test_what_is_not_shown_is_said():
    keys = ("family", "sent", "minus_reference", "size")
    numbers = ("a", 4e3, None), ("b", 1e3, (0.03, 0.01, 0.05)), ("c", 2e3, (0.015, None, None))
    rows = [dict(zip(keys, (*row, "2 replicas"), strict=True)) for row in numbers]
    none, found = (result_tables.fewest_bytes(rows[:n], "a") for n in (2, 3))
    assert none.endswith("fewest bytes, 4.0 KB per step; none that sends less does.")
    assert found.endswith("2.0 KB per step for 4.0: +0.015, by its mean alone.")
