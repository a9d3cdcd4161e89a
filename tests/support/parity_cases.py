# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensor-parallel test cases, their comparison with one process, and the full matrix."""

import itertools
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_lr.compat import dtensor
from torchtitan_lr.models.args import LaxGate, LlamaArgs
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, apply_tensor_parallel, resolve_settings

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""
Tolerances of relative errors. The test suite compares in fp64, which holds on every CPU; fp32 is
for `tests/distributed/test_parity_matrix.py`.
"""

BACKEND = "aot_eager"
"""Backend of ``torch.compile``; a caller on the same rank may set another one."""

BATCH, TOKENS, VOCABULARY = 2, 8, 64


@dataclass(frozen=True)
class Case:
    """One point of the matrix.

    Args:
        family: The model's family.
        settings: Tensor-parallel settings.
        gqa: Whether two query heads share a key-value head.
        degree: Tensor-parallel degree T, of four ranks.
        dtype: Dtype of weights and computation.
        gate: LaX's gate.
        lanes: Number of lanes G of CAAT-Net.
        fraction: Share p of the channels that the lanes synchronize.
    """

    family: str = "cola"
    settings: TPSettings = field(default_factory=TPSettings)
    gqa: bool = True
    degree: int = 4
    dtype: torch.dtype = torch.float64
    gate: LaxGate = "identity"
    lanes: int = 1
    fraction: float = 1.0

    def __str__(self) -> str:
        s = self.settings
        grouping = "grouped" if s.grouping else "ungrouped"
        loss = "lossparallel" if s.loss_parallel else "gatheredlogits"
        parts = [s.plan, self.family + ("-gated" if self.gate == "scalar" else "")]
        parts += ["gqa" if self.gqa else "mha", grouping, s.norm, s.comm, loss]
        if self.lanes > 1:
            parts.append(f"G{self.lanes}-p{self.fraction}" + "-wide" * s.wide_sums)
        return "-".join([*parts, f"T{self.degree}", str(self.dtype).removeprefix("torch.")])


def model_args(case: Case) -> LlamaArgs:
    """Return a model shape with distinct widths, all divisible by four."""
    low_rank = case.family != "full"
    return LlamaArgs(
        family=case.family,
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=4 if case.gqa else None,
        ffn_dim=88,
        vocab_size=VOCABULARY,
        max_seq_len=TOKENS,
        norm_eps=1e-2,  # large enough to detect that it is applied twice
        rank_attention=12 if low_rank else 0,
        rank_ffn=20 if low_rank else 0,
        activation="fullrank" if case.family in ("full", "svd", "tanh") else "both",
        lax_gate=case.gate,
        lanes=case.lanes,
        sync_fraction=case.fraction,
    )


def build_model(case: Case, prepare: Callable[[LlamaModel], None] | None = None) -> LlamaModel:
    """Build on the meta device, shard, and initialize, as the trainer does."""
    with torch.device("meta"):
        model = LlamaModel(model_args(case))
    model.to(case.dtype)
    if prepare is not None:
        prepare(model)
    model.to_empty(device="cpu")
    model.init_weights()
    for name, parameter in model.named_parameters():
        leaf = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith(("norm.weight", "gate")):  # ones would hide a missing factor
            generator = torch.Generator().manual_seed(zlib.crc32(clean(name).encode()))
            full = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                leaf.copy_(1 + 0.3 * dtensor.own_part(parameter, full, {0: 0}))
    return model


def clean(name: str) -> str:
    """Return a parameter's name without the prefix of ``torch.compile``."""
    return name.replace("_orig_mod.", "")


@dataclass
class Result:
    """Results of a forward and backward pass on this rank: local activations, full gradients.

    Args:
        loss: Sum over the tokens, a scalar.
        stream: This rank's part of the embedding's output (b, s, d).
        stream_gradient: Its gradient, of the same shape.
        gradients: Gathered gradient of every parameter, by name.
        logits: (b, s, vocabulary), gathered.
    """

    loss: Tensor
    stream: Tensor
    stream_gradient: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor


def run_model(model: LlamaModel, head_loss: bool = False) -> Result:
    """Run one forward and backward pass on fixed tokens.

    Args:
        model: The model.
        head_loss: Whether the head computes the loss, or the loss follows from the logits.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    streams: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Tensor) -> None:
        out.retain_grad()
        streams.append(out)

    assert model.tok_embeddings is not None
    handle = model.tok_embeddings.register_forward_hook(keep)
    if head_loss:
        loss = model(tokens, targets=labels)
        loss.backward()
        logits = None
    else:
        logits = model(tokens)
        with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
            loss = cross_entropy_sum(logits, labels)
            loss.backward()
    handle.remove()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[clean(name)] = whole
    assert streams[0].grad is not None
    if logits is None:  # after the gradients are read: FSDP2 leaves parameters whole after forward
        logits = model(tokens)
    return Result(
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach(),
        streams[0].detach(),
        streams[0].grad,
        gradients,
        (logits.full_tensor() if isinstance(logits, DTensor) else logits).detach(),
    )


@cache
def reference(case: Case) -> Result:
    """Return the one-process result of a case that `alone` returned."""
    return run_model(build_model(case))


def alone(case: Case) -> Case:
    """Return the case without settings that have no effect in one process."""
    kept = ("family", "gqa", "dtype", "gate", "lanes", "fraction")
    return Case(**{name: getattr(case, name) for name in kept})


def one_process(case: Case) -> Result:
    """Run the same model and data without any parallelism."""
    return reference(alone(case))


@cache
def tp_mesh(degree: int) -> DeviceMesh:
    """Return a mesh of all four ranks, or of two replicas of two."""
    shape = (dist.get_world_size() // degree, degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def resolved(case: Case) -> TPSettings:
    """Return the case's settings with the plan named."""
    return resolve_settings(case.settings, model_args(case), case.degree, TOKENS)


