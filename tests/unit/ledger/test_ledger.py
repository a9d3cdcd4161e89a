# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ledger on one rank: what counts as a collective, its size, its scope and its pass."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.compat.process_groups import OPERATIONS
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.step_traffic import compare, differences
from torchtitan_lr.ledger.ledger import CommLedger

functional = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def four_fake_ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def world() -> str:
    return str(dist.group.WORLD.group_name)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", world()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # The gradient of a sum is expanded; before torch 2.13 the operator refuses it.
        out = functional.reduce_scatter_tensor(gradient.contiguous(), "sum", 4, world())
        return functional.wait_tensor(functional.all_gather_into_tensor(out, 4, world()))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(torch.sigmoid(x * self.weight)).exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = Part()
        self.layers = nn.ModuleDict({"0": Part(), "1": Part()})
        self.output = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        return self.output(x)


def step(model: nn.Module) -> CommLedger:
    with CommLedger([model], {}) as ledger:
        out = model(torch.ones(4, 8))
        loss = Reduce.apply(out).sum()
        loss.backward()
        dist.all_reduce(torch.zeros(3, dtype=torch.float64))
    return ledger


def test_scopes_and_passes() -> None:
    rows = [tuple(row.values()) for row in step(Model()).rows()]
    expected = []
    for scope in ("embedding", "block 0", "block 1", "head", "loss"):
        expected.append((scope, "forward", "all_reduce", "world", "float32", 1, 32, 128))
        for op in ("all_gather", "reduce_scatter"):
            expected.append((scope, "backward", op, "world", "float32", 1, 32, 128))
    expected.append(("step", "optimizer", "all_reduce", "world", "float64", 1, 3, 24))
    assert rows == expected


def test_recomputation_of_half_a_block_is_flagged() -> None:
    """Each block sends twice, and again in its second half."""
    model = Model()
    for name in list(model.layers):
        model.layers[name] = nn.Sequential(Part(), checkpoint_wrapper(Part()))
    found = []
    for row in step(model).rows(split_recompute=True):
        if row["op"] == "all_reduce" and row["scope"].startswith("block"):
            found.append((row["scope"], row["pass"], row["calls"], row["recompute"]))
    first = [("block 0", "forward", 2, False), ("block 0", "backward", 1, True)]
    assert found == [*first, *(("block 1", *rest) for _, *rest in first)]


X, Y = torch.ones(8, 2), torch.ones(32, 2)


@pytest.mark.parametrize(
    ("call", "op", "elements"),
    [
        (lambda: dist.all_reduce(X), "all_reduce", 16),
        (lambda: dist.broadcast(X, 0), "broadcast", 16),
        (lambda: dist.reduce_scatter_tensor(X[:2].clone(), X), "reduce_scatter", 16),
        (lambda: dist.all_gather_into_tensor(Y, X), "all_gather", 64),
        (lambda: dist.all_gather([X.clone() for _ in range(4)], X), "all_gather", 64),
        (lambda: dist.all_to_all_single(X.clone(), X), "all_to_all", 16),
        (lambda: functional.all_reduce(X, "sum", world()), "all_reduce", 16),
        (lambda: functional.all_reduce_(X, "sum", world()), "all_reduce", 16),
        (lambda: functional.all_reduce_coalesced([X, X[:1]], "sum", world()), "all_reduce", 18),
        (lambda: functional.reduce_scatter_tensor(X, "sum", 4, world()), "reduce_scatter", 16),
        (lambda: functional.all_gather_into_tensor(X, 4, world()), "all_gather", 64),
        (lambda: functional.all_gather_into_tensor_out(X, 4, world(), out=Y), "all_gather", 64),
    ],
)
def test_sizes(call: Any, op: str, elements: int) -> None:
    with CommLedger([], {}) as ledger:
        call()
    (row,) = ledger.rows()
    assert (row["mesh_dim"], row["op"], row["elements"]) == ("world", op, elements)


def test_every_collective_of_torch_is_known() -> None:
    """Whatever torch registers on a process group is either known or moves nothing."""
    from torchtitan_lr.compat.process_groups import GROUP_ARGUMENTS, NAMESPACES, NO_PAYLOAD

    unknown = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        arguments = {argument.name for argument in schema.arguments}
        if namespace in NAMESPACES and arguments & GROUP_ARGUMENTS:
            unknown |= {name} - OPERATIONS.keys() - NO_PAYLOAD
    assert unknown == set()


def row(**changes: Any) -> dict[str, Any]:
    identity = {"scope": "head", "pass": "forward", "op": "all_gather", "mesh_dim": "tp"}
    return identity | {"dtype": "float32", "calls": 1, "elements": 5, "bytes": 20} | changes


def test_comparison() -> None:
    traffic = Traffic("head", "forward", "all_gather", "activation", 1, 5)
    dtypes = {"activation": "float32"}
    assert compare([row()], [traffic], dtypes) == [row(expected_calls=1, expected_elements=5)]
    assert differences(compare([row()], [traffic], dtypes)) == []
    for wrong in (row(calls=2), row(elements=6), row(dtype="bfloat16"), row(mesh_dim="fsdp")):
        assert differences(compare([wrong], [traffic], dtypes))
    assert len(differences(compare([], [traffic], dtypes))) == 1
    unknown = compare([row(scope="step")], [], dtypes)
    assert unknown[0]["expected_calls"] is None and differences(unknown) == []
