# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The regime of mixed precision: compute in bf16, masters and reductions in fp32."""

import torch

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.parallel.data_parallel import mixed_precision_policy


def test_gradients_are_reduced_in_their_own_dtype() -> None:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        config = build_job_config([f"--training.mixed_precision_param={name}"])
        policy = mixed_precision_policy(config)
        assert (policy.param_dtype, policy.reduce_dtype) == (dtype, torch.float32)
