# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The loss, of the head's input and weight or of logits.

A head's loss is computed a chunk of tokens at a time, and the gradients of the head's input and
weight while the chunk's logits exist: no product is computed twice, and the logits never exist
whole. ``torch.nn.functional.linear_cross_entropy`` (from torch 2.13) chunks in the same way. It
rounds an fp32 gradient to 1.3e-6 of its largest entry where this one has 1e-7, takes no shard of a
vocabulary, and can run backward only once, where a zero-bubble pipeline needs it twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_lr.collectives import Ranks, all_gather, reduce
from torchtitan_lr.compat.autograd import backward_may_repeat
from torchtitan_lr.numerics import scale_
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import LossFunction

CHUNKS = 8  # of a batch, within these limits:
SMALLEST_CHUNK = 512  # tokens: thinner products are slow
LARGEST_CHUNK = 4096  # tokens: wider products gain nothing

Errors = Callable[[Tensor, Tensor, Tensor], Tensor]  # `errors_in_place`


def chunk_tokens(tokens: int, dim: int) -> int:
    """Return the number of tokens per chunk of a batch of ``tokens`` tokens of width ``dim``."""
    if tokens <= max(SMALLEST_CHUNK, dim):
        return tokens
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, -(-tokens // CHUNKS)))


def linear_loss(
    x: Tensor,  # (b, s, d), with lanes (b, s, g, d), each for its own rows of the weight
    weight: Tensor,  # (V/T, d), Shard(0)
    targets: Tensor,  # token ids (b, s), of which `IGNORE_INDEX` does not count
    ranks: Ranks | None = None,  # that share the vocabulary
    errors: Errors | None = None,  # `errors_in_place`, compiled
) -> Tensor:
    """Sum -log p(target) over the valid tokens, in nats, where p is the softmax of x Wᵀ."""
    # The result is a replicated scalar in at least fp32. The gradient of x is this rank's term.
    flat = x.flatten(0, 1)
    flat = flat.unsqueeze(1) if flat.ndim == 2 else flat  # (n, g, d)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _LinearLoss.apply(flat, weight, targets.flatten(), ranks, wanted, errors)
    return loss


class _LinearLoss(torch.autograd.Function):
    """Forward the loss and, chunk by chunk, its gradients; backward scales them.

    A batch of one chunk keeps its errors (p less one-hot rows), and backward multiplies. It has a
    few tokens, or no more than features: its errors are then smaller than the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (n, g, d)
        weight: Tensor,  # (V/T, d)
        targets: Tensor,  # (n,)
        ranks: Ranks | None,
        wanted: bool,  # the gradients
        compiled: Errors | None,
    ) -> Tensor:
        tokens, compute = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        fused = compiled if ranks is None and x.dtype != compute else None
        size = chunk_tokens(tokens, x.shape[-1])
        if fused is not None:  # no fp32 copy, twice as large: twice the tokens still need less
            size = min(tokens, 2 * size)
        ctx.keeps_errors = size == tokens
        adds_gradients = wanted and not ctx.keeps_errors
        # The chunks use this memory in turn.
        logits = x.new_empty(size, weight.shape[0])
        p = logits if fused is not None or x.dtype == compute else logits.to(compute)
        loss = x.new_zeros((), dtype=compute)
        if adds_gradients:
            dx, dweight = torch.empty_like(x), torch.empty_like(weight, dtype=compute)
        for start in range(0, tokens, size):
            chunk = slice(start, start + size)
            valid = (targets[chunk] != IGNORE_INDEX)[:, None, None]  # (c, 1, 1)
            # Without its input, a token that does not count adds nothing to the weight's gradient.
            # A product would let an inf or a NaN there through.
            counted = torch.where(valid, x[chunk], 0)
            errors = logits[: len(counted)]
            _write_logits(counted, weight, errors)
            column, here = _own_columns(targets[chunk], weight.shape[0], ranks)
            if fused is not None:
                log_p = fused(errors, column, here)
            else:
                log_p = errors_in_passes(errors, column, here, p[: len(errors)], ranks, wanted)
            loss -= torch.where(here, log_p, 0).sum()
            if adds_gradients:
                _add_gradients(errors, counted, valid, weight, dx[chunk], dweight, start == 0)
        if adds_gradients:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        elif wanted:
            ctx.save_for_backward(errors, counted, valid, weight)
        return loss if ranks is None else reduce(loss, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.keeps_errors:
            errors, counted, valid, weight = ctx.saved_tensors
            dx, dweight = torch.empty_like(counted), torch.empty_like(weight)
            _add_gradients(errors, counted, valid, weight, dx, dweight, first=True)
        else:
            dx, dweight = ctx.saved_tensors
            # Scaled in place: new memory as large as the weight costs more time than the product.
            if backward_may_repeat():
                dx, dweight = dx.clone(), dweight.clone()
        scale_([dx, dweight], gradient)
        return dx, dweight, None, None, None, None


def _write_logits(x: Tensor, weight: Tensor, logits: Tensor) -> None:
    """Write x (c, g, d) · Wᵀ, lane by lane, into logits (c, V/T)."""
    lanes = x.shape[1]
    columns = logits.chunk(lanes, 1)
    for lane, own_weight in enumerate(weight.chunk(lanes)):
        torch.mm(x[:, lane], own_weight.t(), out=columns[lane])


def _own_columns(targets: Tensor, width: int, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Return the targets' columns (c, 1) in this rank's logits, and whether they count there."""
    here = targets != IGNORE_INDEX  # (c,)
    if ranks is not None:
        targets = targets - ranks.rank * width
        here &= (targets >= 0) & (targets < width)
    return torch.where(here, targets, 0)[:, None], here


def errors_in_passes(
    logits: Tensor,  # (c, V/T)
    column: Tensor,  # of the targets (c, 1)
    here: Tensor,  # whether the target counts, and is in this rank's shard of the vocabulary (c,)
    p: Tensor,  # memory like the logits, in at least fp32; the same tensor if they are
    ranks: Ranks | None,  # that share the vocabulary
    wanted: bool,  # the errors
) -> Tensor:
    """Turn logits into p less one-hot rows, if wanted; return log p (c,) of the targets."""
    # The logits become probabilities in one pass, and log p is computed for the targets alone.
    of_target = logits.gather(1, column)[:, 0].to(p.dtype)
    largest = logits.amax(1).to(p.dtype)
    if p.dtype != logits.dtype:
        p.copy_(logits)  # softmax with a dtype would cast into memory of its own
    torch.softmax(p, 1, out=p)
    # The largest p is exp(0) / Σ exp(logit - largest). The target's own p may underflow.
    log_largest_p = p.amax(1).log()
    log_p = of_target - largest + log_largest_p
    if ranks is not None:
        own = largest - log_largest_p  # log-sum-exp of this shard
        log_p_of_shard = own - all_gather([own[None]], ranks, 0)[0].logsumexp(0)
        p *= log_p_of_shard.exp()[:, None]
        log_p += log_p_of_shard
    if wanted:
        p.scatter_add_(1, column, -here.to(p.dtype)[:, None])
        if p.dtype != logits.dtype:
            logits.copy_(p)
    return log_p


def errors_in_place(logits: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """Do the same with logits (c, V) of half precision, in operators that torch can fuse."""
    wide = logits.float()
    of_target = wide.gather(1, column)[:, 0]
    largest = wide.amax(1, keepdim=True)
    exponentials = (wide - largest).exp()
    total = exponentials.sum(1, keepdim=True)
    every_column = torch.arange(logits.shape[1], device=logits.device)
    one_hot = (every_column == column) & here[:, None]
    logits.copy_(exponentials / total - one_hot.to(wide.dtype))
    return of_target - largest[:, 0] - total[:, 0].log()


def _add_gradients(
    errors: Tensor,  # (c, V/T)
    x: Tensor,  # (c, g, d), 0 for tokens that do not count
    valid: Tensor,  # (c, 1, 1)
    weight: Tensor,  # (V/T, d)
    dx: Tensor,  # (c, g, d), gets errors · W of the valid tokens
    dweight: Tensor,  # (V/T, d), gets errorsᵀ · x more
    first: bool,  # whether dweight has no value yet
) -> None:
    lanes = x.shape[1]
    shards = zip(errors.chunk(lanes, 1), weight.chunk(lanes), dweight.chunk(lanes), strict=True)
    for lane, (own_errors, own_weight, own_dweight) in enumerate(shards):
        torch.mm(own_errors, own_weight, out=dx[:, lane])
        if own_errors.dtype == own_dweight.dtype:
            own_dweight.addmm_(own_errors.t(), x[:, lane], beta=0 if first else 1)
        else:  # half precision: the sum over the chunks is rounded once
            product = own_errors.t() @ x[:, lane]
            own_dweight.copy_(product) if first else own_dweight.add_(product)
    dx *= valid


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p(label) of logits (b, s, V) over the valid tokens, in nats."""
    # Half precision is raised to fp32; fp64 stays fp64, which upstream's loss would round.
    compute = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits.flatten(0, 1).to(compute),
        labels.flatten(0, 1),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
    )


def summed_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits (b, s, V), or the output if the head has computed its loss."""
    return output if output.ndim == 0 else cross_entropy_sum(output, labels)


def build_loss(job_config: Any, **kwargs: Any) -> LossFunction:
    """Return `summed_loss`, of a model that has computed its loss when it is given the targets."""
    return summed_loss
