# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Running without data and ranks: fake tensors and a fake process group.

Torch uses the classes in its own tests. Tested with torch 2.11 and 2.13.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def functions_by(**others: Any) -> AbstractContextManager[Any]:
    """Replace functions of `torch.nn.functional`, which models look up at every call."""
    return patch.multiple(F, **others)


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a fake process group, whose collectives return at once."""
    # A module of torch's tests registers the backend ``fake`` and its store.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
