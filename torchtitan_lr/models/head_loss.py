# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The loss of a linear head, a chunk of tokens at a time: the logits never exist whole.

The loss of a chunk and its gradients with respect to the head's input and weight are computed while
the chunk's logits exist. Backward scales these gradients, so no product is computed twice, and no
logits outlive their chunk. The whole form keeps (b s, V) numbers at least three times in its peak:
log-probabilities, and the gradients of the label's entries and of the logits.

If there are no more tokens than features, the logits are smaller than the weight's gradient. They
are then one chunk, which keeps its logits' gradient for backward instead.

``torch.nn.functional.linear_cross_entropy`` (from torch 2.13) chunks in the same way. It subtracts
the label's row of the weight from each token's gradient after the product, not within it, which
rounds an fp32 gradient to 1.3e-6 of its largest entry where this one has 1e-7, takes no shard of a
vocabulary, and can run backward only once, where a zero-bubble pipeline needs it twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.components.loss import IGNORE_INDEX

CHUNKS = 8
"""Number of chunks of a batch, within the limits below."""

SMALLEST_CHUNK = 512
"""Tokens of a chunk at least: thinner products are slow."""

LARGEST_CHUNK = 4096
"""Tokens of a chunk at most: wider ones gain nothing."""


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary whose logits are computed here.

    Args:
        first: The first token id of the part.
        total: Given the log-sum-exp (n,) of this part's logits, returns that of all parts (n,).
            None if this part is the whole vocabulary.
        add: Adds a scalar over the parts.
    """

    first: int = 0
    total: Callable[[Tensor], Tensor] | None = None
    add: Callable[[Tensor], Tensor] = torch.clone


WHOLE = VocabularyPart()


def chunk_tokens(tokens: int, dim: int) -> int:
    """Return the number of tokens per chunk of a batch of ``tokens`` tokens of width ``dim``."""
    if tokens <= max(SMALLEST_CHUNK, dim):
        return tokens
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, -(-tokens // CHUNKS)))


def linear_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularyPart = WHOLE
) -> Tensor:
    """Sum -log p(target) over the valid tokens, in nats, where p is the softmax of x Wᵀ.

    The result and its gradients are those of `loss.cross_entropy_sum` of the whole logits.

    Args:
        x: Input of the head (b, s, d); with lanes (b, s, g, d), each lane for its own rows of the
            weight.
        weight: (V/T, d), the rows of this part of the vocabulary.
        targets: Token ids (b, s); `IGNORE_INDEX` does not count.
        vocabulary: The part of the vocabulary.

    Returns:
        A scalar in at least fp32, the same for every part. The gradient of x is this part's term of
        a sum over the parts.
    """
    rows = x.flatten(0, 1)
    rows = rows.unsqueeze(1) if rows.ndim == 2 else rows
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _LinearLoss.apply(rows, weight, targets.flatten(), vocabulary, wanted)
    return loss


class _LinearLoss(torch.autograd.Function):
    """Forward the loss and, chunk by chunk, its gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: VocabularyPart,
        wanted: bool,
    ) -> Tensor:
        tokens = x.shape[0]
        size = chunk_tokens(tokens, x.shape[-1])
        ctx.whole = size == tokens
        now = wanted and not ctx.whole
        chunk = _Chunk(size, x, weight, vocabulary)
        dx = torch.empty_like(x) if now else None
        dweight = torch.empty_like(weight, dtype=chunk.log_p.dtype) if now else None
        loss = chunk.log_p.new_zeros(())
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            valid = (targets[part] != IGNORE_INDEX)[:, None, None]
            # Without its input, a token that does not count adds nothing to the weight's gradient.
            counted = x[part] * valid
            loss += chunk.loss(counted, targets[part])
            errors = chunk.errors() if wanted else None
            if dx is not None and dweight is not None and errors is not None:
                _input_gradient(errors, weight, dx[part])
                dx[part] *= valid
                _add_weight_gradient(errors, counted, dweight, first=start == 0)
        if dx is not None and dweight is not None:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        elif wanted:
            ctx.save_for_backward(errors, counted, weight, valid)
        return vocabulary.add(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.whole:
            dx, dweight = ctx.saved_tensors
            return dx * gradient, dweight * gradient, None, None, None
        errors, counted, weight, valid = ctx.saved_tensors
        dx, dweight = torch.empty_like(counted), torch.empty_like(weight)
        _input_gradient(errors, weight, dx)
        _add_weight_gradient(errors, counted, dweight, first=True)
        return dx * (valid * gradient).to(dx.dtype), dweight * gradient, None, None, None


class _Chunk:
    """The logits of a chunk of tokens, in memory that the chunks use in turn.

    Args:
        size: Tokens of a chunk.
        x: The head's input (n, g, d).
        weight: (V/T, d).
        vocabulary: The part of the vocabulary.
    """

    def __init__(self, size: int, x: Tensor, weight: Tensor, vocabulary: VocabularyPart) -> None:
        self.weight, self.vocabulary = weight, vocabulary
        self.logits = x.new_empty(size, weight.shape[0])
        compute = torch.promote_types(x.dtype, torch.float32)
        self.log_p = self.logits if x.dtype == compute else self.logits.to(compute)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of -log p(target) over the targets (n,) that are in this part."""
        if x.shape[0] < self.logits.shape[0]:  # the last chunk
            same = self.log_p is self.logits
            self.logits = self.logits[: x.shape[0]]
            self.log_p = self.logits if same else self.log_p[: x.shape[0]]
        lanes = x.shape[1]
        columns = self.logits.chunk(lanes, 1)
        for lane, rows in enumerate(self.weight.chunk(lanes)):
            torch.mm(x[:, lane], rows.t(), out=columns[lane])
        total = self.vocabulary.total
        first = None if total is None else self.logits[:, 0].to(self.log_p.dtype, copy=True)
        torch.log_softmax(self.logits, 1, dtype=self.log_p.dtype, out=self.log_p)
        place = targets - self.vocabulary.first
        self.here = targets != IGNORE_INDEX
        if total is not None and first is not None:
            own = first - self.log_p[:, 0]  # log-sum-exp of this part
            self.log_p += (own - total(own))[:, None]
            self.here &= (place >= 0) & (place < self.log_p.shape[1])
        self.place = torch.where(self.here, place, 0)[:, None]
        return -torch.where(self.here, self.log_p.gather(1, self.place)[:, 0], 0).sum()

    def errors(self) -> Tensor:
        """Turn the log-probabilities into p less the targets' one-hot rows, (n, V/T)."""
        errors = self.log_p.exp_()
        errors.scatter_add_(1, self.place, -self.here.to(errors.dtype)[:, None])
        return errors if self.log_p is self.logits else self.logits.copy_(errors)


def _input_gradient(errors: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write errors · W into out (n, g, d), lane by lane."""
    lanes = out.shape[1]
    for lane, (part, rows) in enumerate(
        zip(errors.chunk(lanes, 1), weight.chunk(lanes), strict=True)
    ):
        torch.mm(part, rows, out=out[:, lane])


def _add_weight_gradient(errors: Tensor, x: Tensor, out: Tensor, first: bool) -> None:
    """Add errorsᵀ · x to out (V/T, d), lane by lane; the first chunk overwrites it."""
    lanes = x.shape[1]
    for lane, (part, rows) in enumerate(zip(errors.chunk(lanes, 1), out.chunk(lanes), strict=True)):
        if part.dtype == rows.dtype:
            rows.addmm_(part.t(), x[:, lane], beta=0 if first else 1)
        else:  # half precision: the sum over the chunks is rounded once
            product = part.t() @ x[:, lane]
            rows.copy_(product) if first else rows.add_(product)
