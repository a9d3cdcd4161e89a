# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The TOML keys that this package adds to torchtitan's, and the defaults that it changes.

This file contains only differences from ``torchtitan.config.JobConfig``; torchtitan's
``ConfigManager`` merges the two class trees field by field.
"""

# It merges a section only if the annotation is a class, so this file must not use
# ``from __future__ import annotations``.
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from torchtitan_lr.optim.entries import ENTRIES


class Range(NamedTuple):
    """The values that a key allows, beside its field: ``rank: Annotated[int, POSITIVE] = 1``.

    What depends on another key, on the model or on the ranks is checked in `torchtitan_lr.checks`.
    """

    holds: Callable[[Any], bool]  # whether the key allows a value; must be false for NaN
    want: str  # describes the allowed values in the refusal


def at_least(least: int, want: str = "") -> Range:
    """Return the integers from ``least`` on."""
    return Range(lambda n: n >= least, want or f"an integer of at least {least}")


def only(value: object, why: str) -> Range:
    """Return the one value that is supported here; None, a default, is in records of runs."""
    return Range(lambda given: given in (value, None), f"{json.dumps(value)}: {why}")


POSITIVE = Range(lambda n: n > 0, "a positive number")
NATURAL = at_least(0, "0 or a positive integer")
SEED = Range(lambda n: 0 <= n < 2**63, "an integer from 0 to 2**63 - 1")
DECAY = Range(lambda x: 0 <= x < 1, "a number in [0, 1) such as 0.9")
NOT_ZERO = Range(lambda x: 0 < x < math.inf, "a positive number")
FINITE = Range(lambda x: 0 <= x < math.inf, "a number of at least 0")
_SHARE = Range(lambda x: x is None or 0 <= x <= 1, "a number from 0 to 1")

RANGES_OF_TORCHTITAN: dict[str, Range] = {
    "training.seq_len": POSITIVE,
    "training.local_batch_size": POSITIVE,
    "training.steps": POSITIVE,
    "validation.seq_len": POSITIVE,
    "validation.local_batch_size": POSITIVE,
    "validation.steps": Range(lambda n: n == -1 or n > 0, "a positive integer, or -1 for all"),
    "validation.freq": POSITIVE,
    "metrics.log_freq": POSITIVE,
    "checkpoint.interval": POSITIVE,
    "checkpoint.keep_latest_k": Range(lambda n: n == 0 or n > 1, "at least 2, or 0 for all"),
    "compile.components": Range(lambda names: {*names} <= {"model", "loss"}, "model, loss or both"),
    "checkpoint.load_step": at_least(-1, "a step, or -1 for the newest"),
    "optimizer.lr": NOT_ZERO,
    "optimizer.beta1": DECAY,
    "optimizer.eps": NOT_ZERO,
    "lr_scheduler.warmup_steps": NATURAL,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "activation_checkpoint.memory_budget": _SHARE,
    "comm.mode": Range(lambda mode: mode != "local_tensor", "'default' or 'fake_backend'"),
    "checkpoint.initial_load_in_hf_quantized": only(False, "not supported"),
    "checkpoint.create_seed_checkpoint": only(False, "all layouts draw the same weights"),
    "experimental.custom_args_module": only("", "leave it out"),
    "job.custom_config_module": only("", "no other module adds keys"),
    "memory_estimation.enable": only(False, "not supported; `torchtitan-lr estimate` has it"),
    "model.converters": only([], "no float8 or MX here"),
    "model.tokenizer_path": only("", "use model.hf_assets_path"),
    "optimizer.early_step_in_backward": only(False, "gradients are clipped together"),
    "parallelism.disable_loss_parallel": only(False, "ranks compute the exact loss in parts"),
    "parallelism.enable_async_tensor_parallel": only(False, "the plans are untested with it"),
    "parallelism.expert_parallel_degree": only(1, "there are no experts"),
    "parallelism.expert_tensor_parallel_degree": only(1, "there are no experts"),
    "parallelism.context_parallel_load_balancer": only(
        "headtail", "an early and a late chunk each"
    ),
    "parallelism.context_parallel_rotate_method": only("allgather", "keys and values are gathered"),
}
"""What torchtitan's own keys allow, where it does not refuse the rest before the first step."""


