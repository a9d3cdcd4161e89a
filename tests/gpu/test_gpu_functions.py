# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every autograd Function of the package on a group of one rank, against plain formulas in fp64.

On one rank a collective is the identity, so a Function is the formula of its part of the model. The
package skips collectives of one rank; here they are called, with a number that equals no other.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchtitan_lr
from tests.support.allocations import Noted
from torchtitan_lr.collectives import FEATURES, TOKENS, Ranks
from torchtitan_lr.models import ends as head_loss
from torchtitan_lr.models.lanes import lane_terms, share_channels
from torchtitan_lr.models.linears import Gated, down_products, gated_linear
from torchtitan_lr.numerics import add_product, exact_products, plus_product, product, sides
from torchtitan_lr.parallel import btp, paired
from torchtitan_lr.parallel.context import gather_row
from torchtitan_lr.parallel.megatron import column_parallel, gather_and_sum_wide

B, S, D, R, G = 2, 6, 24, 8, 2
EPS = 1e-5
SHARED = 9


class One(int):
    """The number of the ranks, which the package does not recognise as 1."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


TARGETS = torch.arange(B * S).remainder(7).mul(6).sub(1).reshape(B, S)
TARGETS[TARGETS < 0] = -100  # does not count

ALONE = {"_LinearLoss", "_DownProducts", "_GatedLinear", "_ContiguousGradient"}
"""The Functions that communicate nothing here."""

LIMITS = {torch.float64: 1e-12, torch.bfloat16: 2.0**-7}
"""Of |error| / |expected| over a whole tensor. In fp64 sums of at most 48 terms are off by 1e-14 at
worst. In bf16 a result is rounded at most four times on its way, by at most 2⁻⁹ each."""


@dataclass(frozen=True)
class Case:
    """A Function, what calls it, the same as a formula, and the shapes of its arguments."""

    function: str
    ours: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    variant: str = ""


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * gamma / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def partial_sum(x: Tensor) -> Tensor:
    total = x[..., :SHARED].sum(2, keepdim=True).expand(-1, -1, x.shape[2], -1)
    return torch.cat((total, x[..., SHARED:]), -1)


def lanes_apart(x: Tensor, weight: Tensor) -> Tensor:
    pairs = zip(x.chunk(G, -1), weight.chunk(G, 1), strict=True)
    return torch.stack([part @ columns.T for part, columns in pairs], 2)


def linears(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [x @ weight.T for weight in weights]


def one_by_one(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [x[..., i * R : (i + 1) * R] @ weight.T for i, weight in enumerate(weights)]


def down(ranks: Ranks, x: Tensor, gamma: Tensor, *weights: Tensor, **options: bool) -> list[Tensor]:
    return btp.online_down(x, gamma, D, EPS, weights, btp.Reduction(ranks, **options))


def in_chunks(size: int, x: Tensor, weight: Tensor) -> Tensor:
    """The loss of the targets below; chunks of a size that leaves a smaller last one."""
    targets = TARGETS.to(x.device)
    with patch.object(head_loss, "chunk_tokens", lambda tokens, dim: size):
        return head_loss.linear_loss(x, weight, targets).to(x.dtype)


def whole_loss(x: Tensor, weight: Tensor) -> Tensor:
    lanes = x.unflatten(-1, (-1, D)) if x.ndim == 3 else x
    parts = zip(lanes.unbind(2), weight.chunk(lanes.shape[2]), strict=True)
    log_p = torch.cat([part @ rows.T for part, rows in parts], -1).log_softmax(-1)
    own = log_p.gather(-1, TARGETS.clamp(min=0)[..., None])[..., 0]
    return -own[TARGETS >= 0].sum()


def losses() -> Iterator[Case]:
    for size in (B * S, 5):
        for stream in ((B, S, D), (B, S, G, D)):
            ours = lambda ranks, x, weight, size=size: in_chunks(size, x, weight)  # noqa: E731
            variant = f"{'lanes' if len(stream) == 4 else 'stream'} {size}"
            yield Case("_LinearLoss", ours, whole_loss, (stream, (40, D)), variant)


def exchanges() -> Iterator[Case]:
    for name, call in (
        ("CopyToRanks", paired.copy_to_ranks),
        ("ReduceFromRanks", paired.reduce_from_ranks),
        ("GatherFromRanks", paired.gather_from_ranks),
        ("ScatterToRanks", paired.scatter_to_ranks),
        ("GatherAndCopyToRanks", paired.gather_and_copy_to_ranks),
        ("ReduceScatterToRanks", paired.reduce_scatter_to_ranks),
    ):
        for dim in (TOKENS, FEATURES):
            ours = lambda ranks, x, f=call, dim=dim: f(x, ranks, dim)  # noqa: E731
            yield Case(name, ours, torch.clone, ((B, S, D),), f"dim{dim}")
    yield Case("GatherRow", lambda ranks, x: gather_row(x, ranks), torch.clone, ((B, S, D),))
    wide = lambda ranks, x: gather_and_sum_wide(x, ranks)  # noqa: E731
    yield Case("GatherAndSumWide", wide, torch.clone, ((B, S, D),), "wide")


def cases() -> Iterator[Case]:
    yield from exchanges()
    norm = ((B, S, D), (D,))
    group = (*norm, (R, D), (R + 3, D))
    for options in ("", "sequence"):
        chosen = dict.fromkeys(options.split(), True)
        for grouped in (True, False):
            ours = partial(down, grouping=grouped, **chosen)
            formula = lambda x, gamma, *w: linears(rms_norm(x, gamma), *w)  # noqa: E731
            variant = f"{options} {'grouped' if grouped else 'alone'}".strip()
            yield Case("_OnlineDown", ours, formula, group, variant)
    yield Case("_SyncNorm", lambda ranks, x, g: btp.sync_norm(x, g, D, EPS, ranks), rms_norm, norm)
    yield Case(
        "_ScatteredNorm",
        lambda ranks, x, gamma: btp.sync_norm(x, gamma, D, EPS, ranks, gather=True),
        rms_norm,
        norm,
    )
    yield from losses()
    weights = ((R, D), (R, D), (R + 3, D))
    side_by_side = lambda x, *w: torch.cat(linears(x, *w), -1)  # noqa: E731
    alone = lambda ranks, x, *w: torch.cat(down_products(x, w), -1)  # noqa: E731
    yield Case("_DownProducts", alone, side_by_side, ((B, S, D), *weights))
    summed = lambda ranks, x, *w: torch.cat(btp.down_projections(x, w, btp.Reduction(ranks)), -1)  # noqa: E731
    yield Case(
        "_GatedLinear",
        lambda ranks, x, w: gated_linear(Gated(x, None, False), w, 32),
        lambda x, w: F.pad(F.linear(x, w), (0, 32 - D + 1)),
        ((B, S, D), (D - 1, D)),
        "padded",
    )
    yield Case("_Down", summed, side_by_side, ((B, S, D), *weights))
    column = lambda ranks, x, *w: torch.cat(column_parallel(x, w, ranks), -1)  # noqa: E731
    yield Case("_ColumnParallel", column, side_by_side, ((B, S, D), *weights))
    up = lambda ranks, x, *w: btp.up_projections(x.split(R, -1), w, ranks)  # noqa: E731
    yield Case("_UpProjections", up, one_by_one, ((B, S, 2 * R), (D, R), (D, R)))
    silu = lambda x: x * x.sigmoid()  # noqa: E731
    yield Case(
        "_GatedLinear",
        lambda ranks, h, weight: gated_linear(Gated(h, None, True), weight),
        lambda h, weight: silu(h) @ weight.T,
        ((B, S, R), (D, R)),
    )
    for active in (True, False):
        yield Case(
            "_GatedLinear",
            lambda ranks, gate, up, w, active=active: gated_linear(Gated(gate, up, active), w),
            lambda gate, up, w, active=active: ((silu(gate) if active else gate) * up) @ w.T,
            ((B, S, D), (B, S, D), (R, D)),
            "silu" if active else "identity",
        )
    yield Case(
        "_ContiguousGradient",
        lambda ranks, x, weight: lane_terms(x, weight, G),
        lanes_apart,
        ((B, S, G * R), (D, G * R)),
    )
    for wide in (True, False):
        variant = "wide" if wide else "narrow"
        streams = ((B, S, G, D),)
        share = lambda ranks, x, wide=wide: share_channels(x, SHARED, wide, ranks)  # noqa: E731
        yield Case("_ShareChannels", share, partial_sum, streams, variant)


CASES = list(cases())


def test_every_function_has_a_case() -> None:
    package = Path(torchtitan_lr.__file__).parent
    # An estimate's Function has no values.
    paths = [path for path in package.rglob("*.py") if package / "costs" not in path.parents]
    source = [path.read_text() for path in paths]
    written = re.compile(r"^class (\w+)\((?:torch\.)?autograd\.Function\)", re.MULTILINE)
    made = re.compile(r"= paired\(\"(\w+)\"")
    functions = {name for text in source for p in (written, made) for name in p.findall(text)}
    assert len(functions) >= 10
    assert functions == {case.function for case in CASES}


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp64", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function} {c.variant}".strip())
def test_forward_and_gradients(
    case: Case, dtype: torch.dtype, device: torch.device, one_rank: Ranks
) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    called: set[str] = set()

    def note(func: Any, *_: Any) -> None:
        if func.namespace == "_c10d_functional":
            called.add(func.overloadpacket.__name__)

    ranks = Ranks(one_rank.group, One(1), 0)
    exact = [draw(shape).double().requires_grad_() for shape in case.shapes]
    inputs = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    with Noted(note):
        outputs = _listed(case.ours(ranks, *inputs))
    wanted = _listed(case.formula(*exact))
    assert f"{case.function}Backward" in _nodes(outputs)
    upstream = [draw(tuple(out.shape)) for out in wanted]
    with Noted(note):
        found = torch.autograd.grad(outputs, inputs, [g.to(device) for g in upstream])
    expected = torch.autograd.grad(wanted, exact, [g.double() for g in upstream])
    for ours, theirs in zip((*outputs, *found), (*wanted, *expected), strict=True):
        assert ours.device.type == device.type and ours.dtype == dtype
        error = (ours.detach().cpu().double() - theirs.detach()).norm() / theirs.detach().norm()
        assert error <= LIMITS[dtype]
    assert bool(called) == (case.function not in ALONE)
    assert ("all_to_all_single" in called) == ("wide" in case.variant)


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "three"])
def test_a_split_product_has_16_bits(
    stack: tuple[int, ...], flipped: bool, device: torch.device
) -> None:
    a, b = (_normal(*stack, rows, 304) for rows in (24, 32))
    exact, size = a.double() @ b.double().mT, a.abs() @ b.abs().mT
    rounded = a.bfloat16().double() @ b.bfloat16().double().mT
    a, b = ((x.mT.contiguous().mT if flipped else x).to(device) for x in (a, b))
    with exact_products(split=True):
        left, right = sides(a)[0], sides(b)[1]
        found = product(left, right).cpu()
        total = exact.float().to(device)
        half = plus_product(total, left, right, beta=0.5, alpha=-0.5).cpu()
        add_product(total, left, right, alpha=-1.0)
        wide = [x.dtype for x in sides(exact)]
    assert left.dtype == right.dtype == torch.bfloat16 and left.shape[-1] == 912
    assert left.stride(-2 if flipped else -1) == 1
    assert ((found - exact).abs() <= 2.0**-15 * size).all()
    assert ((rounded - exact).abs() > 2.0**-15 * size).any()
    for sums, factor in ((half, 0.5), (total.cpu(), 1.0)):
        assert ((sums - factor * (exact - found)).abs() <= 1e-6 * size).all()
    # fp64, and fp32 elsewhere, stay as they are; of a symmetric matrix itself is on the right.
    assert wide == [torch.float64] * 2
    assert sides(a)[0] is a and sides(a, symmetric=True)[1] is a


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _nodes(outputs: list[Tensor]) -> set[str]:
    names, left = set(), [out.grad_fn for out in outputs]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left.extend(parent for parent, _ in node.next_functions)
    return names
