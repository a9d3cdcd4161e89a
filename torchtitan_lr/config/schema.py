# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The TOML keys this package adds to torchtitan's, and the defaults it changes.

Only what differs from ``torchtitan.config.JobConfig`` stands here; torchtitan's ``ConfigManager``
merges the two class trees field by field. It merges a section only where the annotation is a real
class, so this file must never use ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan_lr.config.methods import Caat, GradCompression, LowRank, Optimizer

BUILT_IN_PLANS = ("btp", "vanilla", "vanilla_replicated", "megatron", "caat", "btp_caat")
"""The plans of this package; ``parallel.tensor.plans`` refuses to load where it has others."""

TP_PLANS = ["auto", *BUILT_IN_PLANS]
"""Values of ``parallelism.tp_plan``; a plan that is registered adds its name."""

MODELS = ("llama_full", "llama_svd", "llama_cola", "llama_lax")
"""Values of ``model.name`` that ``experimental.custom_import`` registers by default."""

AC_MODES = ["selective", "full", "memory_budget", "none", "low_rank"]
"""Values of ``activation_checkpoint.mode``; a mode that is registered adds its name."""


@dataclass
class Job:
    """Additions to torchtitan's ``[job]``."""

    custom_config_module: str = "torchtitan_lr.config.schema"
    """Module whose JobConfig extends torchtitan's; always this one."""


@dataclass
class Model:
    """Additions to torchtitan's ``[model]``."""

    name: str = "llama_cola"
    """Which model to train: llama_full, llama_svd, llama_cola or llama_lax."""

    flavor: str = "debug"
    """Which size of it: debug, tiny, 60M, 130M, 350M, 1B, 1B_boost, 3B, 7B, 8B, 13B or 30B."""

    vocab_size: int = 0
    """
    Rows of the embedding and of the head, for a tokenizer of one's own; 0 takes the flavor's. It is
    rounded up to a multiple of 64, so that the model is the same at every tensor-parallel degree
    that divides 64, and to one of any other degree and of ``caat.lanes``.
    """

    hf_assets_path: str = "torchtitan_lr/data/assets/bpe4k"
    """
    Folder with the tokenizer: a Hugging Face tokenizer.json, or a tiktoken rank file named
    tokenizer.model (llama-3 format). Relative paths are looked up from the working directory,
    then from the repository root.
    """


@dataclass
class Training:
    """Additions to torchtitan's ``[training]``."""

    dataset: str = "python_stdlib"
    """
    What to train on:
    - 'python_stdlib': the source files of the running interpreter's standard library
    - 'local': the .txt, .jsonl or .parquet files that ``dataset_path`` names (a path or a glob)
    - 'c4', 'c4_validation': streamed from the Hugging Face hub
    """

    max_norm: float | int = 0.5
    """Gradients are scaled down to this global norm; inf turns clipping off."""

    max_skipped_steps: int = 0
    """
    How many steps with a non-finite loss or gradient may be skipped, in the whole run, before it
    stops. 0 stops at the first.
    """

    max_bad_records: int = 0
    """
    How many records of 'local' that cannot be read (a line that is not the JSON it should be, a
    damaged .parquet) may be skipped, in the whole run, before it saves and stops. 0 stops at the
    first. A record counts once, however often it is met.
    """

    allow_changed_corpus: bool = False
    """
    Resume although the corpus is not the one the checkpoint was made with: after a file was mended,
    added or removed. The run goes on at about the same place, and may repeat or miss some text.
    """


