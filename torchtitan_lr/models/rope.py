# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rotary position embedding over neighbouring pairs, with Llama 3.1's frequency scaling.

Pairs are (x0, x1), (x2, x3), ...: Meta's convention. Hugging Face pairs the two halves of a
head instead, hence the permutation in the state-dict adapter.
"""

import math

import torch
from torch import Tensor
from torchtitan.models.llama3.model.args import RoPEScalingArgs


def rope_frequencies(head_dim: int, theta: float, scaling: RoPEScalingArgs | None) -> Tensor:
    """Angle per position of every pair, in radians (RoFormer, section 3.2.2).

    Under Llama 3.1's scaling, pairs that turn often within the original context keep their
    frequency, those that turn rarely have it divided by the factor, and the ones between are
    interpolated linearly in the number of turns.

    Args:
        head_dim: Width of a head (even).
        theta: Base of the geometric series.
        scaling: Parameters of the scaling, or None.

    Returns:
        Tensor of shape (head_dim / 2,), fp64, on the current default device.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = torch.pow(theta, -exponents)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.scaling_factor)


def build_freqs_cis(
    head_dim: int,
    seq_len: int,
    theta: float,
    scaling: RoPEScalingArgs | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Table of rotations exp(i · position · frequency).

    Complex on purpose: FSDP's mixed precision casts real floating-point arguments of a block to
    bf16, which would round the angles, and leaves complex ones alone.

    Args:
        head_dim: Width of a head.
        seq_len: Number of positions.
        theta: Base of the frequencies.
        scaling: Llama 3.1's frequency scaling, or None.
        dtype: Precision of the real and imaginary parts, fp32 or fp64.

    Returns:
        Tensor of shape (seq_len, head_dim / 2), complex64 or complex128, on the current default
        device; the angles are computed in fp64 and rounded once.
    """
    frequencies = rope_frequencies(head_dim, theta, scaling)
    positions = torch.arange(seq_len, dtype=torch.float64, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.complex(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate every pair of every head by its position's angle, in fp32 or better.

    Args:
        x: Queries or keys (b, s, h, head_dim); any number of heads, so a shard of them too.
        freqs_cis: Table (s', head_dim / 2) with s' >= s, see ``build_freqs_cis``; or the rotations
            of every row's own positions, (b, s, head_dim / 2).

    Returns:
        The rotated tensor, of the shape and dtype of ``x``.
    """
    # Real arithmetic on a view of the table: compilers generate no code for complex products.
    if freqs_cis.dim() == 3:
        table = torch.view_as_real(freqs_cis)[:, :, None]  # (b, s, 1, head_dim / 2, 2)
    else:
        table = torch.view_as_real(freqs_cis[: x.shape[1]])[:, None]  # (s, 1, head_dim / 2, 2)
    cos, sin = table.unbind(-1)
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
