# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Caches of keys and values, allocated once.

Prompts of different lengths are padded on the left, so that all rows write to the same column. A
row's positions count from its first token; padding attends only to itself, and nothing attends to
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Columns:
    """The columns of the present forward pass; the caches of all blocks share them.

    Attributes:
        capacity: Number of columns.
        start: Number of columns filled before the present forward pass.
        end: Number of columns filled after it.
        first: Whether it is the first forward pass. Kept beside ``start``, because a compiled step
            that read ``start`` would be compiled anew for every token.
        mask: Which columns the present tokens see, bool (b or 1, 1, s, t); None for causal or all.
        written: The columns of the present tokens (s,), where shapes are static; else None.
    """

    capacity: int
    start: int = 0
    end: int = 0
    first: bool = True
    mask: Tensor | None = None
    written: Tensor | None = None


class KeyValueCache:
    """Cache of a whole model for one batch.

    Args:
        lengths: Number of prompt tokens of each row.
        capacity: Number of columns: the longest prompt and the tokens to come.
        n_layers: Number of blocks.
        device: Device of the model.
        static: Whether attention reads all columns, the empty ones masked, from the second forward
            pass on. No shape then changes from step to step, as a compiled step needs it.

    Attributes:
        layers: The cache of each block.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        capacity: int,
        n_layers: int,
        device: torch.device | str = "cpu",
        static: bool = False,
    ) -> None:
        width = max(lengths)
        self._static = static
        # A block's cache holds these and not the whole one, which would then outlive its batch.
        self._columns = Columns(capacity)
        # Kept only where rows differ: attention without a mask has faster kernels.
        self._padding: Tensor | None = None
        if min(lengths) < width:
            self._padding = torch.tensor([[width - length] for length in lengths], device=device)
        self.layers = [LayerCache(self._columns) for _ in range(n_layers)]

    def begin(self, table: Tensor, new: int) -> Tensor:
        """Move on by ``new`` columns and return the rotations of their positions.

        Args:
            table: Rotary table (s', head_dim / 2, 2).
            new: Number s of new tokens per row.

        Returns:
            Rotations (s, head_dim / 2, 2), or with a batch dimension for rows of different lengths.

        Raises:
            ValueError: The cache has too few columns.
        """
        now = self._columns
        if now.end + new > now.capacity:
            raise ValueError(f"the cache has {now.capacity} columns, not {now.end + new}")
        now.start, now.end = now.end, now.end + new
        now.first = now.start == 0
        columns = torch.arange(now.start, now.end, device=table.device)
        static = self._static and not now.first
        now.written = columns if static else None
        now.mask = None
        if static or self._padding is not None or (new > 1 and not now.first):
            read = torch.arange(now.capacity if static else now.end, device=table.device)
            rows = columns[:, None]
            seen = (read <= rows)[None]
            if self._padding is not None:
                itself = read == rows  # a row of the mask without any column would give NaN
                seen = seen & ((read >= self._padding[:, :, None]) | itself)
            now.mask = seen[:, None]
        if self._padding is None:
            return table[now.start : now.end]
        # Padding, and rows that go on after their end, take any row of the table.
        positions = (columns - self._padding).clamp(0, len(table) - 1)
        return table[positions]


@dataclass(eq=False)
class LayerCache:
    """Keys and values of one block, (b, h_kv, capacity, head_dim) each.

    Args:
        columns: Those of the present forward pass.
    """

    columns: Columns
    keys: Tensor | None = None
    values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of new tokens and attend to all tokens so far.

        Args:
            q: Rotated queries (b, h, s, head_dim).
            k: Rotated keys (b, h_kv, s, head_dim).
            v: Values (b, h_kv, s, head_dim).

        Returns:
            Tensor (b, h, s, head_dim).
        """
        k, v = self.store(k, v)
        now = self.columns
        # The kernel's own causal form reads no mask from memory.
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=now.mask,
            is_causal=now.mask is None and now.first,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new columns.

        Args:
            k: Keys (b, h_kv, s, head_dim); plans of tensor parallelism give a rank's heads.
            v: Values (b, h_kv, s, head_dim).

        Returns:
            Keys and values of all columns so far; of all columns where shapes are static.
        """
        now = self.columns
        if self.keys is None or self.values is None:
            # Zeros, since masked columns are multiplied by zero.
            capacity = now.capacity
            self.keys = k.new_zeros(*k.shape[:2], capacity, k.shape[-1])
            self.values = v.new_zeros(*v.shape[:2], capacity, v.shape[-1])
        if now.written is not None:
            self.keys.index_copy_(2, now.written, k)
            self.values.index_copy_(2, now.written, v)
            return self.keys, self.values
        self.keys[:, :, now.start : now.end] = k
        self.values[:, :, now.start : now.end] = v
        return self.keys[:, :, : now.end], self.values[:, :, : now.end]
