# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimated memory by hand, and the size of a checkpoint against one that the trainer wrote."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.commands import ROOT
from tests.unit.tiny_trainer import tiny_trainer
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import Precision, read_run
from torchtitan_lr.costs.memory import (
    KEEPS_WITHIN,
    checkpoint_bytes,
    gathered_unit_bytes,
    largest_peak,
    rank_memories,
    rank_memory,
)
from torchtitan_lr.costs.optimizer_costs import STEP_BYTES
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.train import inputs_decided

DEBUG = ROOT / "train_configs" / "debug_tagc.toml"


def test_gathered():
    units = [{"e": (100,)}, {"b0": (10,)}, {"b1": (10,)}, {"h": (200,)}]
    precision = Precision(4, 2, 4)
    # In the head: it and a block whole, its gradients in both dtypes.
    assert gathered_unit_bytes(units, units[3], True, precision) == 2 * 210 + 6 * 200
    assert gathered_unit_bytes(units, units[3], False, precision) == 2 * 320 + 6 * 200
    assert gathered_unit_bytes(units[1:3], None, True, precision) == 2 * 20 + 6 * 10


def test_against_a_checkpoint(tmp_path):
    options = ["--checkpoint.enable", "--training.steps=1", "--lr_scheduler.warmup_steps=1"]
    with tiny_trainer(tmp_path, *options) as trainer:
        trainer.train()
        estimate = checkpoint_bytes(read_run(trainer.job_config, 1))
    folder = tmp_path / "checkpoint" / "step-1"
    found = {"weights": 0, "optimizer": 0}
    counters = 0
    for name, entry in read_metadata(str(folder)).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            size = math.prod(entry.size) * entry.properties.dtype.itemsize
            part = "optimizer" if name.startswith("optimizer.") else "weights"
            counters += STEP_BYTES * name.endswith(".step")
            found[part] += 0 if name.endswith(".step") else size
    assert found["weights"] == estimate["weights"]
    # `tiny_trainer` turns the parameters into fp64 before the optimizer makes its moments, and
    # after the checkpoint manager took the fp32 ones.
    assert counters > 0 and found["optimizer"] == 2 * (estimate["optimizer"] - counters)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 0 < stored - sum(found.values()) < 2**20  # a table per file, the position in the data


def test_residuals_of_all_ranks():
    """TAGC: every rank has its own residual of each compressed unit, nothing else grows."""
    runs = [read_run(build_job_config([f"--job.config_file={DEBUG}"]), world) for world in (2, 4)]
    small, large = map(checkpoint_bytes, runs)
    residuals = small.pop("residuals"), large.pop("residuals")
    assert residuals[0] > 0 and residuals[1] == pytest.approx(2 * residuals[0], rel=0.01)
    assert small == large


def run_of(*options):
    config = f"--job.config_file={ROOT / 'train_configs/debug_cola.toml'}"
    return read_run(build_job_config([config, *options]), 4)


def test_an_exchange_by_hand():
    every = "--parallelism.data_parallel_replicate_degree=2", "--outer.every=2"
    kinds = [], ["--outer.bits=4"], ["--outer.bits=4", "--outer.overlap"]
    pieces, sent = {"a": (5, 128), "b": (640,)}, 3 * 10 * (64 + 4)  # its own message, and both
    odd = run_of(*every, "--outer.bits=4").outer
    assert odd.exchange_bytes({"a": (5, 127), "b": (513,)}) == odd.exchange_bytes(pieces)
    found = [run_of(*every, *kind).outer.exchange_bytes(pieces) for kind in kinds]
    # Changes of each, and together. The sum, two messages in fp32 and one in bytes; copies.
    assert found == [2 * 4 * 1280, (3 * 4 + 1) * 1280 + sent, (4 * 4 + 1) * 1280 + sent]


KEEP = "--activation_checkpoint.keep_inputs="


@pytest.mark.parametrize("configured", ["auto", "off"])
def test_a_rank_keeps_inputs_where_its_gpu_has_room(configured, monkeypatch):
    alone = "--parallelism.tensor_parallel_degree=1"
    kept, made = (largest_peak(rank_memories(run_of(KEEP + how, alone))) for how in ("on", "off"))
    assert kept > made
    config = run_of(KEEP + configured, alone).config
    section, memory = config.activation_checkpoint, SimpleNamespace()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: memory}.__getitem__)
    for room, expected in ((kept + 1, "on"), (kept - 1, configured)):
        memory.total_memory = room / KEEPS_WITHIN
        with inputs_decided(config):
            assert section.keep_inputs == (configured if configured == "off" else expected)
        assert section.keep_inputs == configured


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ([], False),
        (["--metrics.comm_ledger"], True),
        (["--optimizer.name=TSRAdam", "--optimizer.tsr_overlap_buckets=1"], True),
        (["--optimizer.name=TSRAdam"], False),  # no step is captured
        (["--metrics.comm_ledger", "--training.step_graph=off"], False),
    ],
)
def test_eager_steps_among_captured_ones_need_their_memory_again(options, differs):
    run = run_of(*options, "--optimizer.tsr_rank=32")
    rehearsal = rehearse_run(run)
    here, on_cpu = (rank_memory(run, 0, rehearsal, on_gpu) for on_gpu in (True, False))
    assert (here["graphs"] > here["activations"]) == differs
    assert here["peak"] == on_cpu["peak"] + here["graphs"]
    assert on_cpu["graphs"] == 0
