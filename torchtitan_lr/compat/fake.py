# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Running without data and without ranks: fake tensors, a fake process group, DTensor's trials.

The rehearsal runs blocks on tensors without memory as one rank of a group that does not exist.
Torch uses the same parts in its own tests and publishes none of them.

Seen in torch 2.11 and 2.13. If a module moves, importing this one or `fake_process_group` fails;
training does not need them, apart from the type `FakeTensor`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator

__all__ = ["FakeTensor", "FakeTensorMode", "fake_process_group", "while_finding_shapes"]


@contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    """Be rank 0 of ranks that do not exist; every collective returns at once.

    The backend ``fake`` and its store are registered by a module of torch's tests. If upstream
    moves it, the import in here fails, and estimates at T > 1 with it.

    Args:
        size: How many ranks there seem to be.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def while_finding_shapes(say: Callable[[bool], None]) -> Iterator[None]:
    """Call ``say(True)`` before DTensor finds out a shape, and ``say(False)`` after it.

    DTensor finds out shapes by running operators on whole tensors, fake ones in a rehearsal; what
    they make is no memory of the run. There is no hook, so a private method is replaced:
    ``ShardingPropagator._propagate_tensor_meta_non_cached``. If upstream renames it, entering
    raises an AttributeError; if DTensor finds out shapes elsewhere, estimates of memory are too
    large and the tests of the rehearsal fail.
    """
    find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def told(*args: Any) -> Any:
        say(True)
        try:
            return find_shapes(*args)
        finally:
            say(False)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", told):
        yield
