# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``[grad_compression]`` of a run: codec, compressed tensors, and what an exchange sends."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs import Codec, SparseCodec, union_entries
from torchtitan_lr.compression.sketch import PEELING_LIMIT, SketchCodec, peels, smallest_theta
from torchtitan_lr.errors import ConfigError, require

CODECS: dict[str, type[Codec]] = {"sparse": SparseCodec, "sketch": SketchCodec}
"""Codecs by name; one from outside adds its name to `config.schema.CODEC_NAMES`, too."""

# Compression c and sparsity θ of the published levels (TAGC, Table 1).
LEVELS: dict[str, tuple[float, float]] = {"2x": (2, 0.8), "4x": (4, 0.9), "10x": (10, 0.9875)}

_ATTENTION = re.compile(r"\.attention\.w[qkv]\.")


@dataclass(frozen=True)
class CompressionSettings:
    """Resolved settings."""

    codec: Codec
    layers: str  # ``all`` or ``non_attention``
    min_size: int  # smaller tensors are sent dense
    # Whether residuals change with the step and not with its exchanges, because the step may be
    # skipped or a checkpoint may still read them. Needs a second residual.
    revocable: bool = False


def compression_settings(config: Any, ranks: int) -> CompressionSettings:
    """Resolve ``[grad_compression]``; a ConfigError if the codec does not support the settings."""
    section = config.grad_compression
    kind = CODECS[section.codec]
    c, requested = LEVELS.get(section.level, (section.c, section.theta))
    theta = 0.0 if kind.sends_all else requested
    half = config.training.mixed_precision_reduce == "bfloat16"
    want = f"'float32' with grad_compression.codec = {section.codec!r}, which cannot round"
    require(kind.can_round or not half, "training.mixed_precision_reduce", "bfloat16", want)
    if kind is SketchCodec and ranks > 1 and not peels(c, theta, ranks):
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
        codec=kind(ranks, c, theta, half),
        layers=section.layers,
        min_size=section.min_size,
        revocable=config.training.max_skipped_steps > 0,
    )


def is_compressed(name: str, size: int, settings: CompressionSettings) -> bool:
    """Return whether a tensor is compressed: not q, k and v for ``non_attention``."""
    left_out = settings.layers == "non_attention" and _ATTENTION.search(name) is not None
    return size >= settings.min_size and not left_out


def merged(names: Iterable[str]) -> str:
    """Return names of tensors or units in one line; equal names of all blocks become one."""
    short = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return ", ".join(name.removesuffix(".weight") for name in short) or "none"


@dataclass(frozen=True)
class Unit:
    """Sizes of the exchange of one unit of the model among W ranks."""

    ranks: int
    compressed: int  # entries m of each destination
    dense: int = 0  # of each destination of a reduce-scatter, of the whole shard in an all-reduce


Collectives = list[tuple[str, str, int]]
"""Of one rank: operation, role (``index``, a byte, or ``gradient``) and elements, of the input of a
reduction or the output of a gather."""


def exchange_unit(codec: Codec, compressed: int, dense: int, all_reduce: bool) -> Unit:
    """Return the sizes of a unit's exchange; all is dense if the codec could not decode it."""
    # Entries are those of a destination, or of the whole shard for `all_reduce`, of which each rank
    # owns a W-th part.
    m = -(-compressed // codec.ranks) if all_reduce else compressed
    if m > 0 and not codec.decodes(m):
        return Unit(codec.ranks, 0, dense + compressed)
    return Unit(codec.ranks, m, dense)


def returned_entries(m: int, codec: Codec) -> int:
    """Return the entries of each owner's sums that go back to all ranks."""
    # These are the entries that can differ from zero, if with a bitmap they are less than all m.
    sent, value = union_entries(codec.ranks, m, codec.theta), 2 if codec.half else 4
    return sent if -(-m // 8) + value * sent < value * m else m


@lru_cache(maxsize=256)
def exchange_traffic(unit: Unit, codec: Codec, all_reduce: bool = False) -> Collectives:
    """Return every collective of an exchange on one rank; all get all sums for `all_reduce`."""
    w, m = unit.ranks, unit.compressed
    if m == 0:
        op, copies = ("all_reduce", 1) if all_reduce else ("reduce_scatter", w)
        return [(op, "gradient", copies * unit.dense)]
    # The codec itself says what it sends, without values.
    message = codec.encode(torch.empty(w, m, device="meta"), 0)
    found = [("all_to_all", _role(sent), sent.numel()) for sent in message.swapped.values()]
    summed = sum(sent.numel() for sent in message.summed.values())
    summed += 0 if all_reduce else w * unit.dense
    if summed:
        found.append(("reduce_scatter", "gradient", summed))
    received = message.swapped | {name: sent[0] for name, sent in message.summed.items()}
    failed = codec.decode(received, m, 0).failed
    if failed is not None:
        found.append(("all_gather", _role(failed), w * failed.numel()))
    if all_reduce:
        returned = returned_entries(m, codec)
        if returned < m:
            found.append(("all_gather", "index", w * -(-m // 8)))
        found.append(("all_gather", "gradient", w * returned))
        if unit.dense:
            found.append(("all_reduce", "gradient", unit.dense))
    return found


def _role(sent: Tensor) -> str:
    return "index" if sent.dtype == torch.uint8 else "gradient"


def sent_bytes(unit: Unit, codec: Codec, all_reduce: bool = False) -> int:
    """Return the bytes of `exchange_traffic`."""
    role_bytes = {"index": 1, "gradient": 2 if codec.half else 4}
    return sum(role_bytes[role] * n for _, role, n in exchange_traffic(unit, codec, all_reduce))


def bits_per_entry(codec: Codec, all_reduce: bool = False) -> float:
    """Return the bits per compressed entry and rank in a large tensor."""
    # That is 1 + b(1 − θ) for the sparse codec and 1 + b/c for the sketch, with values of b = 32 or
    # 16 bits. The sums that return to HSDP's W replicas add min(b, 1 + b·W(1 − θ)).
    large = Unit(codec.ranks, 10**9)
    return 8 * sent_bytes(large, codec, all_reduce) / (large.ranks * large.compressed)
