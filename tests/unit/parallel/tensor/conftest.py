# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lr.parallel.tensor.collectives import Ranks


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """The group of one rank, T = 1."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    assert dist.group.WORLD is not None
    yield Ranks(dist.group.WORLD.group_name, 1, 0)
    dist.destroy_process_group()
