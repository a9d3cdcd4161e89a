# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Caches of keys and values, allocated once, full or in rank space.

Prompts of different lengths are padded on the left, so that all rows write to the same column. A
row's positions count from its first token; padding attends only to itself, and nothing attends to
it.

The latent cache uses that a value is V_t = B h_t, where the latent h_t = σ(A x_t), r wide, is
common to all heads. Attention is linear in the values, so head i gives

    Σ_t p_it V_t^(i) = B^(i) Σ_t p_it h_t

with B^(i) the rows of B that belong to head i's values. The cache therefore stores d_kv + r
numbers per token and block instead of 2 d_kv, and mixes r instead of head_dim numbers per head and
token. Keys stay d_kv wide: the rotation stands between q and B. With lanes every lane has latents
of its own: d_kv + G r numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import local
from torchtitan_lr.models.linears import LowRankLinear

KINDS = ("full", "latent")
"""Values of ``--cache``."""


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
        kind: ``full`` or ``latent`` (see above); ``latent`` needs a low-rank family.
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
        kind: str = "full",
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
        self.layers = [LayerCache(self._columns, kind == "latent") for _ in range(n_layers)]

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
    """Keys of one block (b, h_kv, capacity, head_dim), and its values or their latents.

    Args:
        columns: Those of the present forward pass.
        latent: Whether latents (b, G, capacity, r) stand in for values, which are like the keys.
    """

    columns: Columns
    latent: bool
    keys: Tensor | None = None
    values: Tensor | None = None
    _up: nn.Module | None = None

    def up_edge(self, up: nn.Module) -> Callable[..., list[Tensor]]:
        """Return the block's up edge of q, k and v, or one that leaves v's latent as it is."""
        if not self.latent:
            return up
        if self._up is None:
            self._up = up
        # q (b, s, d), k (b, s, d_kv), and the latent of v (b, s, r).
        return lambda latents, linears: [*up(latents[:2], linears[:2]), latents[2]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, wv: nn.Module) -> Tensor:
        """Store the keys and values of new tokens and attend to all tokens so far.

        Args:
            q: Rotated queries (b, h, s, head_dim).
            k: Rotated keys (b, h_kv, s, head_dim).
            v: The last output of `up_edge`: values (b, s, h_kv · head_dim), or latents (b, s, r).
            wv: The linear of the values; B (h_kv · head_dim, r).

        Returns:
            Tensor (b, h, s, head_dim).
        """
        if not self.latent:
            keys, values = self.store(k, v.unflatten(-1, (-1, k.shape[-1])).transpose(1, 2))
            return self.attention(q, keys, values)
        wv = cast(LowRankLinear, wv)
        latents = v if v.dim() == 4 else v.unsqueeze(2)  # (b, s, G, r)
        keys, stored = self.store(k, latents.transpose(1, 2))
        if self.columns.first and self._up is not None:
            # All latents are here: expanded once, they take the training kernel.
            (values,) = self._up([v], [wv])
            return self.attention(q, keys, values.unflatten(-1, (-1, k.shape[-1])).transpose(1, 2))
        # In rank space; the order of products keeps the sum over tokens r wide.
        batch, heads, new, width = q.shape
        groups, lanes = keys.shape[1], stored.shape[1]
        scores = q.reshape(batch, groups, -1, width) @ keys.mT * width**-0.5
        if self.columns.mask is not None:
            hidden = ~self.columns.mask.repeat(1, 1, heads // groups, 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1).reshape(batch, lanes, -1, keys.shape[2])
        mixed = (weights @ stored).reshape(batch, groups, -1, stored.shape[-1])
        # A rank's rows of B are those of its heads, and a lane owns the heads of its rows.
        rows = local(wv.B.weight).unflatten(0, (groups, width))  # (h_kv, head_dim, r)
        return (mixed @ rows.mT).reshape(batch, heads, new, width)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with values, q (b, h, s, head_dim), k and v (b, h_kv, t, head_dim)."""
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
            v: Values (b, h_kv, s, head_dim) or latents (b, G, s, r).

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
