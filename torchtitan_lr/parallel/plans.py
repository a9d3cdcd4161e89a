# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensor parallelism: the settings, the plans by name, their checks, and how one is applied.

A plan is a function that returns ``{module: (placements, edges)}`` for the arguments of a model and
the settings of a run. The entry in `PLANS` says beside it what must be known without a model: what
it fits, which widths the ranks must divide, and what a rank sends to the next pipeline stage. The
formula of the same name in `formulas.tensor_parallel` states its traffic independently.

Parameters become DTensors. Activations stay plain local tensors throughout: the edges read their
weights by `collectives.local` and call the collectives themselves, which spares DTensor's dispatch
per operation and compiles as one graph.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lr.collectives import FEATURES, TOKENS, Edge, Ranks
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import EmbedEdge, HeadEdge, Stream
from torchtitan_lr.models.lanes import LaneColumnEdge, LaneRowEdge
from torchtitan_lr.models.linears import ColumnEdge, DownEdge, MixEdge, RowEdge, UpEdge
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, JobConfig

EdgeFactory = Callable[[DeviceMesh], nn.Module]
"""Builds the edge of a plan, given the tensor-parallel mesh."""

Splits = dict[str, tuple[Mapping[str, Placement], Mapping[str, EdgeFactory]]]
"""By module name: the placements of its parameters, and its new edges by their names in it."""


@dataclass(frozen=True)
class TPSettings:
    """The tensor-parallel settings of `[parallelism]`; the fields are its `tp_*` keys.

    `config.schema` describes them. Two follow from other keys: whether the loss works on
    sharded logits, and whether CAAT-Net's backward sums in fp32 while it sends half precision.
    """

    plan: str = "auto"
    grouping: bool = True
    norm: Literal["online", "sync"] = "online"
    comm: Literal["all_reduce", "sequence"] = "all_reduce"
    head: Literal["plain", "scatter"] = "plain"
    loss_parallel: bool = True
    wide_sums: bool = False

    @classmethod
    def read(cls, section: Any, **more: Any) -> "TPSettings":
        """Read the ``tp_*`` keys that a section has; the others have their defaults."""
        names = [field.name for field in fields(cls) if hasattr(section, f"tp_{field.name}")]
        return cls(**{name: getattr(section, f"tp_{name}") for name in names}, **more)


def btp(args: LlamaArgs, settings: TPSettings) -> Splits:
    """Bottleneck-aware (BOOST): ranks communicate in the r-wide bottleneck.

    The residual stream is sharded along d. Every A is row-parallel: forward communicates only the
    sum of its r-wide products over the ranks. Every B is column-parallel and its input, the
    latents, is replicated: backward communicates only the r-wide gradient of the latents. Attention
    heads, SwiGLU and residual additions work on shards.
    """
    sequence = settings.comm == "sequence"
    down = on_ranks(
        DownEdge,
        grouped=settings.grouping,
        sequence=sequence,
        online=settings.norm == "online",
    )
    up = on_ranks(UpEdge, grouped=settings.grouping, sequence=sequence)
    blocks = low_rank_blocks(args, settings, down, up, on_ranks(MixEdge, sharded=sequence))
    if settings.head == "scatter":
        return blocks | model_ends(settings, on_ranks(EmbedEdge), "scatter", Shard(0))
    return blocks | model_ends(settings, on_ranks(EmbedEdge), "features")


def vanilla(args: LlamaArgs, settings: TPSettings) -> Splits:
    """Split each pair of factors as Megatron splits an MLP: the baseline of BTP.

    A is column-parallel and B row-parallel, so messages are as wide as a linear's output. The
    residual stream and other d- or f-wide activations are replicated; only the latents are sharded,
    along r. The fair form reduce-scatters q, k and v over the heads, so that each rank computes its
    own heads, and gathers attention's output before A_o. In BOOST's baseline
    (`vanilla_replicated`), which all-reduces q, k and v, every rank computes all heads.
    """
    grouped = settings.grouping
    heads = FEATURES if PLANS[settings.plan].shards_heads else None
    blocks = low_rank_blocks(
        args,
        settings,
        on_ranks(ColumnEdge, grouped=grouped),
        on_ranks(RowEdge),
        on_ranks(MixEdge, sharded=True),
        down_o=on_ranks(ColumnEdge, grouped=grouped, dim=heads),
        up_qkv=on_ranks(RowEdge, dim=heads),
    )
    return blocks | model_ends(settings, on_ranks(EmbedEdge, gather=True))


