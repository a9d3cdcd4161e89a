# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model of a family at a size: of the size's sides, or of the reference's parameters."""

from math import log
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiment import Experiment, Size


def model_of(experiment: Experiment, family: str, size: str) -> Any:
    """Return the ``LlamaArgs`` of a family at a size that has no flavor.

    With ``match = "parameters"`` a family other than the reference has the sides, other than the
    size's, at which its N is the reference's: `matched_sides`.

    Raises:
        ConfigError: There is no such model family, or no such sides.
    """
    shape = experiment.sizes[size]
    sides = (shape.dim, shape.ffn_dim)
    if experiment.match == "parameters" and family != experiment.first:
        sides = matched_sides(experiment, family, size)
    return _args(experiment, family, shape, *sides)


def matched_sides(experiment: Experiment, family: str, size: str) -> tuple[int, int]:
    """Return the widths d and f at which a family has the N of the reference.

    Depth, heads and vocabulary are those of the size; the rank follows from d where the size has
    none. N grows linearly with f, so each d has one f with N nearest to the reference's. Of the d
    with even heads and f >= d, the one is taken whose f / d is nearest to the size's.

    Args:
        experiment: The experiment.
        family: Name of the family.
        size: Name of the size, which has sides.

    Raises:
        ConfigError: The narrowest model already has more parameters.
    """
    shape = experiment.sizes[size]
    wanted = _counted(experiment, experiment.first, shape, shape.dim, shape.ffn_dim)
    found: list[tuple[float, int, int]] = []
    step = 2 * shape.n_heads
    for dim in range(step, 64 * shape.dim, step):
        if dim < shape.rank:
            continue
        least = _counted(experiment, family, shape, dim, dim)
        slope = _counted(experiment, family, shape, dim, dim + 1) - least
        ffn_dim = dim + round((wanted - least) / slope)
        if ffn_dim < dim:
            break
        distance = abs(log(ffn_dim / dim * shape.dim / shape.ffn_dim))
        found.append((distance, dim, ffn_dim))
    if not found:
        want = f"a size at which {family} can have as few parameters: a wider one, or fewer heads"
        raise ConfigError(f"sizes.{size}", f"N = {wanted:,}", want)
    return min(found)[1:]


def _counted(experiment: Experiment, family: str, shape: Size, dim: int, ffn_dim: int) -> int:
    """Return N, as the experiment counts it, at some widths."""
    from torchtitan_lr.formulas.parameters import count_parameters

    parts = count_parameters(_args(experiment, family, shape, dim, ffn_dim))
    without = parts.total - parts.embedding - parts.head
    return parts.total if experiment.count == "all" else without


def _args(experiment: Experiment, family: str, shape: Size, dim: int, ffn_dim: int) -> Any:
    from torchtitan_lr.models.args import LlamaArgs  # late: --help needs no torch
    from torchtitan_lr.models.families.registry import FAMILIES, find_family

    model = experiment.families[family].model or f"llama_{family}"
    found = find_family(model)
    if found is None:
        choices = ", ".join(known.model_name for known in FAMILIES.values())
        raise ConfigError(f"families.{family}.model", model, f"one of {choices}")
    rank = max(1, shape.rank or dim // 4) if found.low_rank else 0
    # Where the nonlinearities are is the family's; the ranks are the size's.
    settings = found.defaults("debug") | {"rank_attention": rank, "rank_ffn": rank}
    return LlamaArgs(
        family=found.name,
        dim=dim,
        ffn_dim=ffn_dim,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads or None,
        vocab_size=shape.vocab_size,
        **settings,
    )


def write_flavor(experiment: Experiment, family: str, size: str, models: Path) -> Path:
    """Write the model of a family at a size to a flavor file; returns its path.

    Args:
        experiment: The experiment.
        family: Name of the family.
        size: Name of the size.
        models: Folder of the flavor files.
    """
    from torchtitan_lr.models.stored_args import write_model_args

    args = model_of(experiment, family, size)
    models.mkdir(parents=True, exist_ok=True)
    path = models / f"{args.family}_{size}.json"
    write_model_args(args, path)
    return path
