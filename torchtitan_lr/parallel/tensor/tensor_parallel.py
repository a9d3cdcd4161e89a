# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensor parallelism: resolves and checks the settings, and applies them to a model."""

from dataclasses import fields, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.plans import PLANS, TPSettings, build_tp_plan
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, JobConfig

_NOT_KEYS = ("loss_parallel", "wide_sums")

__all__ = ["TPSettings", "apply_tensor_parallel", "resolve_settings", "tp_settings"]


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh, settings: TPSettings) -> None:
    """Turn a model's parameters into DTensors and its edges into those of a plan, in place.

    Args:
        model: A `LlamaModel` or a pipeline stage of one, before any other wrapper; on the
            meta device, or with the same full weights on every rank. Nothing is communicated.
        tp_mesh: The one-dimensional mesh of the tensor-parallel ranks; ignored if its size is 1.
        settings: Returned by `resolve_settings`.
    """
    if tp_mesh.size() == 1:
        return
    plan = build_tp_plan(model, settings)
    parallelize_module(model, tp_mesh, plan, src_data_rank=None)
    left = [name for name, p in model.named_parameters() if not hasattr(p, "placements")]
    if left:
        raise RuntimeError(f"the plan {settings.plan} does not place {', '.join(left)}")
    logger.info(f"Applied tensor parallelism over {tp_mesh.size()} ranks: {settings}")


def tp_settings(job_config: JobConfig, args: LlamaArgs, tp_degree: int) -> TPSettings:
    """Resolve the settings of ``[parallelism]`` for a run.

    Args:
        job_config: The run's configuration; its sequence lengths of training and validation are
            checked.
        args: The model's shape.
        tp_degree: Tensor-parallel degree T.

    Raises:
        ConfigError: As `resolve_settings`.
    """
    section, training, validation = (
        job_config.parallelism,
        job_config.training,
        job_config.validation,
    )
    keys = [field.name for field in fields(TPSettings) if field.name not in _NOT_KEYS]
    half = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize < 4
    settings = TPSettings(
        **{key: getattr(section, f"tp_{key}") for key in keys},
        loss_parallel=not section.disable_loss_parallel,
        wide_sums=half and args.lanes > 1 and args.backward_sum == "float32",
    )
    seq_lens = [training.seq_len] + [validation.seq_len] * validation.enable
    return resolve_settings(settings, args, tp_degree, *seq_lens)


def resolve_settings(
    settings: TPSettings, args: LlamaArgs, tp_degree: int, *seq_lens: int
) -> TPSettings:
    """Check the settings against the model, and resolve open choices.

    Args:
        settings: The user's settings.
        args: The model's shape.
        tp_degree: Tensor-parallel degree T; at 1 the plan is checked too.
        *seq_lens: Every sequence length s of the run.

    Returns:
        Settings for `apply_tensor_parallel`: the plan is named, and token sharding is disabled with
        a warning if T does not divide a sequence.

    Raises:
        ConfigError: If the plan does not fit the family, a setting would have no effect under the
            plan, or a width does not divide by T.
    """
    if settings.plan == "auto":
        default = next(plan.name for plan in PLANS.values() if plan.is_default(args))
        settings = replace(settings, plan=default)
    _check_fits(settings.plan, args)
    PLANS[settings.plan].check(settings)
    _check_divisible(settings.plan, args, tp_degree)
    uneven = [s for s in seq_lens if s % tp_degree]
    if settings.comm == "sequence" and uneven:
        # Exact: both forms compute the same sums.
        logger.warning(
            f"parallelism.tp_comm falls back from 'sequence' to 'all_reduce': {tp_degree} ranks "
            f"cannot share {uneven[0]} tokens evenly"
        )
        settings = replace(settings, comm="all_reduce")
    return settings


def _check_fits(name: str, args: LlamaArgs) -> None:
    """Check that the plan supports the model's family and lanes."""
    lanes = args.lanes > 1
    fitting = [p for p in PLANS.values() if p.low_rank == args.low_rank and p.lanes == lanes]
    names = [plan.name for plan in fitting]
    if name in names:
        return
    if lanes:
        what = " or ".join(
            f"{plan.name} (experimental), which auto does not choose"
            if plan.experimental
            else plan.name
            for plan in fitting
        )
        want = f"{what}, for llama_{args.family} with caat.lanes = {args.lanes}"
    elif PLANS[name].lanes:
        want = f"another plan, or caat.lanes of more than {args.lanes}"
    else:
        want = f"one of auto, {', '.join(names)} for llama_{args.family}"
    raise ConfigError("parallelism.tp_plan", name, want)


def _check_divisible(plan: str, args: LlamaArgs, tp_degree: int) -> None:
    if args.lanes > 1 and args.lanes % tp_degree:
        want = f"a divisor of caat.lanes = {args.lanes}"
        raise ConfigError("parallelism.tensor_parallel_degree", tp_degree, want)
    for name, width in PLANS[plan].widths(args).items():
        if width % tp_degree:
            want = f"a divisor of the model's {name} = {width} under the plan {plan}"
            raise ConfigError("parallelism.tensor_parallel_degree", tp_degree, want)