def megatron(args: LlamaArgs, settings: TPSettings) -> Splits:
    """Megatron-LM at full rank: q, k, v, gate and up column-parallel, o and down row-parallel.

    Between the pairs the residual stream is replicated (Megatron-LM, section 3) or sharded along
    the tokens (Korthikanti et al., section 4.2.2), where the norms run on token shards too.
    """
    sequence = settings.comm == "sequence"
    dim = TOKENS if sequence else None
    blocks = dense_blocks(on_ranks(ColumnEdge, dim=dim), on_ranks(RowEdge, dim=dim))
    embed = on_ranks(EmbedEdge, gather=True, sequence=sequence)
    return blocks | model_ends(settings, embed, "tokens" if sequence else "replicated")


def caat(args: LlamaArgs, settings: TPSettings) -> Splits:
    """CAAT-Net: Megatron's placements, with a residual stream for every lane (`models.lanes`)."""
    row = on_ranks(LaneRowEdge, args=args, wide=settings.wide_sums)
    embed = on_ranks(EmbedEdge, lanes=args.lanes, wide=settings.wide_sums)
    blocks = dense_blocks(on_ranks(LaneColumnEdge), row)
    return blocks | model_ends(settings, embed, "lanes")


@dataclass(frozen=True)
class Plan:
    """An entry of `PLANS`.

    Attributes:
        split: The plan.
        low_rank: Whether it splits factorised linears, or dense ones.
        lanes: Whether it is for models with CAAT-Net's lanes.
        factors: Placements of A and B, for factorised linears: Shard(0), Shard(1) or Replicate().
        shards_stream: Whether a rank holds d/T features of the residual stream and sends them to
            the next stage. The norms' weights in the blocks are sharded in the same way.
        shards_latents: Whether it sends r/T features of each of LaX's latents.
        shards_heads: Whether a rank computes its share of the heads, or all heads.
        choices: Fields of `TPSettings` with an effect; others must keep their defaults.
    """

    split: Callable[[LlamaArgs, TPSettings], Splits]
    low_rank: bool = True
    lanes: bool = False
    factors: tuple[Placement, Placement] = (Shard(1), Shard(0))
    shards_stream: bool = False
    shards_latents: bool = False
    shards_heads: bool = True
    choices: Set[str] = frozenset()

    def widths(self, args: LlamaArgs) -> dict[str, int]:
        """Return the widths that T must divide, by name: those of sharded dimensions."""
        a, b = self.factors
        widths: dict[str, int] = {}
        if self.shards_heads:
            widths |= {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads}
        widths["dim"] = args.dim  # of the embedding, in every plan
        if a == Shard(1) or b == Shard(0):
            widths |= {"kv_dim": args.kv_dim, "ffn_dim": args.ffn_dim}
        widths["vocab_size"] = args.vocab_size  # of the head, in every plan
        if a == Shard(0) or b == Shard(1):
            widths |= {"rank_attention": args.rank_attention, "rank_ffn": args.rank_ffn}
        return widths


_COLUMN_ROW = Shard(0), Shard(1)

PLANS = {
    "btp": Plan(btp, shards_stream=True, choices={"grouping", "norm", "comm", "head"}),
    "vanilla": Plan(vanilla, factors=_COLUMN_ROW, shards_latents=True, choices={"grouping"}),
    "vanilla_replicated": Plan(
        vanilla, factors=_COLUMN_ROW, shards_latents=True, shards_heads=False, choices={"grouping"}
    ),
    "megatron": Plan(megatron, low_rank=False, choices={"comm"}),
    "caat": Plan(caat, low_rank=False, lanes=True),
}
"""Plans by name, those of `config.schema.BUILT_IN_PLANS`; `register_plan` adds others."""


def register_plan(name: str, plan: Plan) -> None:
    """Register a plan from outside the package, also as a value of ``parallelism.tp_plan``.

    Raises:
        ValueError: Another plan has the name.
    """
    if name == "auto" or name in PLANS:
        raise ValueError(f"the name {name!r} of a tensor-parallel plan is taken")
    PLANS[name] = plan
    # The command line knows plans by this list, which is there before torch is.
    if name not in TP_PLANS:
        TP_PLANS.append(name)


