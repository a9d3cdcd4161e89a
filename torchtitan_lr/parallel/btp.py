# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP: bottleneck-aware tensor parallelism of low-rank blocks (BOOST, sections 3 and 4).

The residual stream x is sharded along d. A *chunk* begins with a group's up-projections B and ends
with the next group's down-projections A. T ranks communicate where activations are r-wide:

=========================  ===========  =============================  =============================
module                     placement    sent in forward                sent in backward
=========================  ===========  =============================  =============================
tok_embeddings             Shard(1)     --                             --
attention_norm, ffn_norm   Shard(0)     Σx² (b, s)                     --
A of q, k, v               Shard(1)     all-reduce A x (b, s, 3 r)     --
B of q, k, v               Shard(0)     --                             all-reduce dh (b, s, 3 r)
A of o                     Shard(1)     all-reduce A x (b, s, r)       --
B of o                     Shard(0)     --                             all-reduce dh (b, s, r)
A of gate, up              Shard(1)     all-reduce A x (b, s, 2 r)     --
B of gate, up              Shard(0)     --                             all-reduce dh (b, s, 2 r)
A of down                  Shard(1)     all-reduce A x (b, s, r)       --
B of down                  Shard(0)     --                             all-reduce dh (b, s, r)
LaX's learned gates (1,)   Replicate()  --                             --
norm                       Shard(0)     Σx² (b, s)                     <dU, U> (b, s)
output                     Shard(0)     all-gather γ ⊙ x (b, s, d)     reduce-scatter its gradient
=========================  ===========  =============================  =============================

- Every rank has the whole latents, and from them h, the input of B: σ and LaX's additions send
  nothing. Every rank used all of h for its own features of O = B h: dh = Σ_ranks dO_rank B_rank.
- A rank's dB = dOᵀ h needs its own dO and the whole h. Its dA = dPᵀ x, where P is the product that
  forward summed, needs its own x and the whole dP, which every rank computes from dh.
- Without ``tp_grouping`` each linear has a message of its own. The norm ``sync`` sends Σx² before
  the product, and a sum (b, s) in backward. Under ``comm = "sequence"`` an all-reduce of the
  latents, and of the online norm, is a reduce-scatter over the tokens, and an all-gather at their
  next use; the gates' gradients are summed. If context parallelism gathers latents, `BTP.whole`
  sums dh of q, k and v.

RMSNorm needs the features of all ranks. `online_down` (BOOST's online RMSNorm, in the deferred
form) multiplies first and normalizes the r-wide product afterwards, so that statistic and product
are reduced at the same time:

    P = Σ_i (x_i ⊙ γ_i) A_iᵀ,   S = Σ_i |x_i|²,   rstd = (S / d + ε)^(-1/2),   Y = P · rstd

with i over the ranks; Y are the latents. ε enters once, in the global rms. Backward communicates
nothing for the statistic: Y and its gradient are the same on every rank, and so is
dS = -½ · rstd² / d · <dY, Y>. Only with token shards of Y (``comm = "sequence"``) is dS gathered.
`sync_norm` reduces the statistic before it normalizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import (
    FEATURES,
    TOKENS,
    Ranks,
    all_gather,
    cast,
    local,
    reduce,
    start_sum,
    wait,
)
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.linears import (
    LowRankLinear,
    activated,
    all_padded,
    concatenated,
    summed_products,
    unpadded,
    used_width,
)
from torchtitan_lr.models.low_rank_checkpoint import end_recomputation, keep
from torchtitan_lr.models.one_device import Group
from torchtitan_lr.parallel.paired import copy_to_ranks, gather_and_copy_to_ranks
from torchtitan_lr.parallel.plan_parts import ROW_COLUMN, Plan, TPSettings


