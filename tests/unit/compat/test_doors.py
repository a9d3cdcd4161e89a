# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every door to torch's private names opens: what it says is what torch does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import schedules

from tests.support.allocations import Noted, reads
from torchtitan_lr.compat import dispatch, fake, fsdp, pipelining, prefix_attention
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.parallel.data_parallel import sum_gradients


@pytest.fixture
def two_ranks():
    """A mesh of two ranks that do not exist."""
    with fake.fake_process_group(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@pytest.fixture
def unit(two_ranks):
    return fully_shard(nn.Linear(3, 5), mesh=two_ranks)


def test_dispatch_knows_every_fused_attention_kernel():
    """Forward operators of torch for attention; those of other devices and the unfused are none."""
    known = {func.name().removeprefix("aten::") for func in dispatch.ATTENTION_OPERATORS}
    every = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::_scaled_dot_product")
    }
    others = {name for name in every - known if name.endswith(("_backward", "_mps", "_math"))}
    assert every - others == known


@pytest.mark.parametrize("decompose", [torch.linalg.eigh, torch.linalg.svd])
def test_the_host_does_not_ask_whether_it_converged_and_nothing_is_lost(decompose):
    x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    x = x + x.mT
    expected = decompose(x)
    assert reads(lambda: decompose(x)) == 1  # the control
    with dispatch.convergence_on_device(x.device) as codes:
        assert reads(lambda: decompose(x)) == 0
        found = decompose(x)
        decompose(x.index_fill(0, torch.tensor([1]), torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [bool(code.any()) for code in codes] == [False, False, True]
    assert (codes[-1] != 0).tolist()[:2] == [False, True]
    with pytest.raises(torch.linalg.LinAlgError):
        decompose(x.fill_(torch.nan))


def test_pipelining_the_actions_of_a_forward_pass():
    """Torch 2.15 added the waits for sends, without which a schedule is refused."""
    kinds = set(schedules._ComputationType.__members__)
    backward = {kind for kind in kinds if kind.endswith("_B") or "BACKWARD" in kind}
    expected = kinds - backward - {"REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
    assert {*pipelining._FORWARD} & kinds == expected
    assert {*pipelining._FORWARD} - kinds <= {"WAIT_SEND_F"}
    assert "WAIT_SEND_F" in kinds or torch.__version__ < "2.15"


def test_fsdp_the_layout_of_a_unit(unit):
    found = list(fsdp.unit_parameters(unit))
    assert [size for _, size in found] == [9, 3]  # 5 rows over 2 ranks, padded
    assert all(a is b for (a, _), b in zip(found, unit.parameters(), strict=True))
    assert fsdp.param_groups(nn.Linear(1, 1)) == []


def test_fsdp_the_gradients_that_a_unit_sums(unit):
    """This rank's own, of two passes of which the first one sums nothing."""
    norms = []
    fsdp.watch_gradients(unit, norms)
    unit.set_requires_gradient_sync(False)
    unit(torch.ones(2, 3)).sum().backward()
    assert norms == []
    unit.set_requires_gradient_sync(True)
    unit(torch.ones(4, 3)).sum().backward()
    assert len(norms) == 1
    ((parameters, found),) = norms
    assert all(a is b for a, b in zip(parameters, unit.parameters(), strict=True))
    # 15 and 5 entries, of 2 + 4.
    torch.testing.assert_close(found, torch.tensor([540.0, 180.0]).sqrt())
    fsdp.watch_gradients(unit, None)
    unit(torch.ones(4, 3)).sum().backward()
    assert len(norms) == 1


def one_rank_steps(wrap, prepare):
    """Gradients and weights of two steps of two micro-batches, and bytes per weight of FSDP2."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 8, bias=False))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    unit = wrap(layers, mesh=mesh, mp_policy=policy)
    prepare(unit)
    moved, found = [], []

    def note(func, args, result):
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].data_ptr() != args[1].data_ptr():
            moved.append(args[0].nbytes + args[1].nbytes)
        elif name in ("_to_copy", "div"):
            moved.append(args[0].nbytes + result.nbytes)
        elif name == "chunk_cat":
            moved.append(sum(x.nbytes for x in args[0]) * 3)  # bf16, and fp32

    for step in range(2):
        for micro in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + micro))
            half = x.bfloat16()
            with Noted(note):
                unit(half).sum().backward()
        found += [local_part(p.grad).clone() for p in unit.parameters()]
        with torch.no_grad():
            for parameter in unit.parameters():
                local_part(parameter).sub_(local_part(parameter.grad), alpha=0.1)
                parameter.grad = None
    found += [local_part(p).detach().clone() for p in unit.parameters()]
    return found, sum(moved) / 4 / sum(p.numel() for p in unit.parameters())


def test_replicated_units_neither_divide_on_one_rank_nor_copy():
    """FSDP2 casts fp32 weights to bf16 and gradients back: 12 bytes; the bits are the same."""

    def divide(unit):  # the control: as FSDP2 does by itself with a factor
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    with fake.fake_process_group(1):
        plain, usual = one_rank_steps(fsdp.replicate, divide)
        spared, fewer = one_rank_steps(fsdp.replicate, sum_gradients)
        sharded, kept = one_rank_steps(fully_shard, sum_gradients)
    for found in (spared, sharded):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    # Of one shard FSDP2 may free gradients before their last read.
    assert (usual, fewer, kept) == (32, 12, 24) or torch.__version__ < "2.13"


def test_sums_that_fsdp_reads_at_once(unit):
    """It casts them, adds them to gradients, or calls hooks; otherwise it only makes views."""
    unit(torch.ones(2, 3)).sum().backward()
    sums = torch.ones(12)
    assert fsdp.reads_sums_at_once(unit, sums)  # gradients are there
    unit.zero_grad()
    assert not fsdp.reads_sums_at_once(unit, sums)
    assert fsdp.reads_sums_at_once(unit, sums.bfloat16())
    handle = next(unit.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    assert fsdp.reads_sums_at_once(unit, sums)
    handle.remove()
    assert not fsdp.reads_sums_at_once(unit, sums)


def test_attention_to_a_prefix_is_an_operator_that_checkpoints_and_compilers_know():
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 32, 16)
    for seen in (k, k[:, :, :8]):
        inputs = [x.clone().requires_grad_() for x in (q, seen, seen)]
        torch.library.opcheck(prefix_attention.PREFIX_ATTENTION, tuple(inputs))
        with torch.no_grad():
            out = prefix_attention.prefix_attention(*inputs)
        given = (q, *(x.detach() for x in inputs), *out)
        torch.library.opcheck(torch.ops.torchtitan_lr.attend_to_prefix_backward.default, given)
