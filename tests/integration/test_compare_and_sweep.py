# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``compare`` and ``sweep`` with real runs on two ranks, and ``scaling`` on one."""

import json
import signal
import sys

import pytest

from tests.integration import runs
from tests.support.kills import child_pids
from torchtitan_lr.formulas.tensor_parallel import model_traffic
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.placement import TPSettings

LOSS = "loss_metrics/global_avg_loss"
VALIDATION = "validation_metrics/loss"
STEPS = 8
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
LR = [sys.executable, "-m", "torchtitan_lr"]
BYTES = {"activation": 2, "statistic": 4, "loss": 4}  # bf16 compute, torchtitan's default
PLANS = {"full": "megatron", "btp": "btp"}
TP = "\n[parallelism]\ntensor_parallel_degree = 2\n"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Full rank and BTP, three timed steps each."""
    base = tmp_path_factory.mktemp("compare")
    config = runs.write_config(base / "dump", "llama_cola", extra=TP)
    arguments = [config, "--plans=full,btp", "--steps=3", "--warmup=1", f"--out={base / 'work'}"]
    done = runs.run([*LR, "compare", *arguments], NGPU="2")
    assert done.status == 0, done.everything
    return base / "work", done


def test_compare_measures_every_plan(compared):
    work, done = compared
    rows = {row["run"]: row for row in json.loads((work / "compare.json").read_text())}
    assert list(rows) == ["full", "btp"]
    table = [line.split() for line in done.out.splitlines()]
    assert [line[0] for line in table] == ["run", "full", "btp"]
    for row in rows.values():
        assert row["checkpointing"] == "none"
        assert len(row["steps"]) == 3 and row["mfu"] is None
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        # 2 sequences of 32 tokens a step, whatever the plan.
        rates = sorted(64 / seconds for seconds in row["steps"])
        assert row["tokens_per_s"] == pytest.approx(rates[1], rel=0.01)
        assert 0.05 < row["peak_memory_gib"] < 64
    assert (work / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_compare_counts_the_bytes_of_the_formulas(compared):
    work, _ = compared
    found = {}
    for row in json.loads((work / "compare.json").read_text()):
        family = "full" if row["run"] == "full" else "cola"
        settings = TPSettings(PLANS[row["run"]])
        traffic = model_traffic(FLAVORS[family]["debug"], settings, 2, 2 * 32)
        expected = sum(BYTES[line.role] * line.elements for line in traffic)
        measured = found[row["run"]] = row["comm_bytes_by_mesh_dim"]["tp"]
        # Beyond the model: scalars of clipping and logging.
        assert expected <= measured < expected + 1000, row["run"]
    # The control: the plans are far enough apart that no formula fits the other.
    assert found["full"] > found["btp"] + 1000


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """A sweep of two points that is killed while the second one trains, and then repeated."""
    base = tmp_path_factory.mktemp("sweep")
    config = runs.write_config(base / "dump", "llama_cola", steps=STEPS)
    work = base / "work"
    command = [*LR, "sweep", config, "--set", "low_rank.rank=8,16", f"--out={work}"]
    more = ["--checkpoint.interval=4", "--group=ranks"]
    first = runs.Process([*command, *more], NGPU="2", **runs.holding("rank-16:step:6"))
    ranks = first.wait_until(lambda: held_ranks(first.pid))
    (launcher,) = child_pids(first.pid)
    first.send(signal.SIGKILL)
    first.finish()
    refused = runs.run([*command, *more], NGPU="2")  # the run it left behind is still there
    runs.send_all([launcher, *ranks], signal.SIGKILL)
    runs.wait_until_gone([launcher, *ranks])
    before = runs.history(work / "rank-16")
    table = (work / "rank-8" / "metrics.jsonl").read_bytes()
    again = runs.run([*command, *more], NGPU="2")
    return work, refused, again, before, table


def held_ranks(sweep):
    """Both ranks below a sweep, once they hold."""
    below = [sweep]
    for _ in range(3):  # launcher, torchrun, ranks
        below = [child for pid in below for child in child_pids(pid)]
    return (
        below if len(below) == 2 and all(runs.process_state(pid) == "T" for pid in below) else None
    )


@LINUX
@pytest.mark.nightly
def test_a_sweep_beside_a_run_that_was_left_behind_is_refused(cut_off):
    _, refused, *_ = cut_off
    assert refused.status == 2, refused.everything
    (line,) = refused.err.splitlines()
    assert line.startswith("error: --out: got ") and "a run left by one" in line


@LINUX
@pytest.mark.nightly
def test_a_killed_sweep_skips_what_is_finished_and_goes_on(cut_off):
    work, _, again, before, table = cut_off
    assert again.status == 0, again.everything
    assert "rank-8" not in again.err and "rank-16 ..." in again.err
    assert (work / "rank-8" / "metrics.jsonl").read_bytes() == table
    after = runs.history(work / "rank-16")
    losses = [r["step"] for r in after if "grad_norm" in r]
    assert losses == list(range(1, STEPS + 1))
    # Steps up to the checkpoint were not trained again: even their times are the same.
    old = [r for r in before if r["step"] <= 4]
    assert old and [r for r in after if r["step"] <= 4] == old


EXPERIMENT = """
name = "toy"
config = "{config}"
overrides = ["validation.steps=1"]
seeds = [0, 1]
tokens_per_parameter = [0.04]
learning_rates = [3e-3]

[families.full]
[families.cola]

[sizes.a]
dim = 16
ffn_dim = 48
n_heads = 2
n_layers = 2
"""


def test_a_scaling_experiment_has_the_losses_of_its_histories(tmp_path):
    config = runs.write_config(tmp_path / "dump", "llama_full")
    (tmp_path / "toy.toml").write_text(EXPERIMENT.format(config=config))
    work = tmp_path / "work"
    arguments = [tmp_path / "toy.toml", f"--out={work}"]
    done = runs.run([*LR, "scaling", "run", *arguments, "--jobs=2"])
    assert done.status == 0, done.everything
    fitted = runs.run([*LR, "scaling", "fit", *arguments])
    assert fitted.status == 0, fitted.everything
    found = json.loads((work / "scaling.json").read_text())
    assert [(p["family"], p["size"]) for p in found["points"]] == [("full", "a"), ("cola", "a")]
    for point in found["points"]:
        folders = sorted(work.glob(f"{point['family']}_a_*"))
        validated = [[r[VALIDATION] for r in runs.history(f) if VALIDATION in r] for f in folders]
        losses = [values[-1] for values in validated]
        assert list(point["losses"].values()) == losses and losses[0] != losses[1]
        record = json.loads((folders[0] / "job_config.json").read_text())
        assert record["metrics"]["wandb_group"] == "toy"
        assert record["metrics"]["wandb_tags"][:2] == [point["family"], "a"]
    assert (work / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert fitted.out.strip() == (work / "scaling.md").read_text().strip()
