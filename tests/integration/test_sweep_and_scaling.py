# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``sweep`` with real runs on two ranks, and ``scaling`` on one."""

import json
import signal
import sys

import pytest

from tests.integration import runs
from tests.support.kills import child_pids

VALIDATION = "validation_metrics/loss"
STEPS = 8
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")
LR = [sys.executable, "-m", "torchtitan_lr"]


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
