# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's model under other plans, on the same ranks with the same batches and AdamW."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.costs.described_run import Run
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, check_gather, resolve_settings

FULL_RANK = "full"  # the alternative that is a family; ``auto`` selects its plan


def read_plans(text: str) -> list[str]:
    """Read names of alternatives, separated by commas, once the user's module is imported."""
    # Models with lanes have one plan each, and full rank has its own.
    known = [FULL_RANK, *(name for name, plan in PLANS.items() if plan.low_rank and not plan.lanes)]
    plans = text.split(",")
    for plan in plans:
        if plan not in known:
            raise ConfigError("--plans", plan, f"some of {', '.join(known)}")
    return plans


def alternatives(run: Run, plans: Sequence[str]) -> Iterator[tuple[str, Run | ConfigError]]:
    """Yield the run's model under each plan, or the reason why it cannot have it.

    All have one mode of checkpointing: the run's, or ``full`` for ``low_rank`` beside full rank,
    which has no latents to keep. A full-rank model is compared with its flavor's CoLA model.
    """
    config = run.config
    if FULL_RANK in plans and run.checkpointing == "low_rank":
        section = replace(config.activation_checkpoint, mode="full")
        config = replace(config, activation_checkpoint=section)
        check_job_config(config, run.world, "cuda", on_paper=True)
    low = _low_rank(run)
    dense = replace(low, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    for name in plans:
        if name != FULL_RANK and not low.low_rank:
            continue
        plan, args = ("auto", dense) if name == FULL_RANK else (name, low)
        try:
            settings = resolve_settings(TPSettings(plan), args, run.tp, run.seq_len)
        except ConfigError as error:
            yield name, error
            continue
        given = config
        try:
            check_gather(run.gather, args, settings, run.tp)
        except ConfigError:  # this plan has no whole latents to gather
            given = replace(config, parallelism=replace(config.parallelism, cp_gather="kv"))
        yield name, Run(given, run.world, args, settings, baseline=True)


def _low_rank(run: Run) -> LlamaArgs:
    """Return the run's low-rank model without lanes, which these plans do not have."""
    args = replace(run.args, lanes=1, sync_fraction=1.0)
    cola, flavor = FLAVORS["cola"], run.config.model.flavor
    if args.low_rank or flavor not in tuple(cola):  # the file of a shape belongs to one family
        return args
    return replace(cola[flavor], max_seq_len=run.args.max_seq_len)
