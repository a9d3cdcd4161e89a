# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Two ranks that do not exist, and an FSDP unit on them."""

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lr.compat import fake


@pytest.fixture
def two_ranks():
    with fake.fake_process_group(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@pytest.fixture
def unit(two_ranks):
    return fully_shard(nn.Linear(3, 5), mesh=two_ranks)
