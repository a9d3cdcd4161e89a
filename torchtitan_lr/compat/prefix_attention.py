# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Attention of the last n tokens of a prefix of s, by kernels that know no such mask.

The tokens attend to the s - n before them without a mask, and to themselves causally. With lse_i
the log of the sum of a call's exponentials, and o_i its output,

    lse = log(exp(lse_1) + exp(lse_2)),   o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2.

A kernel's backward computes the probabilities as exp(scores - lse) and needs |do · o| of a query:
with the merged o and lse each call returns exactly its own part of the gradients.

Torch publishes no attention that returns lse, nor its backward. If the arguments of a kernel
change, the first step fails. A CPU's was tested with torch 2.13.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def own_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, int]:
    """Return the kernel, and the tokens before that have a call of their own."""
    before = k.shape[-2] - q.shape[-2]
    if q.device.type == "cpu":
        return "cpu", before
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn", before
    return "flash", 0  # its causal mask ends in the lower right


def _forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    else:  # half precision, and 8 divides head_dim: else a RuntimeError
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse.reshape(q.shape[:-1]).contiguous()


def _backward(kernel: str, causal: bool, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from (gradient, q, k, v, out, lse)."""
    *first, lse = given
    lengths = first[1].shape[-2], first[2].shape[-2]
    # Without dropout nothing reads a seed, and rows of one length have no table of starts.
    seed = torch.empty(2, dtype=torch.uint64, device=lse.device)
    results: Any
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        results = backward(*given, 0.0, causal)
    elif kernel == "cudnn":
        backward = aten._scaled_dot_product_cudnn_attention_backward
        lse = lse.unsqueeze(-1)
        results = backward(*first, lse, seed, seed, None, None, None, *lengths, 0.0, causal)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        results = backward(*given, None, None, *lengths, 0.0, causal, seed, seed)
    dq, dk, dv = results
    return dq, dk, dv


# Operators: modes of checkpointing keep the results of one, not those of two calls.
@torch.library.custom_op("torchtitan_lr::attend_to_prefix", mutates_args=())
def prefix_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of q (b, h, n, e) to k and v (b, h_kv, s, e), and its lse (b, h, n)."""
    kernel, before = own_kernel(q, k, v)
    out, lse = _forward(kernel, q, k[:, :, before:], v[:, :, before:], True)
    if not before:
        return out.contiguous(), lse
    other, other_lse = _forward(kernel, q, k[:, :, :before], v[:, :, :before], False)
    total = torch.logaddexp(lse, other_lse)
    weight = (lse - total).exp().unsqueeze(-1)  # (b, h, n, 1), in fp32 or wider
    # other + weight (out - other), as the weights sum to 1.
    merged = torch.lerp(other.to(weight.dtype), out.to(weight.dtype), weight)
    return merged.to(q.dtype, memory_format=torch.contiguous_format), total


@torch.library.custom_op("torchtitan_lr::attend_to_prefix_backward", mutates_args=())
def _prefix_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, before = own_kernel(q, k, v)
    own, past = slice(before, None), slice(before)
    found = _backward(kernel, True, gradient, q, k[:, :, own], v[:, :, own], out, lse)
    if not before:
        dq, dk, dv = found
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    others = _backward(kernel, False, gradient, q, k[:, :, past], v[:, :, past], out, lse)
    dk, dv = (torch.cat([a, b], -2) for a, b in zip(others[1:], found[1:], strict=True))
    return torch.add(found[0], others[0], out=q.new_empty(q.shape)), dk, dv


@prefix_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide)


@_prefix_backward.register_fake
def _(gradient: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:3])


prefix_attention.register_autograd(
    lambda ctx, gradient, _: _prefix_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)
PREFIX_ATTENTION = torch.ops.torchtitan_lr.attend_to_prefix.default
