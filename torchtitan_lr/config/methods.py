# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The TOML sections of the methods: low rank, TSR-Adam, CAAT-Net and TAGC.

As in :mod:`torchtitan_lr.config.schema`, no ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan_lr.config.ranges import DECAY, FINITE, Range, at_least, positive

TSR = "TSRAdam"
"""The value of ``optimizer.name`` that chooses TSR-Adam."""


@dataclass
class LowRank:
    """The section ``[low_rank]``: how the linear layers are factorised."""

    rank: int = 0
    """Rank of every factorised linear; 0 uses the flavor's rank."""

    rank_attention: int = 0
    """Rank of the q, k, v and o projections; 0 uses ``rank``."""

    rank_ffn: int = 0
    """Rank of the gate, up and down projections; 0 uses ``rank``."""

    activation: Literal["flavor", "both", "lowrank", "reduced", "fullrank", "none"] = "flavor"
    """
    Positions of the nonlinearities (CoLA, Table 10):
    - 'flavor': the flavor's default ('both' up to 130M, 'lowrank' from 350M)
    - 'both': in every bottleneck, and the outer SiLU on the gate
    - 'lowrank': in every bottleneck only
    - 'reduced': in the gate's bottleneck only
    - 'fullrank': the outer SiLU only
    - 'none': nowhere
    """

    lax_gate: Literal["identity", "scalar"] = "identity"
    """
    How llama_lax scales the previous block's latents before adding them: not at all, or by one
    learned number per projection.
    """


@dataclass
class Optimizer:
    """Changed defaults of torchtitan's ``[optimizer]`` (CoLA's AdamW), and TSR-Adam's keys."""

    name: Annotated[
        str, Range(lambda name: name in ("AdamW", "Adam", TSR), f"'AdamW', 'Adam' or {TSR!r}")
    ] = "AdamW"
    """Optimizer to use: AdamW, Adam or TSRAdam."""

    beta2: Annotated[float, DECAY] = 0.999
    """Decay of the second moment."""

    weight_decay: Annotated[float, FINITE] = 0.01
    """Decoupled weight decay, applied to every parameter."""

    tsr_rank: Annotated[int, at_least(1)] = 128
    """TSRAdam: rank r of the cores, at most the shorter side of every compressed matrix."""

    tsr_refresh_interval: Annotated[int, at_least(1)] = 100
    """TSRAdam: steps K between refreshes of a matrix's bases."""

    tsr_oversampling: Annotated[int, at_least(0)] = 5
    """TSRAdam: columns p of a refresh's sketch beyond the rank."""

    tsr_power_iterations: Annotated[int, at_least(0)] = 1
    """TSRAdam: power iterations q per refresh; each costs as much as the sketch."""

    tsr_vocabulary_power_iterations: Annotated[
        int, at_least(-1, "a number of iterations, or -1 for tsr_power_iterations")
    ] = -1
    """
    TSRAdam: power iterations of the embedding and of a compressed head, whose refreshes are the
    largest messages; -1 for `tsr_power_iterations`.
    """

    tsr_scale: Annotated[float, positive("a positive number such as 0.75")] = 0.75
    """TSRAdam: factor α on the lifted update of compressed matrices (0.5 at 60M in the paper)."""

    tsr_embedding_rank: Annotated[int, at_least(0, "a rank, or 0 to leave the embedding dense")] = (
        64
    )
    """TSRAdam: rank of the token embedding; 0 leaves it dense."""

    tsr_embedding_refresh_interval: Annotated[int, at_least(1)] = 100
    """TSRAdam: steps between refreshes of the embedding's bases."""

    tsr_moments: Literal["keep", "rotate", "reset"] = "rotate"
    """
    TSRAdam: Adam's moments after a change of bases:
    - 'keep': unchanged (the published code); the new bases are given the signs of the old ones
    - 'rotate': expressed in the new bases (the paper's theory)
    - 'reset': set to zero, and the bias correction restarts
    """

    tsr_refresh: Literal["auto", "sketch", "dense"] = "auto"
    """
    TSRAdam: data reduced over the replicas for a refresh: sketches, the dense gradient, or the
    smaller of the two per matrix ('auto'). The new bases are the same.
    """

    tsr_stagger: bool = False
    """
    TSRAdam: spread the matrices' refreshes over the interval, such that the most expensive step
    sends little; the first ones too with `tsr_start = "random"`.
    """

    tsr_start: Literal["gradient", "random"] = "gradient"
    """
    TSRAdam: bases before a matrix's first regular refresh: those of the first step's gradient, for
    which all matrices refresh in the first step, or random ones without communication ('random').
    """

    tsr_projection: Literal["two_sided", "one_sided"] = "two_sided"
    """
    TSRAdam: project both sides (cores r×r), or only the shorter side as in GaLore (r×max(m, n)); a
    square matrix is projected on the right.
    """

    tsr_compress_head: bool = False
    """TSRAdam: compress the language-model head like a linear."""

    tsr_overlap_buckets: Annotated[int, at_least(1)] = 4
    """
    TSRAdam: number of all-reduces for the cores, and of those for dense gradients; each starts
    during backward, once its gradients are there. With 1, both start after backward.
    """


