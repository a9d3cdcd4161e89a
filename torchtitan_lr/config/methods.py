# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sections of a TOML that belong to one method each: low rank, TSR-Adam, CAAT-Net and TAGC.

As in :mod:`torchtitan_lr.config.schema`, no ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

TSR = "TSRAdam"
"""The value of ``optimizer.name`` that chooses TSR-Adam."""

GRAD_CODECS = ["none", "dense", "sparse", "sketch"]
"""Values of ``grad_compression.codec``; a codec that is registered adds its name."""


@dataclass
class LowRank:
    """The section ``[low_rank]``: how the linear layers are factorised."""

    rank: int = 0
    """Rank of every factorised linear; 0 takes the flavor's."""

    rank_attention: int = 0
    """Rank of the q, k, v and o projections; 0 takes ``rank``."""

    rank_ffn: int = 0
    """Rank of the gate, up and down projections; 0 takes ``rank``."""

    activation: Literal["flavor", "both", "lowrank", "reduced", "fullrank", "none"] = "flavor"
    """
    Where the nonlinearities sit (CoLA, Table 10):
    - 'flavor': as the flavor says ('both' up to 130M, 'lowrank' from 350M)
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
    """Changed defaults of torchtitan's ``[optimizer]`` (AdamW as CoLA trains), and TSR-Adam's."""

    name: str = "AdamW"
    """Optimizer to use: AdamW, Adam or TSRAdam."""

    beta2: float = 0.999
    """Decay of the second moment."""

    weight_decay: float = 0.01
    """Decoupled weight decay, applied to every parameter."""

    tsr_rank: int = 128
    """TSRAdam: rank r of the cores. No compressed matrix may have a shorter side."""

    tsr_refresh_interval: int = 100
    """TSRAdam: steps K from one refresh of a matrix's bases to the next."""

    tsr_oversampling: int = 5
    """TSRAdam: columns p that a refresh's sketch has beyond the rank."""

    tsr_power_iterations: int = 1
    """TSRAdam: power iterations q of a refresh; each costs as much again as the sketch."""

    tsr_scale: float = 0.75
    """TSRAdam: factor α on the lifted update of compressed matrices (0.5 at 60M in the paper)."""

    tsr_embedding_rank: int = 64
    """TSRAdam: rank of the token embedding; 0 leaves it dense."""

    tsr_embedding_refresh_interval: int = 100
    """TSRAdam: steps from one refresh of the embedding's bases to the next."""

    tsr_moments: Literal["keep", "rotate", "reset"] = "rotate"
    """
    TSRAdam: what becomes of Adam's moments when the bases change:
    - 'keep': the numbers stay (the published code); new bases take the signs of the old ones
    - 'rotate': they are expressed in the new bases (the paper's theory)
    - 'reset': they start from zero, and so does the bias correction
    """

    tsr_refresh: Literal["auto", "sketch", "dense"] = "auto"
    """
    TSRAdam: what crosses the replicas when bases refresh: sketches, the dense gradient, or per
    matrix whichever is smaller. The new bases are the same.
    """

    tsr_stagger: bool = False
    """TSRAdam: spread the refreshes of the matrices over the interval, but for the first."""

    tsr_core_dtype: Literal["float32", "bfloat16"] = "float32"
    """TSRAdam: dtype in which cores are summed over ranks; they are kept in fp32."""

    tsr_projection: Literal["two_sided", "one_sided"] = "two_sided"
    """
    TSRAdam: both sides (cores r×r), or as GaLore the shorter alone (r×max(m, n)), a square matrix
    on the right.
    """

    tsr_include: list[str] = field(default_factory=lambda: ["*"])
    """TSRAdam: patterns (as of file names) of the parameters to compress; matrices only."""

    tsr_exclude: list[str] = field(default_factory=list)
    """TSRAdam: patterns of matrices that stay dense, such as "layers.*.attention.wk.weight"."""

    tsr_compress_head: bool = False
    """TSRAdam: compress the language-model head as a linear."""

    tsr_overlap_buckets: int = 1
    """TSRAdam: all-reduces that the cores are split into; each sets out once it is projected."""

    tsr_seed: int = 0
    """TSRAdam: seed of the sketches."""


@dataclass
class Caat:
    """The section ``[caat]``: models of several streams that share only some channels (CAAT-Net).

    Two of its keys define the model: a checkpoint stores them and refuses another value.
    """

    lanes: int = 1
    """
    Number of streams ("lanes") of the residual; 1 is the ordinary model. The tensor-parallel degree
    may be any divisor of it: a rank holds the rest as a dimension of its activations. It must
    divide the heads, d_ff and, for llama_full, the vocabulary. llama_svd and llama_cola have lanes
    in their bottlenecks, with tp_plan = 'btp_caat' (experimental).
    """

    sync_fraction: float = 1.0
    """Share p of the channels that the lanes sum, the first int(p * width); 1 shares everything."""

    backward_sum: Literal["float32", "activation"] = "float32"
    """
    How backward adds up the lanes' bf16 gradients: in fp32, with bf16 on the wire (an all-to-all,
    a local sum and an all-gather), or in bf16, by a plain all-reduce, for comparison.
    """


@dataclass
class GradCompression:
    """The section ``[grad_compression]``: gradients that cross a slow network (TAGC)."""

    codec: Annotated[str, GRAD_CODECS] = "none"
    """
    How gradients are exchanged, over FSDP's shards or, under HSDP, over its replicas:
    - 'none': by FSDP2 itself
    - 'dense': all of them, by the path of the codecs, for comparison
    - 'sparse': a bitmap and the largest values, 1 + 32(1 - theta) bits a parameter, exact
    - 'sketch': an index and a count sketch, 1 + 32/c bits a parameter; needs a sparse union
    Under HSDP the sums return to all replicas, min(32, 1 + 32·replicas(1 - theta)) bits more.
    What is not sent is kept and added to the next gradient: fp32 memory of a whole unsharded
    gradient on every rank, twice where ``training.max_skipped_steps`` is above 0.
    """

    level: Literal["2x", "4x", "10x", "custom"] = "10x"
    """
    The published levels: c = 2, 4, 10 at theta = 0.8, 0.9, 0.9875. 'custom' takes ``c`` and
    ``theta``. A sketch decodes while c(1 - theta^ranks) is at most 0.75; units too small for that
    travel dense.
    """

    c: float = 10.0
    """'custom': entries per cell of the sketch."""

    theta: float = 0.9875
    """'custom': share of the entries that a rank does not send, from 0 to below 1."""

    auto: bool = False
    """Raise theta to the smallest at which the sketch decodes, instead of refusing."""

    index: Literal["exact", "sum1", "sum4"] = "exact"
    """
    'sketch': how an owner learns which entries were sent:
    - 'exact': it ORs the bitmaps of all ranks
    - 'sum1', 'sum4': the published sums at 1 or 4 bits an entry, for comparison. 'sum1' loses
      what two ranks send at once, and corrupts what shares its cells
    """

    layers: Literal["all", "non_attention", "patterns"] = "all"
    """
    Which tensors are compressed: all; all but the query, key and value projections; or those
    whose names fit one of ``patterns``.
    """

    patterns: list[str] = field(default_factory=list)
    """Shell patterns of parameter names, such as 'layers.*.feed_forward.*'."""

    min_size: int = 16384
    """Tensors with fewer entries travel dense, in the same call as the sketches."""

    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of what was not sent; bfloat16 halves its memory and rounds it."""

    seed: int = 0
    """Of the hash functions, which change with every step."""
