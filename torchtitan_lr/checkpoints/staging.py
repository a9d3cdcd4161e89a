# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The copy of a background save, made beside the next step's forward and backward pass."""

# Torch's `DefaultStager` copies in a thread, too. Its copy of a storage holds the interpreter's
# lock, so the training thread stops all the same (measured: no other Python code runs while a
# storage is copied). `DefaultStager` does not wait for the device to finish the step that is saved.
# And its thread reads plain values, such as a data position, when they may have changed.
import copy
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_lr.compat.dispatch import tree_map_with_path
from torchtitan_lr.compat.dtensor import local_part, with_local_part

Copies = list[tuple[Tensor, Tensor]]
"""Buffers on the host, and the tensors that are copied into them."""


class BackgroundStager(AsyncStager):
    """DCP's stager: copies plain values at once, and tensors in a thread; until then keep them.

    The buffers, as large as this rank's part of the checkpoint, are used again by the next save: a
    fresh one costs a page fault per 4 KiB. On a GPU they are pinned, and a stream of its own copies
    what the stream of training has computed at the time of the call.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stager")
        self._stream: torch.Stream | None = None

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Future[dict[str, Any]]:
        """Start a copy to the host, with the same structure; DTensors keep their placements."""
        copies: Copies = []
        before, self._buffers = self._buffers, {}

        def planned(path: tuple[Any, ...], value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            source, buffer = local_part(value).detach(), before.get(path)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._buffers[path] = buffer
            copies.append((buffer, source))
            return with_local_part(value, buffer)

        staged = tree_map_with_path(planned, state_dict)
        stream = None
        if any(source.device.type != "cpu" for _, source in copies):
            self._stream = stream = self._stream or torch.Stream()
            stream.wait_stream(torch.accelerator.current_stream())
        return self._thread.submit(_copied, staged, copies, stream)

    def close(self) -> None:
        """Wait for the copy at hand, and free the buffers."""
        self._thread.shutdown()
        self._buffers = {}


@torch.no_grad()
def _copied(staged: dict[str, Any], copies: Copies, stream: torch.Stream | None) -> dict[str, Any]:
    """Copy into the tensors of ``staged``; the copy of a tensor releases the interpreter's lock."""
    with stream or nullcontext():
        for buffer, source in copies:
            buffer.copy_(source, non_blocking=True)
    if stream is not None:
        stream.synchronize()
    return staged
