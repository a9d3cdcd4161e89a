# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A recorder of operators, which stands for CUDA's graphs on a CPU.

A recorded pass runs the same operators on the same memory, as a graph does. The recorder can also
run a pass again and compare: another operator, number, shape or address than the recorded one's, or
a read of the host, is an AssertionError that names the operator.

A recording keeps every tensor of its pass. So it does not see what a graph's pool of memory would
show: a tensor that is used after its memory was given to another one.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.training import trainer as trainer_module
from torchtitan_lr.training.trainer import Trainer

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
_RESIZE, _WAIT = torch.UntypedStorage.resize_, Work.wait


class _Call(NamedTuple):
    """An operator of a pass; or a change of a storage's size, whose arguments are its own."""

    what: list[Any]  # its name and arguments, without values of tensors
    repeat: Callable[[], None]


class Recording(TorchDispatchMode):
    """Records each operator of a pass with its tensors, and each change of a storage's size."""

    def __init__(
        self, expected: "Recording | None" = None, stands_for: "_Storages | None" = None
    ) -> None:
        super().__init__()
        # What earlier passes have made in a comparison, and what they had made as recorded.
        self._stands_for = stands_for or {}
        self.calls: list[_Call] = []
        self.made: dict[int, torch.UntypedStorage] = {}  # by the pass, by address
        self._outside: set[int] = set()  # addresses of the other storages
        self._expected = expected
        self._waits = False

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run a pass and record it, or compare it with another recording."""

        def resized(storage: Any, size: int) -> Any:
            self._add(["resize_", self._place(storage), size], lambda: _RESIZE(storage, size))
            self._note(storage)
            return _RESIZE(storage, size)

        def waited(sent: Work, *args: Any) -> Any:
            self._waits = True  # gloo calls operators on memory of its own
            try:
                return _WAIT(sent, *args)
            finally:
                self._waits = False

        replaced = patch.object(torch.UntypedStorage, "resize_", resized)
        with replaced, patch.object(Work, "wait", waited), self:
            loss = work()
        if self._expected is not None:
            left = self._expected.calls[len(self.calls) :]
            assert not left, f"the pass ends before its operator {left[0].what}"
        return loss

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # it calls operators on plain tensors
        name, kwargs = str(func), kwargs or {}
        if self._waits or func.namespace == "profiler":  # which marks ranges of a trace
            return func(*args, **kwargs)
        assert func.overloadpacket.__name__ not in HOST_READS, f"the host reads a tensor: {name}"
        self._outside |= {_key(x) for x in _tensors((args, kwargs)) if _key(x) not in self.made}
        what = [name, *map(self._described, tree_leaves((args, kwargs)))]
        result = func(*args, **kwargs)
        # Later the same tensors, whatever then becomes of the Python objects.
        kept = _aliases((args, kwargs, result))
        self._add(what, lambda: _repeat(func, *kept))
        for x in _tensors(result):
            if _key(x) not in self._outside:
                self._note(x.untyped_storage())
        return result

    def _add(self, what: list[Any], repeat: Callable[[], None]) -> None:
        if self._expected is not None:
            known = self._expected.calls[len(self.calls) : len(self.calls) + 1]
            want = known[0].what if known else "the end of the pass"
            assert known and want == what, f"{what} in the place of {want}"
        self.calls.append(_Call(what, repeat))

    def _note(self, storage: torch.UntypedStorage) -> None:
        self.made.setdefault(storage._cdata, storage)

    def _place(self, storage: torch.UntypedStorage) -> str:
        """Return which of its own storages it is, or the address of another one."""
        if storage._cdata in self.made:
            return f"number {list(self.made).index(storage._cdata)}"
        _, storage = self._stands_for.get(storage._cdata, (storage, storage))
        return f"address {storage.data_ptr() if storage.nbytes() else storage._cdata:x}"

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            place = self._place(leaf.untyped_storage())
            return place, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype
        simple = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout)
        return leaf if isinstance(leaf, simple) else type(leaf).__name__


_Storages = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _aliases(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
        if isinstance(new, Tensor):
            if func.namespace == "_c10d_functional":
                torch.ops._c10d_functional.wait_tensor(new)
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        elif "c10d" in func.namespace and isinstance(new, torch.ScriptObject):
            Work.unbox(new).wait()


class Recorder:
    """What `StepGraph` calls to capture a pass."""

    compares = False  # whether replays run their pass again, and compare it

    def __init__(self) -> None:
        self._compared: _Storages = {}

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a pass, which has then run: its first replay does nothing."""
        recording, due = Recording(), False
        loss = recording.run(work)

        def replay() -> None:
            nonlocal due
            if due and self.compares:
                again = Recording(recording, self._compared)
                again.run(work)
                for old, new in zip(recording.made.values(), again.made.values(), strict=True):
                    self._compared[new._cdata] = new, old
                    if old.nbytes() == new.nbytes() > 0 and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            elif due:
                for call in recording.calls:
                    call.repeat()
            due = True

        return loss, replay


def recorded(why_eager: str = "") -> AbstractContextManager[Any]:
    """Let trainers record their passes on a CPU, if nothing is against it."""
    functions: dict[str, Any] = {"CudaCapture": Recorder, "why_eager": lambda *_: why_eager}
    return patch.multiple(trainer_module, **functions)


def trained(trainer: Trainer, batches: Callable[[int], Iterable[Any]]) -> tuple[list[Tensor], int]:
    """Take steps on batches by number.

    Return their losses and the weights behind them, and the number of captured passes.
    """
    steps = 6  # two eager ones, the capture, two replays, a comparison
    if trainer.job_config.optimizer.name == "TSRAdam":
        steps += 4  # it refreshes in the first step, and in the sixth
    losses = []
    for step in range(steps):
        trainer.step = step + 2  # the first is logged
        Recorder.compares = step == steps - 1
        trainer.train_step(iter(batches(step)))
        losses.append(trainer.loss.cpu().clone())
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    weights = [local_part(p).detach().cpu().clone() for p in parameters]
    return losses + weights, 0 if trainer.graph is None else len(trainer.graph.passes)
