# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The optimizers, an entry each. Other rooms ask the entry; `costs` alone has formulas by name.

Commands read this file before torch is loaded, so it imports nothing of the package: an entry names
its functions by paths, ``module:name``, or has those of a module that torch is imported for anyway.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

PRODUCTS = {"tf32": 2, "bf16x3": 4}
"""How products of fp32 matrices may be rounded, with the products in bf16 that take as long: TF32;
three of numbers that are split in two, and the splitting (`numerics.sides`)."""

Function = Callable[..., Any] | str  # a function, or the path of one
Updates = Literal["all", "matrices", "factors"]


@dataclass(frozen=True)
class OptimizerEntry:
    """What the rooms ask of an optimizer."""

    name: str  # the value of ``optimizer.name``
    build: Function
    """Builds torchtitan's container for this rank's model parts, whose weights are drawn, from
    ``[optimizer]`` and `ParallelDims`. An attribute ``gradients`` of it takes the place of
    `optim.gradients.StoredGradients`. An optimizer whose step sends has ``named_groups``: the
    process groups by the names of their mesh dimensions, for the ledger."""
    cost: Function | None = None
    """The class, as `costs.optimizer_costs.OptimizerCost`, of what it sends, holds and computes;
    without one an estimate counts AdamW's, and says so."""
    updates: Updates = "all"
    """Whether it updates every parameter, or the matrices of the blocks, or the factors A and B
    alone; AdamW updates the others, with ``adamw_lr``."""
    splits_columns: bool = False
    """Whether FSDP2 splits A (r, d_in) along d_in, so that r × r sums need no gathered rows."""
    sums_replicas: bool = False
    """Whether it gets the gradients of each replica, and sums what it wants of them itself."""
    sends_state: bool = False
    """Whether it sends tensors of its state, which offloading leaves on the host."""
    half_products: str = ""
    """How its fp32 products run on CUDA where the model computes in half precision: a name of
    `PRODUCTS`, or in fp32."""
    reads_groups: bool = False
    """Whether its rates are those of `optim.groups.rates_of`."""
    keys: tuple[str, ...] = ()
    """How those keys begin that not every optimizer reads, and this one does."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values by key that replace the defaults of config/schema.py."""
    of_models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Those that replace `defaults` for a ``model.name``."""
    rates: tuple[float, float, str] | None = None
    """The least and the highest ``optimizer.lr`` that are known to work, and from where; a rate
    beyond them is warned of."""
    fits: Function | None = None
    """Refuses a model that it cannot train: called with ``[optimizer]`` and the shapes by name."""
    check: Function | None = None
    """Refuses other keys: called with the configuration, the number of ranks and the type of their
    device, before a rank starts. One whose replicas differ refuses ``checkpoint.enable`` here: a
    checkpoint takes each tensor from any one of them."""
    like: str = ""
    """The optimizer whose learning rates and saved state mean the same; itself by default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "like", self.like or self.name)

    def defaults_of(self, model: str) -> dict[str, Any]:
        """Return the values by key that replace the defaults of config/schema.py for a model."""
        return {**self.defaults, **self.of_models.get(model, {})}


def _spectral(
    name: str,
    updates: Updates,
    rates: tuple[float, float, str],
    half_products: str = "bf16x3",
    **facts: Any,
) -> OptimizerEntry:
    return OptimizerEntry(
        name,
        "torchtitan_lr.optim.containers:build_spectral",
        cost="torchtitan_lr.costs.optimizer_costs:SpectralCost",
        updates=updates,
        splits_columns=True,
        sends_state=True,
        half_products=half_products,
        reads_groups=True,
        keys=("optimizer.momentum", "optimizer.nesterov"),
        rates=rates,
        **facts,
    )


