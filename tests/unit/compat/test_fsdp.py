# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP, DTensor and collectives."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.unit.compat.doors import changed
from torchtitan_lr.compat import collectives, dispatch, dtensor, fsdp


def test_fsdp_the_layout_of_a_unit(unit):
    (group,) = fsdp.param_groups(unit)
    want = changed("FSDPParamGroup.fsdp_params", "fsdp.unit_parameters")
    assert hasattr(group, "fsdp_params"), want
    found = list(fsdp.unit_parameters(unit))
    want = changed("FSDPParam.sharded_param, .padded_sharded_param_size", "fsdp.unit_parameters")
    assert [size for _, size in found] == [9, 3], want  # 5 rows over 2 ranks, padded
    assert all(a is b for (a, _), b in zip(found, unit.parameters(), strict=True)), want
    assert fsdp.param_groups(nn.Linear(1, 1)) == []


def test_fsdp_the_calls_of_a_unit(unit):
    called = []

    def wrap(original):
        def noted(*args, **kwargs):
            called.append(original.__name__)
            return original(*args, **kwargs)

        return noted

    undo = fsdp.wrap_unit_calls(unit, wrap)
    unit(torch.ones(2, 3)).sum().backward()
    want = changed("FSDPParamGroup.unshard, .post_backward", "fsdp.wrap_unit_calls")
    assert set(called) == {"unshard", "post_backward"}, want
    inner = fsdp.wrap_unit_calls(unit, wrap)
    inner()
    called.clear()
    unit(torch.ones(2, 3)).sum().backward()
    assert set(called) == {"unshard", "post_backward"}  # a ledger's, after another's within it
    undo()
    called.clear()
    unit(torch.ones(2, 3)).sum().backward()
    assert not called


def test_fsdp_a_reduce_scatter_of_ours_is_called(unit):
    seen = {}

    class Mine(fsdp.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            seen.update(output=output_tensor.numel(), input=input_tensor.numel())

    assert set(fsdp.ReduceScatter.__abstractmethods__) == {"allocate", "__call__"}, changed(
        "the methods of ReduceScatter", "fsdp.ReduceScatter"
    )
    unit.set_custom_reduce_scatter(Mine())
    unit(torch.ones(2, 3)).sum().backward()
    assert seen == {"output": 12, "input": 24}, changed("ReduceScatter", "fsdp.ReduceScatter")


def test_fsdp_replication_is_fsdps(two_ranks):
    module = fsdp.replicate(nn.Linear(2, 2), mesh=two_ranks)
    want = changed("_composable.replicate_with_fsdp", "fsdp.replicate")
    assert isinstance(module, fsdp.ReplicateModule), want
    assert hasattr(module, "set_gradient_divide_factor"), want


def test_dtensor_parts_and_strided_shards(two_ranks):
    whole = torch.arange(8.0)
    x = distribute_tensor(whole, two_ranks, [Shard(0)], src_data_rank=None)
    part = dtensor.local_part(x)
    want = changed("DTensor._local_tensor", "dtensor.local_part")
    assert isinstance(x, DTensor) and part is dtensor.local_part(x), want
    assert torch.equal(part, whole[:4]), want
    assert dtensor.local_part(whole) is whole
    strided = dtensor.StridedShard(0, split_factor=2)
    want = changed("_StridedShard", "dtensor.StridedShard")
    assert (strided.dim, strided.split_factor) == (0, 2), want


def test_collectives_of_groups(two_ranks):
    group = two_ranks.get_group()
    want = changed("_resolve_process_group", "collectives.group_size")
    assert collectives.group_size(group.group_name) == 2, want
    want = changed("ProcessGroup.unbox", "collectives.group_name_of")
    boxed = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            boxed.extend(a for a in args if isinstance(a, torch.ScriptObject))
            return func(*args, **(kwargs or {}))

    with Mode():
        dist.all_reduce(torch.ones(2), group=group)
    names = set()
    for found in boxed:
        try:
            names.add(collectives.group_name_of(found))
        except (RuntimeError, TypeError):  # the operation is boxed, too
            continue
    assert group.group_name in names, want
    assert collectives.group_name_of("a") == "a"


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_collectives_functional_operators(operator, arguments):
    schema = getattr(collectives.functional, operator).default._schema
    assert [argument.name for argument in schema.arguments] == arguments, changed(
        f"_c10d_functional::{operator}", "collectives.functional"
    )


def test_collectives_of_one_tensor(two_ranks):
    out = torch.zeros(2)
    collectives.reduce_scatter(out, torch.ones(4), group=two_ranks.get_group())
    collectives.all_gather(torch.zeros(4), out, group=two_ranks.get_group())
    assert isinstance(collectives.AsyncCollectiveTensor, type)


def test_sums_that_fsdp_reads_at_once(unit):
    """It casts them, adds them to gradients, or calls hooks; otherwise it only makes views."""
    want = changed(
        "FSDPParamGroup._orig_dtype, FSDPParam.offload_to_cpu", "fsdp.reads_sums_at_once"
    )
    unit(torch.ones(2, 3)).sum().backward()
    sums = torch.ones(12)
    assert fsdp.reads_sums_at_once(unit, sums), want  # gradients are there
    unit.zero_grad()
    assert not fsdp.reads_sums_at_once(unit, sums), want
    assert fsdp.reads_sums_at_once(unit, sums.bfloat16()), want
    handle = next(unit.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    assert fsdp.reads_sums_at_once(unit, sums), want
    handle.remove()
    assert not fsdp.reads_sums_at_once(unit, sums), want