class Meaning(Enum):
    """What a changed key means for a run that is resumed, beside its field: `Annotated[int, FREE]`.

    With `OF_RESIDUALS` it decides all: `training.fingerprint` puts the values of keys that refuse
    into a save, `checkpoints.record` compares them, and `checkpoints.run_record` lists what is
    applied.
    """

    FREE = "free"  # it changes no number
    APPLIED = "applied"  # the run goes on with it, and lists it among its changes
    MODEL = "model"  # the weights are another model's: refused
    OPTIMIZER = "optimizer"  # its state has other tensors: refused, unless the state is left out
    DATA = "data"  # the position is one in other data: refused, unless it is left out


FREE, APPLIED, MODEL, OPTIMIZER, DATA = Meaning

_OF_SECTIONS = {
    **dict.fromkeys(("model", "low_rank", "caat"), MODEL),
    **dict.fromkeys(("training", "optimizer", "lr_scheduler", "grad_compression"), APPLIED),
    # With a ``global_batch_size`` it changes no more than a result's last digits.
    "parallelism": APPLIED,
    "outer": APPLIED,
}
"""The meaning of a key that has none beside it, by section; in all others it is free."""

_OF_TORCHTITAN = {
    **dict.fromkeys(("training.dataset_path", "training.seq_len"), DATA),
    **dict.fromkeys(("training.gc_freq", "training.gc_debug", "training.dataloader"), FREE),
    **dict.fromkeys(("training.enable_cpu_offload", "optimizer.implementation"), FREE),
    "training.local_batch_size": FREE,  # the sequences of all ranks count
    "environment.ranks": APPLIED,  # of a run's record
}
"""The meaning of keys that are not declared here."""

OF_RESIDUALS = (
    *("parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"),
    *("parallelism.data_parallel_replicate_degree", "parallelism.tp_plan"),
    *("grad_compression.layers", "grad_compression.min_size"),
)
"""Keys that residuals of compressed gradients belong to, too: another value is refused, unless they
are left out. A residual is of one rank's part of the batch, and flat."""


@cache
def meanings() -> dict[str, Meaning]:
    """Return the meaning of the keys that do not have their section's."""
    found = dict(_OF_TORCHTITAN)
    for section in fields(JobConfig):
        for option in fields(section.type):  # type: ignore[arg-type]
            for mark in getattr(option.type, "__metadata__", ()):
                if isinstance(mark, Meaning):
                    found[f"{section.name}.{option.name}"] = mark
    return found


def meaning_of(key: str) -> Meaning:
    """Return what a change of a key means for a run that is resumed."""
    return meanings().get(key, _OF_SECTIONS.get(key.partition(".")[0], FREE))


NO_EFFECT = frozenset({"job", "metrics", "profiling", "comm", "experimental"})
"""Sections that no loss depends on."""

TP_PLANS = ["auto", "btp", "vanilla", "vanilla_replicated", "megatron", "caat"]
"""Values of ``parallelism.tp_plan``; registering a plan adds its name."""

ITS_MODULE = "--experimental.custom_import=MODULE of the module that registers it"
"""Names the remedy where a family or a plan is unknown."""

CODEC_NAMES = ["none", "sparse", "sketch"]
"""Values of ``grad_compression.codec``; registering a codec adds its name."""

AC_MODES = ["selective", "full", "memory_budget", "none", "low_rank"]
"""Values of ``activation_checkpoint.mode``."""

# A vocabulary that followed the tensor-parallel degree alone would be another model, with other
# losses, at every degree.
_VOCABULARY_UNIT = 64


