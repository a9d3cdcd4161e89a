# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The same run at full rank and under other tensor-parallel plans, to compare estimates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.run import Run, with_checkpointing
from torchtitan_lr.estimate.variants import FULL_RANK, read_modes, shared_mode
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.recompute.activation_checkpoint import MODES
from torchtitan_lr.parallel.tensor.tensor_parallel import TPSettings, resolve_settings

ALTERNATIVES = ("full", "vanilla", "btp")
"""What a run is compared with by default: full rank, and the low-rank model under two plans."""


def alternative_modes(
    config: Any, world: int, named: str = "", plans: Sequence[str] = ALTERNATIVES
) -> dict[str, str]:
    """Return the mode of activation checkpointing of every alternative of a run.

    Args:
        config: The run's.
        world: Its ranks.
        named: Modes of single alternatives, as `read_modes` reads them; the others have the one
            that all models have.
        plans: The alternatives, as `tools.variants.read_plans` returns them.

    Raises:
        ConfigError: The alternative or mode does not exist, or the mode is not supported.
    """
    shared = shared_mode(config.activation_checkpoint.mode, plans)
    modes = dict.fromkeys(plans, shared) | read_modes(named, plans)
    if FULL_RANK in modes and MODES[modes[FULL_RANK]].low_rank:
        want = "full=MODE with another mode: full rank has no low-rank activations"
        raise ConfigError("--checkpointing", f"{FULL_RANK}={modes[FULL_RANK]}", want)
    for mode in set(modes.values()):
        if not MODES[mode].low_rank:
            check_job_config(with_checkpointing(config, mode), world, "cuda", on_paper=True)
    return modes


def alternatives(run: Run, modes: Mapping[str, str]) -> Iterator[tuple[str, Run | ConfigError]]:
    """Yield the alternatives with the same shape, ranks, batches, and AdamW.

    Full rank has the plan that ``auto`` gives it. A full-rank model is compared with the CoLA model
    of its flavor. Instead of a plan that cannot be carried out comes the reason.

    Args:
        run: The run.
        modes: Mode of activation checkpointing by alternative, see `alternative_modes`.
    """
    low = replace(run.args, lanes=1, sync_fraction=1.0)  # these plans have no lanes
    if not low.low_rank:
        cola = FLAVORS["cola"]
        flavor = run.config.model.flavor
        if flavor in tuple(cola):  # the file of a shape belongs to one family
            low = replace(cola[flavor], max_seq_len=run.args.max_seq_len)
    dense = replace(low, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    for name, mode in modes.items():
        if name != FULL_RANK and not low.low_rank:
            continue
        plan, args = ("auto", dense) if name == FULL_RANK else (name, low)
        try:
            settings = resolve_settings(TPSettings(plan), args, run.tp, run.seq_len)
        except ConfigError as error:
            yield name, error
        else:
            config = with_checkpointing(run.config, mode)
            yield name, Run(config, run.world, args, settings, baseline=True)
