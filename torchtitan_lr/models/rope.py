# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rotary position embedding over neighbouring pairs, with Llama 3.1's frequency scaling.

Pairs are (x0, x1), (x2, x3), ...: Meta's convention. Hugging Face pairs the two halves of a
head instead, hence the permutation in the state-dict adapter.
"""

import math

import torch
from torch import Tensor

from torchtitan_lr.titan.specs import RoPEScalingArgs


def build_freqs_cis(
    head_dim: int,
    seq_len: int,
    theta: float,
    scaling: RoPEScalingArgs | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Table of rotations exp(i · position · frequency) (RoFormer, section 3.2.2).

    Under Llama 3.1's scaling, pairs that turn often within the original context keep their
    frequency, those that turn rarely have it divided by the factor, and the ones between are
    interpolated linearly in the number of turns.

    The model keeps the table complex, so that no cast of the model rounds it, and hands its blocks
    the same memory as real numbers: compilers generate no code for complex ones.

    Args:
        head_dim: Width of a head (even).
        seq_len: Number of positions.
        theta: Base of the frequencies, a geometric series.
        scaling: Llama 3.1's frequency scaling, or None.
        dtype: Precision of the real and imaginary parts, fp32 or fp64.

    Returns:
        Tensor of shape (seq_len, head_dim / 2), complex64 or complex128, on the current default
        device; the angles are computed in fp64 and rounded once.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = torch.pow(theta, -exponents)  # radians per position
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / scaling.scaling_factor)
    positions = torch.arange(seq_len, dtype=torch.float64, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.complex(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate every pair of every head by its position's angle, in fp32 or better.

    Args:
        x: Queries or keys (b, s, h, head_dim); any number of heads, so a shard of them too.
        table: Cosines and sines (s', head_dim / 2, 2) with s' >= s, or the complex table
            (s', head_dim / 2) of `build_freqs_cis`; not rounded below fp32. For rows with
            different positions (b, s, head_dim / 2, 2).

    Returns:
        The rotated tensor, of the shape and dtype of ``x``.
    """
    table = torch.view_as_real(table) if table.is_complex() else table
    # ([b,] s, 1, head_dim / 2, 2)
    table = table[:, :, None] if table.dim() == 4 else table[: x.shape[1], None]
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    # Real arithmetic, (x0 cos - x1 sin, x0 sin + x1 cos), is fused by the compiler with its
    # neighbours. Eagerly a product of complex numbers is one kernel instead of eight.
    if torch.compiler.is_compiling():
        (cos, sin), (even, odd) = table.unbind(-1), pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    # The view needs pairs side by side; a slice of a wider tensor may have them elsewhere.
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(table)
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)
