# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The race of an experiment's methods: bytes, seconds on links, winners."""

import json
import math
import re

import pytest

from scripts.research import finished_runs, result_tables
from tests.unit.scaling.test_experiment import plan_of, scaling, write
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.links import SECONDS_FILE, Course, Link, read_seconds, wire_share
from torchtitan_lr.scaling.races import beaten, holm, read_races, rules, verdict
from torchtitan_lr.scaling.sweep import POINT_FILE, Sweep
from torchtitan_lr.training.history import STEP_SECONDS

# Both methods are AdamW to the plan; what differs is what their runs have recorded.
RACE = (
    ('["training.local_batch_size=2", "validation.steps=1"]', '["metrics.comm_ledger"]'),
    ("seeds = [0, 1]", "ranks = 2\nseeds = [0, 1, 2]"),
    ("[5e-4, 1e-3, 2e-3]", "[1e-3]"),
    ("[families.cola]", '[families.terse]\nmodel = "llama_full"'),
)
STEPS = 40


def record_runs(plan, sent, lost=(), worse=0.0, status="diverged"):
    """Write runs as they end: the loss falls by 0.1 per step, a little later with every seed.

    Args:
        plan: The plan.
        sent: Bytes per step by family.
        lost: Families and seeds of runs that have not finished.
        worse: Added to the losses of terse.
        status: Theirs.
    """
    for point in plan.main_points(dict.fromkeys(plan.costs, 1e-3)):
        folder, family = plan.work / point.name, point.settings["family"]
        folder.mkdir(parents=True)
        row = {"status": "finished", "val_loss": 5.0, "steps": STEPS}
        if (family, point.settings["seed"]) in lost:
            row = {"status": status}
        record = {"arguments": [point.config, *point.arguments], "row": row}
        (folder / POINT_FILE).write_text(json.dumps(record))
        lines = []
        for step in range(1, STEPS + 1):
            line = {"step": step, "loss_metrics/global_avg_loss": 9 - 0.1 * step}
            line["loss_metrics/global_avg_loss"] += 0.01 * point.settings["seed"]
            line["loss_metrics/global_avg_loss"] += worse * (family == "terse")
            line |= {"comm_bytes/fsdp": sent[family], "time_metrics/end_to_end(s)": 0.01}
            lines.append(json.dumps(line) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))


def report(tmp_path, capsys, *options, changes=()):
    path = write(tmp_path, *RACE, *changes)
    status = scaling.main(["report", path, f"--out={tmp_path / 'work'}", *options])
    return status, capsys.readouterr()


def races_of(plan):
    """Return the races of both sizes on a link of 8 Mbit/s."""
    points = plan.main_points(dict.fromkeys(plan.costs, 1e-3))
    Sweep(plan.work, points)
    return read_races(plan, points, [8.0])


def table_of(plan):
    """Return the table of size a."""
    return races_of(plan)[0].table()


