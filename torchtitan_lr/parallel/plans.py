# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tensor-parallel plans by name, the settings that a run has, and how a plan is applied."""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.errors import require
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.btp import BTP
from torchtitan_lr.parallel.megatron import CAAT, Megatron, Vanilla, VanillaReplicated
from torchtitan_lr.parallel.plan_parts import Plan, TPSettings
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, JobConfig

PLANS: dict[str, type[Plan]] = {
    "btp": BTP,
    "vanilla": Vanilla,
    "vanilla_replicated": VanillaReplicated,
    "megatron": Megatron,
    "caat": CAAT,
}
"""Plans by name; modules from outside add theirs."""


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh, settings: TPSettings) -> None:
    """Turn a model's parameters into DTensors and let it apply them by a plan, in place."""
    # The model, or one pipeline stage, has no wrapper yet; it is on the meta device, or the same on
    # every rank.
    if tp_mesh.size() == 1:
        return
    args: LlamaArgs = model.model_args  # type: ignore[assignment]
    plan = PLANS[settings.plan](args, settings, Ranks.of(tp_mesh))
    names = [name for name, _ in model.named_parameters()]
    parallelize_module(model, tp_mesh, plan.styles(names))
    plan.take_over(model)


def tp_settings(job_config: JobConfig, args: LlamaArgs, tp_degree: int) -> TPSettings:
    """Resolve the settings of ``[parallelism]`` for a run, for the sequences it has."""
    # The only place that does so, a pure function of the configuration: checks and estimates call
    # it before a rank exists, and on a rank whoever gets the configuration alone.
    section: Any = job_config.parallelism
    training = job_config.training
    # fp32 is summed in fp32 anyway.
    half = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize < 4
    wide_sums = half and args.lanes > 1 and args.backward_sum == "float32"
    settings = TPSettings(
        section.tp_plan, section.tp_grouping, section.tp_norm, section.tp_comm, wide_sums
    )
    rows = [training.seq_len]
    if job_config.validation.enable:
        rows.append(job_config.validation.seq_len)
    seq_lens = [seq_len // section.context_parallel_degree for seq_len in rows]
    return resolve_settings(settings, args, tp_degree, *seq_lens)


def resolve_settings(
    settings: TPSettings, args: LlamaArgs, tp_degree: int, *seq_lens: int
) -> TPSettings:
    """Check the settings against the model (ConfigError), and resolve open choices."""
    # ``seq_lens`` are the tokens of a row that tensor-parallel ranks have together. The plan is
    # named, and tokens are not sharded if T does not divide them. At T = 1 the plan is checked too.
    if settings.plan == "auto":
        dense = "caat" if args.lanes > 1 else "megatron"
        settings = replace(settings, plan="btp" if args.low_rank else dense)
    _check_plan(settings, args)
    widths = {f"the model's {n}": width for n, width in PLANS[settings.plan].widths(args).items()}
    if args.lanes > 1:
        widths = {"caat.lanes": args.lanes} | widths
    for name, width in widths.items():
        want = f"a divisor of {name} = {width} under the plan {settings.plan}"
        require(width % tp_degree == 0, "parallelism.tensor_parallel_degree", tp_degree, want)
    if settings.comm == "sequence" and any(s % tp_degree for s in seq_lens):
        # Exact: both forms compute the same sums. `checks.support.check_plans` warns.
        settings = replace(settings, comm="all_reduce")
    return settings


def check_gather(gather: str, args: LlamaArgs, settings: TPSettings, tp_degree: int) -> None:
    """Refuse ``parallelism.cp_gather`` of latents that the model lacks, or that the plan splits."""
    key, latents = "parallelism.cp_gather", gather == "latents"
    want = f"'kv' for llama_{args.family}, which has no latents"
    require(args.low_rank or not latents, key, gather, want)
    whole = tp_degree == 1 or settings.plan == "btp"
    want = f"'kv' under the plan {settings.plan}, or the plan btp, whose ranks have whole latents"
    require(whole or not latents, key, gather, want)


def _check_plan(settings: TPSettings, args: LlamaArgs) -> None:
    """Refuse a plan that is for other models, and settings that the plan does not have."""
    name, lanes = settings.plan, args.lanes > 1
    fitting = ["auto"]
    for other, plan in PLANS.items():
        if plan.low_rank == args.low_rank and plan.lanes == lanes:
            fitting.append(other)
    want = f"{' or '.join(fitting)} for llama_{args.family} with caat.lanes = {args.lanes}"
    require(name in fitting, "parallelism.tp_plan", name, want)
    for key in ("norm", "comm", "grouping"):
        value, default = getattr(settings, key), getattr(TPSettings(), key)
        fits = key in PLANS[name].choices or value == default
        want = f"{repr(default).lower()} under the plan {name}, which has no choice"
        require(fits, f"parallelism.tp_{key}", value, want)
