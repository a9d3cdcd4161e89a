# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Forward, loss and backward of a micro-batch as one CUDA graph.

A captured pass launches the same kernels on the same memory at once, faster than Python can. The
first micro-batch writes gradients, later ones add to them, the last sums them over the ranks: each
kind is captured by itself, all in one step in their order, since they share a pool of memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.errors import OUT_OF_MEMORY, RunFailedError

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Records what a call launches, without running it; returns its loss and what runs it."""

WARM_UP = 2  # eager steps before the capture: they compile, choose kernels and create what is lazy


class CudaCapture:
    """A `Capture` into CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a pass."""
        graph = torch.cuda.CUDAGraph()
        # Threads that load data or save checkpoints may use the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            loss = work()
        return loss, graph.replay


class CapturedPass(NamedTuple):
    """One captured pass, and the memory that it reads and writes."""

    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    replay: Callable[[], None]


class StepGraph:
    """Runs the passes of steps: eagerly at first, later by replaying what it captured."""

    def __init__(self, model_parts: Sequence[nn.Module], capture: Callable[[], Capture]) -> None:
        self._parameters = [p for part in model_parts for p in part.parameters()]
        self._new_capture, self._capture = capture, capture()
        self._eager_steps: dict[Any, int] = {}  # by the shapes of a step's micro-batches
        self.passes: dict[Any, CapturedPass] = {}  # by shapes and kind of pass
        self._step: Any = None
        self._eager = True

    def begin(self, shapes: Any, eager: bool = False) -> None:
        """Begin a step, which must be eager or may; steps of other shapes are other graphs."""
        self._step = shapes
        done = self._eager_steps.get(shapes, 0)
        self._eager = eager or done < WARM_UP
        if self._eager and not eager:
            self._eager_steps[shapes] = done + 1

    def run(
        self, one_pass: Callable[..., Tensor], inputs: Mapping[str, Tensor], first: bool, last: bool
    ) -> Tensor:
        """Run one pass and return this rank's share of the loss, a scalar."""
        if self._eager:
            return one_pass(**inputs)
        key = self._step, first, last
        if key not in self.passes:
            self.passes[key] = self._captured(one_pass, inputs)
        captured = self.passes[key]
        for name, tensor in inputs.items():
            captured.inputs[name].copy_(tensor)
        captured.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        return captured.loss.clone()  # the next replay writes its memory

    def _captured(
        self, one_pass: Callable[..., Tensor], inputs: Mapping[str, Tensor]
    ) -> CapturedPass:
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            loss, replay = self._capture(lambda: one_pass(**fixed))
        except RuntimeError as error:  # CUDA's, and torch's
            # The end of a capture fails too, behind the operator that it does not take.
            cause = error.__context__
            first = cause if isinstance(cause, Exception) else error
            for known in (first, error):
                if OUT_OF_MEMORY.search(str(known)) or isinstance(known, RunFailedError):
                    raise known from known.__cause__
            reason = str(first).partition("\n")[0]
            remedy = "training.step_graph = 'off' runs them eagerly"
            raise RunFailedError(f"the passes cannot be captured ({reason}); {remedy}") from first
        return CapturedPass(fixed, loss, [(p, p.grad) for p in self._parameters], replay)

    def free(self) -> None:
        """Free the graphs, for new ones; the process groups that they use must still exist."""
        self.passes.clear()
        self._capture = self._new_capture()  # a pool without a graph takes no other one


def shapes_of(microbatches: Iterable[Batch]) -> tuple[Any, ...]:
    """Return the shapes of a step's tensors on this rank."""
    return tuple(
        (*((name, tensor.shape) for name, tensor in inputs.items()), labels.shape)
        for inputs, labels in microbatches
    )
