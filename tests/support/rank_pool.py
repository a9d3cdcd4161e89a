# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A pool of rank processes, which torchtitan and gloo start once for many tests.

A function that fails on any rank fails the test with that rank's traceback. Then, or when a test's
time is up, the pool is rebuilt: collectives may be out of order.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

DIED = "the process died"
PR_SET_PDEATHSIG = 1
LOADED: set[str] = set()
"""The modules of a rank before its first call: those of `torchtitan_lr.train`."""
FOLDER_VARIABLE = "RANK_POOL_FOLDER"
"""The environment variable of a rank that names the pool's folder."""


class RankPool:
    """`world_size` processes in one gloo process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in rank order."""
        results = {}
        for rank, failed, value in self._answers(function, args):
            if failed:
                self.close()
                raise RuntimeError(f"rank {rank}:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def errors(self, function: Callable[..., Any], *args: Any) -> list[str]:
        """Call a function that must raise on every rank; the pool stays usable."""
        results = {}
        for rank, failed, value in self._answers(function, args):
            if not failed or value.startswith(DIED):
                self.close()
                raise RuntimeError(f"rank {rank} raised nothing: {value}")
            results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _answers(
        self, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Iterator[tuple[int, bool, Any]]:
        """Yield (rank, whether it failed, its result or traceback) in order of arrival."""
        if not self._ranks:
            self._start()
        self._signal(signal.SIGCONT)
        for _, pipe in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a rank that died; the loop below says so
                pipe.send((function, args))
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while pending:
            try:
                ready = wait(list(pending))
            except BaseException:  # pytest-timeout's, or Ctrl-C
                self._abort(sorted(pending.values()))
                self.close()
                raise
            for pipe in [pipe for pipe in pending if pipe in ready]:
                rank = pending.pop(pipe)
                try:
                    failed, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process, _ = self._ranks[rank]
                    process.join(10)
                    failed, value = True, f"{DIED}, exit code {process.exitcode}"
                yield rank, failed, value
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """Send SIGSTOP or SIGCONT to all ranks: the threads of an idle group would poll."""
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _abort(self, ranks: Sequence[int]) -> None:
        """End ranks, one after the other, each of which prints the stacks of its threads."""
        for rank in ranks:
            process, _ = self._ranks[rank]
            print(f"rank {rank} gave no answer:", file=sys.stderr, flush=True)
            os.kill(process.pid, signal.SIGABRT)  # faulthandler prints, whatever the rank waits for
            process.join(10)

    def close(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _start(self) -> None:
        # Ranks are forked from a process with all imports done.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torchtitan_lr.train"])
        rendezvous = os.path.join(tempfile.mkdtemp(dir=self._folder), "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


class _GroupCache:
    """Reuses a mesh's groups of the same ranks, backend and description, in their order.

    Torch keeps every group, whose gloo threads poll: after a hundred runs ranks would mostly poll.
    """

    def __init__(self, new_group: Callable[..., Any]) -> None:
        self._new_group = new_group
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._used: Counter[tuple[Any, ...]] = Counter()

    def start_call(self) -> None:
        """Make all groups available to the next call."""
        self._used.clear()

    def __call__(
        self,
        ranks: Sequence[int],
        backend: str | None = None,
        group_desc: str | None = None,
        **options: Any,
    ) -> Any:
        """Return a cached group; arguments as in `torch.distributed.new_group`."""
        kind = (tuple(ranks), backend, group_desc)
        self._used[kind] += 1
        key = (*kind, self._used[kind])
        if key not in self._groups:
            self._groups[key] = self._new_group(
                ranks=ranks, backend=backend, group_desc=group_desc, **options
            )
        return self._groups[key]


def loaded() -> set[str]:
    """Return what a rank has loaded by itself."""
    return LOADED


def new_folder() -> str:
    """Create a folder that is removed with the pool; outside a rank of a pool, a temporary one."""
    return tempfile.mkdtemp(dir=os.environ.get(FOLDER_VARIABLE))


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), CUDA_VISIBLE_DEVICES=""
    )
    os.environ[FOLDER_VARIABLE] = os.path.dirname(rendezvous)
    LOADED.update(sys.modules)
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    faulthandler.enable()  # prints the stacks at a crash in native code, and for `_abort`
    torch.set_num_threads(1)
    # A daemon may have no children, but the first rank that needs a corpus prepares it with some.
    multiprocessing.current_process()._config["daemon"] = False
    if sys.platform == "linux":  # a stopped rank does not notice the end of its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # later collections skip all imported modules
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    groups = _GroupCache(dist.new_group)
    assert hasattr(device_mesh, "new_group"), "its meshes would create groups of their own"
    device_mesh.new_group = groups
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        groups.start_call()
        torch.compiler.reset()  # compiled blocks of many models in one process reach its limit
        try:
            answer = (False, function(*args))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send(answer)