@dataclass
class Parallelism:
    """Additions to torchtitan's ``[parallelism]``: how tensor parallelism works."""

    tp_plan: Annotated[str, TP_PLANS] = "auto"
    """
    The tensor-parallel plan:
    - 'auto': 'btp' for the low-rank families, 'megatron' for llama_full, 'caat' where it has lanes
    - 'btp': bottleneck-aware (BOOST): residual stream sharded, one r-wide reduction a chunk
    - 'vanilla': every factor pair column- then row-parallel, heads sharded: the fair baseline
    - 'vanilla_replicated': the same with every head on every rank, as BOOST's authors measured it
    - 'megatron': column- and row-parallel full-rank linears
    - 'caat': llama_full with ``[caat] lanes``: each rank has streams of its own (CAAT-Net)
    - 'btp_caat': experimental, svd and cola with ``[caat] lanes``: 'btp' whose reductions are
      partial; never chosen by 'auto'
    """

    tp_grouping: bool = True
    """
    btp, btp_caat: q, k, v (and gate, up) share one product and one reduction. vanilla: they share
    the backward reduction of their input.
    """

    tp_norm: Literal["online", "sync"] = "online"
    """
    btp: how RMSNorm gets the statistic of a sharded stream. 'online' divides after the
    projection, so that the statistic travels beside the latents; 'sync' reduces it first.
    """

    tp_norm_stat: Literal["async", "column"] = "async"
    """
    btp with tp_norm = 'online': the statistic in an fp32 all-reduce of its own, started before the
    projection, or as a column of the latents' payload (fewest calls; rounds it in bf16).
    """

    tp_comm: Literal["all_reduce", "sequence"] = "all_reduce"
    """
    btp and megatron: reductions leave every rank all tokens, or each rank a shard of them
    (reduce-scatter, then all-gather in front of the next product).
    """

    tp_head: Literal["plain", "scatter"] = "plain"
    """
    btp: the head's backward as an all-reduce of d-wide gradients, or as the cheaper
    reduce-scatter, with the final norm applied to the logits.
    """


@dataclass
class ActivationCheckpoint:
    """Additions to torchtitan's ``[activation_checkpoint]``."""

    mode: Annotated[str, AC_MODES] = "none"
    """
    What is recomputed in backward; torchtitan's modes, and 'low_rank': keep the r-wide latents
    and recompute what is wider (CoLA-M; under tp_plan = 'btp' without communication).
    """

    low_rank_save_attention: bool = True
    """'low_rank': keep attention's output and log-sum-exp too, instead of attending twice."""


@dataclass
class Validation:
    """Changed defaults of torchtitan's ``[validation]``."""

    dataset: str = "training"
    """
    What to validate on:
    - 'training': what is held out from the training corpus: one file in 20 of 'python_stdlib', one
      document in 200 of 'local' (chosen by hash, never trained on), the validation split of 'c4'
    - 'python_stdlib': its held-out files
    - 'local': all of the files that ``dataset_path`` names, none of which may be trained on
    - 'c4_validation': streamed from the Hugging Face hub
    """


@dataclass
class Checkpoint:
    """Changed defaults of torchtitan's ``[checkpoint]``, and what may be loaded."""

    last_save_model_only: bool = False
    """Save only the model at the last step. Such a checkpoint cannot be resumed."""

    fall_back: bool = False
    """
    Where the checkpoint to resume from is damaged, go on from the newest older one that is whole,
    instead of naming it and stopping. The damaged one is put aside.
    """

    initial_load_other_model: bool = False
    """
    Let ``initial_load_path`` name a checkpoint of another family, activation or tokenizer, whose
    weights have the same names and shapes. A run's own checkpoints must always be this model's.
    """


@dataclass
class Metrics:
    """Additions to torchtitan's ``[metrics]``."""

    wandb_project: str = "torchtitan_lr"
    """Weights & Biases project."""

    wandb_run_name: str = ""
    """Name of the run; empty lets wandb choose one."""

    wandb_group: str = ""
    """Group of the run; empty for none."""

    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run."""

    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """'auto' goes online where credentials are found and writes offline where they are not."""

    comm_ledger: bool = False
    """
    Count the collectives of every logged step and log bytes a step and mesh dimension. A counted
    step is slower.
    """


@dataclass
class Experimental:
    """Changed defaults of torchtitan's ``[experimental]``."""

    custom_import: str = "torchtitan_lr.training.register"
    """Module imported before the model is looked up; this one registers the four models."""


@dataclass
class Debug:
    """Changed defaults of torchtitan's ``[debug]``."""

    seed: int = 0
    """Seed of the weights and of every random choice: runs are reproducible by default."""


@dataclass
class JobConfig:
    """The sections to merge into torchtitan's ``JobConfig``."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    low_rank: LowRank = field(default_factory=LowRank)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    caat: Caat = field(default_factory=Caat)
    grad_compression: GradCompression = field(default_factory=GradCompression)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    experimental: Experimental = field(default_factory=Experimental)
    debug: Debug = field(default_factory=Debug)
