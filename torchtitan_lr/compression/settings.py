# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Resolves ``[grad_compression]`` for a run: the codec, and the compressed tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan_lr.compression.sizes import (
    FORMULAS,
    LEVELS,
    PEELING_LIMIT,
    CodecSizes,
    peels,
    smallest_theta,
)
from torchtitan_lr.errors import ConfigError, require

_ATTENTION = re.compile(r"\.attention\.w[qkv]\.")


@dataclass(frozen=True)
class CompressionSettings:
    """Resolved settings, with the final θ in the codec."""

    codec: CodecSizes
    requested_theta: float  # the configured one; smaller if ``auto`` raised it
    ranks: int
    layers: str  # ``all`` or ``non_attention``
    min_size: int  # smaller tensors are sent dense
    # Whether residuals change with the step and not with its exchanges, because the step may be
    # skipped or a checkpoint may still read them. Needs a second residual.
    revocable: bool = False


def compression_settings(config: Any, ranks: int) -> CompressionSettings:
    """Resolve ``[grad_compression]``; a ConfigError if the codec does not support the settings."""
    section = config.grad_compression
    c, requested = LEVELS.get(section.level, (section.c, section.theta))
    if FORMULAS[section.codec].sends_all:
        requested = 0.0
    half = config.training.mixed_precision_reduce == "bfloat16"
    want = f"'float32' with grad_compression.codec = {section.codec!r}, which cannot round"
    fits = not half or FORMULAS[section.codec].rounds
    require(fits, "training.mixed_precision_reduce", "bfloat16", want)
    theta = requested
    if section.codec == "sketch" and ranks > 1 and not peels(c, theta, ranks):
        theta = smallest_theta(c, ranks)
        if not section.auto:
            key = "theta" if section.level == "custom" else "level"
            want = (
                f"a theta of at least {theta} (level = 'custom', c = {c:g}), or auto = true: "
                f"on {ranks} ranks c*(1 - theta^ranks) is {c * (1 - requested**ranks):.3f} at "
                f"theta {requested:g}, and above {PEELING_LIMIT:g} a sketch does not peel"
            )
            got = requested if section.level == "custom" else section.level
            raise ConfigError(f"grad_compression.{key}", got, want)
    return CompressionSettings(
        codec=CodecSizes(section.codec, c, theta, half),
        requested_theta=requested,
        ranks=ranks,
        layers=section.layers,
        min_size=section.min_size,
        revocable=config.training.max_skipped_steps > 0
        or config.checkpoint.async_mode == "async_with_pinned_mem",
    )


def is_compressed(name: str, size: int, settings: CompressionSettings) -> bool:
    """Return whether a tensor is compressed: not q, k and v for ``non_attention``."""
    left_out = settings.layers == "non_attention" and _ATTENTION.search(name) is not None
    return size >= settings.min_size and not left_out


def merged(names: Iterable[str]) -> str:
    """Return names of tensors or units in one line; equal names of all blocks become one."""
    short = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return ", ".join(name.removesuffix(".weight") for name in short) or "none"
