# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run leaves behind: the summary, the curve, checkpoints, metrics in three places, logs.

Then its command is given again.
"""

import json
import math
import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration import runs
from tests.wandb_file import parts, values_of

LOSS = "loss_metrics/global_avg_loss"
VAL_LOSS = "validation_metrics/loss"

SUMMARY_KEYS = [
    *("steps", "train_loss", "val_loss", "val_losses", "val_ppl", "unigram_entropy"),
    *("tokens_per_s", "mfu", "peak_memory_gib", "checkpoint", "curve"),
    *("sent_bytes", "adamw_bytes"),
]

TRAIN_SCALARS = {
    *(LOSS, "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen", "skipped_steps"),
    *("throughput/tokens_per_s_per_device", "throughput/tokens_per_s", "tflops"),
    *("memory/max_reserved(GiB)", "time_metrics/slowest_rank", "time_metrics/slowest_behind(%)"),
}
VALIDATION_SCALARS = {
    f"validation_metrics/{name}" for name in ("loss", "perplexity", "tokens", "unigram_entropy")
}


@pytest.fixture(scope="module")
def summary(finished):
    return json.loads((finished.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def records(finished):
    return runs.history(finished.folder)


def test_summary(finished, summary, records):
    assert list(summary) == SUMMARY_KEYS
    assert summary["steps"] == 6
    assert summary["train_loss"] == [r[LOSS] for r in records if LOSS in r][-1]
    assert summary["val_loss"] == [r[VAL_LOSS] for r in records if VAL_LOSS in r][-1]
    assert summary["val_ppl"] == pytest.approx(math.exp(summary["val_loss"]), rel=1e-12)
    assert summary["unigram_entropy"] < summary["val_loss"]
    assert summary["tokens_per_s"] > 0
    assert summary["mfu"] is None
    assert 0.05 < summary["peak_memory_gib"] < 64
    assert summary["checkpoint"] == str(finished.folder / "checkpoint" / "step-6")


def test_console_ends_with_the_summary(finished, summary):
    said = [line for line in finished.done.out.splitlines() if not line.startswith("[rank")]
    values = dict(line.split("  ", 1) for line in said[-13:])
    values = {name: value.strip() for name, value in values.items()}
    assert values["steps"] == "6"
    assert values["train loss"] == f"{summary['train_loss']:.4f} nats/token"
    assert values["validation loss"] == f"{summary['val_loss']:.4f} nats/token"
    assert values["checkpoint"] == summary["checkpoint"]
    assert finished.done.out.splitlines()[-13:] == said[-13:]  # nothing comes after it


def test_metrics_file(records):
    train = [record for record in records if LOSS in record]
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5, 6]
    assert all(record.keys() >= TRAIN_SCALARS for record in train)
    assert [record["n_tokens_seen"] for record in train] == [2 * 2 * 32 * k for k in range(1, 7)]
    assert len({record[LOSS] for record in train}) == 6
    assert all(math.isfinite(record[LOSS]) and record["grad_norm"] > 0 for record in train)
    assert not any("mfu(%)" in record for record in train)  # absent, not zero


def test_validation_runs_after_the_last_step(records):
    # freq = 4 alone would stop at step 4; step 1 is left out.
    steps = [record["step"] for record in records if VAL_LOSS in record]
    assert steps == [4, 6]
    assert all(r["validation_metrics/seconds"] > 0 for r in records if VAL_LOSS in r)


def test_tensorboard(finished, records):
    (events,) = (finished.folder / "tb").glob("*/events.out.tfevents.*")
    board = EventAccumulator(str(events))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert tags >= TRAIN_SCALARS | VALIDATION_SCALARS
    for key in (LOSS, "grad_norm", "lr", VAL_LOSS):
        expected = [(r["step"], r[key]) for r in records if key in r]
        shown = [(event.step, event.value) for event in board.Scalars(key)]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        # Event files hold single precision.
        assert [v for _, v in shown] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_wandb_writes_offline_what_is_logged(finished, records):
    (path,) = finished.folder.glob("**/offline-run-*/run-*.wandb")
    found = parts(path)
    (run,) = found["run"]
    assert (run.display_name, list(run.tags)) == ("tiny", ["cola", "two ranks"])
    rows = [values_of(row.item) for row in found["history"]]
    for key in (LOSS, VAL_LOSS):
        assert [r[key] for r in rows if key in r] == [r[key] for r in records if key in r]
    assert [end.exit_code for end in found["exit"]] == [0]


def test_a_step_of_each_rank_is_profiled(finished):
    for rank in range(2):
        path = finished.folder / f"profile_traces/iteration_5/rank{rank}_trace.json"
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {"ProfilerStep#4", "gloo:all_gather"} <= names, sorted(map(str, names))
    # The flight recorder's folder is gone: nothing has hung.
    assert not (finished.folder / "comm_traces").exists()


def test_shown_ranks(finished):
    lines = (finished.done.out + finished.done.err).splitlines()
    shown = {line.partition(":")[0] for line in lines if line.startswith("[rank")}
    assert shown == {"[rank1]"}
    # All output is in the logs.
    for rank in range(2):
        (log,) = finished.folder.glob(f"logs/*/*/attempt_0/{rank}/stderr.log")
        assert "Training starts at step 1" in log.read_text() + (
            log.with_name("stdout.log").read_text()
        )
    assert "Traceback" not in finished.done.out + finished.done.err


KEPT = ("job_config.json", "run_state.json", "summary.json", "metrics.jsonl")


@pytest.fixture
def again(finished, tmp_path):
    """Launches on a copy of a finished run of 6 steps; returns its end and the copy."""
    copy = tmp_path / "dump"
    shutil.copytree(finished.folder, copy)

    def launch(*arguments):
        process = runs.launch(
            finished.config,
            *("--training.steps=6", "--metrics.no_enable_wandb", f"--job.dump_folder={copy}"),
            *arguments,
        )
        return process.finish(), copy

    return launch


def contents(folder):
    files = {name: (folder / name).read_bytes() for name in KEPT}
    return files | {"logs": sorted(path.name for path in (folder / "logs").iterdir())}


def test_the_same_command_has_nothing_to_do(again, finished):
    done, copy = again()
    assert done.status == 0, done.everything
    first, *summary = done.out.splitlines()
    assert first == (
        "already at step 6 of 6: nothing to train; choose more training.steps, or another folder, "
        f"as in --job.dump_folder={copy}-2"
    )
    assert summary[0].split() == ["steps", "6"] and len(summary) == 13
    assert contents(copy) == contents(finished.folder)


def test_ranks_that_refuse_leave_a_finished_run_finished(again, tmp_path):
    """Damage is found by the ranks, after the launcher's checks."""
    (part, *_) = (tmp_path / "dump" / "checkpoint" / "step-6").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-8])
    before = {name: (tmp_path / "dump" / name).read_bytes() for name in KEPT}
    done, copy = again("--training.steps=8")
    assert done.status == 2 and "bytes instead of" in done.everything
    assert len(list((copy / "logs").iterdir())) == 2  # the ranks were started
    assert {name: (copy / name).read_bytes() for name in KEPT} == before
