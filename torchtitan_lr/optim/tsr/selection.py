# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the parameters that TSR-Adam compresses, their ranks and their refresh schedules.

The selection is a pure function of names, shapes and settings. The configuration check calls it
before ranks start. Every rank calls it with the whole model's names, so that all layouts select the
same matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.tsr.sizes import sketch_width

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
    scale: float = 0.75
    embedding_rank: int = 64
    embedding_refresh_interval: int = 100
    moments: Literal["keep", "rotate", "reset"] = "rotate"
    refresh: Literal["auto", "sketch", "dense"] = "auto"
    stagger: bool = False
    core_dtype: Literal["float32", "bfloat16"] = "float32"
    projection: Literal["two_sided", "one_sided"] = "two_sided"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    compress_head: bool = False
    overlap_buckets: int = 4
    seed: int = 0

    @classmethod
    def from_config(cls, optimizer: Any) -> "TSRSettings":
        """Read the settings from ``[optimizer]``."""
        values = {name: getattr(optimizer, f"tsr_{name}") for name in cls.__dataclass_fields__}
        values |= {name: tuple(values[name]) for name in ("include", "exclude")}
        return cls(**values)


@dataclass(frozen=True)
class MatrixPlan:
    """The compression of one matrix.

    Args:
        name: Of the parameter.
        rows: m of the matrix in the orientation in which it is projected.
        columns: n in that orientation.
        rank: r.
        width: k, columns of its sketch.
        interval: Steps between refreshes.
        offset: Refreshes happen this many steps after each multiple of the interval.
        two_sided: Whether both sides are projected.
        transposed: Whether rows and columns are those of the transposed parameter. A one-sided
            projection compresses the shorter side, which is always called rows here. A square
            parameter is transposed, because the published GaLore code projects it on the right.
    """

    name: str
    rows: int
    columns: int
    rank: int
    width: int
    interval: int
    offset: int
    two_sided: bool
    transposed: bool

    def is_due(self, step: int, refreshes: int) -> bool:
        """Return whether a step refreshes the bases.

        Args:
            step: Steps done so far.
            refreshes: Refreshes done so far; at 0 there are no bases yet.
        """
        return refreshes == 0 or step % self.interval == self.offset


def plan_matrices(
    shapes: Mapping[str, Sequence[int]], settings: TSRSettings
) -> dict[str, MatrixPlan]:
    """Plan the compressed matrices; all other parameters stay dense.

    Args:
        shapes: Global shape by name of every parameter of the whole model.
        settings: The settings.

    Raises:
        ConfigError: A pattern matches no matrix, no matrix is left to compress, or a rank is larger
            than a side of its matrix.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    _check_patterns(settings, matrices)
    chosen = sorted(name for name in matrices if _is_chosen(name, settings))
    if not chosen:
        want = "patterns that leave a matrix to compress"
        raise ConfigError("optimizer.tsr_include", list(settings.include), want)
    ranked: dict[str, list[str]] = {"embedding": [], "linear": []}
    for name in chosen:
        ranked["embedding" if name == EMBEDDING else "linear"].append(name)
    plans = {}
    for kind, names in ranked.items():
        for place, name in enumerate(names):
            plans[name] = _plan(name, matrices[name], kind, (place, len(names)), settings)
    return plans


def _is_chosen(name: str, settings: TSRSettings) -> bool:
    if name == HEAD and not settings.compress_head:
        return False
    if name == EMBEDDING and settings.embedding_rank == 0:
        return False
    included = any(fnmatchcase(name, pattern) for pattern in settings.include)
    return included and not any(fnmatchcase(name, pattern) for pattern in settings.exclude)


def _plan(
    name: str, shape: Sequence[int], kind: str, place: tuple[int, int], settings: TSRSettings
) -> MatrixPlan:
    prefix = "embedding_" if kind == "embedding" else ""
    rank = getattr(settings, f"{prefix}rank")
    interval = getattr(settings, f"{prefix}refresh_interval")
    if rank > min(shape):
        want = f"at most {min(shape)}, the shorter side of {name} {tuple(shape)}"
        raise ConfigError(f"optimizer.tsr_{prefix}rank", rank, f"{want}, or to exclude it")
    two_sided = settings.projection == "two_sided"
    transposed = not two_sided and shape[0] >= shape[1]
    rows, columns = reversed(shape) if transposed else shape
    index, count = place
    offset = index * interval // count if settings.stagger else 0
    width = sketch_width(rows, columns, rank, settings.oversampling)
    return MatrixPlan(name, rows, columns, rank, width, interval, offset, two_sided, transposed)


def _check_patterns(settings: TSRSettings, matrices: Mapping[str, Sequence[int]]) -> None:
    for key in ("include", "exclude"):
        for pattern in getattr(settings, key):
            if not any(fnmatchcase(name, pattern) for name in matrices):
                example = next(iter(matrices), "none")
                want = f"a pattern that matches the name of a matrix, such as {example}"
                raise ConfigError(f"optimizer.tsr_{key}", pattern, want)
