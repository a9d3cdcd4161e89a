# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears, rotary positions and masks of an exported low-rank LLaMA. Needs torch only.

Shapes: batch b, tokens s, width d, rank r, lanes G.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_torchtitan_lr import TorchtitanLRConfig


class LaneRows(nn.Linear):
    """Maps each lane by its own rows of W: (b, s, G, d_in) to (b, s, d_out), lanes side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply W (d_out, d_in)."""
        weight = self.weight.unflatten(0, (x.shape[2], -1))
        return torch.einsum("bsgi,goi->bsgo", x, weight).flatten(2)


class LaneTerms(nn.Linear):
    """Maps each lane's features by its own columns of W, and sums the first channels over lanes.

    CAAT-Net's partial reduction (equations 8 and 12): (b, s, d_in) to (b, s, G, d_out), where the
    first ``shared`` channels are the same in every lane.

    Args:
        d_in: Input width, of all lanes together.
        d_out: Output width.
        lanes: Their number G.
        shared: The number of channels that are summed.
    """

    def __init__(self, d_in: int, d_out: int, lanes: int, shared: int) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.lanes, self.shared = lanes, shared

    def forward(self, x: Tensor) -> Tensor:
        """Apply W (d_out, d_in)."""
        weight = self.weight.unflatten(1, (self.lanes, -1))
        terms = torch.einsum("bsgi,ogi->bsgo", x.unflatten(-1, (self.lanes, -1)), weight)
        private = terms[..., self.shared :]
        # Half precision is added up in fp32 and rounded once.
        wide = torch.promote_types(x.dtype, torch.float32)
        total = terms[..., : self.shared].sum(2, keepdim=True, dtype=wide).to(x.dtype)
        return torch.cat((total.expand(-1, -1, self.lanes, -1), private), dim=-1)


class LowRankLinear(nn.Module):
    """B σ(A x + g · carried); σ, the carried latent and the gate g only where the model has them.

    Args:
        config: The model's configuration.
        projection: One of q, k, v, o, gate, up, down.
        d_in: Input width.
        d_out: Output width.
        gated: Whether g is learned; else it is 1.
    """

    def __init__(
        self, config: TorchtitanLRConfig, projection: str, d_in: int, d_out: int, gated: bool
    ) -> None:
        super().__init__()
        rank = config.rank_attention if projection in ("q", "k", "v", "o") else config.rank_ffn
        self.silu = projection in config.latent_silu
        self.A, self.B = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
        self.gate = nn.Parameter(torch.ones(1)) if gated else None

    def forward(self, x: Tensor, carried: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output (b, s, d_out), and the latent A x for the next block."""
        latent = self.A(x)
        mixed = latent
        if carried is not None:
            mixed = latent + (carried if self.gate is None else self.gate * carried)
        return self.B(F.silu(mixed) if self.silu else mixed), latent


def build_linear(
    config: TorchtitanLRConfig, projection: str, d_in: int, d_out: int, first_block: bool
) -> nn.Module:
    """Build one linear of a block; see `apply_linear`."""
    if config.family != "full":
        gated = config.family == "lax" and config.lax_gate == "scalar" and not first_block
        return LowRankLinear(config, projection, d_in, d_out, gated)
    if config.lanes == 1:
        return nn.Linear(d_in, d_out, bias=False)
    if projection in ("o", "down"):
        return LaneTerms(d_in, d_out, config.lanes, config.shared_channels(d_out))
    return LaneRows(d_in, d_out, bias=False)


def apply_linear(
    linear: nn.Module, x: Tensor, carried: Tensor | None, latents: list[Tensor]
) -> Tensor:
    """Apply one linear of a block; a low-rank one adds its latent to ``latents``."""
    if not isinstance(linear, LowRankLinear):
        out: Tensor = linear(x)
        return out
    out, latent = linear(x, carried)
    latents.append(latent)
    return out


def build_rotations(config: TorchtitanLRConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position's angles (RoFormer, section 3.2.2).

    Args:
        config: The model's configuration.
        positions: (b or 1, s).
        dtype: The model's precision; angles are computed in fp64 and rounded to fp32 at least.

    Returns:
        Tensor (b or 1, s, 1, head_dim / 2, 2).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = torch.pow(config.rotary_base, -exponents)
    scaling = config.rotary_scaling
    if scaling is not None:
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / scaling["factor"])
    angles = positions.double()[..., None] * frequencies.to(positions.device)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return table.to(torch.promote_types(dtype, torch.float32))[:, :, None]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x (b, s, h, head_dim), in the precision of the rotations."""
    even, odd = x.to(rotations.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class CausalMask:
    """Which keys a query sees: the earlier ones and itself, without padding.

    Args:
        attention_mask: 1 for tokens and 0 for padding (b, past + s), all for None; or a mask
            (b, 1, s, keys) as scaled_dot_product_attention takes it.
        past: The number of cached tokens.
        tokens: The number s of new ones.
    """

    def __init__(self, attention_mask: Tensor | None, past: int, tokens: int) -> None:
        self.past, self.tokens = past, tokens
        self.given: Tensor | None = None
        if attention_mask is not None and attention_mask.ndim == 4:
            self.given, attention_mask = attention_mask, None
        if attention_mask is not None and attention_mask.shape[-1] < past + tokens:
            raise ValueError(
                f"attention_mask: got {attention_mask.shape[-1]} columns, expected one for each of"
                f" {past} cached and {tokens} new tokens"
            )
        self.padding = None if attention_mask is None else attention_mask.bool()
        # A value decides: a graph cannot know it, and keeps the mask.
        if self.padding is not None and not torch.compiler.is_compiling() and self.padding.all():
            self.padding = None
        self._built: dict[tuple[int, torch.device], Tensor] = {}

    def slots(self, device: torch.device) -> Tensor:
        """Return the new tokens' places (s,) among the keys."""
        return torch.arange(self.past, self.past + self.tokens, device=device)

    def __call__(self, keys: int, device: torch.device) -> tuple[Tensor | None, bool]:
        """Return a mask (b or 1, 1, s, keys), or None where ``is_causal``, the second, says all.

        Args:
            keys: Number of keys, those of a preallocated cache's empty end too.
            device: Where to put the mask.
        """
        if self.given is not None:
            return self.given[..., :keys].to(device), False
        if self.padding is None and keys == self.past + self.tokens:
            if self.past == 0:
                return None, True
            if self.tokens == 1:
                return None, False
        if (keys, device) not in self._built:
            self._built[keys, device] = self._build(keys, device)
        return self._built[keys, device], False

    def _build(self, keys: int, device: torch.device) -> Tensor:
        key = torch.arange(keys, device=device)
        query = self.slots(device)[:, None]
        seen = (key <= query)[None, None]
        if self.padding is not None:
            padding = self.padding[:, : self.past + self.tokens].to(device)
            tokens = F.pad(padding, (0, keys - padding.shape[1]))
            # Padding sees itself: a softmax over nothing is not a number.
            seen = (seen & tokens[:, None, None]) | (key == query)
        return seen
