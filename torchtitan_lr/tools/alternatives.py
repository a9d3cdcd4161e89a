# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Alternatives of a run for comparing estimates: full rank, vanilla tensor parallelism, BTP."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.run import Run, with_checkpointing
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.tensor.tensor_parallel import TPSettings, resolve_settings
from torchtitan_lr.tools.variants import read_modes, shared_mode

ALTERNATIVES = ("full", "vanilla", "btp")
"""The alternatives of a run: full rank, and the low-rank model under two plans."""


def alternative_modes(config: Any, world: int, named: str = "") -> dict[str, str]:
    """Return the mode of activation checkpointing of every alternative of a run.

    Args:
        config: Configuration of the run.
        world: Number of ranks.
        named: Modes of single alternatives, in the syntax of `read_modes`; the others use the
            shared mode.

    Raises:
        ConfigError: The alternative or mode does not exist, or the mode is not supported.
    """
    shared = shared_mode(config.activation_checkpoint.mode, ALTERNATIVES)
    modes = dict.fromkeys(ALTERNATIVES, shared) | read_modes(named, ALTERNATIVES)
    if modes["full"] == "low_rank":
        want = "full=MODE with another mode: full rank has no low-rank activations"
        raise ConfigError("--checkpointing", "full=low_rank", want)
    for mode in set(modes.values()) - {"low_rank"}:
        check_job_config(with_checkpointing(config, mode), world, "cuda", on_paper=True)
    return modes


def alternatives(run: Run, modes: Mapping[str, str]) -> Iterator[tuple[str, Run | ConfigError]]:
    """Yield full rank, vanilla and BTP with the same shape, ranks and batches, and AdamW.

    A full-rank model is compared with the CoLA model of its flavor. For an unsupported plan the
    error is yielded instead of a run.

    Args:
        run: The run.
        modes: Mode of activation checkpointing by alternative, see `alternative_modes`.
    """
    low = replace(run.args, lanes=1, sync_fraction=1.0)  # these plans have no lanes
    if not low.low_rank:
        cola = FLAVORS["cola"]
        flavor = run.config.model.flavor
        if flavor in cola:
            low = replace(cola[flavor], max_seq_len=run.args.max_seq_len)
    dense = replace(low, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    wanted = {
        "full": (TPSettings("megatron"), dense),
        "vanilla": (TPSettings("vanilla"), low),
        "btp": (TPSettings("btp"), low),
    }
    for name, (plan, args) in wanted.items():
        if name != "full" and not low.low_rank:
            continue
        try:
            settings = resolve_settings(plan, args, run.tp, run.seq_len)
        except ConfigError as error:
            yield name, error
        else:
            config = with_checkpointing(run.config, modes[name])
            yield name, Run(config, run.world, args, settings, baseline=True)