# Our searches are those of docs/results.md, at widths 48 to 128, for full rank, CoLA and svd: one
# rate of embedding, head and norms was good for all. Spectron's authors have 7e-2 at every size.
_OF_ENDS = {"optimizer.adamw_lr": 6e-2}
# The size of an update does not depend on the gradient's: nothing is clipped.
_UNCLIPPED = {"training.max_norm": math.inf}
_COLA = {  # Appendix D.1, whose decay and clipping are those of config/schema.py
    "optimizer.lr": 3e-3,  # "a balanced choice"
    "lr_scheduler.warmup_ratio": 0.1,
    "lr_scheduler.decay_type": "cosine",
}
_ADAMW = OptimizerEntry(
    "AdamW",
    "torchtitan_lr.optim.containers:build_adam",
    cost="torchtitan_lr.costs.optimizer_costs:OptimizerCost",
    reads_groups=True,
    of_models=dict.fromkeys(("llama_cola", "llama_svd", "llama_lax"), _COLA),
    rates=(0.0, 1e-2, "our searches; CoLA has 1e-3 to 6e-3"),
)
ENTRIES: dict[str, OptimizerEntry] = {
    "AdamW": _ADAMW,
    "Adam": replace(_ADAMW, name="Adam"),
    "TSRAdam": OptimizerEntry(
        "TSRAdam",
        "torchtitan_lr.optim.containers:build_tsr",
        cost="torchtitan_lr.costs.optimizer_costs:TSRCost",
        sums_replicas=True,
        sends_state=True,
        # They are the only fp32 products of such a run: errors stay below bf16's of the gradients.
        half_products="tf32",
        reads_groups=True,
        keys=("optimizer.tsr_",),
        defaults={"optimizer.lr": 1e-2},  # the paper's, at every size
        rates=(2.5e-3, 4e-2, "our searches; the paper has 1e-2"),
        fits="torchtitan_lr.optim.tsr.selection:plan_configured",
    ),
    "Muon": _spectral(
        "Muon",
        "matrices",
        (1e-4, 2.5e-2, "Moonlight's and Spectron's dense models; our searches"),
        # Rates: of the flat part of our searches for full rank and LaX, for CoLA and plain factors.
        # Jordan et al.'s momentum; Moonlight's decay (arXiv 2502.16982).
        defaults=_OF_ENDS
        | _UNCLIPPED
        | {"optimizer.lr": 4e-3, "optimizer.weight_decay": 0.1, "optimizer.nesterov": True},
        of_models={name: {"optimizer.lr": 1e-2} for name in ("llama_cola", "llama_svd")},
    ),
    "Spectron": _spectral(
        "Spectron",
        "factors",
        (1e-3, 2.5e-1, "the paper's stable rates; our searches; its authors' code has 7e-2"),
        # Rates: of the flat part of our searches for CoLA, for plain factors and LaX. The rest is
        # the authors' training code (github.com/da462/spectron), with their decay of 1e-2.
        defaults=_OF_ENDS
        | {
            "optimizer.lr": 1e-1,
            "optimizer.momentum": 0.95,
            "optimizer.nesterov": True,
            "optimizer.beta2": 0.95,
            "training.max_norm": 1.0,
            "lr_scheduler.warmup_ratio": 0.05,
            "lr_scheduler.decay_type": "cosine",
            "lr_scheduler.min_lr_factor": 0.0,
        },
        of_models={name: {"optimizer.lr": 4e-2} for name in ("llama_svd", "llama_lax")},
    ),
    "LoRAMuon": _spectral(
        "LoRAMuon",
        "factors",
        (1e-3, 1e-1, "our searches; Jordan et al. have 2e-2 for updates of spectral norm 1"),
        # Rates: of the flat part of our searches for CoLA and plain factors, and for LaX.
        defaults=_OF_ENDS | _UNCLIPPED | {"optimizer.lr": 4e-2},
        of_models={"llama_lax": {"optimizer.lr": 1.5e-2}},
        # The roots of weights' Gram matrices need more than 16 bits; three products in TF32 have
        # 21, and take longer than one in fp32 (docs/data/h200.json).
        half_products="",
    ),
}
"""The optimizers by name; `register_optimizer` adds those from outside the package."""


def register_optimizer(entry: OptimizerEntry) -> None:
    """Make an optimizer from outside the package a value of ``optimizer.name``."""
    if entry.name in ENTRIES:
        raise ValueError(f"the name {entry.name!r} of an optimizer is taken")
    ENTRIES[entry.name] = entry


def variant(base: str, name: str, build: Function, **facts: Any) -> OptimizerEntry:
    """Return the entry of an optimizer that changes what `build_optimizers` returns for ``base``.

    State that ``build`` adds is its own to save: a resumed run begins without it. What it costs is
    not known by its base.
    """
    own = {"cost": None} | facts
    return replace(ENTRIES[base], name=name, build=build, **own)


def imported(function: Function) -> Callable[..., Any]:
    """Return a function, or import it by its path."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def build_optimizers(model_parts: list[Any], config: Any, parallel_dims: Any) -> Any:
    """Build the container of the optimizer that ``[optimizer]`` names."""
    return imported(ENTRIES[config.name].build)(model_parts, config, parallel_dims)


def unread_keys(name: str) -> tuple[str, ...]:
    """Return how those keys begin that other optimizers read, and this one does not."""
    own = ENTRIES[name].keys
    return tuple(key for entry in ENTRIES.values() for key in entry.keys if key not in own)


def like(name: object) -> str:
    """Return the optimizer whose rates mean the same as those of a name, known or not."""
    entry = ENTRIES.get(str(name))
    return entry.like if entry else str(name)
