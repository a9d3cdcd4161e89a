# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The layouts of a run on its ranks that the checks allow, by modelled time per step.

Every layout trains the same rows in a step. Tensor parallelism stays within a node, and a row is
split into pieces of at least `PIECE` tokens. Replicas are none, whole nodes or as many as there can
be. A micro-batch has 1, 2, 4, … or 64 rows, of at most `MOST_TOKENS` tokens together.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.memory import largest_peak, rank_memory, with_kept_inputs
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.costs.step_time import StepTime, step_time
from torchtitan_lr.costs.step_traffic import averaged, step_traffic
from torchtitan_lr.errors import ConfigError

PIECE = 1024  # tokens of a row on a context-parallel rank: fewer make thin products
MOST_TOKENS = 32768  # of a micro-batch on a rank: more make no product faster
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
    """Return the layout with its fastest micro-batch that fits, or with one row where none does.

    The largest that fits has the largest products. In a pipeline it leaves the ranks idle longer,
    so that half of it is tried too.
    """
    smallest = read_run(config, world)
    # Rows of a data-parallel rank in a step, of which a micro-batch has a divisor.
    own = config.training.global_batch_size * smallest.cp // (smallest.shard * smallest.replicas)
    most = min(own, MOST_TOKENS * smallest.cp // smallest.seq_len)
    batches = [n for n in (64, 32, 16, 8, 4, 2) if own % n == 0 and n <= most] + [1]
    limit = hardware.memory_gib * GIB
    fitting: list[Layout] = []
    for batch in batches:
        if batch > 1 and least_peak(config, batch, world) > limit:
            continue
        layout = _model(with_batch(config, batch, world), hardware)
        if layout.peak <= limit or batch == 1:
            fitting.append(layout)
        if len(fitting) == min(smallest.pp, 2):
            break
    best = min(fitting, key=lambda layout: layout.time.total)
    keeping = with_kept_inputs(best.run, limit)
    return best if keeping is best.run else _model(keeping, hardware)


def with_batch(config: Any, batch: int, world: int) -> Run:
    """Return a layout with a number of rows in a micro-batch."""
    if config.parallelism.pipeline_parallel_degree > 1:
        section = replace(config.parallelism, pipeline_parallel_microbatch_size=batch)
        config = replace(config, parallelism=section)
    else:
        config = replace(config, training=replace(config.training, local_batch_size=batch))
    return read_run(config, world)


def least_peak(config: Any, batch: int, world: int) -> float:
    """Return less than the first rank's peak: blocks keep so many times what they keep of a row."""
    # A batch that does not fit is the slowest to rehearse: its loss has most chunks.
    one = rehearse_run(with_batch(config, 1, world))
    blocks = replace(one, block=one.block * batch, ends=0, working=0)
    return 0.98 * rank_memory(with_batch(config, batch, world), 0, blocks)["peak"]


def _model(run: Run, hardware: Hardware) -> Layout:
    rehearsal, ranks = rehearse_run(run), range(run.pp)
    traffic = [averaged(run, rank, step_traffic(run, rank, rehearsal)) for rank in ranks]
    return Layout(run, step_time(run, traffic, hardware, rehearsal), largest_peak(run))
