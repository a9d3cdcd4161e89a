# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Context parallelism: C ranks share the tokens of every row (docs/contexts.md).

Rank i has the chunks i and 2C - 1 - i of a row's 2C: chunk j attends to the first j + 1 chunks.
Tensor-parallel ranks that share tokens too (``tp_comm = "sequence"``) cut a rank's s/C tokens once
more, into T parts. What attention gathers is as large for any C. So it is freed after
forward, and backward gathers it again, in every mode of activation checkpointing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import SINGLE, TOKENS, Ranks, all_gather, local, reduce
from torchtitan_lr.compat.prefix_attention import prefix_attention
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.linears import Gated, LowRankLinear, gated_linear
from torchtitan_lr.models.llama import PLACES, Attend, Attention, Mask, Rows, attend, split_heads
from torchtitan_lr.models.low_rank_checkpoint import checkpoint_block
from torchtitan_lr.models.one_device import Group, OneDevice
from torchtitan_lr.parallel.paired import paired
from torchtitan_lr.titan.base import ParallelDims


def context_ranks(parallel_dims: ParallelDims) -> Ranks:
    """Return the ranks that share the tokens of a row with this one."""
    mesh = parallel_dims.get_optional_mesh("cp")
    return SINGLE if mesh is None else Ranks.of(mesh)


