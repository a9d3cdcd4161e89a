# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a logged step says about speed and memory: numbers by hand, a fake clock, a fake peak.

One rank of eight: two replicas of two shards, each of two tensor-parallel ranks. Every rank reads
the tokens of its data-parallel share, so a rank's tokens are four times in the batch, not eight.
"""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lr.titan.base import JobConfig, ParallelDims
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training import metrics
from torchtitan_lr.training.metrics import LowRankMetricsProcessor

GIB = 2**30
# Ratios of a few fp64 numbers.
EXACT = 1e-12

SPEED = "throughput/tokens_per_s_per_device"
ALL_RANKS = "throughput/tokens_per_s"
SECONDS = "time_metrics/end_to_end(s)"
LOADING = "time_metrics/data_loading(%)"


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


@pytest.fixture
def processor_of(tmp_path, monkeypatch, clock):
    """Builds the processor of a rank on a device of a known peak and known memory."""
    bind_device()
    peaks = {
        "active_bytes.all.peak": 3 * GIB,
        "reserved_bytes.all.peak": 5 * GIB,
        "num_alloc_retries": 7,
        "num_ooms": 2,
    }
    device = SimpleNamespace(
        get_device_name=lambda *_: "a device",
        current_device=lambda: 0,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=8 * GIB),
        memory_stats=lambda *_: peaks,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(titan_metrics, "device_module", device)

    def build(rank=0, peak=200e12):
        monkeypatch.setattr(titan_utils, "get_peak_flops", {"a device": peak}.__getitem__)
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


def log(processor, step, **extra):
    """Logs a step and returns its record."""
    processor.log(step, 2.5, 3.5, 0.25, extra)
    return json.loads(processor.history.path.read_text().splitlines()[-1])


def test_speed_by_hand(processor_of, clock):
    processor = processor_of()
    processor.ntokens_since_last_log += 6000
    processor.data_loading_times += [0.2, 0.1]
    clock.now += 1.5
    record = log(processor, 1, lr=0.125)
    # 6000 tokens on a rank, which computes half of each, in 1.5 s.
    assert record[SPEED] == pytest.approx(2000, rel=EXACT)
    # Four data-parallel shares of 6000 tokens.
    assert record[ALL_RANKS] == pytest.approx(4 * 6000 / 1.5, rel=EXACT)
    assert record["tflops"] == pytest.approx(2.0, rel=EXACT)
    assert record["mfu(%)"] == pytest.approx(1.0, rel=EXACT)
    assert record[SECONDS] == pytest.approx(1.5, rel=EXACT)
    assert record[LOADING] == pytest.approx(20.0, rel=EXACT)
    assert record["memory/max_active(GiB)"] == 3
    assert record["memory/max_reserved(GiB)"] == 5
    assert record["memory/num_alloc_retries"] == 7
    assert record["memory/num_ooms"] == 2
    assert record["loss_metrics/global_avg_loss"] == 2.5
    assert record["loss_metrics/global_max_loss"] == 3.5
    assert record["grad_norm"] == 0.25
    assert (record["step"], record["lr"]) == (1, 0.125)


def test_a_resumed_run_counts_its_own_steps(processor_of, clock, tmp_path):
    history = tmp_path / "metrics.jsonl"
    history.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 4, 8)))
    processor = processor_of()
    processor.start_after(6)
    clock.now += 5
    record = log(processor, 8)
    assert record[SECONDS] == pytest.approx(2.5, rel=EXACT)  # of steps 7 and 8
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps == [1, 4, 8]  # the 8 of the run before is gone


@pytest.mark.parametrize("rank", [0, 1])
def test_training_goes_on_without_wandb(rank, processor_of, monkeypatch, caplog):
    def fail(**_):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("wandb.init", fail)
    processor = processor_of(rank)
    processor.job_config.metrics.enable_wandb = True
    processor.start_after(0)
    assert processor.logger.opened == []
    assert ("training goes on without it" in caplog.text) == (rank == 0)


@pytest.mark.parametrize(("mean", "shown"), [(2.25, "loss 2.25000"), (math.nan, "loss 2.50000")])
def test_the_console_shows_the_mean_of_the_interval(mean, shown, processor_of, clock, monkeypatch):
    lines = []
    monkeypatch.setattr(metrics.console, "info", lines.append)
    processor = processor_of()
    clock.now += 1
    processor.ntokens_since_last_log += 600
    log(processor, 4, interval_loss=mean)
    assert f"  {shown}  " in lines[0]
