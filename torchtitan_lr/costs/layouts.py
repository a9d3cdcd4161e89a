# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The layouts of a run on its ranks that the checks allow, by modelled time per step.

Every layout trains the same rows in a step. Tensor parallelism stays within a node, and a row is
split into pieces of at least `PIECE` tokens. Replicas are none, whole nodes or as many as there can
be. Of micro-batches of 1, 2, 4, … rows a layout has the fastest that fits.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.memory import rank_memory
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.rehearsal import Passes, Rehearsal, rehearse_run
from torchtitan_lr.costs.step_time import StepTime, step_time
from torchtitan_lr.costs.step_traffic import step_traffic
from torchtitan_lr.errors import ConfigError

PIECE = 1024  # tokens of a row on a context-parallel rank: fewer make thin products
LARGEST = 64  # rows of a micro-batch
GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """A layout with its fastest micro-batch that fits, else with its smallest one."""

    run: Run
    time: StepTime
    peak: int  # bytes of the rank that needs most


@dataclass
class Layouts:
    """What a search over layouts found."""

    fitting: list[Layout] = field(default_factory=list)  # the fastest first
    too_large: list[Layout] = field(default_factory=list)  # the smallest first
    refused: Counter[str] = field(default_factory=Counter)  # layouts by the key that refuses them


def find_layouts(
    run: Run, hardware: Hardware, check: Callable[[Any], None], splits: bool = True
) -> Layouts:
    """Try all layouts of a run, or those alone that split neither products, rows nor the model.

    ``check`` raises a ConfigError for a configuration that cannot run.
    """
    found = Layouts()
    for config in _configs(run, hardware, splits):
        try:
            check(config)
        except ConfigError as error:
            found.refused[error.key] += 1
            continue
        layout = _fastest(config, run.world, hardware)
        fits = layout.peak <= hardware.memory_gib * GIB
        (found.fitting if fits else found.too_large).append(layout)
    found.fitting.sort(key=lambda layout: layout.time.total)
    found.too_large.sort(key=lambda layout: layout.peak)
    return found


def _configs(run: Run, hardware: Hardware, splits: bool) -> Iterator[Any]:
    """Yield the configuration of every layout, with one row in a micro-batch."""
    node, rows = hardware.devices_per_node, run.tokens_per_step // run.seq_len
    most = (node, run.args.n_layers, max(1, run.seq_len // PIECE)) if splits else (1, 1, 1)
    for tp in _divisors(math.gcd(run.world, node), most[0]):
        for pp in _divisors(run.world // tp, most[1]):
            for cp in _divisors(run.world // tp // pp, most[2]):
                rest = run.world // tp // pp // cp
                in_a_node = max(1, node // tp // cp)
                replicas = {1, rest} | ({rest // in_a_node} if rest % in_a_node == 0 else set())
                if run.config.outer.every:  # another number trains another way
                    replicas = {run.replicas} if rest % run.replicas == 0 else set()
                for count in sorted(replicas):
                    local = max(1, rows // rest) if pp > 1 else 1
                    yield _laid_out(run.config, tp, pp, cp, count, rows, local)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _laid_out(config: Any, tp: int, pp: int, cp: int, replicas: int, rows: int, local: int) -> Any:
    section = replace(
        config.parallelism,
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=pp,
        context_parallel_degree=cp,
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=-1,
        pipeline_parallel_microbatch_size=1,
        module_fqns_per_model_part=None,
        pipeline_parallel_layers_per_stage=None,
    )
    training = replace(config.training, global_batch_size=rows, local_batch_size=local)
    return replace(config, parallelism=section, training=training)


def _fastest(config: Any, world: int, hardware: Hardware) -> Layout:
    """Return the layout with its fastest micro-batch that fits, or with one row where none does."""
    tried: list[Layout] = []
    room = hardware.memory_gib * GIB
    smallest = read_run(config, world)
    rehearsals = _Rehearsals(smallest)
    # Rows of a data-parallel rank in a step, of which a micro-batch has a divisor.
    own = config.training.global_batch_size * smallest.cp // (smallest.shard * smallest.replicas)
    batch = 1
    while batch <= LARGEST and own % batch == 0:
        run = read_run(_with_batch(config, batch), world)
        rehearsal = rehearsals.of(batch)
        peak = max(rank_memory(run, rank, rehearsal)["peak"] for rank in _ends(run))
        if peak > room and tried:
            break
        traffic = []
        for rank in range(run.pp):
            rows = step_traffic(run, rank, rehearsal)
            passes = [row for row in rows if row.pass_ != "optimizer"]
            mean = run.optimizer.mean_traffic(rank) + run.outer.mean_traffic(rank)
            traffic.append(passes + mean)
        tried.append(Layout(run, step_time(run, traffic, hardware, rehearsal), peak))
        if peak > room:
            break
        batch *= 2
    return min(tried, key=lambda layout: layout.time.total)


def _ends(run: Run) -> set[int]:
    """Return the pipeline ranks that may need most: the first keeps most, the last has the head."""
    return {0, run.pp - 1}


def _with_batch(config: Any, batch: int) -> Any:
    if config.parallelism.pipeline_parallel_degree > 1:
        section = replace(config.parallelism, pipeline_parallel_microbatch_size=batch)
        return replace(config, parallelism=section)
    return replace(config, training=replace(config.training, local_batch_size=batch))


class _Rehearsals:
    """The rehearsals of one layout by rows of a micro-batch.

    Two are run. Bytes, FLOPs and kernels are affine in the rows, so that they give all others.
    """

    def __init__(self, run: Run) -> None:
        self.rows = max(1, 4096 // run.seq_len)  # of the first; the second has twice as many
        self.run = run

    def of(self, batch: int) -> Rehearsal:
        one, two = (self._rehearsed(n) for n in (self.rows, 2 * self.rows))
        return _extended(one, two, batch / self.rows - 1)

    def _rehearsed(self, batch: int) -> Rehearsal:
        run = replace(self.run)
        run.microbatch = batch
        return rehearse_run(run)


def _extended(one: Rehearsal, two: Rehearsal, share: float) -> Rehearsal:
    """Return what lies at a share of the way from one rehearsal to another, or beyond."""

    def mean(a: Passes, b: Passes) -> Passes:
        return [x.plus(x, -share).plus(y, share) for x, y in zip(a, b, strict=True)]

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    def rows(a: list[Traffic], b: list[Traffic]) -> list[Traffic]:
        pairs = zip(a, b, strict=True)
        return [replace(x, elements=round(between(x.elements, y.elements))) for x, y in pairs]

    return replace(
        one,
        block=between(one.block, two.block),
        ends=round(between(one.ends, two.ends)),
        working=round(max(0.0, between(one.working, two.working))),
        block_work=mean(one.block_work, two.block_work),
        ends_work=mean(one.ends_work, two.ends_work),
        sent_again=rows(one.sent_again, two.sent_again),
        sent_again_in_halves=rows(one.sent_again_in_halves, two.sent_again_in_halves),
    )