def chunks_of(x: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """Return the two of the 2C chunks of a dimension that a rank has, the earlier one first."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def own_chunks(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the chunks of this rank, see `chunks_of`."""
    return chunks_of(x, ranks.rank, ranks.size, dim)


def own_tokens(batch: Batch, ranks: Ranks) -> Batch:
    """Keep a rank's tokens of a batch of whole rows: tokens, their places and labels (b, s/C)."""
    # Other inputs, such as the indices of documents, stay those of the whole row.
    if ranks.size == 1:
        return batch
    inputs, labels = batch
    tokens = inputs["input"]
    places = torch.arange(tokens.shape[TOKENS]).expand_as(tokens)
    own = {"input": own_chunks(tokens, ranks, TOKENS), PLACES: own_chunks(places, ranks, TOKENS)}
    return inputs | own, own_chunks(labels, ranks, TOKENS)


def _row(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Gather (..., s/C, n) of every rank as (..., s, n) in the row's order."""
    (parts,) = all_gather([x.unsqueeze(0)], ranks, 0)  # (C, ..., s/C, n)
    heads, tails = parts.chunk(2, dim=-2)  # chunks 0 to C - 1, and 2C - 1 down to C
    return torch.cat([*heads.unbind(), *reversed(tails.unbind())], dim=-2)


def _own_sum(gradient: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sum the ranks' gradients (..., s, n) of the tokens of this one (..., s/C, n)."""
    parts = [chunks_of(gradient, rank, ranks.size, -2) for rank in range(ranks.size)]
    return reduce(torch.stack(parts), ranks, 0).squeeze(0)


gather_row = paired("GatherRow", _row, _own_sum)


def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of the last tokens of a prefix of a row; arguments as for `attend`."""
    # Causal from the lower right. Torch's class of that bias, `CausalBias`, cannot be built under a
    # dispatch mode, as which the ledger runs, and takes other kernels where flash does not fit: one
    # of them ignores that queries are grouped.
    if q.device.type == "cuda":
        out: Tensor = prefix_attention(q, k, v)[0]
        return out
    queries, keys = q.shape[-2], k.shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1]
    )


def attend_from_chunks(
    q: Tensor,  # (b, h, s/C, head_dim)
    k: Tensor,  # (b, h_kv, s, head_dim), the row's, as v
    v: Tensor,
    mask: Mask | None,  # of the documents (`separate`), own tokens to the row's; None is causal
    ranks: Ranks,
    to_prefix: Callable[[Tensor, Tensor, Tensor], Tensor] = attend_to_prefix,
) -> Tensor:
    """Return attention's output for a rank's two chunks of a row, (b, h, s/C, head_dim)."""
    if mask is not None:
        return attend(q, k, v, mask)
    early, late = q.chunk(2, dim=-2)  # (b, h, s/2C, head_dim)
    own = [(ranks.rank, early), (2 * ranks.size - 1 - ranks.rank, late)]
    outputs = []
    for chunk, queries in own:
        seen = (chunk + 1) * queries.shape[-2]
        outputs.append(to_prefix(queries, k[:, :, :seen], v[:, :, :seen]))
    return torch.cat(outputs, dim=-2)


class GatheredAttention(Attend):
    """Attention of a rank's own queries to the keys and values of the whole row."""

    # Whether it gathers again in backward by itself. In a block that runs again in backward it
    # gathers there.
    repeats = True
    to_prefix = staticmethod(attend_to_prefix)

    def __init__(self, ranks: Ranks, head_dim: int) -> None:
        super().__init__(head_dim)
        self.ranks = ranks

    def forward(self, q: Tensor, k: Any, v: Any, rows: Rows) -> Tensor:
        """Return attention's output (b, h, s/C, head_dim) of q, k, v (b, s/C, h · head_dim)."""
        q, k = split_heads(q, self.head_dim, rows.table), split_heads(k, self.head_dim, rows.table)
        return self.repeated(self._from_keys, q, k, split_heads(v, self.head_dim), rows.mask)

    def repeated(self, attention: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call what gathers and attends; only its arguments and attention's results are kept."""
        if not self.repeats:
            return attention(*arguments)
        # Torch's selective checkpoint would repeat once; a split backward needs it twice.
        out: Tensor = checkpoint_block(attention, *arguments, save_attention=True)
        return out

    def _from_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        k, v = gather_row(torch.stack([k, v]), self.ranks).unbind()  # one message
        return attend_from_chunks(q, k, v, mask, self.ranks, self.to_prefix)


class Unexpanded(NamedTuple):
    """B σ(h) of the own tokens, which attention computes for all tokens of the row."""

    latent: Tensor  # h (b, s/C, r), before σ
    weight: Tensor  # B (d_kv/T, r)


class QueriesGroup(Group):
    """q, k and v of one device or BTP, of which q alone is expanded."""

    def __init__(self, args: LlamaArgs, plan: OneDevice) -> None:
        super().__init__(args, "qkv")
        self.plan = plan

    def expand(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Any]:
        """Return q (b, s/C, d/T), and k and v as `Unexpanded`."""
        whole = self.plan.whole(latents)
        weights = [local(linear.B.weight) for linear in linears]
        q = gated_linear(Gated(whole[0], None, self.use_silu[0]), weights[0])
        return [q, Unexpanded(whole[1], weights[1]), Unexpanded(whole[2], weights[2])]


class LatentAttention(GatheredAttention):
    """The same, but the latents σ(h) of keys and values are gathered, r wide."""

    def __init__(self, ranks: Ranks, head_dim: int, silu: bool) -> None:
        super().__init__(ranks, head_dim)
        self.silu = silu

    def forward(self, q: Tensor, k: Unexpanded, v: Unexpanded, rows: Rows) -> Tensor:
        """Return attention's output (b, h, s/C, head_dim)."""
        # Tensors alone: in a compiled block a checkpoint takes no others.
        q = split_heads(q, self.head_dim, rows.table)
        return self.repeated(self._from_latents, q, *k, *v, rows.row_table, rows.mask)

    def _from_latents(
        self,
        q: Tensor,
        h_k: Tensor,
        b_k: Tensor,
        h_v: Tensor,
        b_v: Tensor,
        row_table: Tensor,
        mask: Mask | None,
    ) -> Tensor:
        # Every rank computes k = B_k σ(h_k) and v = B_v σ(h_v) of all tokens. Backward sums the
        # ranks' gradients of the latents; those of B are sums over the tokens that a rank's queries
        # have seen, which data parallelism adds up.
        latents = torch.stack([h_k, h_v])  # (2, b, s/C, r), one message
        latents = gather_row(F.silu(latents) if self.silu else latents, self.ranks)
        # As a batched product, because selective checkpointing keeps the results of others.
        row = torch.bmm(latents.flatten(1, 2), torch.stack([b_k, b_v]).mT)
        k, v = row.unflatten(1, latents.shape[1:3]).unbind()  # (b, s, d_kv/T)
        k, v = split_heads(k, self.head_dim, row_table), split_heads(v, self.head_dim)
        return attend_from_chunks(q, k, v, mask, self.ranks, self.to_prefix)


def apply_context_parallel(model: nn.Module, ranks: Ranks, gather: str) -> None:
    """Let the blocks of a model, or of a pipeline stage, share rows with other ranks, in place."""
    # Call it after tensor parallelism, and before checkpointing wraps the blocks.
    for module in model.modules():
        if not isinstance(module, Attention):
            continue
        module.attend = GatheredAttention(ranks, module.head_dim)
        if gather == "latents":
            args: LlamaArgs = model.model_args  # type: ignore[assignment]
            module.qkv = QueriesGroup(args, module.qkv.plan)
            module.attend = LatentAttention(ranks, module.head_dim, module.qkv.use_silu[1])
