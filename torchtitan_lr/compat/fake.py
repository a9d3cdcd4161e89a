# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Running without data and ranks: tensors without data, a fake process group, DTensor's shapes.

Torch uses the classes in its own tests. Tested with torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from torchtitan_lr.compat.dispatch import TorchDispatchMode, fused_attention

if TYPE_CHECKING:
    from typing_extensions import Self


@contextmanager
def rms_norm_by(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace `torch.nn.functional.rms_norm`, which `torch.nn.RMSNorm` looks up at every call."""
    # If upstream calls another function, the norms of a block are counted as the CPU's several
    # kernels, and its tests fail.
    original = F.rms_norm
    with patch.object(F, "rms_norm", function):
        yield original


@contextmanager
def attention_is_fused() -> Iterator[None]:
    """Let attention of tensors on ``meta`` be a fused kernel, a CPU's."""
    # Torch chooses the unfused one there. If the models call another function, a test that counts
    # the FLOPs of attention fails.

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        return fused_attention(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


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


class RehearsalMode(TorchDispatchMode):
    """A dispatch mode that observes operators on local tensors.

    It leaves out those by which DTensor infers shapes, on global tensors: there is no hook, so
    ``ShardingPropagator._propagate_tensor_meta_non_cached`` is replaced. If DTensor infers shapes
    elsewhere, memory estimates are too large and the tests of the rehearsal fail.
    """

    _finding_shapes = 0

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at an operator that has run."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self._finding_shapes:
            self._observe(func, args, kwargs or {}, out)
        return out

    def __enter__(self) -> "Self":
        infer_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def counting(*args: Any) -> Any:
            self._finding_shapes += 1
            try:
                return infer_shapes(*args)
            finally:
                self._finding_shapes -= 1

        name = "_propagate_tensor_meta_non_cached"
        self._replacement = patch.object(ShardingPropagator, name, counting)
        self._replacement.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._replacement.__exit__(*exception)