def on_ranks(edge: type[Edge], **options: Any) -> EdgeFactory:
    """Return a factory of an edge, given its options."""
    return lambda mesh: edge(Ranks.of(mesh), **options)


def low_rank_blocks(
    args: LlamaArgs,
    settings: TPSettings,
    down: EdgeFactory,
    up: EdgeFactory,
    mix: EdgeFactory | None = None,
    **attention: EdgeFactory,
) -> Splits:
    """Return placements and edges of low-rank blocks: every A and B, and the norms' weights.

    Args:
        args: The model's arguments.
        settings: The settings; the plan's entry says how A, B and the stream are placed.
        down: The edge that ends a chunk: applies A of a group.
        up: The edge that starts a chunk: applies B of a group.
        mix: The edge of families with carried latents, not used for others.
        **attention: Edges of attention that differ from these, by name.
    """
    plan = PLANS[settings.plan]
    a, b = plan.factors
    lax = {"mix": mix} if mix is not None and args.model_family.carries_latents else {}
    of_attention = {"down_qkv": down, "up_qkv": up, "down_o": down, "up_o": up}
    of_ffn = {"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up}
    linear: dict[str, Placement] = {"A.weight": a, "B.weight": b, "gate": Replicate()}
    return _blocks(
        Shard(0) if plan.shards_stream else Replicate(),
        dict.fromkeys(("wq", "wk", "wv", "wo", "w1", "w2", "w3"), linear),
        of_attention | attention | lax,
        of_ffn | lax,
    )


def dense_blocks(column: EdgeFactory, row: EdgeFactory) -> Splits:
    """Return placements and edges of a full-rank block: column-, then row-parallel linears.

    Args:
        column: The edge of q, k, v and of gate, up; weights Shard(0).
        row: The edge of o and of down; weights Shard(1).
    """
    linears = {
        name: {"weight": Shard(1) if name in ("wo", "w2") else Shard(0)}
        for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    }
    return _blocks(
        Replicate(), linears, {"qkv": column, "o": row}, {"gate_up": column, "down": row}
    )


def _blocks(
    norm: Placement,
    linears: Mapping[str, Mapping[str, Placement]],
    attention: Mapping[str, EdgeFactory],
    feed_forward: Mapping[str, EdgeFactory],
) -> Splits:
    splits: Splits = {
        "layers.*.attention_norm": ({"weight": norm}, {}),
        "layers.*.ffn_norm": ({"weight": norm}, {}),
        "layers.*.attention": ({}, attention),
        "layers.*.feed_forward": ({}, feed_forward),
    }
    for name, placements in linears.items():
        parent = "feed_forward" if name in ("w1", "w2", "w3") else "attention"
        splits[f"layers.*.{parent}.{name}"] = placements, {}
    return splits


def model_ends(
    settings: TPSettings,
    embed: EdgeFactory,
    stream: Stream = "replicated",
    norm: Placement = Replicate(),  # noqa: B008
) -> Splits:
    """Return both ends of the model: the embedding sharded along d, the head along V.

    Args:
        settings: The settings.
        embed: The embedding's edge.
        stream: Layout of the residual stream in front of the head.
        norm: Placement of the final norm's weight.
    """
    head = on_ranks(HeadEdge, stream=stream, loss_parallel=settings.loss_parallel)
    return {
        "tok_embeddings": ({"weight": Shard(1)}, {"embed": embed}),
        "norm": ({"weight": norm}, {}),
        "output": ({"weight": Shard(0)}, {"head": head}),
    }


@dataclass
class EdgeParallel(ParallelStyle):
    """Distribute the parameters of a module and replace its edges.

    Args:
        placements: Placement by parameter name, relative to the module. A parameter that is None
            (the gate of a linear without one) is skipped.
        edges: The new edge by the edge's name in the module.
    """

    placements: Mapping[str, Placement]
    edges: Mapping[str, EdgeFactory]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            parameter = getattr(owner, leaf)
            if parameter is not None:
                # Every rank has the same full value (none on the meta device): no broadcast.
                sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
                owner.register_parameter(leaf, nn.Parameter(sharded))
        for name, build in self.edges.items():
            module.get_submodule(name)  # raises for a name that is no edge
            module.register_module(name, build(device_mesh))
        return module


def build_tp_plan(model: nn.Module, settings: TPSettings) -> dict[str, ParallelStyle]:
    """Return the styles of a model or of one pipeline stage, for ``parallelize_module``."""
    args: LlamaArgs = model.model_args  # type: ignore[assignment]
    splits = PLANS[settings.plan].split(args, settings)
    # `parallelize_module` warns of names that a stage does not have.
    stage = {name for name, child in model.named_children() if child is not None}
    return {name: EdgeParallel(*s) for name, s in splits.items() if name.split(".")[0] in stage}


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
    parallelize_module(model, tp_mesh, build_tp_plan(model, settings), src_data_rank=None)
    left = [name for name, p in model.named_parameters() if not hasattr(p, "placements")]
    if left:
        raise RuntimeError(f"the plan {settings.plan} does not place {', '.join(left)}")
    logger.info(f"Applied tensor parallelism over {tp_mesh.size()} ranks: {settings}")


def tp_settings(job_config: JobConfig, args: LlamaArgs, tp_degree: int) -> TPSettings:
    """Resolve the settings of ``[parallelism]`` for a run, for the sequences of its configuration.

    All that reads a run's settings calls this: checks, parallelize functions, pipeline, estimate
    and the run's record.

    Raises:
        ConfigError: As `resolve_settings`.
    """
    section, training = job_config.parallelism, job_config.training
    # fp32 is summed in fp32 anyway.
    half = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize < 4
    settings = TPSettings.read(
        section,
        loss_parallel=not section.disable_loss_parallel,
        wide_sums=half and args.lanes > 1 and args.backward_sum == "float32",
    )
    seq_lens = [training.seq_len]
    if job_config.validation.enable:
        seq_lens.append(job_config.validation.seq_len)
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
    uneven = [s for s in seq_lens if s % tp_degree]
    if settings.comm == "sequence" and uneven:
        # Exact: both forms compute the same sums.
        logger.warning(
            f"parallelism.tp_comm falls back from 'sequence' to 'all_reduce': {tp_degree} ranks "
            f"cannot share {uneven[0]} tokens evenly"
        )
        settings = replace(settings, comm="all_reduce")
    return settings


def _check_plan(settings: TPSettings, args: LlamaArgs) -> None:
    """Check that the plan supports the model, and has a choice where the settings make one."""
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
    for key in ("norm", "head", "comm", "grouping"):
        value, default = getattr(settings, key), getattr(TPSettings(), key)
        if key not in fitting[name].choices and value != default:
            others = " or ".join(other for other, plan in PLANS.items() if key in plan.choices)
            want = f"{repr(default).lower()}: only the plan {others} has a choice"
            raise ConfigError(f"parallelism.tp_{key}", value, want)


@dataclass(frozen=True)
class Boundary:
    """A rank's message to the next pipeline stage for one sequence: ``rows`` rows.

    Args:
        rows: s, or s/T if tokens are sharded.
        stream: Elements of the residual stream per row: the rank's share, divided by ``rows``.
        latents: Elements of each latent per row; empty if no latents are sent.
        tokens_per_row: Number of tokens whose stream shards are in a row: T if the latents are
            token-sharded and the stream is feature-sharded, else 1.
        lanes: CAAT-Net: number of streams (b, s, lanes, d) on the rank; 0 if the stream has no such
            dimension.
    """

    rows: int
    stream: int
    latents: tuple[int, ...]
    tokens_per_row: int = 1
    lanes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of a row."""
        return self.rows, self.stream + sum(self.latents)


def stage_boundary(
    args: LlamaArgs, settings: TPSettings, tp_degree: int, seq_len: int, latents: bool
) -> Boundary:
    """Return the shape of a boundary between pipeline stages on one rank.

    A rank sends its part of the residual stream. LaX also sends the seven latents that the next
    block mixes in: without them the model's output would depend on the stage split.

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

    Args:
        args: The model's arguments.
        settings: The tensor-parallel plan; ignored at T = 1.
        tp_degree: T.
        seq_len: Tokens s of a sequence.
        latents: Whether there are blocks on both sides, so that LaX's latents are sent.
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
    if plan.shards_latents:
        widths = [width // tp_degree for width in widths]
    stream = args.dim // tp_degree if plan.shards_stream else args.dim
    return Boundary(seq_len, stream, tuple(widths))
