# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the model needs from a cache of earlier tokens.

`torchtitan_lr.inference.cache` implements both protocols. Without a cache the model reads whole
sequences, as in training.
"""

from typing import Protocol

from torch import Tensor, nn


class AttentionCache(Protocol):
    """The cache of one block's attention."""

    def up_edge(self, up: nn.Module) -> nn.Module:
        """Return the edge that applies B to the latents of q, k and v.

        Args:
            up: The block's own edge, such as `models.linears.UpEdge`.

        Returns:
            ``up``, or an edge that leaves the last latent as it is.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, wv: nn.Module) -> Tensor:
        """Store the keys and values of new tokens and attend to all tokens so far.

        Args:
            q: Rotated queries (b, h, s, head_dim).
            k: Rotated keys (b, h_kv, s, head_dim).
            v: The last output of `up_edge`: values (b, s, h_kv · head_dim), or latents (b, s, r).
            wv: The linear of the values.

        Returns:
            Tensor (b, h, s, head_dim).
        """
        ...


class ModelCache(Protocol):
    """The caches of all blocks, and the positions of the tokens."""

    def begin(self, table: Tensor, new: int) -> Tensor:
        """Prepare for a forward pass over new tokens.

        Args:
            table: Rotary table (s', head_dim / 2, 2).
            new: Number s of new tokens per row.

        Returns:
            Rotations of their positions, (s, head_dim / 2, 2), or with a batch dimension if the
            rows have different positions.
        """
        ...

    def layer(self, index: int) -> AttentionCache:
        """Return the cache of one block, by its place in the model from 0."""
        ...
