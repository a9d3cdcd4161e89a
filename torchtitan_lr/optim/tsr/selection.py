# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the parameters that TSR-Adam compresses, their ranks and their refresh schedules.

The selection is a pure function of names, shapes and settings. The configuration check calls it
before ranks start, without torch. Every rank calls it with the whole model's names, so that all
layouts select the same matrices.

`formulas/tsr_traffic.py` states the same sizes independently, from the paper. A mistake here
therefore shows up as a difference between measured and predicted bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchtitan_lr.errors import ConfigError

EMBEDDING = "tok_embeddings.weight"
"""The embedding, which has its own rank and interval."""

HEAD = "output.weight"
"""The head, compressed only on request."""


@dataclass(frozen=True)
class TSRSettings:
    """``[optimizer] tsr_*``; see `torchtitan_lr.config.methods.Optimizer`."""

    rank: int = 128
    refresh_interval: int = 100
    oversampling: int = 5
    power_iterations: int = 1
    vocabulary_power_iterations: int = -1
    scale: float = 0.75
    embedding_rank: int = 64
    embedding_refresh_interval: int = 100
    moments: Literal["keep", "rotate", "reset"] = "rotate"
    refresh: Literal["auto", "sketch", "dense"] = "auto"
    stagger: bool = False
    start: Literal["gradient", "random"] = "gradient"
    product_precision: Literal["float32", "bfloat16"] = "float32"
    projection: Literal["two_sided", "one_sided"] = "two_sided"
    compress_head: bool = False
    overlap_buckets: int = 4

    @classmethod
    def from_config(cls, optimizer: Any) -> "TSRSettings":
        """Read the settings from ``[optimizer]``."""
        return cls(**{name: getattr(optimizer, f"tsr_{name}") for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class MatrixPlan:
    """The compression of one matrix.

    Args:
        name: Of the parameter.
        rows: m of the matrix in the orientation in which it is projected.
        columns: n in that orientation.
        rank: r.
        width: k, columns of its sketch.
        power_iterations: q of its refreshes.
        interval: Steps between refreshes.
        offset: Refreshes happen this many steps after each multiple of the interval.
        two_sided: Whether both sides are projected.
        transposed: Whether rows and columns are those of the transposed parameter. A one-sided
            projection compresses the shorter side, which is always called rows here. A square
            parameter is transposed, because the published GaLore code projects it on the right.
        waits: Whether random bases are used until the first refresh; else it is in the first step.
    """

    name: str
    rows: int
    columns: int
    rank: int
    width: int
    power_iterations: int
    interval: int
    offset: int
    two_sided: bool
    transposed: bool
    waits: bool = False

    def is_due(self, step: int, refreshes: int) -> bool:
        """Return whether a step refreshes the bases."""
        has_bases = self.waits or refreshes > 0
        return not has_bases or step % self.interval == self.offset


def plan_matrices(
    shapes: Mapping[str, Sequence[int]], settings: TSRSettings
) -> dict[str, MatrixPlan]:
    """Plan the compressed matrices; all other parameters stay dense.

    Args:
        shapes: Global shape by name of every parameter of the whole model.
        settings: The settings.

    Raises:
        ConfigError: No matrix is left to compress, or a rank is larger than a side of its matrix.
    """
    chosen = {name for name, shape in shapes.items() if len(shape) == 2}
    if not settings.compress_head:
        chosen.discard(HEAD)
    if settings.embedding_rank == 0:
        chosen.discard(EMBEDDING)
    if not chosen:
        want = "tsr_compress_head or tsr_embedding_rank > 0: the model has no other matrix"
        raise ConfigError("optimizer.tsr_embedding_rank", settings.embedding_rank, want)
    # The embedding first: its rank and interval are its own.
    names = sorted(chosen, key=lambda name: (name != EMBEDDING, name))
    plans = {name: _plan(name, shapes[name], settings) for name in names}
    return _stagger(plans, settings) if settings.stagger else plans


def _stagger(plans: Mapping[str, MatrixPlan], settings: TSRSettings) -> dict[str, MatrixPlan]:
    """Spread refreshes over their interval, so that the most expensive step sends little.

    The matrices of one interval are placed in turn, the most expensive first, each in the step
    that has sent least so far (the first of equals).
    """
    loads: dict[int, list[int]] = {plan.interval: [0] * plan.interval for plan in plans.values()}
    offsets = {}
    for name in sorted(plans, key=lambda name: -_refresh_cost(plans[name], settings)):
        load = loads[plans[name].interval]
        offsets[name] = load.index(min(load))
        load[offsets[name]] += _refresh_cost(plans[name], settings)
    return {name: replace(plan, offset=offsets[name]) for name, plan in plans.items()}


def _refresh_cost(plan: MatrixPlan, settings: TSRSettings) -> int:
    """Return the elements of a refresh, by the sizes of the whole matrix."""
    sides = (plan.rows, plan.columns)
    if refresh_is_dense(*sides, plan.width, plan.power_iterations, settings.refresh):
        return plan.rows * plan.columns
    return (1 + plan.power_iterations) * sum(sides) * plan.width


def _plan(name: str, shape: Sequence[int], settings: TSRSettings) -> MatrixPlan:
    prefix = "embedding_" if name == EMBEDDING else ""
    rank = getattr(settings, f"{prefix}rank")
    if rank > min(shape):
        want = f"at most {min(shape)}, the shorter side of {name} {tuple(shape)}"
        raise ConfigError(f"optimizer.tsr_{prefix}rank", rank, want)
    two_sided = settings.projection == "two_sided"
    transposed = not two_sided and shape[0] >= shape[1]
    rows, columns = reversed(shape) if transposed else shape
    own = settings.vocabulary_power_iterations
    return MatrixPlan(
        name,
        rows,
        columns,
        rank,
        min(rank + settings.oversampling, rows, columns),
        own if own >= 0 and name in (EMBEDDING, HEAD) else settings.power_iterations,
        getattr(settings, f"{prefix}refresh_interval"),
        offset=0,
        two_sided=two_sided,
        transposed=transposed,
        waits=settings.start == "random",
    )


def largest_block(size: int, ranks: Iterable[int]) -> int:
    """Return the rows (or columns) of the largest block of a split matrix.

    Args:
        size: Rows (or columns) of the whole matrix.
        ranks: Size of each mesh dimension that splits it, in the mesh's order.
    """
    for count in ranks:
        size = (size + count - 1) // count
    return size


def refresh_is_dense(
    rows: int, columns: int, width: int, power_iterations: int, refresh: str
) -> bool:
    """Return whether a refresh sums dense gradients, not sketches, over the replicas.

    The sketches are Y (m, k) and B (k, n), plus Z (n, k) and Y again for each power iteration.

    Args:
        rows: m of a rank's largest block.
        columns: n of that block.
        width: k.
        power_iterations: q.
        refresh: ``sketch``, ``dense``, or ``auto`` for the one that sends less.
    """
    if refresh != "auto":
        return refresh == "dense"
    sketches = (1 + power_iterations) * (rows + columns) * width
    return rows * columns <= sketches
