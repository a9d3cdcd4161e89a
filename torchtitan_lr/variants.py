# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The same job under another plan: full rank, vanilla or bottleneck-aware, from one TOML."""

from collections.abc import Sequence

from torchtitan_lr.config_checks import build_job_config

PLANS = ("full", "vanilla", "vanilla_replicated", "btp")
"""What `derive` makes: llama_full under Megatron's plan, or a low-rank model under the others."""

_ONE_LANE = ["--caat.lanes=1", "--caat.sync_fraction=1.0"]
"""The ordinary model: these plans have no lanes."""

_BTP_DEFAULTS = [
    "--parallelism.tp_norm=online",
    "--parallelism.tp_norm_stat=async",
    "--parallelism.tp_head=plain",
]
"""What only the bottleneck-aware plan may choose."""

_FULL_RANK = [
    *("--model.name=llama_full", "--parallelism.tp_plan=auto", "--parallelism.tp_grouping"),
    *("--low_rank.rank=0", "--low_rank.rank_attention=0", "--low_rank.rank_ffn=0"),
    *("--low_rank.activation=flavor", "--low_rank.lax_gate=identity"),
    *_BTP_DEFAULTS,
]


def derive(config: str, plan: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the overrides that turn a TOML's model and plan into another.

    Full rank takes the flavor's full-rank model; where the TOML keeps the latents for backward,
    which it does not have, it recomputes whole blocks. A TOML of llama_full becomes llama_cola.

    Args:
        config: The TOML file.
        plan: One of `PLANS`.
        overrides: The user's, which are part of what is derived from.

    Raises:
        ConfigError: The TOML or an override cannot be read.
    """
    given = build_job_config([f"--job.config_file={config}", *overrides])
    if plan == "full":
        low_rank = given.activation_checkpoint.mode == "low_rank"
        return [*_FULL_RANK, *_ONE_LANE, *["--activation_checkpoint.mode=full"] * low_rank]
    changes = [f"--parallelism.tp_plan={plan}", *_ONE_LANE]
    if given.model.name == "llama_full":
        changes.append("--model.name=llama_cola")
    if plan != "btp":
        changes += [*_BTP_DEFAULTS, "--parallelism.tp_comm=all_reduce"]
    return changes
