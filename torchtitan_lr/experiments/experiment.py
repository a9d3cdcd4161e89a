# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The file of an experiment: one TOML, strictly typed. Reading it needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan_lr.config.parse import check_toml, load_toml
from torchtitan_lr.config.paths import SHIPPED
from torchtitan_lr.errors import ConfigError, one_of, require

FOLDER = SHIPPED / "experiments"  # the shipped experiments


@dataclass(frozen=True)
class Family:
    """One of the compared families, ``[families.NAME]``: a model, and possibly an optimizer."""

    model: str = ""  # ``model.name``; by default ``llama_NAME``
    # Overrides of its runs, ``section.key=value``: once read, also those of all runs, and the
    # command line's, which win
    overrides: list[str] = field(default_factory=list)
    # The family's grid; empty for the experiment's
    learning_rates: list[float] = field(default_factory=list)
    ranks: int = 0  # ranks of the family's runs; 0 for the experiment's


@dataclass(frozen=True)
class Size:
    """A shape of the ladder, ``[sizes.NAME]``: a flavor, or the sides of the model."""

    flavor: str = ""  # ``model.flavor``; empty where the sides below are given
    dim: int = 0  # width d of the residual stream; low-rank families have rank d/4
    ffn_dim: int = 0  # hidden width f of the feed-forward
    n_layers: int = 0  # number L of blocks
    n_heads: int = 0
    vocab_size: int = 4096  # rows V of the embedding and of the head
    seeds: list[int] = field(default_factory=list)  # the size's seeds; empty for the experiment's
    # The size's tokens per parameter; empty for the experiment's
    budgets: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """An experiment: its families at its sizes, budgets and seeds."""

    name: str = ""
    config: str = ""  # TOML of all runs, a path or the name of a shipped file
    description: str = ""
    overrides: list[str] = field(default_factory=list)  # overrides of all runs
    ranks: int = 1
    seeds: list[int] = field(default_factory=lambda: [0])  # ``debug.seed`` of the repetitions
    # The budgets; parameters N are those without embedding and head
    tokens_per_parameter: list[float] = field(default_factory=lambda: [20.0])
    # What families share at a size and budget: ``tokens_per_parameter`` (each of its own N),
    # ``tokens`` or ``flops`` of the ``reference``, or ``both`` of these, one run each. Searches are
    # at equal tokens then.
    equal: Literal["tokens_per_parameter", "tokens", "flops", "both"] = "tokens_per_parameter"
    reference: str = ""  # the family with which the others are compared; the first by default
    # Values to try, ascending; one value is used without a search
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    # Sizes at which they are tried; empty for all. The first tries all values, a later one those
    # beside the best; a grid whose best is at its end goes on. Other sizes have the last one's.
    search: list[str] = field(default_factory=list)
    warmup: float = 0.1  # share of the steps in which the learning rate grows
    families: dict[str, Family] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)  # the sizes by name, ascending


def read_experiment(text: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check an experiment; sizes and families have what they inherit."""
    shipped = FOLDER / f"{Path(text).name.removesuffix('.toml')}.toml"
    path = Path(text) if Path(text).is_file() else shipped
    known = (path.stem for path in sorted(FOLDER.glob("*.toml")))
    require(path.is_file(), "EXPERIMENT", text, f"a TOML file, or {one_of(known, text)}")
    values = load_toml(str(path))
    families = _tables("families", values.pop("families", {}), Family)
    sizes = _tables("sizes", values.pop("sizes", {}), Size)
    given = Experiment(**check_toml(values, Experiment))
    last = [item.removeprefix("--") for item in overrides]
    for name, family in families.items():
        families[name] = replace(
            family,
            model=family.model or f"llama_{name}",
            overrides=[*given.overrides, *family.overrides, *last],
            learning_rates=family.learning_rates or given.learning_rates,
            ranks=family.ranks or given.ranks,
        )
    for name, size in sizes.items():
        budgets = size.budgets or given.tokens_per_parameter
        sizes[name] = replace(size, seeds=size.seeds or given.seeds, budgets=budgets)
    given = replace(
        given,
        reference=given.reference or next(iter(families)),
        search=given.search or list(sizes),
        families=families,
        sizes=sizes,
    )
    _check(given)
    return given


def _tables(key: str, tables: Any, kind: Any) -> dict[str, Any]:
    given = isinstance(tables, dict) and tables
    if not given or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(key, tables, f"at least one table [{key}.NAME]")
    return {
        name: kind(**check_toml(table, kind, prefix=f"{key}.{name}."))
        for name, table in tables.items()
    }


def _check(given: Experiment) -> None:
    """Refuse what no run's own check would refuse."""
    for name in (given.name, *given.families, *given.sizes):
        require(name and "/" not in name, "name", name, "a name without /")
    reference = given.reference
    require(reference in given.families, "reference", reference, "one of the families")
    require(0 <= given.warmup <= 1, "warmup", given.warmup, "a share of the steps, from 0 to 1")
    require({*given.search} <= {*given.sizes}, "search", given.search, "some of the sizes")
    for name, size in given.sizes.items():
        require(size.seeds, f"sizes.{name}.seeds", size.seeds, "at least one")
        fits = size.budgets and all(0 < budget < math.inf for budget in size.budgets)
        want = "positive numbers of tokens per parameter, at least one"
        require(fits, f"sizes.{name}.budgets", size.budgets, want)
        alone = not size.flavor or not (size.dim or size.n_layers)
        want = "a flavor or the sides of a model, not both"
        require(alone, f"sizes.{name}.flavor", size.flavor, want)
    for name, family in given.families.items():
        require(family.ranks > 0, f"families.{name}.ranks", family.ranks, "at least 1")
        grid = family.learning_rates
        fits = grid == sorted({*grid}) and len(grid) not in (0, 2)
        want = "one value, or at least three in ascending order"
        require(fits, f"families.{name}.learning_rates", grid, want)
