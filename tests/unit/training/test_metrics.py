# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a logged step says about speed and memory, the file of its records, and their summary.

The numbers are by hand, of one rank of eight: two replicas of two shards, each of two
tensor-parallel ranks. Every rank reads the tokens of its data-parallel share, so a rank's tokens
are four times in the batch, not eight.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lr.config.schema import Outer
from torchtitan_lr.optim.outer import OuterSteps
from torchtitan_lr.titan.base import JobConfig, ParallelDims
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training import metrics
from torchtitan_lr.training.figures import draw_curve
from torchtitan_lr.training.history import TRAIN_COMMON, append_record, build_summary, read_history
from torchtitan_lr.training.metrics import LowRankMetricsProcessor

GIB = 2**30
EXACT = 1e-12  # ratios of a few fp64 numbers


@pytest.fixture
def processor_of(tmp_path, monkeypatch):
    """Builds the processor of a rank on a device of a known peak and known memory."""
    bind_device()
    peaks = {"active_bytes.all.peak": 3 * GIB, "reserved_bytes.all.peak": 5 * GIB}
    peaks |= {"num_alloc_retries": 7, "num_ooms": 2}
    device = SimpleNamespace(
        get_device_name=lambda *_: "a device",
        current_device=lambda: 0,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=8 * GIB),
        memory_stats=lambda *_: peaks,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(titan_metrics, "device_module", device)
    monkeypatch.setattr(titan_utils, "get_peak_flops", {"a device": 200e12}.__getitem__)

    def build(rank=0):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=8)
        job = JobConfig()
        job.job.dump_folder = str(tmp_path)
        job.metrics.log_freq = 4
        job.training.steps = 11
        processor = LowRankMetricsProcessor(job, dims)
        processor.num_flops_per_token = 10**9
        return processor

    yield build
    dist.destroy_process_group()


def log(processor, step, seconds, **extra):
    processor.seconds += seconds
    processor.log(step, 2.5, 3.5, 0.25, extra)
    return json.loads(processor.history.read_text().splitlines()[-1])


def test_speed_by_hand(processor_of):
    processor = processor_of()
    processor.ntokens_since_last_log += 6000
    processor.data_loading_times += [0.2, 0.1]
    expected = {
        # 6000 tokens on a rank, which computes half of each, in 1.5 s.
        "throughput/tokens_per_s_per_device": 2000,
        # Four data-parallel shares of 6000 tokens.
        "throughput/tokens_per_s": 4 * 6000 / 1.5,
        "tflops": 2.0,
        "mfu(%)": 1.0,
        "time_metrics/end_to_end(s)": 1.5,
        "time_metrics/data_loading(%)": 20.0,
        **{"memory/max_active(GiB)": 3, "memory/max_reserved(GiB)": 5},
        **{"memory/num_alloc_retries": 7, "memory/num_ooms": 2},
        **{"loss_metrics/global_avg_loss": 2.5, "loss_metrics/global_max_loss": 3.5},
        **{"grad_norm": 0.25, "step": 1, "lr": 0.125},
    }
    assert log(processor, 1, 1.5, lr=0.125) == pytest.approx(expected, rel=EXACT)


def test_a_resumed_run_counts_its_own_steps(processor_of, tmp_path):
    history = tmp_path / "metrics.jsonl"
    history.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 4, 8)))
    processor = processor_of()
    processor.start_after(6, {})
    record = log(processor, 8, 5.0)
    assert record["time_metrics/end_to_end(s)"] == 2.5  # of steps 7 and 8
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps == [1, 4, 8]  # the 8 of the run before is gone


@pytest.mark.parametrize(("mean", "shown"), [(2.25, "loss 2.25000"), (math.nan, "loss 2.50000")])
def test_the_console_shows_the_mean_of_the_interval_and_says_whose(
    mean, shown, processor_of, monkeypatch
):
    lines = []
    monkeypatch.setattr(metrics.console, "info", lines.append)
    processor, common = processor_of(), {}
    log(processor, 0, 1.0, interval_loss=mean)
    assert f"  {shown}  " in lines.pop()
    processor.outer = OuterSteps({"w": torch.zeros(1)}, 1, Outer(every=3))
    for step in range(1, 8):
        processor.outer.after(step)
        if step != 3:
            record = log(processor, step, 1.0, interval_loss=mean)
            common[step] = record[TRAIN_COMMON], f"  {shown} (common)  " in lines.pop()
    # Step 4 began with the common weights, but step 3, whose loss is in the mean, did not. Without
    # a mean the loss is step 4's own.
    expected = {1: (1, True), 4: (1, math.isnan(mean)), 7: (1, True)}
    assert common == dict.fromkeys((1, 2, 4, 5, 6, 7), (0, False)) | expected


def test_history_survives_non_finite_values_and_a_torn_line(tmp_path):
    path = tmp_path / "runs" / "metrics.jsonl"
    append_record(path, {"loss": 0.1 + 0.2, "norm": math.nan}, step=1)
    with path.open("a") as torn:  # by a kill
        torn.write('{"step": 2, "lo')
    append_record(path, {"loss": math.inf}, step=2)
    append_record(path, {"loss": 1.0}, step=3)
    assert read_history(path) == [
        {"step": 1, "loss": 0.1 + 0.2, "norm": None},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 1.0},
    ]
    text = path.read_text()
    assert "NaN" not in text and len(text.splitlines()) == 4  # no empty line


def records():
    """Four steps, the last of an interval with a skipped one, and a validation on two sets."""
    logged = []
    speeds = (1.0, 100.0, 140.0, 120.0)
    intervals = (8.0, 7.0, 5.5, math.nan)
    losses = (8.0, 6.0, 5.0, 4.5)
    for step, loss, mean, tps in zip((1, 2, 3, 4), losses, intervals, speeds, strict=True):
        record = {"step": step, "interval_loss": mean, "throughput/tokens_per_s": tps}
        logged.append(record | {"loss_metrics/global_avg_loss": loss})
    entropy = {"validation_metrics/unigram_entropy": 5.7}
    losses = {"validation_metrics/loss": 4.6, "validation_metrics/books/loss": 4.9}
    return [*logged, {"step": 4, **losses, **entropy}]


def test_a_summary_has_the_last_losses_and_the_median_speed_without_the_first_window():
    assert build_summary(records(), 4, 1.25, "run/checkpoint/step-4") == {
        "steps": 4,
        "train_loss": 4.5,  # of its last batch, since a skipped step has no loss
        "val_loss": 4.6,
        "val_losses": {"books": 4.9},
        "val_ppl": math.exp(4.6),
        "unigram_entropy": 5.7,
        "tokens_per_s": 120.0,
        "mfu": None,
        "peak_memory_gib": 1.25,
        "checkpoint": "run/checkpoint/step-4",
        "curve": None,
    }
    assert build_summary(records()[:3], 3, 1.0, None)["train_loss"] == 5.5  # the interval's


def test_the_curve_shows_means_of_intervals_and_not_single_batches(tmp_path):
    figure = draw_curve(records(), tmp_path / "curve.png")
    assert list(figure.axes[0].lines[0].get_ydata()) == [8.0, 7.0, 5.5, 4.5]
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert (drawn["validation loss"], drawn["validation loss of books"]) == ([4.6], [4.9])
