# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One tensor-parallel case run on a rank and compared with one process, and the list of all cases."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_lr.loss import cross_entropy_sum
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.initialization import draw_parameter
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.tensor_parallel import (
    TPSettings,
    apply_tensor_parallel,
    resolve_settings,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
BATCH, TOKENS, VOCABULARY = 2, 8, 64


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    family: str = "cola"
    settings: TPSettings = field(default_factory=TPSettings)
    gqa: bool = True
    degree: int = 4
    dtype: torch.dtype = torch.float64
    gate: str = "identity"

    def __str__(self) -> str:
        s = self.settings
        norm = s.norm if s.norm == "sync" else f"{s.norm}-{s.norm_stat}"
        grouping = "grouped" if s.grouping else "ungrouped"
        loss = "lossparallel" if s.loss_parallel else "gatheredlogits"
        parts = [s.plan, self.family + ("-gated" if self.gate == "scalar" else "")]
        parts += ["gqa" if self.gqa else "mha", grouping, norm, s.comm, s.head, loss]
        return "-".join([*parts, f"T{self.degree}", str(self.dtype).removeprefix("torch.")])


def model_args(case: Case) -> LlamaArgs:
    """A model in which no two widths coincide and every width divides by four."""
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
        norm_eps=1e-2,  # large enough to be noticed where it is applied twice
        rank_attention=12 if low_rank else 0,
        rank_ffn=20 if low_rank else 0,
        activation="fullrank" if case.family in ("full", "svd") else "both",
        lax_gate=case.gate,
    )


def build_model(case: Case, prepare: Callable[[LlamaModel], None] | None = None) -> LlamaModel:
    """Build on the meta device, shard, draw: as the trainer does."""
    with torch.device("meta"):
        model = LlamaModel(model_args(case))
    model.to(case.dtype)
    if prepare is not None:
        prepare(model)
    model.to_empty(device="cpu")
    model.init_weights()
    for name, parameter in model.named_parameters():
        leaf = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith(("norm.weight", "gate")):  # ones would hide a forgotten factor
            draw_parameter(parameter, name, 0.3, seed=1)
            with torch.no_grad():
                leaf.add_(1.0)
    return model


@dataclass
class Result:
    """What a pass produced on this rank: local activations, whole gradients."""

    loss: Tensor
    stream: Tensor
    stream_gradient: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor


def run_model(model: LlamaModel, dtype: torch.dtype) -> Result:
    """One forward and backward pass on fixed tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    streams: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Tensor) -> None:
        # Scaled, because a stream of embeddings of norm 0.02 would sit far below ε.
        out.retain_grad()
        streams.append(out)

    assert model.tok_embeddings is not None
    handle = model.tok_embeddings.register_forward_hook(keep)
    logits = model(tokens)
    sharded = isinstance(logits, DTensor)
    with loss_parallel() if sharded else nullcontext():
        loss = cross_entropy_sum(logits, labels)
        loss.backward()
    handle.remove()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name.replace("_orig_mod.", "")] = whole
    assert streams[0].grad is not None
    return Result(
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach(),
        streams[0].detach(),
        streams[0].grad,
        gradients,
        (logits.full_tensor() if sharded else logits).detach(),
    )


@cache
def reference(case: Case) -> Result:
    return run_model(build_model(case), case.dtype)


def one_process(case: Case) -> Result:
    """The same model and data without any parallelism."""
    return reference(Case(case.family, gqa=case.gqa, dtype=case.dtype, gate=case.gate))


@cache
def tp_mesh(degree: int) -> DeviceMesh:
    """All four ranks, or two replicas of two."""
    shape = (dist.get_world_size() // degree, degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def shard_model(case: Case) -> Callable[[LlamaModel], None]:
    settings = resolve_settings(case.settings, model_args(case), case.degree, TOKENS)
    return lambda model: apply_tensor_parallel(model, tp_mesh(case.degree), settings)


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max()).item()


def own_part(case: Case, whole: Tensor) -> Tensor:
    """This rank's part of a residual stream (b, s, d) under the case's plan."""
    plan, rank = case.settings.plan, tp_mesh(case.degree).get_local_rank()
    if plan in ("auto", "btp") and case.family != "full":
        return whole.chunk(case.degree, -1)[rank]
    return whole.chunk(case.degree, 1)[rank] if case.settings.comm == "sequence" else whole


def compare(case: Case, result: Result) -> dict[str, float]:
    """Relative errors against one process, by what is compared."""
    expected = one_process(case)
    assert result.gradients.keys() == expected.gradients.keys()
    errors = {
        "loss": relative(result.loss, expected.loss),
        "logits": relative(result.logits, expected.logits),
        "x": relative(result.stream, own_part(case, expected.stream)),
        "dx": relative(result.stream_gradient, own_part(case, expected.stream_gradient)),
    }
    for name, gradient in expected.gradients.items():
        errors[name] = relative(result.gradients[name], gradient)
    return errors


def parity(case: Case) -> dict[str, float]:
    """Run a case on this rank; call it on all four."""
    return compare(case, run_model(build_model(case, shard_model(case)), case.dtype))


def parities(cases: list[Case]) -> list[dict[str, float]]:
    return [parity(case) for case in cases]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Exchange an attribute for a while: how faults are injected."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


NORMS = {
    "online-async": {"norm": "online", "norm_stat": "async"},
    "online-column": {"norm": "online", "norm_stat": "column"},
    "sync": {"norm": "sync"},
}


def all_cases() -> list[Case]:
    """The whole matrix."""
    cases = []
    dtypes = (torch.float64, torch.float32)
    low_rank = ("svd", "cola", "lax")
    for degree, dtype, gqa in itertools.product((2, 4), dtypes, (False, True)):
        common = {"gqa": gqa, "degree": degree, "dtype": dtype}
        for family, grouping, norm, comm, head in itertools.product(
            low_rank, (True, False), NORMS, ("all_reduce", "sequence"), ("plain", "scatter")
        ):
            settings = TPSettings("btp", grouping, **NORMS[norm], comm=comm, head=head)
            cases.append(Case(family, settings, **common))
        for plan, family, grouping in itertools.product(
            ("vanilla", "vanilla_replicated"), low_rank, (True, False)
        ):
            cases.append(Case(family, TPSettings(plan, grouping), **common))
        for comm in ("all_reduce", "sequence"):
            cases.append(Case("full", TPSettings("megatron", comm=comm), **common))
        for plan, comm in (("btp", "all_reduce"), ("btp", "sequence"), ("vanilla", "all_reduce")):
            settings = TPSettings(plan, comm=comm)
            cases.append(Case("lax", settings, gate="scalar", **common))
        gathered = TPSettings("btp", loss_parallel=False)
        cases.append(Case("cola", gathered, **common))
    return cases