class BTP(Plan):
    """The plan of the module's table."""

    factors = ROW_COLUMN
    shards_stream = True
    choices = frozenset({"grouping", "norm", "comm"})

    def __init__(self, args: LlamaArgs, settings: TPSettings, ranks: Ranks) -> None:
        super().__init__(args, settings, ranks)
        self.how = Reduction(ranks, settings.grouping, self.sequence)

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1): (b, s, d/T), Shard(-1)."""
        return F.embedding(tokens, local(embedding.weight))

    def down(
        self, group: Group, x: Any, linears: Sequence[LowRankLinear], norm: Any
    ) -> list[Tensor]:
        """End a chunk: map x (b, s, d_in/T), Shard(-1), by every A (r, d_in/T), Shard(1)."""
        # The norm's weight (d_in/T,) is Shard(0). Latents are (b, s, r), replicated; for
        # ``sequence`` (b, s/T, r), Shard(1). The norm's statistic is reduced with them
        # (``online``) or before (``sync``).
        weights = [local(linear.A.weight) for linear in linears]
        if norm is None:
            return down_projections(x, weights, self.how)
        if self.settings.norm == "online":
            return online_down(x, *norm_numbers(norm), weights, self.how)
        return down_projections(sync_norm(x, *norm_numbers(norm), self.ranks), weights, self.how)

    def up(
        self, group: Group, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """Start a chunk: map latents as `down` returns them by B (d_out/T, r), Shard(0)."""
        # Outputs are (b, s, d_out/T), Shard(-1); products of equal shape are one under
        # ``grouping``.
        latents = activated(latents, group.use_silu)
        weights = [local(linear.B.weight) for linear in linears]
        dim = TOKENS if self.sequence else None
        rows = used_width(weights[0], group.pads) - len(weights[0])  # of zeros; gate is like up
        if self.settings.grouping:
            return up_projections(latents, weights, self.ranks, dim, rows)
        outputs = []
        for latent, weight in zip(latents, weights, strict=True):
            outputs += up_projections([latent], [weight], self.ranks, dim, rows)
        return outputs

    def whole(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Return the latents (b, s, r), replicated; their gradients are summed over the ranks."""
        grouping = self.settings.grouping
        copies = []
        for message in [concatenated(latents, dim=-1)] if grouping else latents:
            if self.sequence:
                copies.append(gather_and_copy_to_ranks(message, self.ranks, TOKENS))
            else:
                copies.append(copy_to_ranks(message, self.ranks))
        if not grouping:
            return copies
        return list(copies[0].split([latent.shape[-1] for latent in latents], dim=-1))

    def normalized(self, x: Tensor, norm: Any) -> Tensor:
        """Normalize and gather x (b, s, d/T), Shard(-1); the norm's weight (d/T,) is Shard(0)."""
        # γ ⊙ x is gathered and then scaled by rstd, so that the gathered tensor's gradient is
        # reduce-scattered at once instead of all-reduced and sliced.
        return sync_norm(x, *norm_numbers(norm), self.ranks, gather=True)


