# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The regime of mixed precision: compute in bf16, masters and sums of micro-batches in fp32."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.tiny import build_tiny
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.parallel.data_parallel import mixed_precision_policy


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_policy_sums_in_fp32(wire: str) -> None:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        options = [f"--training.mixed_precision_param={name}"]
        config = build_job_config([*options, f"--training.mixed_precision_reduce={wire}"])
        policy = mixed_precision_policy(config)
        assert (policy.param_dtype, policy.reduce_dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("cast", [False, True])
def test_the_rotary_table_is_not_rounded(cast: bool) -> None:
    policy = mixed_precision_policy(build_job_config(["--training.mixed_precision_param=bfloat16"]))
    model = build_tiny("cola")
    seen: dict[str, Any] = {}

    def look(module: Any, args: tuple[Any, ...]) -> None:
        seen["x"], seen["table"] = args[0].dtype, args[2]

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
