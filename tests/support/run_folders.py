# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Folders of runs with one checkpoint, written without training."""

import json
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp

from tests.commands import Command
from torchtitan_lr.checkpoints.record import Record, read_step
from torchtitan_lr.checkpoints.saving import StepWriter
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.hf.exported import read_any, read_args, read_weights
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training.loading import as_model, build_model_args

export = Command("export")


def run_record(family, seq_len=64, **low_rank):
    """What a run writes about itself, as far as a model is concerned."""
    section = {"rank": 0, "rank_attention": 0, "rank_ffn": 0}
    section |= {"activation": "flavor", "lax_gate": "identity"}
    return {
        "model": {
            "name": f"llama_{family}",
            "flavor": "debug",
            "hf_assets_path": "torchtitan_lr/data/assets/bpe4k",
        },
        "training": {"seq_len": seq_len},
        "debug": {"seed": 3},
        "low_rank": {**section, **low_rank},
    }


def write_run(folder, family, dtype=torch.float32, vocab_size=None, **low_rank):
    """A dump folder with one checkpoint, laid out as torchtitan's CheckpointManager does."""
    folder.mkdir(parents=True, exist_ok=True)
    record = run_record(family, **low_rank)
    if vocab_size is not None:
        record["model"]["vocab_size"] = vocab_size
    step = folder / "checkpoint" / "step-20"
    args = build_model_args(build_job_config([], record))
    model = LlamaModel(args)
    model.init_weights()
    model.to(dtype)
    state = dict(model.state_dict())
    state["optimizer"] = {"state": {"output.weight": {"exp_avg": torch.ones(3)}}}
    state["train_state"] = {"step": torch.tensor(20)}
    state["lr_scheduler"] = {"last_epoch": 20}
    state["dataloader"] = {"sample": 1280}
    state["grad_compression"] = {"layers.0.residual": torch.ones(2, 5), "layers.0.exchanges": 20}
    dcp.save(state, storage_writer=StepWriter(step, Record({"model": {}})), no_dist=True)
    rewrite_record(step, record)
    return step, model


def rewrite_record(step, record):
    """Let a step be one of a run with another record."""
    (step.parent.parent / "job_config.json").write_text(json.dumps(record))
    replace(read_step(step), run=record).write(step)


def loaded(folder):
    """The trainer's model of a run, a step or an export, and the tokenizer."""
    args, weights, tokenizer, _ = read_any(folder)
    return as_model(args, weights), tokenizer


def model_in(folder):
    """The trainer's model with the weights of an export, which needs no tokenizer."""
    args, tied = read_args(folder)
    return as_model(args, read_weights(folder, args, tied))
