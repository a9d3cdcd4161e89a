# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One process checks a run; all others receive its verdict.

On one machine it is the launcher, before any rank starts. On several machines, and below plain
torchrun, it is rank 0: the checks read the corpus, the tokenizer and the checkpoint, and a thousand
ranks would read them at the same moment.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import HELD_VARIABLE

_stores: list[Any] = []  # on rank 0 the store's server lives with the object, and others read late
_READ_SECONDS = 10.0  # in which the other ranks must have read a refusal: then the store may end


def checked_once(dump_folder: str, check: Callable[[], dict[str, str]]) -> None:
    """Check a run in one process, and raise its refusal in all.

    The ranks meet at the store of ``env://``, at which the process group then meets too. Each rank
    but the first makes one request.

    Args:
        dump_folder: ``job.dump_folder``.
        check: Checks the run, and returns environment variables for all ranks.

    Raises:
        ConfigError: The run cannot start; the same on all ranks.
    """
    if os.environ.get(HELD_VARIABLE) == os.path.realpath(dump_folder):
        return  # the launcher has checked it
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        os.environ.update(check())
        return
    from torch.distributed import rendezvous

    store, rank, ranks = next(rendezvous("env://"))
    _stores.append(store)
    key = f"verdict/{ranks}"  # another number of ranks, after a machine is lost, is checked anew
    if rank:
        # Rank 0 may prepare a corpus for hours; if it ends, torchrun ends this rank too.
        store.wait([key], timedelta(days=7))
        verdict = json.loads(store.get(key))
        if (refusal := verdict.get("refusal")) is not None:
            store.add(f"{key}/read", 1)
            raise ConfigError(*refusal)
        os.environ.update(verdict["variables"])
        return
    try:
        variables = check()
    except Exception as error:
        _refuse(store, key, error, ranks)
        raise
    store.set(key, json.dumps({"variables": variables}))
    os.environ.update(variables)


def _refuse(store: Any, key: str, error: Exception, ranks: int) -> None:
    """Give the other ranks a refusal, and keep the store until they have read it."""
    what: tuple[str, object, str]
    what = ("rank 0", f"{type(error).__name__}: {error}", "a run that can be checked")
    if isinstance(error, ConfigError):
        what = (error.key, error.got, error.want)
    store.set(key, json.dumps({"refusal": what}, default=str))
    end = time.monotonic() + _READ_SECONDS
    while store.add(f"{key}/read", 0) < ranks - 1 and time.monotonic() < end:
        time.sleep(0.05)
