# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The TOML keys this package adds to torchtitan's, and the defaults it changes.

Only what differs from ``torchtitan.config.JobConfig`` stands here; torchtitan's ``ConfigManager``
merges the two class trees field by field. It merges a section only where the annotation is a real
class, so this file must never use ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Job:
    """Additions to torchtitan's ``[job]``."""

    custom_config_module: str = "torchtitan_lr.job_config"
    """Module whose JobConfig extends torchtitan's; always this one."""


@dataclass
class Model:
    """Additions to torchtitan's ``[model]``."""

    name: str = "llama_cola"
    """Which model to train: llama_full, llama_svd, llama_cola or llama_lax."""

    flavor: str = "debug"
    """Which size of it: debug, 60M, 130M, 350M, 1B, 1B_boost, 3B, 7B, 8B, 13B or 30B."""

    hf_assets_path: str = "torchtitan_lr/data/assets/bpe4k"
    """
    Folder with the tokenizer: a Hugging Face tokenizer.json, or a tiktoken rank file named
    tokenizer.model (llama-3 format). Relative paths are looked up from the working directory,
    then from the repository root.
    """


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
    """Changed defaults of torchtitan's ``[optimizer]``: AdamW as CoLA trains."""

    name: str = "AdamW"
    """Optimizer to use: AdamW or Adam."""

    beta2: float = 0.999
    """Decay of the second moment."""

    weight_decay: float = 0.01
    """Decoupled weight decay, applied to every parameter."""


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


@dataclass
class Validation:
    """Changed defaults of torchtitan's ``[validation]``."""

    dataset: str = "python_stdlib"
    """What to validate on; the choices of ``training.dataset``, their held-out part."""


@dataclass
class Checkpoint:
    """Changed defaults of torchtitan's ``[checkpoint]``."""

    last_save_model_only: bool = False
    """Save only the model at the last step. Such a checkpoint cannot be resumed."""


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
    """'auto' goes online when the server answers and writes offline when it does not."""


@dataclass
class Experimental:
    """Changed defaults of torchtitan's ``[experimental]``."""

    custom_import: str = "torchtitan_lr"
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
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    experimental: Experimental = field(default_factory=Experimental)
    debug: Debug = field(default_factory=Debug)
