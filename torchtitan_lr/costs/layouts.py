# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The layouts of a run on its ranks that the checks allow, by modelled time per step.

Every layout trains the same rows in a step. Tensor parallelism stays within a node, and a row is
split into pieces of at least `PIECE` tokens. Replicas are none, whole nodes or as many as there can
be. A micro-batch has 1, 2, 4, … or 64 rows, of at most `MOST_TOKENS` tokens together, and a
pipeline as many micro-batches as its schedule wants.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.memory import largest_peak, rank_memories, with_kept_inputs
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.costs.step_time import StepTime, step_time
from torchtitan_lr.costs.step_traffic import averaged, step_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.stage_split import takes

PIECE = 1024  # tokens of a row on a context-parallel rank: fewer make thin products
MOST_TOKENS = 32768  # of a micro-batch on a rank: more make no product faster
GIB = 2**30


@dataclass
class Modelled:
    """A run on a kind of machine, as the model has it; lists are by pipeline rank."""

    run: Run
    hardware: Hardware

    @cached_property
    def memory(self) -> list[dict[str, int]]:
        """Bytes of a rank by part, see `rank_memory`."""
        return rank_memories(self.run)

    @cached_property
    def sent(self) -> list[list[Traffic]]:
        """What a rank sends in an ordinary step."""
        rehearsal = rehearse_run(self.run)
        return [step_traffic(self.run, rank, rehearsal) for rank in range(self.run.pp)]

    @cached_property
    def time(self) -> StepTime:
        """Seconds of an average step."""
        mean = [averaged(self.run, rank, rows) for rank, rows in enumerate(self.sent)]
        return step_time(self.run, mean, self.hardware, rehearse_run(self.run))

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return largest_peak(self.memory)

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.peak <= self.hardware.memory_gib * GIB


def with_inputs(modelled: Modelled) -> Modelled:
    """Return a run as its ``activation_checkpoint.keep_inputs`` = auto decides there."""
    keeping = with_kept_inputs(modelled.run, modelled.hardware.memory_gib * GIB)
    return modelled if keeping is modelled.run else Modelled(keeping, modelled.hardware)


def find_layouts(
    run: Run, hardware: Hardware, check: Callable[[Any], None], splits: bool = True
) -> tuple[list[Modelled], Counter[str]]:
    """Try all layouts of a run, or those alone that split neither products, rows nor the model.

    A layout has its fastest micro-batch that fits, else its smallest one. ``check`` raises a
    ConfigError for a configuration that cannot run; the second result counts them by key.
    """
    found, refused = [], Counter[str]()
    for config in _configs(run, hardware, splits):
        try:
            check(config)
        except ConfigError as error:
            refused[error.key] += 1
        else:
            found.append(_fastest(read_run(config, run.world), hardware))
    return found, refused


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


def _fastest(run: Run, hardware: Hardware) -> Modelled:
    """Return a layout with its fastest micro-batch.

    The largest that fits has the largest products. In a pipeline it leaves the ranks idle longer,
    so that half of it is tried too.
    """
    # Rows of a data-parallel rank in a step, of which a micro-batch has a divisor.
    own = run.config.training.global_batch_size * run.cp // (run.shard * run.replicas)
    most = min(own, MOST_TOKENS * run.cp // run.seq_len)
    batches = [n for n in (64, 32, 16, 8, 4, 2) if own % n == 0 and n <= most] + [1]
    if run.pp > 1:
        schedule = run.config.parallelism.pipeline_parallel_schedule
        batches = [n for n in batches if takes(schedule, run.pp, own // n)]
    found: list[Modelled] = []
    for batch in batches:
        tried = Modelled(_with_batch(run, batch), hardware)
        if batch == 1 or tried.fits:
            found.append(tried)
        if len(found) == min(run.pp, 2):
            break
    return with_inputs(min(found, key=lambda layout: layout.time.total))


def _with_batch(run: Run, batch: int) -> Run:
    """Return a layout with a number of rows in a micro-batch."""
    config = run.config
    if run.pp > 1:
        section = replace(config.parallelism, pipeline_parallel_microbatch_size=batch)
        return replace(run, config=replace(config, parallelism=section))
    training = replace(config.training, local_batch_size=batch)
    return replace(run, config=replace(config, training=training))
