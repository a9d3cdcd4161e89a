# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One process checks a run; all others receive its answer.

On one machine it is the launcher, before any rank starts. On several machines, and below plain
torchrun, it is rank 0: the checks read the corpus, the tokenizer and the checkpoint, and a thousand
ranks would read them at the same moment. Then one rank of each machine finds the prepared tokens
there, or prepares them: machines need not share a folder.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

from torchtitan_lr.agreement import done_by_first
from torchtitan_lr.launch.folder_lock import HELD_VARIABLE, SIGNATURE_VARIABLE

_stores: list[Any] = []  # on rank 0 the store's server lives with the object, and others read late


def checked_once(
    dump_folder: str, check: Callable[[], str], prepare: Callable[[], dict[str, str]]
) -> str:
    """Check a run in one process, prepare it in one of each machine, raise refusals in all.

    Returns the signature in the folder's lock (`locked`).

    The ranks meet at the store of ``env://``, at which the process group then meets too.

    Args:
        dump_folder: ``job.dump_folder``.
        check: Checks the run, locks its folder and returns the signature.
        prepare: Prepares what a machine needs, and returns environment variables for its ranks.

    Raises:
        ConfigError: The run cannot start; the same on all ranks that it was found for.
    """
    if os.environ.get(HELD_VARIABLE) == os.path.realpath(dump_folder):
        return os.environ[SIGNATURE_VARIABLE]  # the launcher has checked it
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        signed = check()
        os.environ.update(prepare())
        return signed
    from torch.distributed import rendezvous

    store, rank, ranks = next(rendezvous("env://"))
    _stores.append(store)
    key = f"check/{ranks}"  # another number of ranks, after a machine is lost, is checked anew
    signed = done_by_first(store, key, rank == 0, ranks, check)
    machine = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    local, here = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if "LOCAL_RANK" not in os.environ:  # each rank for itself: who shares a machine is unknown
        machine, here = f"rank {rank}", 1
    os.environ.update(done_by_first(store, f"{key}/{machine}", local == 0, here, prepare))
    return signed
