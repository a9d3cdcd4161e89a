# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rotary positions: their values, and that no cast rounds the table."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.tiny import build_tiny
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.models.llama import apply_rope, build_freqs_cis
from torchtitan_lr.parallel.data_parallel import mixed_precision_policy
from torchtitan_lr.titan.specs import RoPEScalingArgs


def rotate(x, freqs_cis):
    """The definition: multiply each pair, as a complex number, by the table."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs_cis[: x.shape[1], None]).flatten(-2)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("scaling", [None, RoPEScalingArgs(original_max_position_embeddings=8)])
def test_real_and_complex_arithmetic_agree(dtype, limit, scaling):
    """The values and the gradients of both forms, on a shard of the heads too."""
    table = build_freqs_cis(8, 16, 10000.0, scaling, dtype)
    generator = torch.Generator().manual_seed(0)
    wide, g = (torch.randn(2, 16, n, 8, generator=generator).to(dtype) for n in (5, 3))
    x = wide[:, :, 1:4].requires_grad_()
    eager = apply_rope(x, torch.view_as_real(table))
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        compiled, backward = apply_rope(x, table), apply_rope(x, table.conj().resolve_conj())
    for a, b, same in (
        (eager, compiled, True),
        (*(torch.autograd.grad(y, x, g)[0] for y in (eager, compiled)), True),
        (eager, backward, False),
    ):
        assert a.dtype == dtype
        assert ((a - b).abs().max() <= limit * b.abs().max()).item() == same


def test_bf16_is_rotated_in_fp32():
    x = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = build_freqs_cis(8, 16, 10000.0, None)
    exact = rotate(x.double(), build_freqs_cis(8, 16, 10000.0, None, torch.float64))
    # One rounding to bf16, and four in fp32: of the table, the products and their sum.
    limit = 2**-8 * exact.abs() + 4 * 2**-23 * x.double().abs().max()
    out = apply_rope(x, table)
    assert out.dtype == torch.bfloat16
    assert ((out - exact).abs() <= limit).all()
    rounded = torch.complex(table.real.bfloat16().float(), table.imag.bfloat16().float())
    assert not ((apply_rope(x, rounded) - exact).abs() <= limit).all()


def test_a_cast_of_the_model_does_not_round_the_table():
    model = build_tiny("cola")
    exact = build_freqs_cis(12, 32, 10000.0, None, torch.float64)
    assert model.freqs_cis.dtype == torch.complex64
    assert torch.equal(model.double().freqs_cis, exact)
    # What a plain cast would have left behind is another table.
    assert not torch.equal(build_freqs_cis(12, 32, 10000.0, None).to(torch.complex128), exact)
    assert torch.equal(model.bfloat16().freqs_cis, exact.to(torch.complex64))
    assert torch.equal(model.to(torch.bfloat16).freqs_cis, exact.to(torch.complex64))


@pytest.mark.parametrize("cast", [False, True])
def test_fsdp_does_not_round_the_table(cast: bool) -> None:
    policy = mixed_precision_policy(build_job_config(["--training.mixed_precision_param=bfloat16"]))
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    model = build_tiny("cola")
    seen: dict[str, Any] = {}

    def look(module: Any, args: tuple[Any, ...]) -> None:
        seen["x"], seen["table"] = args[0].dtype, args[2].table

    with fake_process_group(1):
        mesh = init_device_mesh("cpu", (1,))
        if cast:
            policy = replace(policy, cast_forward_inputs=True)  # torch's default: the control
        for module in (model.tok_embeddings, *model.layers.values(), model.output, model):
            assert module is not None
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model.layers["0"].attention.register_forward_pre_hook(look)
        with pytest.raises(RuntimeError, match="BFloat16") if cast else nullcontext():
            assert model(torch.zeros(1, 8, dtype=torch.long)).dtype == torch.bfloat16
    assert seen["x"] == torch.bfloat16
    exact = torch.view_as_real(model.freqs_cis)
    assert (seen["table"].dtype == torch.float32) == (not cast)
    assert torch.equal(seen["table"].float(), exact) == (not cast)
