# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The device under test and a process group of one rank."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from torchtitan_lr.collectives import Ranks

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the code under test runs."""
    yield from _exact_products(request.param)


@pytest.fixture(params=["meta", CUDA])
def unread_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device that the host must not wait for; ``meta`` stands for a GPU where there is none."""
    yield from _exact_products(request.param)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """A process group of this process alone: gloo on the CPU, NCCL on a GPU, no port."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(dist.group.WORLD.group_name, 1, 0)
    dist.destroy_process_group()


def _exact_products(name: str) -> Iterator[torch.device]:
    """Yield a device whose fp32 products are fp32: no TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.device(name)
    torch.set_float32_matmul_precision(before)
