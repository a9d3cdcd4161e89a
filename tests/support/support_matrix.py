# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``docs/support_matrix.toml``: its lists, its refusals, and combinations drawn from it."""

import math
import random
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, combinations, islice, product
from pathlib import Path
from typing import Any

import tomli

PATH = Path(__file__).resolve().parents[2] / "docs/support_matrix.toml"
GLOBAL_BATCH = 16
MICRO_BATCHES = 4  # of a pipeline, at most
NONE = "none"

Combination = dict[str, str]
"""A value of every axis."""


class SupportMatrix:
    def __init__(self, path: Path = PATH) -> None:
        content = tomli.loads(path.read_text())
        self.axes: dict[str, dict[str, dict[str, Any]]] = content["axes"]
        self.rules: list[dict[str, Any]] = content["refused"]
        self._values = {axis: list(values) for axis, values in self.axes.items()}

    def refusals(self, combination: Combination) -> list[dict[str, Any]]:
        """Return the rules that refuse a full or partial combination."""
        return [rule for rule in self.rules if _refuses(rule, combination)]

    def draw(self, source: random.Random) -> Combination:
        """Draw a value for every axis, whether refused or not."""
        return {axis: source.choice(values) for axis, values in self._values.items()}

    @cached_property
    def every_draw(self) -> list[Combination]:
        """Return combinations that have every working pair; ``--full`` trains all of them."""
        source, missing = random.Random(0), set(self.working_pairs)
        chosen: list[Combination] = []
        for ranks in (4, 8):  # most need at most four
            for cell in sorted(missing):
                alone = dict.fromkeys(self.axes, NONE) | dict(cell)
                if cell not in missing or world_size(alone) > ranks:
                    continue
                drawn = (self.draw(source) | dict(cell) for _ in range(4000))
                candidates = list(islice((c for c in drawn if self._fits(c, ranks)), 40))
                if candidates:
                    chosen.append(
                        max(candidates, key=lambda c: len(missing.intersection(pairs(c))))
                    )
                    missing.difference_update(pairs(chosen[-1]))
        return chosen

    @cached_property
    def working_pairs(self) -> set[Any]:
        """Return every pair of values in at least one supported combination."""
        # A rule refuses values that are used together, and never NONE.
        found = set()
        for pair in combinations(sorted(self.axes), 2):
            tried = {
                axis: list(values) if axis in pair or NONE not in values else [NONE]
                for axis, values in self.axes.items()
            }
            for drawn in product(*tried.values()):
                combination = dict(zip(tried, drawn, strict=True))
                if not self.refusals(combination):
                    found.add(tuple((axis, combination[axis]) for axis in pair))
        return found

    def _fits(self, combination: Combination, ranks: int) -> bool:
        if not 1 < world_size(combination) <= ranks:
            return False
        return not any(_refuses(rule, combination) for rule in self.rules)

    def arguments(self, combination: Combination, backend: str = "aot_eager") -> list[str]:
        """Return the trainer's arguments for a combination on `world_size` ranks."""
        replicas = 2 if combination["data"] in ("hsdp", "replicas") else 1
        accumulated = 2 if combination["accumulation"] != NONE else 1
        local = GLOBAL_BATCH // data_degree(combination) // accumulated
        chosen = [self.axes[axis][value]["arguments"] for axis, value in combination.items()]
        return [
            *chain.from_iterable(chosen),
            f"--training.global_batch_size={GLOBAL_BATCH}",
            f"--training.local_batch_size={local}",
            f"--parallelism.data_parallel_replicate_degree={replicas}",
            f"--parallelism.tensor_parallel_degree={_degree(combination, 'tensor')}",
            f"--parallelism.pipeline_parallel_degree={_degree(combination, 'pipeline')}",
            f"--parallelism.pipeline_parallel_microbatch_size={max(1, local // MICRO_BATCHES)}",
            f"--compile.backend={backend}",
        ]

    def reference(self, combination: Combination) -> Combination:
        """Return the same training in one process, or in one for each replica that trains apart."""
        kept = ("family", "precision", "optimizer", "text", "rates", "outer")
        alone = {axis: combination[axis] if axis in kept else NONE for axis in self.axes}
        if (replicas := _replicas_apart(combination)) != NONE:
            # Accumulation changes which rows a replica has.
            alone |= {"data": replicas, "accumulation": combination["accumulation"]}
        return alone

    def table(self) -> str:
        """Return the lists of ``docs/choose.md``: every axis with its values, every refusal."""
        lists = []
        for axis, values in self.axes.items():
            titles = [value["title"] for name, value in values.items() if name != NONE]
            lists.append(f"- `{axis}`: {'; '.join(titles)}")
        notes = [f"{i}. {self._note(rule)}" for i, rule in enumerate(self.rules, 1)]
        return "\n".join([*lists, "", "All go together but these:", "", *notes])

    def _title(self, axis: str, value: str) -> str:
        return str(self.axes[axis][value]["title"])

    def _note(self, rule: dict[str, Any]) -> str:
        parts = []
        for axis, values in rule["when"].items():
            others = [self._title(axis, v) for v in self.axes[axis] if v not in (NONE, *values)]
            if values == [NONE]:
                parts.append(f"no `{axis}`")
            elif len(values) > 2 and len(others) < 2:
                parts.append(" but ".join([f"any `{axis}`", *others]))
            else:
                parts.append(" or ".join(self._title(axis, value) for value in values))
        return f"{' with '.join(parts)} (`{rule['key']}`): {rule['why']}."


def _refuses(rule: dict[str, Any], combination: Combination) -> bool:
    return all(combination.get(axis) in values for axis, values in rule["when"].items())


def _replicas_apart(combination: Combination) -> str:
    """Return the data axis of as many replicas, if outer steps make their number matter."""
    several = combination["data"] in ("hsdp", "replicas") and combination["outer"] != NONE
    return "replicas" if several else NONE


def pairs(combination: Combination) -> Iterator[Any]:
    return combinations(sorted(combination.items()), 2)


def data_degree(combination: Combination) -> int:
    return {NONE: 1, "fsdp": 2, "hsdp": 4, "replicas": 2}[combination["data"]]


def world_size(combination: Combination) -> int:
    """Return the number of ranks: 2 per used dimension, 2 x 2 for HSDP."""
    split = (_degree(combination, axis) for axis in ("tensor", "pipeline", "context"))
    return data_degree(combination) * math.prod(split)


def _degree(combination: Combination, axis: str) -> int:
    return 1 if combination[axis] == NONE else 2


def neighbour(matrix: SupportMatrix, combination: Combination) -> Combination:
    """Return a combination with one dimension of the mesh less, not compiled, which works too."""
    for axis in ("context", "pipeline", "tensor", "data"):
        less = _replicas_apart(combination) if axis == "data" else NONE
        near = combination | {axis: less, "compile": NONE}
        if combination[axis] != NONE and not matrix.refusals(near):
            return near
    raise ValueError(f"{combination} has no neighbour")