def cells_of(text, family):
    """Return the cells of the first line of a family."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {family} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_who_wins_which_link(tmp_path, capsys):
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    status, said = report(tmp_path, capsys, "--links=8,1e6")
    assert status == 0
    # FSDP's ranks send half of what the ledger counts: 40 steps of 1 MB at 1 MB/s, and 0.4 s.
    full, terse = (cells_of(said.out, family) for family in ("full", "terse"))
    assert [float(full[3]), float(terse[3])] == [40.0, 4.0]
    assert float(full[4].split()[0]) == pytest.approx(40.4, abs=0.01)
    assert float(terse[4].split()[0]) == pytest.approx(4.4, abs=0.01)
    assert "- 8 Mbit/s (modelled): terse wins" in said.out
    assert "| 8 Mbit/s (modelled): s to full + 0.02 [95%] |" in said.out
    assert "the verdicts, 4 in all, are not corrected" in said.out and "Seed" not in said.out
    for name in ("bytes", "seconds"):
        for size in ("a", "b"):
            picture = tmp_path / f"work/links_{name}_llama_full_{size}_0.05.png"
            assert picture.read_bytes()[:4] == b"\x89PNG"
    # On a link that was measured the bytes do not count; equal times have no winner.
    measured = {"8": {"full": 0.5, "terse": 0.5}, "9": {"full": 0.5}}
    measured["compute"] = {"full": 0.26, "terse": 0.01}
    (tmp_path / "work" / SECONDS_FILE).write_text(json.dumps(measured))
    _, said = report(tmp_path, capsys, "--links=8,9")
    assert "- 8 Mbit/s (measured): no difference shown between full and terse" in said.out
    # Its model stands beside it, from what steps take without a link: 40 times .26 and 1 second.
    times = [float(cell.split()[0]) for cell in cells_of(said.out, "full")[4:6]]
    assert times == [20.0, 50.4] and "- 8 Mbit/s (modelled): terse wins" in said.out
    assert "- 9 Mbit/s (modelled): terse wins" in said.out  # one of them has not been measured


@pytest.mark.parametrize(
    ("finished", "status", "state", "says"),
    [
        (1, "diverged", "1/3, 2 diverged", "full alone reaches the loss with all seeds"),
        (0, "refused", "0/3, 3 refused", "full alone reaches the loss with all seeds"),
        (1, "failed", "1/3, 2 failed", "no verdict: terse has not ended"),
        (2, "cut off", "2/3, 1 cut off or running", "no verdict: terse has not ended"),
        (0, "to do", "0/3, 3 not run", "no verdict: terse has not ended"),
    ],
)
def test_a_method_without_all_of_its_seeds_does_not_compete(
    tmp_path, finished, status, state, says
):
    lost = [("terse", seed) for seed in range(finished, 3)]
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5}, lost, status=status)
    table = table_of(plan)
    assert cells_of(table, "terse")[1] == state
    assert cells_of(table, "terse")[4] == "-"
    assert f"- 8 Mbit/s (modelled): {says}" in table.splitlines()


@pytest.mark.parametrize("lost", [1, 3])
def test_without_all_seeds_of_the_reference_there_is_no_verdict(tmp_path, lost):
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5}, [("full", seed) for seed in range(lost)])
    table = table_of(plan)
    assert f"seeds of full, the reference: {3 - lost}/3, {lost} diverged." in table
    assert "the verdicts, 1 in all, are not" in rules(plan, races_of(plan))  # of size b
    assert "- 8 Mbit/s" not in table and len(cells_of(table, "terse")) == 4


def test_a_method_whose_rate_is_an_edge_has_a_row(tmp_path, capsys):
    """The searched runs of seed 0 alone: terse is best at its lowest rate."""
    rates = ("[families.terse]", "[families.terse]\nlearning_rates = [1e-3, 2e-3, 3e-3]")
    plan = plan_of(tmp_path, *RACE, rates)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    for rate in (2e-3, 3e-3):
        point = plan.point("terse", "a", 0.05, 0, rate)
        row = {"status": "finished", "val_loss": 6.0}
        (plan.work / point.name).mkdir()
        record = json.dumps({"arguments": [point.config, *point.arguments], "row": row})
        (plan.work / point.name / POINT_FILE).write_text(record)
    status, said = report(tmp_path, capsys, "--links=8", changes=[rates])
    assert status == 1
    assert cells_of(said.out, "terse") == ["terse", "0/3, 3 not run", "-", "-", "-"]
    assert "terse a: learning rate 0.001 is an edge of its grid (0.001 to 0.003)" in said.out
    assert "Seed 0 chose the learning rates" in said.out


@pytest.mark.parametrize(("margin", "cell"), [(0.05, "4.4"), (0.015, "reached by 0/3")])
def test_a_seed_races_to_its_own_goal(tmp_path, margin, cell):
    """Losses of terse end 0.03 above those of the same seed of full."""
    plan = plan_of(tmp_path, *RACE, ('name = "x"', f'name = "x"\nmargin = {margin}'))
    record_runs(plan, {"full": 2e6, "terse": 2e5}, worse=0.03)
    assert cells_of(table_of(plan), "terse")[4].startswith(cell)


def test_runs_that_did_not_count_are_refused(tmp_path, capsys):
    assert report(tmp_path, capsys)[0] == 2
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    path = next((tmp_path / "work").glob("terse_a*/metrics.jsonl"))
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[::2]))
    status, said = report(tmp_path, capsys)
    assert status == 2 and "metrics.log_freq = 1" in said.err and said.err.count("\n") == 1
    for text in ("", "".join(whole[:-1]), "".join(whole).replace(STEP_SECONDS, "unknown")):
        path.write_text(text)  # of a run that is restored without its steps, and of a damaged one
        status, said = report(tmp_path, capsys)
        assert status == 2 and "metrics.log_freq = 1" in said.err and said.err.count("\n") == 1
    for wrong in ("0", "x", "50,50"):
        assert report(tmp_path, capsys, f"--links={wrong}")[0] == 2


def test_one_rank_has_no_link(tmp_path, capsys):
    one = [*RACE, ("ranks = 2", "ranks = 1")]
    record_runs(plan_of(tmp_path, *one), {"full": 0.0, "terse": 0.0})
    status, said = report(tmp_path, capsys, changes=one[len(RACE) :])
    assert status == 2 and said.err.startswith("error: ranks: got 1, expected 2 or more")


def test_stored_runs_have_the_same_race(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    record_runs(plan_of(tmp_path, *RACE), {"full": 2e6, "terse": 2e5}, [("terse", 2)])
    measured = {"200": {"full": 0.5, "terse": 0.25}}
    (tmp_path / "work" / SECONDS_FILE).write_text(json.dumps(measured))
    before = report(tmp_path, capsys)[1].out
    assert "200 Mbit/s (measured)" in before
    finished_runs.store("x", tmp_path / "work")
    stored = finished_runs.stored_runs("x")
    assert sum("course" in run for run in stored.values()) == 7  # not of the one that diverged
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert finished_runs.restore("x", tmp_path / "work") == 8
    assert report(tmp_path, capsys)[1].out == before
    # The page has the same tables, and the pictures that it shows.
    page = "<!-- table: x -->\n<!-- end of table: x -->\n"
    written = result_tables.with_tables(page, "x", tmp_path)
    tables = [line for line in before.splitlines() if line.startswith(("| ", "- "))]
    assert tables and all(line in written.splitlines() for line in tables)
    pictures = re.findall(r"\(images/(x_\w+_llama_full_[ab]_0\.05\.png)\)", written)
    assert len(pictures) == 4
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)


def test_a_run_that_skipped_steps_or_diverged_has_no_course(tmp_path, monkeypatch):
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    plan = plan_of(tmp_path, *RACE)
    record_runs(plan, {"full": 2e6, "terse": 2e5})
    damaged, again = sorted(plan.work.glob("terse_a*/metrics.jsonl"))[:2]
    damaged.write_text("".join(damaged.read_text().splitlines(keepends=True)[::2]))
    again.write_text(again.read_text() * 2)  # cut off without a checkpoint, and started again
    finished_runs.store("x", plan.work)
    stored = finished_runs.stored_runs("x")
    assert "course" not in stored[damaged.parent.name]
    assert len(stored[again.parent.name]["course"]["losses"]) == STEPS


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"8": 1}', '{"8": {"full": "x"}}', '{"8": {"full": 0, "terse": 1}}']
)
def test_seconds_that_are_none_are_refused(text, tmp_path):
    assert read_seconds(tmp_path / SECONDS_FILE) == {}
    (tmp_path / SECONDS_FILE).write_text(text)
    with pytest.raises(ConfigError, match="seconds per step such as"):
        read_seconds(tmp_path / SECONDS_FILE)


def test_a_method_that_alone_reaches_the_loss_has_won_no_test():
    assert verdict({}, "full") == "full alone reaches the loss with all seeds"
    assert verdict({"terse": 0.01}, "full") == "full wins"
    assert verdict({"terse": 0.01}, "full", ["a", "b"]) == "full wins so far: a, b have not ended"
    assert verdict({"terse": None}, "full") == "no difference shown between full and terse"


def test_holm_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
    assert found == {"a": 0.04, "c": 0.09, "b": 0.09, "d": None}


def test_shares_of_a_ring():
    assert wire_share("dp_replicate", 4, 1) == 1.5 and wire_share("fsdp", 1, 4) == 0.75
    with pytest.raises(ValueError, match="dp_replicate, fsdp"):
        wire_share("tp", 1, 1)


def test_times_that_differ_by_less_than_they_are_known_are_no_winner():
    """Seeds have one ratio, whose spread is 0; the error of the steps' seconds stays."""
    errors = dict.fromkeys("ab", 0.07)
    steps = dict.fromkeys(range(3), 50.0)
    # By hand: t tables have 2.0739 for 22 degrees of freedom, times .07 · 2^(1/2) = .0990.
    for lead, wins in ((0.200, False), (0.211, True)):
        slower = {seed: seconds * math.exp(lead) for seed, seconds in steps.items()}
        p_value = beaten({"a": steps, "b": slower}, "a", errors)["b"]
        assert p_value is not None and (p_value < 0.05) is wins
    # Logs .1, .2, .3 without such an error: t = 2 · 3^(1/2), p of two degrees of freedom .0742.
    noisy = {"a": dict.fromkeys(range(3), 1.0)}
    noisy["b"] = {seed: math.exp((seed + 1) / 10) for seed in range(3)}
    exact = beaten(noisy, "a", dict.fromkeys("ab", 0.0))
    assert exact["b"] == pytest.approx(0.0742, abs=1e-4)
    # With it: variance .01/3 + .0098 and, by Welch and Satterthwaite, 17.4 degrees of freedom.
    assert beaten(noisy, "a", errors)["b"] == pytest.approx(0.0986, abs=1e-4)


def test_a_model_of_a_slow_link_is_known_better_than_its_computation():
    course = Course([3.0, 2.0], [5e5, 1e6], seconds=1.0, validation=2.0)  # 2 s, and 8 Mbit
    assert Link(8, {}, {}).error("a", course) == pytest.approx(0.07 * 2 / 3)
    assert Link(8, {}, {"a": 1.5}).error("a", course) == 0.07
