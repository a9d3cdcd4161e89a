# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The file of a scaling experiment: one TOML, strictly typed. Reading it needs no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from torchtitan_lr.config.parse import check_toml, load_toml
from torchtitan_lr.config.shipped import SHIPPED, find_config
from torchtitan_lr.errors import ConfigError

FOLDER = SHIPPED / "experiments"
"""The shipped experiments."""

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class Family:
    """What is compared, ``[families.NAME]``: a model, or an optimizer with it.

    Args:
        model: ``model.name``; by default ``llama_NAME``.
        overrides: Overrides of its runs, ``section.key=value``.
        learning_rates: Its own grid; empty for that of ``[learning_rate]``.
        rate_of: A family whose learning rate it takes; empty to search its own.
        ranks: Ranks of its runs; 0 for those of the experiment.
    """

    model: str = ""
    overrides: list[str] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    rate_of: str = ""
    ranks: int = 0


@dataclass(frozen=True)
class Size:
    """A shape of the ladder, ``[sizes.NAME]``: a flavor, or the sides of the model.

    Args:
        flavor: ``model.flavor``; empty where the sides below are given.
        dim: Width d of the residual stream; low-rank families have rank d/4.
        ffn_dim: Hidden width f of the feed-forward.
        n_layers: Number L of blocks.
        n_heads: Number of heads.
        vocab_size: Rows V of the embedding and of the head.
        seeds: Its own seeds; empty for those of the experiment.
        budgets: Its own tokens per parameter; empty for those of the experiment.
    """

    flavor: str = ""
    dim: int = 0
    ffn_dim: int = 0
    n_layers: int = 0
    n_heads: int = 0
    vocab_size: int = 4096
    seeds: list[int] = field(default_factory=list)
    budgets: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class LearningRate:
    """How learning rates are chosen, ``[learning_rate]``.

    Args:
        grid: Values to try, ascending; one value is used without a search.
        search: Sizes at which the grid is searched; empty for all. Beyond them the rate is on a
            line through log(learning rate) over log(N); with one size it is that size's.
    """

    grid: list[float] = field(default_factory=lambda: [1e-3])
    search: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """A scaling experiment.

    Args:
        name: Its name, the group in wandb.
        config: TOML of all runs, a path or the name of a shipped file.
        description: One line.
        overrides: Overrides of all runs.
        ranks: Number of ranks of a run.
        seeds: ``debug.seed`` of the repetitions.
        tokens_per_parameter: The budgets; parameters N are those without embedding and head.
        equal: What families share at a size and budget: ``tokens_per_parameter`` (each of its own
            N), or ``tokens`` or ``flops`` of the ``reference``.
        reference: The family that others are compared with; by default the first.
        checkpoints: Checkpoints per run, from which a stopped one goes on; 0 for none.
        learning_rate: The search.
        families: The families by name.
        sizes: The sizes by name, ascending.
    """

    name: str = ""
    config: str = ""
    description: str = ""
    overrides: list[str] = field(default_factory=list)
    ranks: int = 1
    seeds: list[int] = field(default_factory=lambda: [0])
    tokens_per_parameter: list[float] = field(default_factory=lambda: [20.0])
    equal: Literal["tokens_per_parameter", "tokens", "flops"] = "tokens_per_parameter"
    reference: str = ""
    checkpoints: int = 4
    learning_rate: LearningRate = field(default_factory=LearningRate)
    families: dict[str, Family] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)


def read_experiment(text: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check an experiment.

    Args:
        text: A path, or the name of a shipped experiment.
        overrides: Further overrides of all runs, ``--section.key=value``.

    Returns:
        The experiment, in which sizes and families have what they inherit.

    Raises:
        ConfigError: It is missing, not TOML, has an unknown key or a wrong value.
    """
    shipped = FOLDER / f"{Path(text).name.removesuffix('.toml')}.toml"
    path = Path(text) if Path(text).is_file() else shipped
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
        raise ConfigError("EXPERIMENT", text, f"a TOML file, or one of {known}")
    values = load_toml(str(path))
    families = _tables("families", values.pop("families", {}), Family)
    sizes = _tables("sizes", values.pop("sizes", {}), Size)
    checked = check_toml(values, Experiment)
    rates = LearningRate(**checked.pop("learning_rate", {}))
    given = Experiment(**checked, families=families, sizes=sizes)
    given = replace(
        given,
        overrides=[*given.overrides, *(item.removeprefix("--") for item in overrides)],
        reference=given.reference or next(iter(families)),
        learning_rate=replace(rates, search=rates.search or list(sizes)),
        families={
            name: replace(
                family,
                model=family.model or f"llama_{name}",
                learning_rates=family.learning_rates or rates.grid,
                ranks=family.ranks or given.ranks,
            )
            for name, family in families.items()
        },
        sizes={
            name: replace(
                size,
                seeds=size.seeds or given.seeds,
                budgets=size.budgets or given.tokens_per_parameter,
            )
            for name, size in sizes.items()
        },
    )
    _check(given)
    return given


def _tables(key: str, tables: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(key, tables, f"at least one table [{key}.NAME]")
    found = {}
    for name, table in tables.items():
        where = f"{key}.{name}"
        if not isinstance(table, dict) or not _NAME.fullmatch(name):
            raise ConfigError(where, table, "a table with a name of letters, digits and . + - _")
        found[name] = kind(**check_toml(table, kind, prefix=f"{where}."))
    return found


def _check(given: Experiment) -> None:
    """Refuse values that cannot be run."""
    names, families = (f"one of {', '.join(table)}" for table in (given.sizes, given.families))
    shipped = "a TOML file of a run, or the name of a shipped one such as debug_full"
    search = given.learning_rate.search
    for key, got, right, want in (
        ("name", given.name, _NAME.fullmatch(given.name), "letters, digits and . + - _"),
        ("config", given.config, Path(find_config(given.config)).is_file(), shipped),
        ("ranks", given.ranks, given.ranks >= 1, "an integer of at least 1"),
        ("checkpoints", given.checkpoints, given.checkpoints >= 0, "an integer of at least 0"),
        ("reference", given.reference, given.reference in given.families, families),
        ("learning_rate.search", search, {*search} <= {*given.sizes}, names),
    ):
        if not right:
            raise ConfigError(key, got, want)
    for name, size in given.sizes.items():
        sides = (size.dim, size.ffn_dim, size.n_layers, size.n_heads)
        if bool(size.flavor) == any(sides) or not (size.flavor or min(sides) > 0):
            want = "either flavor, or positive dim, ffn_dim, n_layers and n_heads"
            raise ConfigError(f"sizes.{name}", size.flavor or sides, want)
        for key, numbers in (("seeds", size.seeds), ("budgets", size.budgets)):
            right = all(isfinite(number) and number >= 0 for number in numbers)
            if not right or len({*numbers}) < len(numbers) or (key == "budgets" and 0 in numbers):
                raise ConfigError(f"sizes.{name}.{key}", numbers, "different positive numbers")
    for name, family in given.families.items():
        other = given.families.get(family.rate_of)
        if family.rate_of and (other is None or other.rate_of):
            want = "a family with a learning rate of its own"
            raise ConfigError(f"families.{name}.rate_of", family.rate_of, want)
        grid = family.learning_rates
        if grid != sorted({*grid}) or len(grid) == 2 or not all(0 < rate < 1e9 for rate in grid):
            want = "one positive value, or at least three in ascending order"
            raise ConfigError("learning_rate.grid", grid, want)
