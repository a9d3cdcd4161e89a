# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private upstream methods that ours override, functions that ours rewrite (torch 2.11 to 2.15).

No private module of either, and no patch, is outside ``compat/`` and ``titan/``.
"""

import ast
import hashlib
import importlib
import inspect
import sys

import pytest

from tests.commands import ROOT

OVERRIDES = [  # ours, upstream's, its parameters, the method of upstream that calls it
    # A cast must not round the rotary table; to, float and to_empty all end here.
    (
        *("torchtitan_lr.models.llama:LlamaModel._apply", "torch.nn:Module._apply"),
        *("self fn recurse", "torch.nn:Module.to"),
    ),
    # Adam collects its tensors here; the override replaces them by local shards.
    (
        *("torchtitan_lr.optim.containers:ShardAdam._init_group", "torch.optim:Adam._init_group"),
        "self group params_with_grad grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps",
        "torch.optim:Adam.step",
    ),
    # Tensor-parallel styles implement this method; torch has no public name for it.
    (
        "torchtitan_lr.parallel.plan_parts:Placed._apply",
        "torch.distributed.tensor.parallel:ParallelStyle._apply",
        "self module device_mesh",
        "torch.distributed.tensor.parallel.api:parallelize_module",
    ),
    # Upstream deletes by number; an incomplete folder would displace a complete one.
    (
        "torchtitan_lr.training.checkpoint:CheckpointManager._purge_stale_checkpoints",
        "torchtitan.components.checkpoint:CheckpointManager._purge_stale_checkpoints",
        *("self", "torchtitan.components.checkpoint:CheckpointManager.save"),
    ),
    # torchrun restarts what would end in the same way, and tells ranks no reason.
    *(
        (
            f"torchtitan_lr.compat.elastic:Agent.{name}",
            f"torch.distributed.elastic.agent.server:SimpleElasticAgent.{name}",
            *("self worker_group", f"torch.distributed.elastic.agent.server:{caller}"),
        )
        for name, caller in (
            ("_rendezvous", "SimpleElasticAgent._initialize_workers"),
            ("_start_workers", "SimpleElasticAgent._initialize_workers"),
            ("_stop_workers", "SimpleElasticAgent._restart_workers"),
            ("_monitor_workers", "SimpleElasticAgent._invoke_run"),
        )
    ),
]

REWRITES = [  # ours, upstream's, first digits of the SHA-256 of upstream's source
    # All ranks agree between backward and the optimizer whether the step is finite.
    ("training.trainer:Trainer.train_step", "train:Trainer.train_step", "471795acb90b"),
    # A run stops after the step in which a signal arrives, and reports start and end.
    ("training.trainer:Trainer.train", "train:Trainer.train", "6d9a39ca1238"),
    # A damaged or incomplete step is not loaded; later steps are renamed.
    (
        "training.checkpoint:CheckpointManager.load",
        *("components.checkpoint:CheckpointManager.load", "a739d1f02684"),
    ),
    # Throughput excludes validation and saves; MFU is omitted if the peak is unknown.
    (
        "training.metrics:LowRankMetricsProcessor.log",
        *("components.metrics:MetricsProcessor.log", "3c99cf39c0a7"),
    ),
    # Upstream averages per-batch means; ours is the mean over all tokens of the set.
    (
        "training.validate:Validator.validate",
        *("components.validate:Validator.validate", "3c8d2dd9470e"),
    ),
    # Norm and head are separate units, and all gradients are summed.
    (
        "parallel.data_parallel:apply_data_parallel",
        *("models.llama3.infra.parallelize:apply_fsdp", "aac252bf68dd"),
    ),
]


def resolve(name):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("ours", "upstream", "parameters", "caller"), OVERRIDES)
def test_an_overridden_method_is_there_and_called(ours, upstream, parameters, caller):
    assert [*inspect.signature(resolve(upstream)).parameters] == parameters.split()
    owner, _, method = ours.rpartition(".")
    assert f".{method}(" in inspect.getsource(resolve(caller))
    assert upstream.endswith(f".{method}") and method in vars(resolve(owner))


@pytest.mark.parametrize(("ours", "upstream", "digest"), REWRITES)
def test_rewritten_functions_have_not_changed_upstream(ours, upstream, digest):
    assert callable(resolve(f"torchtitan_lr.{ours}"))
    source = inspect.getsource(resolve(f"torchtitan.{upstream}"))
    found = hashlib.sha256(source.encode()).hexdigest()[:12]
    assert found == digest, f"{upstream} has changed: compare it with {ours}"


PACKAGE = ROOT / "torchtitan_lr"
ROOMS = ("compat", "titan")
FILES = [p for p in PACKAGE.rglob("*.py") if p.parent.relative_to(PACKAGE).name not in ROOMS]


def reached(text):
    """Lines of a program that import a private name, or change what they have imported."""
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            if names[0].split(".")[0] not in sys.stdlib_module_names:
                imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
            parts = [part for name in names for part in name.split(".")]
            if "unittest" in parts or any(p[0] == "_" and p[:2] != "__" for p in parts):
                yield ast.unparse(node)
    for node in ast.walk(ast.parse(text)):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node).split(".")[0] in imported:
            yield ast.unparse(node)


def test_upstreams_private_names_stand_in_two_rooms():
    found = {str(path.relative_to(PACKAGE)): [*reached(path.read_text())] for path in FILES}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}
