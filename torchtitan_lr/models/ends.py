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
    errors: Errors | None = None,
) -> Tensor:
    """Sum -log p(target) over the valid tokens, in nats, where p is the softmax of x Wᵀ."""
    # The result is a replicated scalar in at least fp32. The gradient of x is this rank's term.
    rows = x.flatten(0, 1)
    rows = rows.unsqueeze(1) if rows.ndim == 2 else rows
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _LinearLoss.apply(rows, weight, targets.flatten(), ranks, wanted, errors)
    return loss


class _LinearLoss(torch.autograd.Function):
    """Forward the loss and, chunk by chunk, its gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (n, g, d)
        weight: Tensor,  # (V/T, d)
        targets: Tensor,  # (n,)
        ranks: Ranks | None,
        wanted: bool,
        compiled: Errors | None,
    ) -> Tensor:
        tokens = x.shape[0]
        size = chunk_tokens(tokens, x.shape[-1])
        # With no more tokens than features the logits are smaller than the weight's gradient. One
        # chunk then keeps its errors (p less one-hot rows) for backward instead.
        ctx.whole = size == tokens
        compute = torch.promote_types(x.dtype, torch.float32)
        # The chunks use this memory in turn.
        logits = x.new_empty(size, weight.shape[0])
        p = logits if x.dtype == compute else logits.to(compute)
        fused = compiled if ranks is None and p.dtype != logits.dtype else None
        loss = p.new_zeros(())
        if wanted and not ctx.whole:
            dx, dweight = torch.empty_like(x), torch.empty_like(weight, dtype=compute)
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            counts = targets[part] != IGNORE_INDEX
            valid = counts[:, None, None]
            # Without its input, a token that does not count adds nothing to the weight's gradient.
            # A product would let an inf or a NaN there through.
            counted = torch.where(valid, x[part], 0)
            errors = logits[: counted.shape[0]]
            _write_logits(counted, weight, errors)
            place, here = targets[part], counts
            if ranks is not None:  # the targets in this rank's part of the vocabulary
                place = place - ranks.rank * weight.shape[0]
                here = counts & (place >= 0) & (place < weight.shape[0])
            place = torch.where(here, place, 0)[:, None]
            if fused is not None:
                log_p = fused(errors, place, here)
            else:
                log_p = errors_in_passes(errors, place, here, p[: len(errors)], ranks, wanted)
            loss -= torch.where(here, log_p, 0).sum()
            if wanted and not ctx.whole:
                _add_gradients(errors, counted, weight, dx[part], dweight, first=start == 0)
                dx[part] *= valid
        if wanted and ctx.whole:
            ctx.save_for_backward(errors, counted, weight, valid)
        elif wanted:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return loss if ranks is None else reduce(loss, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.whole:
            dx, dweight = ctx.saved_tensors
            # New memory as large as the weight costs more time than the product.
            if backward_may_repeat():
                dx, dweight = dx.clone(), dweight.clone()
            scale_([dx, dweight], gradient)
            return dx, dweight, None, None, None, None
        # The one chunk kept its errors, which are smaller than the weight's gradient.
        errors, counted, weight, valid = ctx.saved_tensors
        dx, dweight = torch.empty_like(counted), torch.empty_like(weight)
        _add_gradients(errors, counted, weight, dx, dweight, first=True)
        dx *= valid
        scale_([dx, dweight], gradient)
        return dx, dweight, None, None, None, None


def _write_logits(x: Tensor, weight: Tensor, logits: Tensor) -> None:
    """Write x (n, g, d) · Wᵀ, lane by lane, into logits (n, V/T)."""
    lanes = x.shape[1]
    columns = logits.chunk(lanes, 1)
    for lane, rows in enumerate(weight.chunk(lanes)):
        torch.mm(x[:, lane], rows.t(), out=columns[lane])


def errors_in_passes(
    logits: Tensor,  # (n, V/T)
    place: Tensor,  # columns of the targets (n, 1)
    here: Tensor,  # whether the target counts, and is in this rank's part of the vocabulary (n,)
    p: Tensor,  # memory like the logits, in at least fp32; the same tensor if they are
    ranks: Ranks | None,  # that share the vocabulary
    wanted: bool,  # the errors
) -> Tensor:
    """Turn logits into p less one-hot rows, if wanted; return log p (n,) of the targets."""
    # The logits become probabilities in one pass, and log p is computed for the targets alone.
    of_target = logits.gather(1, place)[:, 0].to(p.dtype)
    largest = logits.amax(1).to(p.dtype)
    if p.dtype != logits.dtype:
        p.copy_(logits)  # softmax with a dtype would cast into memory of its own
    torch.softmax(p, 1, out=p)
    # The largest p is exp(0) / Σ exp(logit - largest). The target's own p may underflow.
    log_largest_p = p.amax(1).log()
    log_p = of_target - largest + log_largest_p
    if ranks is not None:
        own = largest - log_largest_p  # log-sum-exp of this part
        part = own - all_gather([own[None]], ranks, 0)[0].logsumexp(0)
        p *= part.exp()[:, None]
        log_p += part
    if wanted:
        p.scatter_add_(1, place, -here.to(p.dtype)[:, None])
        if p.dtype != logits.dtype:
            logits.copy_(p)
    return log_p


def errors_in_place(logits: Tensor, place: Tensor, here: Tensor) -> Tensor:
    """Do the same with logits (n, V) of half precision, in operators that torch can fuse."""
    wide = logits.float()
    of_target = wide.gather(1, place)[:, 0]
    largest = wide.amax(1, keepdim=True)
    exponentials = (wide - largest).exp()
    total = exponentials.sum(1, keepdim=True)
    column = torch.arange(logits.shape[1], device=logits.device)
    hit = (column == place) & here[:, None]
    logits.copy_(exponentials / total - hit.to(wide.dtype))
    return of_target - largest[:, 0] - total[:, 0].log()


def _add_gradients(
    errors: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dweight: Tensor, first: bool
) -> None:
    """Write errors · W into dx (n, g, d), and add errorsᵀ · x to dweight (V/T, d), lane by lane."""
    lanes = x.shape[1]
    parts = zip(errors.chunk(lanes, 1), weight.chunk(lanes), dweight.chunk(lanes), strict=True)
    for lane, (part, rows, drows) in enumerate(parts):
        torch.mm(part, rows, out=dx[:, lane])
        if part.dtype == drows.dtype:
            drows.addmm_(part.t(), x[:, lane], beta=0 if first else 1)
        else:  # half precision: the sum over the chunks is rounded once
            product = part.t() @ x[:, lane]
            drows.copy_(product) if first else drows.add_(product)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of ``-log p(label)`` over the valid tokens of a batch, in nats, a scalar."""
    # The logits are (b, s, V).
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
