# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The two ends of the model: the embedding, and the final norm with the head and its loss.

`TokenEmbedding` and `OutputProjection` own the weights and call a module without parameters:
`Embed` and `Head` here, on several ranks a plan's edges.

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
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchtitan_lr.collectives import Ranks, all_gather, local, reduce
from torchtitan_lr.compat.autograd import backward_may_repeat
from torchtitan_lr.models.lanes import lane_linear
from torchtitan_lr.numerics import scale_
from torchtitan_lr.titan import IGNORE_INDEX, logger
from torchtitan_lr.titan.base import JobConfig, LossFunction

CHUNKS = 8  # of a batch, within these limits:
SMALLEST_CHUNK = 512  # tokens: thinner products are slow
LARGEST_CHUNK = 4096  # tokens: wider products gain nothing


class Embed(nn.Module):
    """The look-up of tokens, in all features or in this rank's: nothing is sent."""

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1); returns (b, s, d/T), Shard(-1)."""
        return F.embedding(tokens, local(embedding.weight))


Errors = Callable[[Tensor, Tensor, Tensor], Tensor]  # `errors_in_place`


class Head(nn.Module):
    """The final norm, then the logits or the loss."""

    # Compiled, for a loss in half precision; None computes the same in passes of their own.
    errors: Errors | None = None

    def forward(
        self, x: Tensor, norm: nn.Module, output: nn.Linear, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits (b, s, V) of x (b, s, d), or with targets (b, s) the loss."""
        # With lanes x is (b, s, G, d), and each lane scores its part of the vocabulary.
        x = norm(x)
        if targets is not None:
            return linear_loss(x, output.weight, targets, errors=self.errors)
        return lane_linear(x, output.weight) if x.ndim == 4 else F.linear(x, output.weight)


class TokenEmbedding(nn.Embedding):
    """Token embedding whose look-up is a module that a plan may replace."""

    # A child of this module, not of the model: a pipeline split keeps both on one stage, and FSDP's
    # hooks run before the look-up.
    embed: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens (b, s) as (b, s, d); with lanes at full rank as (b, s, G, d)."""
        out: Tensor = self.embed(input, self)
        return out


class OutputProjection(nn.Linear):
    """Output projection that applies the final norm too, by a module that a plan may replace."""

    head: nn.Module

    def forward(  # type: ignore[override]
        self, input: Tensor, norm: nn.RMSNorm, targets: Tensor | None = None
    ) -> Tensor:
        """Turn the residual stream (b, s, d) into logits (b, s, V) or a loss, see `Head`."""
        # A call of this module for the loss too, so that FSDP has gathered the weight.
        out: Tensor = self.head(input, norm, self, targets)
        return out


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
        # chunk then keeps its logits' gradient for backward instead.
        ctx.whole = size == tokens
        now = wanted and not ctx.whole
        # The chunks use this memory in turn.
        logits = x.new_empty(size, weight.shape[0])
        compute = torch.promote_types(x.dtype, torch.float32)
        p = logits if x.dtype == compute else logits.to(compute)
        dx = torch.empty_like(x) if now else None
        dweight = torch.empty_like(weight, dtype=compute) if now else None
        loss = p.new_zeros(())
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            counts = targets[part] != IGNORE_INDEX
            valid = counts[:, None, None]
            # Without its input, a token that does not count adds nothing to the weight's gradient.
            # A product would let an inf or a NaN there through.
            counted = torch.where(valid, x[part], 0)
            memory = logits[: counted.shape[0]], p[: counted.shape[0]]
            own, errors = _chunk_loss(
                counted, weight, targets[part], counts, *memory, ranks, wanted, compiled
            )
            loss += own
            if dx is not None and dweight is not None:
                _add_gradients(errors, counted, weight, dx[part], dweight, first=start == 0)
                dx[part] *= valid
        if dx is not None and dweight is not None:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        elif wanted:
            ctx.save_for_backward(errors, counted, weight, valid)
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


def _chunk_loss(
    x: Tensor,  # (n, g, d)
    weight: Tensor,  # (V/T, d)
    targets: Tensor,  # (n,)
    counts: Tensor,  # whether each label counts (n,)
    logits: Tensor,  # memory (n, V/T), of the dtype of x
    p: Tensor,  # the same in at least fp32; the same tensor if x is
    ranks: Ranks | None,  # that share the vocabulary
    wanted: bool,
    errors: Errors | None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of -log p(target) of n tokens, and p less one-hot rows (n, V/T) if wanted."""
    # The second result is in the memory of ``logits``. The logits become probabilities in one pass,
    # and log p is computed for the targets alone.
    lanes = x.shape[1]
    columns = logits.chunk(lanes, 1)
    for lane, rows in enumerate(weight.chunk(lanes)):
        torch.mm(x[:, lane], rows.t(), out=columns[lane])
    place, here = targets, counts
    if ranks is not None:  # the targets in this rank's part of the vocabulary
        place = targets - ranks.rank * weight.shape[0]
        here = counts & (place >= 0) & (place < logits.shape[1])
    place = torch.where(here, place, 0)[:, None]
    of_target = logits.gather(1, place)[:, 0].to(p.dtype)
    largest = logits.amax(1).to(p.dtype)
    if errors is not None and ranks is None and p.dtype != logits.dtype:
        return -torch.where(here, errors(logits, place, here), 0).sum(), logits
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
    loss = -torch.where(here, log_p, 0).sum()
    if wanted:
        p.scatter_add_(1, place, -here.to(p.dtype)[:, None])
        if p.dtype != logits.dtype:
            logits.copy_(p)
    return loss, logits


def errors_in_place(logits: Tensor, place: Tensor, here: Tensor) -> Tensor:
    """Turn logits (n, V) of half precision into p less one-hot rows; return log p (n,) in fp32."""
    # ``place`` (n, 1) has the targets, ``here`` (n,) whether each counts.
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
    # The logits (b, s, V) are a plain tensor, or a DTensor Shard(-1) in loss-parallel context.
    # Half precision is raised to fp32; fp64 stays fp64, which upstream's loss would round.
    compute = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(
        logits.flatten(0, 1).to(compute),
        labels.flatten(0, 1),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss


def summed_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits (b, s, V), or the output if the head has computed its loss."""
    return output if output.ndim == 0 else cross_entropy_sum(output, labels)


def build_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Build the loss: `summed_loss`, or its compiled form for a model that returns logits."""
    compiled = job_config.compile.enable and "loss" in job_config.compile.components
    if compiled and not head_computes_loss(job_config):
        logger.info("Compiling the loss function with torch.compile")
        return torch.compile(cross_entropy_sum, backend=job_config.compile.backend)
    return summed_loss


def head_computes_loss(job_config: JobConfig) -> bool:
    """Return whether the model's output, given the targets, is the loss."""
    section = job_config.parallelism
    return not (section.disable_loss_parallel and section.tensor_parallel_degree > 1)
