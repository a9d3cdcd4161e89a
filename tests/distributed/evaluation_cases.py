# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checkpoints of small fresh models, and their evaluation on the ranks of a pool."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from tests.support import parity_runs  # adds the flavor `parity`  # noqa: F401
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.saving import StepWriter
from torchtitan_lr.hf.evaluate import evaluate
from torchtitan_lr.hf.loading import build_model_args
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP

WINDOW = 24
SHARPER = 16.0
"""Makes a fresh model's losses differ from token to token, and with them all wrong means."""


def write_run(folder: Path, family: str, **sections: dict[str, Any]) -> tuple[Path, LlamaModel]:
    """Write a checkpoint in fp64, as a run does, and return its folder and the model."""
    record: dict[str, Any] = {
        "model": {
            "name": f"llama_{family}",
            "flavor": "parity",
            "hf_assets_path": "torchtitan_lr/data/assets/bpe4k",
        },
        "training": {"seq_len": WINDOW, "dataset": "python_stdlib", "no_such_key_now": 1},
        "debug": {"seed": 3},
        "low_rank": {"rank": 0, "rank_attention": 0, "rank_ffn": 0, "activation": "flavor"},
        "optimizer": {"name": "TSRAdam"},
        "activation_checkpoint": {"mode": "full"},
    }
    record["low_rank"]["lax_gate"] = "scalar" if FAMILIES[family].gated else "identity"
    folder.mkdir(parents=True)
    (folder / "job_config.json").write_text(json.dumps(record | sections))
    step = folder / "checkpoint" / "step-20"
    tables = {name: SimpleNamespace(**table) for name, table in record.items()}
    model = LlamaModel(build_model_args(SimpleNamespace(**tables)))
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if name == "output.weight":
                parameter.mul_(SHARPER)
            if name.endswith("gate"):
                parameter.mul_(0.7)
    writer = StepWriter(step, Record({"model": {}}, record | sections))
    dcp.save(dict(model.state_dict()), storage_writer=writer, no_dist=True)
    return step, model.eval()


def options_of(checkpoint: Path, *overrides: str, **changes: Any) -> SimpleNamespace:
    """What the command ``evaluate`` parses."""
    usual: dict[str, Any] = {"corpus": "local", "path": None, "documents": 0, "seq_len": 0}
    usual["text_column"] = "text"
    usual |= {"batch_size": 2, "as_validated": False, "device": "", "config": None}
    usual |= {"checkpoint": checkpoint, "overrides": list(overrides)}
    return SimpleNamespace(**(usual | changes))


def evaluate_all(cases: list[SimpleNamespace]) -> list[dict[str, Any]]:
    """Evaluate on every rank, in fp64 where the weights are."""
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with (
        patch.dict(os.environ, variables),
        patch.dict(TORCH_DTYPE_MAP, float64=torch.float64),
    ):
        return [evaluate(case) for case in cases]  # type: ignore[arg-type]
