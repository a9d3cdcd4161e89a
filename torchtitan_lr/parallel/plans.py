# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tensor-parallel plans by name, the settings that a run has, and how a plan is applied."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.one_device import use_plan
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
    use_plan(model, plan)


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
        if width % tp_degree:
            want = f"a divisor of {name} = {width} under the plan {settings.plan}"
            raise ConfigError("parallelism.tensor_parallel_degree", tp_degree, want)
    if settings.comm == "sequence" and any(s % tp_degree for s in seq_lens):
        # Exact: both forms compute the same sums. `checks.support.check_plans` warns.
        settings = replace(settings, comm="all_reduce")
    return settings


def check_gather(gather: str, args: LlamaArgs, settings: TPSettings, tp_degree: int) -> None:
    """Refuse ``parallelism.cp_gather`` of latents that the model lacks, or that the plan splits."""
    if gather != "latents":
        return
    key = "parallelism.cp_gather"
    if not args.low_rank:
        raise ConfigError(key, gather, f"'kv' for llama_{args.family}, which has no latents")
    if tp_degree > 1 and settings.plan != "btp":
        want = (
            f"'kv' under the plan {settings.plan}, or the plan btp, whose ranks have whole latents"
        )
        raise ConfigError(key, gather, want)


def _check_plan(settings: TPSettings, args: LlamaArgs) -> None:
    name, lanes = settings.plan, args.lanes > 1
    fitting = {
        key: plan
        for key, plan in PLANS.items()
        if plan.low_rank == args.low_rank and plan.lanes == lanes
    }
    if name not in fitting:
        want = f"one of auto, {', '.join(fitting)} for llama_{args.family}"
        if lanes:
            want = f"{' or '.join(fitting)}, for llama_{args.family} with caat.lanes = {args.lanes}"
        elif PLANS[name].lanes:
            want = f"another plan, or caat.lanes of more than {args.lanes}"
        raise ConfigError("parallelism.tp_plan", name, want)
    for key in ("norm", "comm", "grouping"):
        value, default = getattr(settings, key), getattr(TPSettings(), key)
        if key not in fitting[name].choices and value != default:
            others = " or ".join(other for other, plan in PLANS.items() if key in plan.choices)
            want = f"{repr(default).lower()}: only the plan {others} has a choice"
            raise ConfigError(f"parallelism.tp_{key}", value, want)


@dataclass(frozen=True)
class Boundary:
    """A rank's message to the next pipeline stage for one sequence: ``rows`` rows."""

    rows: int  # s, or s/T if tokens are sharded
    stream: int  # elements of the residual stream per row: the rank's share, divided by the rows
    latents: tuple[int, ...]  # elements of each latent per row; empty if none are sent
    # Tokens whose stream shards are in a row: T if the latents are token-sharded and the stream is
    # feature-sharded.
    tokens_per_row: int = 1
    lanes: int = 0  # streams (b, s, lanes, d) on the rank; 0 without this dimension

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of a row."""
        return self.rows, self.stream + sum(self.latents)


def stage_boundary(
    args: LlamaArgs, settings: TPSettings, tp_degree: int, seq_len: int, latents: bool
) -> Boundary:
    """Return the shape of a boundary between pipeline stages on one rank.

    LaX also sends the seven ``latents`` that the next block mixes in, if there are blocks on both
    sides: without them the model's output would depend on the stage split.

    ============================  =====  ======  =======================
    plan                          rows   stream  latents (LaX), 7 of
    ============================  =====  ======  =======================
    none (T = 1)                  s      d       r
    none, G lanes at full rank    s      Gd      full rank has none
    caat, G lanes                 s      Gd/T    full rank has none
    btp                           s      d/T     r (replicated)
    btp, ``comm = "sequence"``    s/T    d       r (token-sharded)
    vanilla, vanilla_replicated   s      d       r/T (feature-sharded)
    megatron                      s      d       full rank has none
    megatron, ``"sequence"``      s/T    d       full rank has none
    ============================  =====  ======  =======================
    """
    widths = [args.rank_attention] * 4 + [args.rank_ffn] * 3
    if not (latents and args.model_family.carries_latents):
        widths = []
    if args.lanes > 1:
        lanes = args.lanes // tp_degree
        return Boundary(seq_len, lanes * args.dim, (), lanes=lanes)
    if tp_degree == 1:
        return Boundary(seq_len, args.dim, tuple(widths))
    plan = PLANS[settings.plan]
    if settings.comm == "sequence":
        shared = tp_degree if plan.shards_stream else 1
        return Boundary(seq_len // tp_degree, args.dim, tuple(widths), shared)
    factors = [plan.attention] * 4 + [plan.feed_forward] * 3
    for i in range(len(widths)):
        if factors[i][0] == Shard(0):  # A is split along r
            widths[i] //= tp_degree
    stream = args.dim // tp_degree if plan.shards_stream else args.dim
    return Boundary(seq_len, stream, tuple(widths))
