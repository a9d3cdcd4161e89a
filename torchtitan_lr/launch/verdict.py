# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One process checks a run; all others receive its verdict.

On one machine it is the launcher, before any rank starts. On several machines, and below plain
torchrun, it is rank 0: the checks read the corpus, the tokenizer and the checkpoint, and a thousand
ranks would read them at the same moment. Then one rank of each machine finds the prepared tokens
there, or prepares them: machines need not share a folder.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import HELD_VARIABLE

_stores: list[Any] = []  # on rank 0 the store's server lives with the object, and others read late
_READ_SECONDS = 10.0  # in which the other ranks must have read a refusal: then the store may end


def checked_once(
    dump_folder: str, check: Callable[[], None], prepare: Callable[[], dict[str, str]]
) -> None:
    """Check a run in one process, prepare it in one of each machine, raise refusals in all.

    The ranks meet at the store of ``env://``, at which the process group then meets too. Most ranks
    make two requests.

    Args:
        dump_folder: ``job.dump_folder``.
        check: Checks the run.
        prepare: Prepares what a machine needs, whose folders may be its own, and returns
            environment variables for its ranks.

    Raises:
        ConfigError: The run cannot start; the same on all ranks that it was found for.
    """
    if os.environ.get(HELD_VARIABLE) == os.path.realpath(dump_folder):
        return  # the launcher has checked it
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        check()
        os.environ.update(prepare())
        return
    from torch.distributed import rendezvous

    store, rank, ranks = next(rendezvous("env://"))
    _stores.append(store)
    key = f"verdict/{ranks}"  # another number of ranks, after a machine is lost, is checked anew
    _told(store, key, rank == 0, ranks, check)
    machine = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    local, here = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if "LOCAL_RANK" not in os.environ:  # each rank for itself: who shares a machine is unknown
        machine, here = f"rank {rank}", 1
    os.environ.update(_told(store, f"{key}/{machine}", local == 0, here, prepare))


def _told(store: Any, key: str, first: bool, ranks: int, work: Callable[[], Any]) -> Any:
    """Do some work in the first of some ranks; return its result, or raise its refusal, in all."""
    if not first:
        # The first may prepare a corpus for hours; if it ends, torchrun ends this rank too.
        store.wait([key], timedelta(days=7))
        told = json.loads(store.get(key))
        if (refusal := told.get("refusal")) is not None:
            store.add(f"{key}/read", 1)
            raise ConfigError(*refusal)
        return told["result"]
    try:
        result = work()
    except Exception as error:
        _refuse(store, key, error, ranks)
        raise
    store.set(key, json.dumps({"result": result}))
    return result


def _refuse(store: Any, key: str, error: Exception, ranks: int) -> None:
    """Give the other ranks a refusal, and keep the store until they have read it."""
    what: tuple[str, object, str]
    rank = os.environ.get("RANK", "0")
    what = (f"rank {rank}", f"{type(error).__name__}: {error}", "a run that can be checked")
    if isinstance(error, ConfigError):
        what = (error.key, error.got, error.want)
    store.set(key, json.dumps({"refusal": what}, default=str))
    end = time.monotonic() + _READ_SECONDS
    while store.add(f"{key}/read", 0) < ranks - 1 and time.monotonic() < end:
        time.sleep(0.05)
