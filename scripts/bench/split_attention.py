# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A chunk's attention to a prefix of its row as two calls, merged by their log-sum-exp.

The last n of s tokens attend to the s - n before them without a mask, and to themselves causally.
Kernels that know no other mask than the upper left triangle compute both. With lse_i the log of the
sum of a call's exponentials and o_i its output,

    lse = log(exp(lse_1) + exp(lse_2)),   o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2.

A kernel's backward computes the probabilities as exp(scores - lse) and needs |do · o| of a query:
given the merged o and lse, each of two calls returns exactly its own part of the gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Any, ...]]
"""Attention of q to k and v, causal or not: output (b, h, n, head_dim), log-sum-exp with b · h · n
numbers, and what else backward wants."""

Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Gradients of q, k and v from (gradient, q, k, v, out, lse, rest, causal)."""


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel that returns its log-sum-exp."""

    forward: Forward
    backward: Backward


aten = torch.ops.aten


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    return tuple(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))


def _cpu_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    _: Any,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(gradient, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    return tuple(aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal))


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Any,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    starts_q, starts_k, n_q, n_k, seed, offset, _ = rest
    backward = aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = backward(
        gradient, q, k, v, out, lse, starts_q, starts_k, n_q, n_k, 0.0, causal, seed, offset
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    return tuple(aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal))


def _cudnn_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Any,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    starts_q, starts_k, n_q, n_k, seed, offset, _ = rest
    backward = aten._scaled_dot_product_cudnn_attention_backward
    dq, dk, dv = backward(
        *(gradient, q, k, v, out, lse, seed, offset, None),
        *(starts_q, starts_k, n_q, n_k, 0.0, causal),
    )
    return dq, dk, dv


CPU = Kernel(_cpu, _cpu_backward)
FLASH = Kernel(_flash, _flash_backward)
CUDNN = Kernel(_cudnn, _cudnn_backward)


def with_repeated_heads(kernel: Kernel) -> Kernel:
    """Return a kernel for grouped queries from one that knows no groups: it copies k and v."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
        times = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        return kernel.forward(q, k, v, causal)

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, times = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        dq, dk, dv = kernel.backward(gradient, q, k, v, *others)
        dk, dv = (x.unflatten(1, (heads, times)).sum(2) for x in (dk, dv))
        return dq, dk, dv

    return Kernel(forward, backward)


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two calls' outputs (b, h, n, head_dim) and log-sum-exps (b, h, n) over other keys.

    Returns:
        The output over all keys, of the dtype of ``out``, and its log-sum-exp.
    """
    total = torch.logaddexp(lse, other_lse)
    weight = (lse - total).exp().unsqueeze(-1)  # (b, h, n, 1), in fp32 or wider
    # other + weight (out - other), as the weights sum to 1.
    return torch.lerp(other.to(weight.dtype), out.to(weight.dtype), weight).to(out.dtype), total


class _SplitAttention(torch.autograd.Function):
    """Forward two calls, backward two with the merged output."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (b, h, n, head_dim)
        k: Tensor,  # (b, h_kv, s, head_dim)
        v: Tensor,
        kernel: Kernel,
    ) -> Tensor:
        n = q.shape[-2]
        before = k.shape[-2] - n
        out, lse, *own_rest = kernel.forward(q, k[:, :, before:], v[:, :, before:], True)
        shape, rest = lse.shape, [own_rest]
        if before:
            other, other_lse, *other_rest = kernel.forward(
                q, k[:, :, :before], v[:, :, :before], False
            )
            flat = q.shape[:-1]
            out, lse = merged(out, lse.reshape(flat), other, other_lse.reshape(flat))
            rest.append(other_rest)
        ctx.kernel, ctx.before = kernel, before
        # What is not a tensor, beside them.
        ctx.rest = rest
        ctx.save_for_backward(q, k, v, out, lse.reshape(shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        backward, before = ctx.kernel.backward, ctx.before
        keys, values = k[:, :, before:], v[:, :, before:]
        dq, dk, dv = backward(gradient, q, keys, values, out, lse, ctx.rest[0], True)
        if before:
            keys, values = k[:, :, :before], v[:, :, :before]
            more, dk_before, dv_before = backward(
                gradient, q, keys, values, out, lse, ctx.rest[1], False
            )
            dq = dq + more
            dk, dv = torch.cat([dk_before, dk], -2), torch.cat([dv_before, dv], -2)
        return dq, dk, dv, None


def split_attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """Return attention's output of the last tokens of a prefix.

    Args:
        q: Queries (b, h, n, head_dim) of the last n tokens.
        k: Keys (b, h_kv, s, head_dim) of all s.
        v: Values, likewise.
        kernel: What computes both calls.
    """
    out: Tensor = _SplitAttention.apply(q, k, v, kernel)
    return out
