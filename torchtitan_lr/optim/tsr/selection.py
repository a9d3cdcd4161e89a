# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the parameters that TSR-Adam compresses, their ranks and their refresh schedules.

The selection is a pure function of names, shapes and settings. The configuration check and the
estimate call it without torch, before ranks start. Every rank calls it with the whole model's
names, so that all layouts select the same matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from torchtitan_lr.errors import ConfigError

EMBEDDING = "tok_embeddings.weight"
"""The embedding, which has its own rank and interval."""

HEAD = "output.weight"
"""The head, compressed only on request."""

BUCKET_ELEMENTS = 2**26
"""Elements of a bucket of dense gradients, and of what a refresh holds at a time: its sketches, and
what is gathered of them."""


@dataclass(frozen=True)
class TSRSettings:
    """``[optimizer] tsr_*``; see `torchtitan_lr.config.schema.Optimizer`."""

    rank: int = 128
    refresh_interval: int = 100
    oversampling: int = 5
    power_iterations: int = 1
    scale: float = 0.75
    embedding_rank: int = 0
    embedding_refresh_interval: int = 100
    moments: Literal["keep", "rotate"] = "keep"
    refresh: Literal["auto", "sketch", "dense"] = "auto"
    stagger: bool = False
    start: Literal["gradient", "random"] = "gradient"
    projection: Literal["two_sided", "one_sided"] = "two_sided"
    compress_head: bool = False
    overlap_buckets: int = 4
    share_refresh: bool = False

    @classmethod
    def from_config(cls, optimizer: Any) -> "TSRSettings":
        """Read the settings from ``[optimizer]``."""
        return cls(**{name: getattr(optimizer, f"tsr_{name}") for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class MatrixPlan:
    """The compression of one matrix."""

    name: str
    rows: int  # m, in the orientation in which the matrix is projected
    columns: int  # n, in that orientation
    rank: int  # r
    width: int  # k, columns of its sketch
    power_iterations: int  # q of its refreshes
    interval: int  # steps between refreshes
    offset: int  # refreshes happen this many steps after each multiple of the interval
    two_sided: bool  # whether both sides are projected
    transposed: bool
    """Whether rows and columns are those of the transposed parameter: a one-sided projection
    compresses the shorter side, which is called rows. A square parameter is transposed, because the
    published GaLore code projects it on the right."""
    waits: bool = False
    """Whether random bases are used until the first refresh; else it is in the first step."""
    refresh: str = "auto"
    """What a refresh sums over the replicas: ``sketch``, ``dense``, or the lesser (``auto``)."""

    def is_due(self, step: int, refreshes: int) -> bool:
        """Return whether a step refreshes the bases, given how often they were refreshed."""
        has_bases = self.waits or refreshes > 0
        return not has_bases or step % self.interval == self.offset

    def core_elements(self, columns: int) -> int:
        """Return the elements of a core, r·r; r·n of a one-sided one, for a block of n columns."""
        return self.rank * (self.rank if self.two_sided else columns)

    def step_flops(self, rows: int, columns: int) -> int:
        """Return the FLOPs that project a gradient (m, n) to its core, and lift the core again.

        UᵀG and (UᵀG) V, then U D and (U D) Vᵀ; one-sided, UᵀG and U D alone.
        """
        flops = 4 * rows * columns * self.rank
        if self.two_sided:
            flops += 2 * (rows + columns) * self.rank**2
        return flops

    def sends(self, rows: int, columns: int) -> tuple[bool, int]:
        """Return whether a refresh sums dense gradients over the replicas, and its elements.

        The sketches are Y (m, k) and B (k, n), plus Z (n, k) and Y again for each power iteration.
        ``rows`` and ``columns`` are those of a rank's largest block: all ranks must decide alike.
        """
        dense = rows * columns
        sketches = (1 + self.power_iterations) * (rows + columns) * self.width
        if self.refresh == "dense" or (self.refresh == "auto" and dense <= sketches):
            return True, dense
        return False, sketches

    def gathered(self, rows: int, ranks: Sequence[int]) -> list[int]:
        """Return the elements that a sketch's QR factorization gathers over each mesh dimension.

        Ranks with fewer rows than columns gather the rows, others their triangles (k, k). ``rows``
        are those of a rank's largest block, ``ranks`` the sizes of the dimensions that split them.
        """
        elements = []
        for size in ranks:
            rows = size * min(rows, self.width)
            elements.append(rows * self.width)
        return elements

    def held(self, block: Sequence[int], ranks: Sequence[Sequence[int]]) -> int:
        """Return the elements of a rank's sketches, (m, k) and (n, k), and of the largest gather.

        ``block`` is m and n of a rank's largest block, ``ranks`` as in `gathered`, for each side.
        """
        gathers = [self.gathered(*side) for side in zip(block, ranks, strict=True)]
        return sum(block) * self.width + max(chain(*gathers), default=0)


def plan_matrices(
    shapes: Mapping[str, Sequence[int]], settings: TSRSettings
) -> dict[str, MatrixPlan]:
    """Plan the compressed matrices, from the global shapes of the whole model's parameters.

    A ConfigError if no matrix is left to compress, or a rank is larger than a side of its matrix.
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
    plans = {}
    for name in names:
        shape, prefix = shapes[name], "embedding_" if name == EMBEDDING else ""
        rank = getattr(settings, f"{prefix}rank")
        if rank > min(shape):
            want = f"at most {min(shape)}, the shorter side of {name} {tuple(shape)}"
            raise ConfigError(f"optimizer.tsr_{prefix}rank", rank, want)
        two_sided = settings.projection == "two_sided"
        transposed = not two_sided and shape[0] >= shape[1]
        rows, columns = reversed(shape) if transposed else shape
        plans[name] = MatrixPlan(
            name,
            rows,
            columns,
            rank,
            min(rank + settings.oversampling, rows, columns),
            settings.power_iterations,
            getattr(settings, f"{prefix}refresh_interval"),
            offset=0,
            two_sided=two_sided,
            transposed=transposed,
            waits=settings.start == "random",
            refresh=settings.refresh,
        )
    return staggered(plans) if settings.stagger else plans


def plan_configured(optimizer: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, MatrixPlan]:
    """Return `plan_matrices` by ``[optimizer]``."""
    return plan_matrices(shapes, TSRSettings.from_config(optimizer))


def staggered(plans: Mapping[str, MatrixPlan]) -> dict[str, MatrixPlan]:
    """Spread refreshes over their interval, so that the most expensive step sends little.

    The matrices of one interval are placed in turn, the most expensive first, each in the step that
    has sent least so far (the first of equals).
    """
    loads = {plan.interval: [0] * plan.interval for plan in plans.values()}
    costs = {name: plan.sends(plan.rows, plan.columns)[1] for name, plan in plans.items()}
    found = dict(plans)
    for name in sorted(plans, key=lambda name: -costs[name]):
        load = loads[plans[name].interval]
        offset = load.index(min(load))
        load[offset] += costs[name]
        found[name] = replace(plans[name], offset=offset)
    return found
