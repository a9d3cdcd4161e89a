# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What ranks tell each other outside tensors.

With a process group every rank of it calls the function, and no other collective of the group may
run at that moment.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from torchtitan_lr.errors import ConfigError

T = TypeVar("T")

_LONGEST_WORK = timedelta(days=7)  # of `done_by_first`: it may prepare a corpus for hours
_READ_SECONDS = 10.0  # in which the other ranks must have read a refusal: then the store may end


def from_first_rank(value: T) -> T:
    """Return the first rank's value; one process returns its own."""
    # A rank that leaves this function knows that the first one has entered it.
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in the order of the ranks of a group; of all by default."""
    if not dist.is_initialized():
        return [value]
    values = cast(list[T], [None] * dist.get_world_size(group))
    dist.all_gather_object(values, value, group)
    return values


def first_rank_with(found: str | None) -> tuple[int, str] | None:
    """Return the first rank with a ``found``, and that, on all ranks; None if none has one."""
    texts = enumerate(from_all_ranks(found))
    return next(((rank, text) for rank, text in texts if text is not None), None)


def done_by_first(store: Any, key: str, first: bool, ranks: int, work: Callable[[], T]) -> T:
    """Do some work on the first of some ranks; return its result, or raise its refusal, on all."""
    # Whatever the work raised on the first rank, others raise a ConfigError.
    if not first:
        # If the first rank ends without an answer, torchrun ends this one too.
        store.wait([key], _LONGEST_WORK)
        answer = json.loads(store.get(key))
        if (refusal := answer.get("refusal")) is not None:
            store.add(f"{key}/read", 1)
            raise ConfigError(*refusal)
        return cast(T, answer["result"])
    try:
        result = work()
    except Exception as error:
        refused = error
        if not isinstance(refused, ConfigError):
            rank, what = os.environ.get("RANK", "0"), f"{type(error).__name__}: {error}"
            refused = ConfigError(f"rank {rank}", what, "a run that can be checked")
        refusal = refused.key, refused.got, refused.want
        store.set(key, json.dumps({"refusal": refusal}, default=str))
        end = time.monotonic() + _READ_SECONDS
        while store.add(f"{key}/read", 0) < ranks - 1 and time.monotonic() < end:
            time.sleep(0.05)
        raise
    store.set(key, json.dumps({"result": result}))
    return result