def vocabulary_rows(wanted: int, tp_degree: int, lanes: int) -> int:
    """Return ``model.vocab_size`` as a model has it, rounded up as the key describes; 0 for 0."""
    # Degrees and lanes that are no positive numbers are refused elsewhere.
    unit = math.lcm(_VOCABULARY_UNIT, max(1, tp_degree), max(1, lanes))
    return -(-wanted // unit) * unit


_DECAY_OR_SAME = Range(lambda x: x == -1 or 0 <= x < math.inf, "at least 0, or -1 for weight_decay")


def least_ranks(layout: Mapping[str, Any]) -> int:
    """Return the product of the degrees of a ``[parallelism]``; none counts as less than 1."""
    kinds = ["tensor_parallel", "pipeline_parallel", "context_parallel"]
    kinds += ["data_parallel_replicate", "data_parallel_shard"]
    return math.prod(max(1, layout.get(f"{kind}_degree", 1)) for kind in kinds)


@dataclass
class Model:
    """Additions to torchtitan's ``[model]``."""

    name: str = "llama_cola"
    """Model family: llama_full, llama_svd, llama_cola or llama_lax."""

    flavor: str = "debug"
    """Size: debug, tiny, 60M, 130M, 350M, 1B, 1B_boost, 3B, 7B, 8B, 13B or 30B; or the path of a
    model_args.json, which torchtitan-lr import writes."""

    vocab_size: int = 0
    """Rows of the embedding and of the head, for a custom tokenizer; 0 uses the flavor's. The value
    is rounded up to a multiple of 64, so that the model is the same at every tensor-parallel degree
    that divides 64, and to a multiple of any other degree and of ``caat.lanes``."""

    hf_assets_path: str = "torchtitan_lr/data/assets/bpe4k"
    """Folder with the tokenizer, a Hugging Face tokenizer.json. Relative paths are looked up from
    the working directory, then from the repository root."""


@dataclass
class DataLoader:
    """Changed defaults of torchtitan's ``[training.dataloader]``."""

    pin_memory: bool = True
    """Put batches in pinned memory, where there is CUDA, so that copies do not stop the host."""


@dataclass
class Training:
    """Additions to torchtitan's ``[training]``."""

    dataset: Annotated[str, DATA] = "cpython"
    """The training corpus:
    - 'cpython': source files of one version's standard library, in the package: the same text on
      every machine
    - 'python_stdlib': the source files of the running interpreter's standard library
    - 'python_stdlib_docs': pairs for fine-tuning, in the package: short functions of the files of
      'cpython', and the first lines of their docstrings
    - 'local': the .txt, .jsonl or .parquet files that ``dataset_path`` names (a path or a glob);
      .txt and .jsonl may be compressed (.gz, .zst, .bz2, .xz), and .jsonl files may hold pairs
      (``prompt``, ``completion``) or chats (``messages``), one per row of the batch, with loss on
      the answers alone
    - 'hf': the Hugging Face dataset that ``dataset_path`` names: a folder, or a name on the Hub
      such as 'owner/name' or 'owner/name@revision'
    - 'c4': streamed from the Hugging Face hub
    - 'prepared': the folder that ``dataset_path`` names, written by ``torchtitan-lr prepare``, by
      Megatron-LM or by NeMo Curator

    All others are prepared before the first step, once for all runs: see ``token_folder``."""

    text_column: Annotated[str, DATA] = "text"
    """Name of the text in the records of 'hf' and 'local'."""

    hf_name: Annotated[str | None, DATA] = None
    """'hf': the dataset's configuration, such as 'en'."""

    hf_split: Annotated[str, DATA] = "train"
    """'hf': the split to train on."""

    hf_held_out: Annotated[str, DATA] = ""
    """'hf': the split to validate on; empty holds out one document in 200 of ``hf_split``."""

    hf_streaming: Annotated[bool, DATA] = True
    """'hf': stream the dataset, and prepare as many tokens as the run reads. False downloads all of
    it and prepares all of it."""

    hf_tokens: Annotated[int, NATURAL, DATA] = 0
    """'hf': tokens to prepare of a streamed dataset; 0 takes those that ``training.steps`` read in
    batches of ``training.global_batch_size``. Another number is another corpus, so set it where a
    run may get more steps later, or has no ``global_batch_size`` and several data ranks."""

    mixture: Annotated[list[dict[str, str | float]], DATA] = field(default_factory=list)
    """Several corpora instead of ``dataset``: a table ``[[training.mixture]]`` for each, with the
    keys ``dataset``, ``path``, ``weight`` (its share over the sum of all; 1 by default), ``name``
    (in the log; by default the dataset), ``text_column``, ``hf_name`` and ``hf_split``."""

    dataloader: DataLoader = field(default_factory=DataLoader)

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients travel between data-parallel ranks: those of FSDP's shards and of
    replicas, TSR-Adam's cores and sketches, and the values that a gradient codec sends. 'bfloat16'
    halves these bytes. Micro-batches are added up as without it."""

    max_norm: Annotated[float | int, POSITIVE] = 0.5
    """Gradients are clipped to this global norm; inf disables clipping, and is the default with
    Muon and LoRAMuon, 1.0 with Spectron."""

    max_skipped_steps: Annotated[int, NATURAL, FREE] = 0
    """Number of steps with a non-finite loss or gradient that may be skipped in the whole run
    before it stops. 0 stops at the first."""

    max_bad_records: Annotated[int, NATURAL, FREE] = 0
    """Number of unreadable records (a line that is no JSON, or not UTF-8) that a preparation may
    leave out. With more of them nothing is trained. A file that breaks off is never left out."""

    mask_documents: bool = False
    """Keep the documents of a sequence apart: a token attends to its own document only, positions
    restart, and the token after a document's last is not predicted. Also in validation."""

    step_graph: Annotated[Literal["auto", "on", "off"], FREE] = "auto"
    """Forward, loss and backward of a micro-batch as one CUDA graph, which is faster where the host
    launches kernels more slowly than the GPU runs them. 'auto' captures on a GPU what can be
    captured, and says in a line why not; 'on' refuses the rest. Numbers are those without it."""

    check_memory: Annotated[bool, FREE] = True
    """Refuse ranks on the CPU that need more memory than their machine has, by the estimate of
    ``torchtitan-lr estimate``. False starts them anyway."""

    shuffle: Annotated[bool, DATA] = True
    """Read the sequences of a corpus in a seeded order, another one in each epoch. False reads them
    from its start to its end."""

    shuffle_seed: Annotated[int | None, DATA] = None
    """Seed of the reading order; None uses ``debug.seed``."""

    token_folder: Annotated[str, FREE] = ""
    """Folder of the prepared tokens of raw corpora, which all runs share; empty for
    ``torchtitan_lr/tokens`` in the user's cache folder. Nothing in it is deleted: delete folders
    there while no run reads them."""


@dataclass
class Parallelism:
    """Additions to torchtitan's ``[parallelism]`` for tensor parallelism."""

    tp_plan: Annotated[str, TP_PLANS] = "auto"
    """The tensor-parallel plan:
    - 'auto': 'btp' for the low-rank families, 'megatron' for llama_full, 'caat' if it has lanes
    - 'btp': bottleneck-aware (BOOST): sharded residual stream, one r-wide reduction per chunk
    - 'vanilla': every factor pair column- then row-parallel, heads sharded: the fair baseline
    - 'vanilla_replicated': the same with all heads on every rank, as measured in BOOST's paper
    - 'megatron': column- and row-parallel full-rank linears
    - 'caat': llama_full with ``[caat] lanes``: each rank has its own streams (CAAT-Net)"""

    tp_grouping: bool = True
    """btp: q, k, v (and gate, up) share one product and one reduction. vanilla: they
    share the backward reduction of their input."""

    tp_norm: Literal["online", "sync"] = "online"
    """btp: how RMSNorm reduces the statistic of a sharded stream. 'online' divides after the
    projection, so that the statistic's fp32 all-reduce runs beside the projection; 'sync' reduces
    it before the projection."""

    tp_comm: Literal["all_reduce", "sequence"] = "all_reduce"
    """btp and megatron: after a reduction every rank has all tokens ('all_reduce'), or a shard of
    them ('sequence': reduce-scatter, then all-gather before the next product)."""

    cp_gather: Literal["kv", "latents"] = "kv"
    """What attention gathers from the ranks of ``context_parallel_degree``: keys and values ('kv'),
    or in a low-rank model the r-wide latents of both, from which every rank computes the keys and
    values of all tokens ('latents', without tensor parallelism or with 'btp'). Latents send less
    where the rank is below the width of the keys; ``torchtitan-lr estimate`` tells the costs."""


@dataclass
class LowRank:
    """The section ``[low_rank]``: how the linear layers are factorised."""

    rank: Annotated[int, NATURAL] = 0
    """Rank of every factorised linear; 0 uses the flavor's rank."""

    rank_attention: int = 0
    """Rank of the q, k, v and o projections; 0 uses ``rank``."""

    rank_ffn: int = 0
    """Rank of the gate, up and down projections; 0 uses ``rank``."""

    activation: Literal["flavor", "both", "lowrank", "reduced", "fullrank", "none"] = "flavor"
    """Positions of the nonlinearities (CoLA, Table 10):
    - 'flavor': the flavor's default ('both' up to 130M, 'lowrank' from 350M)
    - 'both': in every bottleneck, and the outer SiLU on the gate
    - 'lowrank': in every bottleneck only
    - 'reduced': in the gate's bottleneck only
    - 'fullrank': the outer SiLU only
    - 'none': nowhere"""

    lax_gate: Literal["identity", "scalar"] = "identity"
    """How llama_lax scales the previous block's latents before adding them: not at all, or by one
    learned number per projection."""


@dataclass
class Optimizer:
    """Changed defaults of torchtitan's ``[optimizer]`` (CoLA's AdamW), and other optimizers' keys.

    Defaults that depend on ``name`` are in `optim.entries`.
    """

    name: Annotated[str, ENTRIES, OPTIMIZER] = "AdamW"
    """Optimizer to use:
    - 'AdamW', 'Adam': for every parameter
    - 'TSRAdam': replicas exchange r×r cores instead of gradients
    - 'Muon': orthogonal updates of every matrix of the blocks
    - 'Spectron': for low-rank factors, with a bounded change of their product
    - 'LoRAMuon': for low-rank factors, the steepest descent of their product
    - the name of an optimizer that ``experimental.custom_import`` registers

    With 'Muon', 'Spectron' and 'LoRAMuon', AdamW updates all parameters that they do not:
    embedding, head, norms and gates. Defaults that depend on the name and on ``model.name`` are in
    docs/choose.md and, with their sources, in optim/entries.py; ``config show`` marks them."""

    beta2: Annotated[float, DECAY] = 0.999
    """Decay of the second moment."""

    weight_decay: Annotated[float, FINITE] = 0.01
    """Weight decay: decoupled, but with Adam a term of the gradient. LoRAMuon splits it between A
    and B, so that B A decays by it."""

    weight_decay_on: Literal["all", "matrices"] = "all"
    """What `weight_decay` shrinks: every parameter ('all'), or all but norms and gates
    ('matrices')."""

    groups: list[dict[str, str | float]] = field(default_factory=list)
    """Other rates for some parameters: a table ``[[optimizer.groups]]`` for each group, with the
    keys ``pattern``, ``lr_multiplier`` and ``weight_decay_multiplier`` (factors on the learning
    rate and weight decay of its parameters; 1 by default). A pattern is a regular expression, found
    anywhere in a name such as ``layers.0.attention.wq.A.weight``. A parameter belongs to the first
    group whose pattern is in its name. All groups follow one schedule."""

    momentum: Annotated[float, DECAY] = 0.95
    """Muon, Spectron, LoRAMuon: decay of the momentum, which is an average of the gradients."""

    nesterov: bool = False
    """Muon, Spectron, LoRAMuon: use Nesterov's form of the momentum."""

    adamw_lr: Annotated[float, FINITE] = 0.0
    """Learning rate of the embedding, the head, norms and gates, which AdamW updates beside a
    spectral optimizer too (with ``beta1``, ``beta2`` and ``eps``); 0 uses ``lr``. The default is
    6e-2 with 'Muon', 'Spectron' and 'LoRAMuon'."""

    adamw_weight_decay: Annotated[float, _DECAY_OR_SAME] = -1.0
    """Weight decay of the embedding, the head, norms and gates; -1 uses `weight_decay`."""

    tsr_rank: Annotated[int, at_least(1), OPTIMIZER] = 128
    """TSRAdam: rank r of the cores, at most the shorter side of every compressed matrix."""

    tsr_refresh_interval: Annotated[int, at_least(1)] = 100
    """TSRAdam: steps K between refreshes of a matrix's bases."""

    tsr_oversampling: Annotated[int, at_least(0)] = 5
    """TSRAdam: columns p of a refresh's sketch beyond the rank."""

    tsr_power_iterations: Annotated[int, at_least(0)] = 1
    """TSRAdam: power iterations q per refresh; each costs as much as the sketch."""

    tsr_scale: Annotated[float, NOT_ZERO] = 0.75
    """TSRAdam: factor α on the lifted update of compressed matrices (0.5 at 60M in the paper)."""

    tsr_embedding_rank: Annotated[int, at_least(0, "a rank, or 0: dense"), OPTIMIZER] = 0
    """TSRAdam: rank of the token embedding; 0 leaves it dense, which sends more and loses less: in
    our runs 0.125 instead of 0.597 behind AdamW."""

    tsr_embedding_refresh_interval: Annotated[int, at_least(1)] = 100
    """TSRAdam: steps between refreshes of the embedding's bases."""

    tsr_moments: Literal["keep", "rotate"] = "keep"
    """TSRAdam: Adam's moments after a change of bases:
    - 'keep': unchanged (the published code); the new bases are given the signs of the old ones
    - 'rotate': expressed in the new bases (the paper's theory), 0.064 nats behind 'keep'"""

    tsr_refresh: Annotated[Literal["auto", "sketch", "dense"], FREE] = "auto"
    """TSRAdam: data reduced over the replicas for a refresh: sketches, the dense gradient, or the
    smaller of the two per matrix ('auto'). The new bases are the same."""

    tsr_share_refresh: Annotated[bool, FREE] = False
    """TSRAdam: replicas, too, share a refresh's decompositions of (k, k), k = r + p, as ranks that
    split a matrix always do. That sends k(2k + 1) numbers per matrix, and pays where a link has
    more than about 3 Gbit/s (an H200 took 5.8 ms per matrix of k = 517)."""

    tsr_stagger: bool = False
    """TSRAdam: spread the matrices' refreshes over the interval, such that the most expensive step
    sends little; the first ones too with `tsr_start = "random"`."""

    tsr_start: Literal["gradient", "random"] = "gradient"
    """TSRAdam: bases before a matrix's first regular refresh: those of the first step's gradient,
    for which all matrices refresh in the first step, or random ones without communication
    ('random')."""

    tsr_projection: Annotated[Literal["two_sided", "one_sided"], OPTIMIZER] = "two_sided"
    """TSRAdam: project both sides (cores r×r), or only the shorter side as in GaLore (r×max(m, n));
    a square matrix is projected on the right."""

    tsr_compress_head: Annotated[bool, OPTIMIZER] = False
    """TSRAdam: compress the language-model head like a linear."""

    tsr_overlap_buckets: Annotated[int, at_least(1), FREE] = 4
    """TSRAdam: number of all-reduces for the cores, and of those for dense gradients; each starts
    during backward, once its gradients are there. With 1, both start after backward."""


@dataclass
class Caat:
    """The section ``[caat]``: models of several streams that share only some channels (CAAT-Net).

    ``lanes`` and ``sync_fraction`` define the model: a checkpoint stores them, and loading raises
    for other values.
    """

    lanes: int = 1
    """Number of residual streams ("lanes"); 1 is the ordinary model. The tensor-parallel degree may
    be any divisor of it: each rank holds lanes / degree of them as a dimension of its activations.
    It must divide the heads, d_ff and the vocabulary. Only llama_full has lanes."""

    sync_fraction: float = 1.0
    """Fraction p of the channels that the lanes sum: the first int(p * width); 1 shares all."""

    backward_sum: Annotated[Literal["float32", "activation"], APPLIED] = "float32"
    """How backward sums the lanes' bf16 gradients: 'float32' sums in fp32 and sends bf16 (an
    all-to-all, a local sum and an all-gather); 'activation' is a plain bf16 all-reduce, for
    comparison."""


@dataclass
class GradCompression:
    """The section ``[grad_compression]``: compressed gradients for slow networks (TAGC)."""

    codec: Annotated[str, CODEC_NAMES] = "none"
    """How gradients are reduced over FSDP's shards or, under HSDP, over its replicas:
    - 'none': by FSDP2
    - 'sparse': a bitmap and the largest values, 1 + 32(1 - theta) bits per parameter, exact
    - 'sketch': an index and a count sketch, 1 + 32/c bits per parameter; needs a sparse union
    - the name of a codec that ``experimental.custom_import`` registers

    Under HSDP the sums are sent back to all replicas, min(32, 1 + 32·replicas(1 - theta)) more
    bits. Entries that are not sent are added to the next gradient; these residuals take the memory
    of an unsharded fp32 gradient on every rank, twice if ``training.max_skipped_steps`` is above
    0."""

    level: Literal["2x", "4x", "10x", "custom"] = "10x"
    """The published levels: c = 2, 4, 10 at theta = 0.8, 0.9, 0.9875. 'custom' uses ``c`` and
    ``theta``. A sketch can be decoded if c(1 - theta^ranks) is at most 0.75; units that are too
    small for a sketch are sent dense."""

    c: Annotated[float, NOT_ZERO] = 10.0
    """'custom': entries per cell of the sketch."""

    theta: Annotated[float, DECAY] = 0.9875
    """'custom': fraction of the entries that a rank does not send, from 0 to below 1."""

    auto: bool = False
    """Raise theta to the smallest decodable value, instead of stopping with an error."""

    layers: Literal["all", "non_attention"] = "all"
    """Tensors to compress: all, or all except the query, key and value projections."""

    min_size: Annotated[int, at_least(1, "a positive integer")] = 16384
    """Tensors with fewer entries are sent dense, in the same call as the sketches."""


@dataclass
class Outer:
    """The section ``[outer]``: replicas that train apart between rare messages (DiLoCo, MuLoCo)."""

    every: Annotated[int, NATURAL, OPTIMIZER] = 0
    """Steps between two exchanges of ``data_parallel_replicate_degree`` replicas, which send one
    another nothing else: what they have changed since, averaged, is the gradient of SGD. One
    replica takes these steps too, without messages. 0 turns them off."""

    lr: Annotated[float, POSITIVE] = 0.7
    """Learning rate of the outer SGD; 1 without momentum averages the replicas' weights."""

    momentum: Annotated[float, DECAY] = 0.8
    """Momentum of the outer SGD: 0.8 to 0.9 with AdamW inside, 0.6 with Muon (MuLoCo)."""

    nesterov: bool = True
    """Use Nesterov's form of the momentum."""

    bits: Annotated[int, Range(lambda b: b in (32, 16, 8, 4, 2), "32, 16, 8, 4 or 2")] = 32
    """Bits per number of a message: 32 sends the parameters' dtype, others whole multiples of one
    scale per 128 numbers."""

    feedback: bool = True
    """With fewer than 32 bits: add what rounding has left out to the replica's next message."""

    fragments: Annotated[int, at_least(1, "a positive integer")] = 1
    """Parts of the model, of consecutive layers, that are exchanged in turns: each every ``every``
    steps, all of them after the last step."""

    overlap: bool = False
    """Send while the next step computes, and take the outer step after it. A replica keeps what it
    has changed in that step."""


@dataclass
class ActivationCheckpoint:
    """Additions to torchtitan's ``[activation_checkpoint]``, and a changed default."""

    mode: Annotated[str, AC_MODES] = "none"
    """Activations to recompute in backward: torchtitan's modes, and 'low_rank', which saves the
    r-wide latents and recomputes wider activations (CoLA-M; without communication under tp_plan =
    'btp')."""

    low_rank_save_attention: bool = True
    """'low_rank': also save attention's output and log-sum-exp, instead of recomputing them."""

    keep_inputs: Literal["auto", "on", "off"] = "auto"
    """'none', low-rank families: keep the inputs of products that backward can make again from what
    is kept anyway: σ(A x), SwiGLU's product and, in compiled blocks, the normalized stream. That is
    faster, for half as many bytes of activations again, at the same numbers. 'auto' keeps them
    without tensor parallelism, on a GPU of which the estimate then needs at most nine tenths."""

    preserve_rng_state: bool = False
    """'full', 'selective': let a block of your own draw the same random numbers again."""


@dataclass
class Validation:
    """Changed defaults of torchtitan's ``[validation]``, and additional keys."""

    dataset: str = "training"
    """The validation corpus:
    - 'training': the held-out part of the training corpus: one file in 20 of 'cpython', one
      document or pair in 200 of 'local' (chosen by hash, never trained on), the validation split of
      'c4'
    - 'cpython', 'python_stdlib', 'python_stdlib_docs': their held-out files
    - 'local': all files that ``dataset_path`` names; none of them may be a training file"""

    sets: list[dict[str, str | int]] = field(default_factory=list)
    """More sets, each validated with that of ``dataset`` and logged under its own name: a table
    ``[[validation.sets]]`` for each, with the keys ``dataset``, ``dataset_path``, ``steps`` (by
    default the section's) and ``name`` (as in ``validation_metrics/NAME/loss``; by default the
    dataset). Batches and `seq_len` are the section's."""


@dataclass
class Checkpoint:
    """Changed defaults of torchtitan's ``[checkpoint]``."""

    last_save_model_only: bool = False
    """Save only the model at the last step. Such a checkpoint cannot be resumed."""

    minutes: Annotated[float, FINITE] = 10.0
    """Save too when the last save is so long ago; 0 saves by ``interval`` alone. Where a save takes
    more than a twentieth of this time, it waits for twenty times as long as the save took."""

    keep_every: Annotated[int, NATURAL] = 0
    """Steps whose number this divides are kept beside the ``keep_latest_k``; 0 keeps none."""


@dataclass
class Metrics:
    """Additions to torchtitan's ``[metrics]``."""

    verbose: bool = False
    """Show everything that is logged on the console, and not only in each rank's details.log: what
    torchtitan, torch and other libraries report."""

    wandb_project: str = "torchtitan_lr"
    """Weights & Biases project."""

    wandb_run_name: str = ""
    """Name of the run; empty lets wandb choose one."""

    wandb_group: str = ""
    """Group of the run; empty for none."""

    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run."""

    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """'auto' is online if credentials are found, else offline."""

    comm_ledger: bool = False
    """Count the collectives of every logged step and log bytes per step and mesh dimension. A
    counted step is slower."""


@dataclass
class Experimental:
    """Changed defaults of torchtitan's ``[experimental]``."""

    custom_import: str = "torchtitan_lr.training.register"
    """Module imported before the model is looked up; the default registers the four models."""


@dataclass
class Debug:
    """Changed defaults of torchtitan's ``[debug]``."""

    seed: Annotated[int, SEED] = 0
    """Seed of the weights and of every random choice: runs are reproducible by default."""


_RATIO = Range(lambda x: x == -1 or 0 <= x <= 1, "a number from 0 to 1, or -1 for warmup_steps")


@dataclass
class LRScheduler:
    """Additions to torchtitan's ``[lr_scheduler]``."""

    warmup_ratio: Annotated[float, _RATIO, FREE] = 0.02
    """Share of the steps, or of ``total_steps``, in which the learning rate grows: it sets
    ``warmup_steps`` (by default torchtitan's 200 of its 10,000). -1 is off: ``warmup_steps``
    that a later file or the command line sets does that. The default is 0.05 with Spectron, 0.1
    with AdamW and a low-rank family."""


@dataclass
class JobConfig:
    """The sections merged into torchtitan's ``JobConfig``."""

    model: Model = field(default_factory=Model)
    low_rank: LowRank = field(default_factory=LowRank)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    caat: Caat = field(default_factory=Caat)
    grad_compression: GradCompression = field(default_factory=GradCompression)
    outer: Outer = field(default_factory=Outer)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    experimental: Experimental = field(default_factory=Experimental)
    debug: Debug = field(default_factory=Debug)