@dataclass(frozen=True)
class Reduction:
    """How the products of a group's down-projections are summed over the ranks."""

    # No default: torch 2.11 compiles no dataclass whose default is an object.
    ranks: Ranks  # that share the features
    grouping: bool = True  # whether the linears' products are one message, or one each
    sequence: bool = False  # whether each rank keeps only its shard of the tokens

    def start(self, term: Tensor) -> Tensor:
        """Start the sum of this rank's term (b, s, ...), which is given away."""
        return start_sum(term, self.ranks, TOKENS if self.sequence else None, owned=True)

    def messages(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the weights whose products are one message, message by message."""
        return [list(weights)] if self.grouping else [[weight] for weight in weights]

    def by_weight(self, products: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Split each message back into one tensor per linear."""
        if len(products) == len(weights):
            return list(products)
        return list(products[0].split([weight.shape[0] for weight in weights], dim=-1))


class _OnlineDown(torch.autograd.Function):
    """Forward: one reduction per message and one of the statistic; backward: see the module."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: without gradients, the compiler compares numbers of arguments to
        # decide if a forward has a context, and is wrong for (ctx, x, *weights) with two weights.
        x, gamma, dim, eps, how, *weights = inputs  # (b, s, d/T), (d/T,); A (r_i, d/T)
        # P, one per message: (b, s, Σ r_i), or (b, s/T, Σ r_i). It leaves `reduced` by this list,
        # since what `reduced` returns is kept in memory, and backward needs rstd and Y alone.
        products: list[Tensor] = []

        def reduced() -> tuple[Tensor]:
            statistic = how.start(sum_of_squares(x))  # S: (b, s)
            started = []
            for message in how.messages(weights):
                # (x ⊙ γ) Aᵀ = x (A ⊙ γ)ᵀ: A has r rows, and x has b·s.
                folded = concatenated(message) * gamma
                # No name for the product itself: it would outlive the reduction, which runs during
                # the next product.
                started.append(how.start(F.linear(x, folded)))
            products.extend(wait(reduction) for reduction in started)
            return (torch.rsqrt(wait(statistic) / dim + eps),)

        def normalized() -> tuple[Tensor, ...]:
            return tuple(cast(p * rstd.unsqueeze(-1), x.dtype) for p in products)

        # A recomputation receives both results from forward: it calls neither function. There are
        # two, because Y must follow from the kept rstd: from another rstd, a compiled backward
        # would reduce the statistic again.
        (rstd,) = keep(reduced)  # (b, s)
        ys = keep(normalized)
        ctx.save_for_backward(x, gamma, rstd, *ys, *weights)
        ctx.dim, ctx.how, ctx.n_messages = dim, how, len(ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, gamma, rstd, *rest = ctx.saved_tensors
        how, ys, weights = ctx.how, rest[: ctx.n_messages], rest[ctx.n_messages :]
        inner = sum((dy * y.to(rstd.dtype)).sum(-1) for dy, y in zip(dys, ys, strict=True))
        ds = -0.5 / ctx.dim * rstd.square() * inner  # (b, s), equal on every rank
        dps = [(dy * rstd.unsqueeze(-1)).to(x.dtype) for dy in dys]
        if how.sequence:
            ds, *dps = all_gather([ds, *dps], how.ranks, TOKENS)
        dx = 2 * ds.unsqueeze(-1) * x  # (b, s, d/T)
        dgamma = torch.zeros_like(gamma, dtype=rstd.dtype)
        dweights: list[Tensor] = []
        for dp, message in zip(dps, how.messages(weights), strict=True):
            dx = dx + summed_products(dp, [weight * gamma for weight in message])
            # d(A ⊙ γ) = dPᵀ x: the gradients of both factors come from one product.
            dfolded = dp.flatten(0, 1).T @ x.flatten(0, 1)
            sizes = [weight.shape[0] for weight in message]
            for own, weight in zip(dfolded.split(sizes), message, strict=True):
                dgamma = dgamma + (own.to(rstd.dtype) * weight).sum(0)
                dweights.append(own * gamma)
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None, *dweights


def online_down(
    x: Tensor, gamma: Tensor, dim: int, eps: float, weights: Sequence[Tensor], how: Reduction
) -> list[Tensor]:
    """Project a sharded stream down and normalize the product (deferred RMSNorm)."""
    # The arguments are those of `sync_norm` and `down_projections`, the result is that of the
    # latter.
    return how.by_weight(_OnlineDown.apply(x, gamma, dim, eps, how, *weights), weights)


class _Down(torch.autograd.Function):
    """Forward: one reduction per message. Backward sends nothing, or gathers token shards."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `_OnlineDown`.
        x, how, *weights = inputs  # (b, s, d_in/T); A (r_i, d_in/T)
        # The weights themselves, not what is put side by side: a copy per block would survive when
        # FSDP frees the gathered weights.
        ctx.save_for_backward(x, *weights)
        ctx.how = how

        def reduced() -> tuple[Tensor, ...]:
            started = []  # each reduction runs during the next product
            for message in how.messages(all_padded(weights, columns=x.shape[-1])):
                started.append(how.start(F.linear(x, concatenated(message))))
            return tuple(wait(reduction) for reduction in started)

        return keep(reduced)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        whole = list(gradients)
        if ctx.how.sequence:
            whole = all_gather(gradients, ctx.how.ranks, TOKENS)
        gradient = concatenated(whole, dim=-1)  # dP: (b, s, Σ r_i)
        dw = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        dx = summed_products(gradient, all_padded(weights, columns=x.shape[-1]))
        parts = dw.split([weight.shape[0] for weight in weights])
        return (dx, None, *map(unpadded, parts, weights))


def down_projections(x: Tensor, weights: Sequence[Tensor], how: Reduction) -> list[Tensor]:
    """Map one x (b, s, d_in/T), Shard(-1), by A (r_i, d_in/T), Shard(1), and sum over the ranks."""
    # x may have features of zeros behind its own, see `models.linears.used_width`.
    # Latents are (b, s, r_i), replicated, or for token shards (b, s/T, r_i), Shard(1). Low-rank
    # checkpointing saves them.
    return how.by_weight(_Down.apply(x, how, *weights), weights)


class _UpProjections(torch.autograd.Function):
    """Forward B h; backward the sum of the latents' gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `_OnlineDown`.
        # (b, s, Σ r_i), or (b, s/T, Σ r_i); B (d_i/T, r_i)
        latents, ranks, dim, rows, *weights = inputs
        whole = latents
        if dim is not None:
            (whole,) = keep(lambda: tuple(all_gather([latents], ranks, dim)))
        ctx.save_for_backward(whole, *weights)
        end_recomputation(whole, *weights)
        ctx.ranks, ctx.dim, ctx.rows = ranks, dim, rows
        outputs = []
        for h, run in _latents_by_run(whole, all_padded(weights, rows)):
            if len(run) == 1:
                outputs.append(F.linear(h, run[0]))  # (b, s, d_i/T)
            else:
                outputs.append(torch.bmm(h, torch.stack(run).mT))  # (n, b s, d_i/T)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        # The sum of dh over the ranks: it runs while the gradients of the weights are computed.
        # No name for the term itself: it would outlive the reduction.
        used = all_padded(weights, ctx.rows)
        summed = start_sum(
            _own_term_of_dh(gradients, used).view_as(whole), ctx.ranks, ctx.dim, owned=True
        )
        # dB = dOᵀ h needs this rank's dO and the whole h: nothing is sent for the weights.
        dweights: list[Tensor] = []
        for gradient, (h, run) in zip(gradients, _latents_by_run(whole, used), strict=True):
            if len(run) == 1:
                dweights.append(gradient.flatten(0, 1).T @ h.flatten(0, 1))
            else:
                dweights.extend(torch.bmm(gradient.mT, h).unbind())
        return (wait(summed), None, None, None, *map(unpadded, dweights, weights))


def up_projections(
    latents: Sequence[Tensor],
    weights: Sequence[Tensor],
    ranks: Ranks,
    dim: int | None = None,
    rows: int = 0,
) -> list[Tensor]:
    """Map each latent (b, s, r_i) by its own B (d_out_i/T, r_i), Shard(0): (b, s, d_out_i/T)."""
    # Forward gathers the latents along ``dim`` and backward reduce-scatters; None is for replicated
    # latents, whose gradient is all-reduced. Outputs have ``rows`` features of zeros more.
    side_by_side = concatenated(latents, dim=-1)
    outputs = _UpProjections.apply(side_by_side, ranks, dim, rows, *weights)
    found: list[Tensor] = []
    for out, run in zip(outputs, _runs(weights), strict=True):
        # The product of a run of n is (n, b·s, d_out/T).
        found += [out] if len(run) == 1 else out.unflatten(1, (latents[0].shape[0], -1)).unbind()
    return found


def _runs(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Put neighbours of equal shape together: each run of n is one product, batched if n > 1."""
    # Under grouped-query attention q has another shape and its own product; k and v share one.
    return [list(run) for _, run in groupby(weights, key=lambda weight: weight.shape)]


def _latents_by_run(whole: Tensor, weights: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Pair the latents of each run, (b, s, r), or (n, b s, r) if n > 1, with its weights."""
    runs = _runs(weights)
    latents = whole.split([len(run) * run[0].shape[1] for run in runs], dim=-1)  # (b, s, n r)
    pairs = []
    for h, run in zip(latents, runs, strict=True):
        if len(run) > 1:  # viewed as a batch: no copy, as `bmm` accepts any strides
            h = h.unflatten(-1, (len(run), -1)).flatten(0, 1).transpose(0, 1)
        pairs.append((h, run))
    return pairs


def _own_term_of_dh(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return dO B of this rank (b s, Σ r_i), from the gradients dO of each run's outputs."""
    douts: list[Tensor] = []  # (b s, d_i/T) per weight
    for gradient, run in zip(gradients, _runs(weights), strict=True):
        douts += [gradient.flatten(0, 1)] if len(run) == 1 else gradient.unbind()
    if len(weights) == 1 or torch.compiler.is_compiling():
        return concatenated([dout @ b for dout, b in zip(douts, weights, strict=True)], -1)
    # Eagerly each product is written where it belongs: a `cat` would copy all of them once more.
    widths = [b.shape[1] for b in weights]
    term = douts[0].new_empty(douts[0].shape[0], sum(widths))
    for dout, b, part in zip(douts, weights, term.split(widths, dim=-1), strict=True):
        torch.mm(dout, b, out=part)
    return term


class _SyncNorm(torch.autograd.Function):
    """Forward all-reduce of the statistic, backward all-reduce of its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, gamma, dim, eps, ranks = inputs  # (b, s, d/T), (d/T,)
        total = partial(reduce, ranks=ranks, owned=True)
        (rstd,) = keep(lambda: (torch.rsqrt(total(sum_of_squares(x)) / dim + eps),))
        rstd = rstd.unsqueeze(-1)  # (b, s, 1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(x * rstd * gamma, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        scaled = dy * gamma.to(rstd.dtype)
        inner = reduce((scaled * x).sum(-1), ctx.ranks, owned=True).unsqueeze(-1)
        dx = rstd * scaled - rstd.pow(3) / ctx.dim * inner * x
        dgamma = (dy * (x * rstd)).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None


class _ScatteredNorm(torch.autograd.Function):
    """N = U · rstd, U the gathered γ ⊙ x; backward reduce-scatters dU and all-reduces <dU, U>."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, gamma, dim, eps, ranks = inputs  # (b, s, d/T), (d/T,)
        started = start_sum(sum_of_squares(x), ranks, owned=True)
        (gathered,) = all_gather([x * gamma], ranks, FEATURES)  # (b, s, d)
        rstd = torch.rsqrt(wait(started) / dim + eps).unsqueeze(-1)  # (b, s, 1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(gathered * rstd, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        dgathered = (gradient * rstd).to(x.dtype)  # (b, s, d)
        du = reduce(dgathered, ctx.ranks, FEATURES).to(rstd.dtype)  # (b, s, d/T)
        # dS = -½ rstd² / d · <dN, N>, and <dN, N> = <dU, U> is a sum over the features, of which
        # a rank has its own.
        inner = reduce((du * (x * gamma)).sum(-1), ctx.ranks, owned=True).unsqueeze(-1)
        ds = -0.5 / ctx.dim * rstd.square() * inner
        dx = du * gamma + 2 * ds * x
        dgamma = (du * x).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None


def sync_norm(
    x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks, gather: bool = False
) -> Tensor:
    """Normalize x (b, s, d/T), Shard(-1), after reducing its statistic; γ (d/T,) is Shard(0)."""
    # There are ``dim`` features on all ranks. With ``gather`` the result is (b, s, d), replicated,
    # for vocabulary shards, and its gradient is summed over the ranks.
    kind = _ScatteredNorm if gather else _SyncNorm
    out: Tensor = kind.apply(x, gamma, dim, eps, ranks)
    return out


def norm_numbers(norm: nn.RMSNorm) -> tuple[Tensor, int, float]:
    """Return a norm's weight on this rank, its features d over all ranks, and its ε."""
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    return local(norm.weight), norm.normalized_shape[0], eps


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum x² over the last dimension, accumulated and returned in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()
