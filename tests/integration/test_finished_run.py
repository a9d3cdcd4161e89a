# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run leaves behind: the summary, the curve, checkpoints, metrics in three places, logs."""

import json
import math
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from tests.integration import runs

LOSS = "loss_metrics/global_avg_loss"
VAL_LOSS = "validation_metrics/loss"

SUMMARY_KEYS = [
    *("steps", "train_loss", "val_loss", "val_ppl", "unigram_entropy"),
    *("tokens_per_s", "mfu", "peak_memory_gib", "checkpoint", "curve"),
]

TRAIN_SCALARS = {
    *(LOSS, "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen", "skipped_steps"),
    *("throughput(tps)", "throughput/tokens_per_s", "tflops", "memory/max_reserved(GiB)"),
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
    # test_summary_by_hand.py has these losses and the entropy from the run's own checkpoints.
    assert summary["unigram_entropy"] < summary["val_loss"]
    assert summary["tokens_per_s"] > 0
    assert summary["mfu"] is None
    assert 0.05 < summary["peak_memory_gib"] < 64
    assert summary["checkpoint"] == str(finished.folder / "checkpoint" / "step-6")


def test_console_ends_with_the_summary(finished, summary):
    said = [line for line in finished.done.out.splitlines() if not line.startswith("[rank")]
    values = dict(line.split("  ", 1) for line in said[-12:])
    values = {name: value.strip() for name, value in values.items()}
    assert values["steps"] == "6"
    assert values["train loss"] == f"{summary['train_loss']:.4f} nats/token"
    assert values["validation loss"] == f"{summary['val_loss']:.4f} nats/token"
    assert values["validation perplexity"] == f"{summary['val_ppl']:.2f}"
    assert values["unigram entropy"].startswith(f"{summary['unigram_entropy']:.4f} nats")
    assert values["MFU"] == "unknown peak"
    for name in ("checkpoint", "curve"):
        assert values[name] == summary[name]
    assert values["summary"] == str(finished.folder / "summary.json")
    assert values["logs"].startswith(str(finished.folder / "logs"))
    assert finished.done.out.splitlines()[-12:] == said[-12:]  # nothing comes after it


def test_curve_is_a_picture(summary):
    with open(summary["curve"], "rb") as file:
        head = file.read(24)
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > 300 and height > 200


def test_checkpoints_are_complete(finished):
    assert runs.step_folders(finished.folder) == {4: True, 6: True}
    for step in (4, 6):
        shards = (finished.folder / "checkpoint" / f"step-{step}").glob("*.distcp")
        assert len(list(shards)) == 4


def test_metrics_file(records):
    train = [record for record in records if LOSS in record]
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5, 6]
    assert all(record.keys() >= TRAIN_SCALARS for record in train)
    assert [record["n_tokens_seen"] for record in train] == [4 * 2 * 32 * k for k in range(1, 7)]
    assert len({record[LOSS] for record in train}) == 6
    assert all(math.isfinite(record[LOSS]) and record["grad_norm"] > 0 for record in train)
    assert not any("mfu(%)" in record for record in train)  # absent, not zero


def test_validation_runs_after_the_last_step(records):
    # freq = 4 alone would stop at step 4.
    steps = [record["step"] for record in records if VAL_LOSS in record]
    assert steps == [1, 4, 6]


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


def wandb_records(path):
    """Reads wandb's transaction log: LevelDB's log format behind a header of seven bytes."""
    data, position, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_writes_offline_what_the_toml_asks_for(finished, records):
    (path,) = finished.folder.glob("**/offline-run-*/run-*.wandb")
    entries = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(path)]
    (run,) = (entry.run for entry in entries if entry.HasField("run"))
    assert run.project == "low-rank tests"
    assert run.display_name == "tiny"
    assert run.run_group == "integration"
    assert list(run.tags) == ["cola", "four ranks"]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in (entry.history for entry in entries if entry.HasField("history"))
    ]
    assert [row[LOSS] for row in rows if LOSS in row] == [r[LOSS] for r in records if LOSS in r]
    val_losses = [row[VAL_LOSS] for row in rows if VAL_LOSS in row]
    assert val_losses == [record[VAL_LOSS] for record in records if VAL_LOSS in record]


def test_wandb_stays_off_unless_asked_for(undisturbed):
    """The control: without the keys there is neither a run folder nor an event file."""
    assert not list(undisturbed.folder.glob("**/wandb"))
    assert not list(undisturbed.folder.glob("**/*tfevents*"))
    assert (undisturbed.folder / "metrics.jsonl").is_file()


def test_shown_ranks(finished):
    lines = (finished.done.out + finished.done.err).splitlines()
    shown = {line.partition(":")[0] for line in lines if line.startswith("[rank")}
    assert shown == {"[rank0]", "[rank3]"}
    # The others' output is in the logs.
    for rank in range(4):
        (log,) = finished.folder.glob(f"logs/*/*/attempt_0/{rank}/stderr.log")
        assert "Training starts at step 1" in log.read_text() + (
            log.with_name("stdout.log").read_text()
        )
    assert "Traceback" not in finished.done.out + finished.done.err


def test_record_of_the_configuration(finished):
    record = json.loads((finished.folder / "job_config.json").read_text())
    assert record["model"]["name"] == "llama_cola"
    assert record["training"]["seq_len"] == 32
    assert record["training"]["steps"] == 6  # the command line's, over the TOML's 99
    assert record["metrics"]["wandb_tags"] == ["cola", "four ranks"]
    assert record["debug"]["seed"] == 0  # a default