@dataclass
class Caat:
    """The section ``[caat]``: models of several streams that share only some channels (CAAT-Net).

    ``lanes`` and ``sync_fraction`` define the model: a checkpoint stores them, and loading raises
    for other values.
    """

    lanes: int = 1
    """
    Number of residual streams ("lanes"); 1 is the ordinary model. The tensor-parallel degree may be
    any divisor of it: each rank holds lanes / degree of them as a dimension of its activations. It
    must divide the heads, d_ff and, for llama_full, the vocabulary. llama_svd and llama_cola have
    lanes in their bottlenecks, with tp_plan = 'btp_caat' (experimental).
    """

    sync_fraction: float = 1.0
    """Fraction p of the channels that the lanes sum: the first int(p * width); 1 shares all."""

    backward_sum: Literal["float32", "activation"] = "float32"
    """
    How backward sums the lanes' bf16 gradients: 'float32' sums in fp32 and sends bf16 (an
    all-to-all, a local sum and an all-gather); 'activation' is a plain bf16 all-reduce, for
    comparison.
    """


@dataclass
class GradCompression:
    """The section ``[grad_compression]``: compressed gradients for slow networks (TAGC)."""

    codec: Literal["none", "sparse", "sketch"] = "none"
    """
    How gradients are reduced over FSDP's shards or, under HSDP, over its replicas:
    - 'none': by FSDP2
    - 'sparse': a bitmap and the largest values, 1 + 32(1 - theta) bits per parameter, exact
    - 'sketch': an index and a count sketch, 1 + 32/c bits per parameter; needs a sparse union
    Under HSDP the sums are sent back to all replicas, min(32, 1 + 32·replicas(1 - theta)) more
    bits. Entries that are not sent are added to the next gradient; these residuals take the memory
    of an unsharded fp32 gradient on every rank, twice if ``training.max_skipped_steps`` is above 0.
    """

    level: Literal["2x", "4x", "10x", "custom"] = "10x"
    """
    The published levels: c = 2, 4, 10 at theta = 0.8, 0.9, 0.9875. 'custom' uses ``c`` and
    ``theta``. A sketch can be decoded if c(1 - theta^ranks) is at most 0.75; units that are too
    small for a sketch are sent dense.
    """

    c: Annotated[float, positive("a positive number such as 10")] = 10.0
    """'custom': entries per cell of the sketch."""

    theta: Annotated[float, Range(lambda x: 0 <= x < 1, "a number in [0, 1) such as 0.9875")] = (
        0.9875
    )
    """'custom': fraction of the entries that a rank does not send, from 0 to below 1."""

    auto: bool = False
    """Raise theta to the smallest decodable value, instead of stopping with an error."""

    layers: Literal["all", "non_attention", "patterns"] = "all"
    """
    Tensors to compress: all; all except the query, key and value projections; or those whose names
    match one of ``patterns``.
    """

    patterns: list[str] = field(default_factory=list)
    """Shell patterns of parameter names, such as 'layers.*.feed_forward.*'."""

    min_size: Annotated[int, at_least(1, "a positive integer")] = 16384
    """Tensors with fewer entries are sent dense, in the same call as the sketches."""

    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the residuals; bfloat16 halves their memory and rounds them."""

    save_residuals: bool = True
    """
    Whether checkpoints hold the residuals of all ranks, which are larger than the model by the
    number of ranks. Without, a run resumes with empty ones, and may have other ranks.
    """