def shard_model(case: Case) -> Callable[[LlamaModel], None]:
    """Return what applies the case's tensor parallelism to a model."""
    settings = resolved(case)
    return lambda model: apply_tensor_parallel(model, tp_mesh(case.degree), settings)


def relative(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b| of two tensors of one shape."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max()).item()


def own_part(case: Case, whole: Tensor) -> Tensor:
    """Return this rank's part of a residual stream (b, s, d), or of the lanes' streams."""
    plan, rank = resolved(case).plan, tp_mesh(case.degree).get_local_rank()
    if case.lanes > 1 and case.family == "full":
        return whole.chunk(case.degree, 2)[rank]
    if PLANS[plan].shards_stream:
        return whole.chunk(case.degree, -1)[rank]
    return whole.chunk(case.degree, 1)[rank] if case.settings.comm == "sequence" else whole


def compare(case: Case, result: Result) -> dict[str, float]:
    """Return the relative errors against one process, by compared quantity."""
    expected = one_process(case)
    assert result.gradients.keys() == expected.gradients.keys()
    errors = {
        "loss": relative(result.loss, expected.loss),
        "logits": relative(result.logits, expected.logits),
        "x": relative(result.stream, own_part(case, expected.stream)),
        "dx": relative(result.stream_gradient, own_part(case, expected.stream_gradient)),
    }
    gates = [name for name in expected.gradients if name.endswith("gate")]
    for name in expected.gradients.keys() - set(gates):
        errors[name] = relative(result.gradients[name], expected.gradients[name])
    if gates:  # scalars, compared together, since a single one can be close to zero
        pair = [torch.cat([run.gradients[name] for name in gates]) for run in (result, expected)]
        errors["gates"] = relative(*pair)
    return errors


def parity(case: Case, *wrappers: Callable[[LlamaModel, Case], None]) -> dict[str, float]:
    """Run a case and return its errors; call it on all four ranks."""

    def prepare(model: LlamaModel) -> None:
        shard_model(case)(model)
        for wrap in wrappers:
            wrap(model, case)

    return compare(case, run_model(build_model(case, prepare), resolved(case).loss_parallel))


def compile_blocks(model: LlamaModel, case: Case) -> None:
    """Compile every block, in place."""
    compile_named(model, list(model.layers))


def compile_named(model: LlamaModel, names: list[str]) -> None:
    """Compile the blocks of these names with `BACKEND`, in place; a graph break is an error."""
    torch.compiler.reset()
    for name in names:
        block = model.layers[name]
        compiled: Any = torch.compile(block, backend=BACKEND, fullgraph=True)
        model.layers.register_module(name, compiled)


LOW_RANK: tuple[str, ...] = ("svd", "cola", "lax")


def strategies() -> list[tuple[str, LaxGate, dict[str, Any]]]:
    """Every family, kind of LaX gate and choice of settings."""
    found: list[tuple[str, LaxGate, dict[str, Any]]] = []
    for family, grouping, norm, comm in itertools.product(
        LOW_RANK,
        (True, False),
        ("online", "sync"),
        ("all_reduce", "sequence"),
    ):
        settings = {"plan": "btp", "grouping": grouping, "norm": norm, "comm": comm}
        found.append((family, "identity", settings))
    for plan, family, grouping in itertools.product(
        ("vanilla", "vanilla_replicated"), LOW_RANK, (True, False)
    ):
        found.append((family, "identity", {"plan": plan, "grouping": grouping}))
    for comm in ("all_reduce", "sequence"):
        found.append(("full", "identity", {"plan": "megatron", "comm": comm}))
    for plan, comm in (("btp", "all_reduce"), ("btp", "sequence"), ("vanilla", "all_reduce")):
        found.append(("lax", "scalar", {"plan": plan, "comm": comm}))
    found.append(("cola", "identity", {"plan": "btp", "loss_parallel": False}))
    return found


def all_cases() -> list[Case]:
    """Return all cases of the matrix."""
    dtypes = (torch.float64, torch.float32)
    return [
        Case(family, TPSettings(**settings), gqa, degree, dtype, gate)
        for degree, dtype, gqa in itertools.product((2, 4), dtypes, (False, True))
        for family, gate, settings in strategies()
    ]


def axes(case: Case) -> dict[str, Any]:
    """Return the case's value on every axis of the matrix."""
    settings = {name: getattr(case.settings, name) for name in TPSettings.__dataclass_fields__}
    own = {name: getattr(case, name) for name in ("family", "gqa", "degree", "dtype", "gate")}
    return settings | own


def pairs(case: Case) -> set[Any]:
    """Return every pair of values of two axes that the case covers."""
    return set(itertools.combinations(axes(case).items(), 2))


def covering(cases: list[Case]) -> list[Case]:
    """Return a fixed small subset of cases that covers every pair of values of all cases."""
    left = set().union(*(pairs(case) for case in cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        chosen.append(best)
    return chosen
