# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Derive the same job under another plan from one TOML: full rank, vanilla, bottleneck-aware."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.removed import refuse_removed
from torchtitan_lr.config.schema import AC_MODES
from torchtitan_lr.errors import ConfigError

COMPARED_PLANS: tuple[str, ...] = ("full", "vanilla", "vanilla_replicated", "btp")
"""What `derive` makes: llama_full under Megatron's plan, or a low-rank model under the others.

`read_plans` takes those that a configuration registers too.
"""

ALTERNATIVES = ("full", "vanilla", "btp")
"""The default alternatives of a run: full rank, and the low-rank model under two plans."""

FULL_RANK = "full"
"""The target that is a family; ``auto`` selects its plan."""

_ONE_LANE = ["--caat.lanes=1", "--caat.sync_fraction=1.0"]
"""Overrides that remove lanes, which these plans do not support."""

_DEFAULTS = {
    "norm": "--parallelism.tp_norm=online",
    "head": "--parallelism.tp_head=plain",
    "comm": "--parallelism.tp_comm=all_reduce",
}
"""Overrides of settings that only some plans support."""

_KEYS_AND_VALUES = "--parallelism.cp_gather=kv"
"""Override for plans whose ranks have no whole latents to gather."""

_FULL_RANK = [
    *("--model.name=llama_full", "--parallelism.tp_plan=auto", "--parallelism.tp_grouping"),
    *("--low_rank.rank=0", "--low_rank.rank_attention=0", "--low_rank.rank_ffn=0"),
    *("--low_rank.activation=flavor", "--low_rank.lax_gate=identity"),
    *(_DEFAULTS[key] for key in ("norm", "head")),
    _KEYS_AND_VALUES,
]


def derive(config: str, plan: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the overrides that change a TOML's model and plan.

    Full rank uses the flavor's full-rank model. A TOML of llama_full becomes llama_cola. The mode
    of activation checkpointing stays; `shared_mode` returns the mode for all models.

    Args:
        config: The TOML file.
        plan: Returned by `read_plans`.
        overrides: The user's, which are part of what is derived from.

    Raises:
        ConfigError: The TOML or an override cannot be read.
    """
    given = build_job_config([f"--job.config_file={config}", *overrides])
    if plan == FULL_RANK:
        return [*_FULL_RANK, *_ONE_LANE]
    # Late: both import torch, and --help does not wait.
    from torchtitan_lr.models.families import find_family
    from torchtitan_lr.parallel import plans

    changes = [f"--parallelism.tp_plan={plan}", *_ONE_LANE]
    family = find_family(given.model.name)
    if family is not None and not family.low_rank:
        changes.append("--model.name=llama_cola")
    if plan != "btp":
        changes.append(_KEYS_AND_VALUES)
    choices = plans.PLANS[plan].choices
    return [*changes, *(default for key, default in _DEFAULTS.items() if key not in choices)]


def read_plans(text: str, config: str | None, overrides: Sequence[str] = ()) -> list[str]:
    """Read the plans that are to be compared.

    Args:
        text: Plans separated by commas: some of `COMPARED_PLANS`, and of those that the module of
            ``experimental.custom_import`` registers.
        config: The TOML file; None where there are several, or none.
        overrides: The user's.

    Raises:
        ConfigError: There is no such plan.
    """
    plans, known = text.split(","), COMPARED_PLANS
    if config is not None and not set(plans) <= set(known):
        with suppress(ConfigError):  # it is reported where the run is read
            known = _known_plans(config, overrides)
    for plan in plans:
        if plan not in known:
            refuse_removed({"parallelism.tp_plan": plan})
            raise ConfigError("--plans", plan, f"some of {', '.join(known)}")
    return plans


def _known_plans(config: str, overrides: Sequence[str]) -> tuple[str, ...]:
    build_job_config([f"--job.config_file={config}", *overrides])  # imports the module
    from torchtitan_lr.parallel import plans

    # Models with lanes have one plan each, and full rank has its own.
    names = [n for n, plan in plans.PLANS.items() if plan.low_rank and not plan.lanes]
    return (*COMPARED_PLANS, *(name for name in names if name not in COMPARED_PLANS))


def shared_mode(mode: str, plans: Collection[str]) -> str:
    """Return the mode of activation checkpointing for a comparison of plans.

    What a run repeats in backward belongs to its mode, not to its plan: two runs of different modes
    differ in both. The configured mode holds for all plans that have it. Full rank has no latents
    to keep; with it, ``low_rank`` and its like become ``full`` for all.

    Args:
        mode: The configured mode.
        plans: The compared plans, out of `COMPARED_PLANS`.
    """
    return "full" if mode == "low_rank" and FULL_RANK in plans else mode


def read_modes(text: str, columns: Collection[str]) -> dict[str, str]:
    """Parse modes of activation checkpointing for single columns of a comparison.

    Args:
        text: ``COLUMN=MODE`` pairs separated by commas, or empty.
        columns: The compared columns.

    Raises:
        ConfigError: A column or mode does not exist.
    """
    modes: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        column, _, mode = item.partition("=")
        if column not in columns or mode not in AC_MODES:
            want = f"COLUMN=MODE, of {', '.join(columns)} and {', '.join(AC_MODES)}"
            raise ConfigError("--checkpointing", item, want)
        modes[column] = mode
    return modes
