# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pipeline parallelism: torchtitan's `pipeline_llm` with our stages and an exactly normalized loss.

torchtitan's pipelines backpropagate the summed loss and divide only the logged value, so their
gradients are too large by the number of tokens. Here the loss function divides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Shard

from torchtitan_lr.compat.dispatch import tree_leaves
from torchtitan_lr.compat.pipelining import (
    SPLITS_BACKWARD,
    PipelineSchedule,
    PipelineStage,
    forward_only,
)
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.data_parallel import synchronize_gradients
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, tp_settings
from torchtitan_lr.parallel.stage_split import layers_before_boundaries
from torchtitan_lr.titan.base import (
    TORCH_DTYPE_MAP,
    BaseModelArgs,
    JobConfig,
    LossFunction,
    ParallelDims,
)
from torchtitan_lr.titan.specs import ParallelizeFunction, pipeline_llm, stages_built_by

# Sends and receives run outside the model, where no forward hook or autograd node identifies them.
_MARK = "_pipeline_boundary"


def _marked(name: str, offset: int, pass_: str) -> Any:
    """Return a method of torch's stage with marks on the tensors of its operations."""
    # Boundary i lies between the stages i and i + 1; stage i's is i + ``offset``.

    def operations_of(stage: PipelineStage, microbatch: int) -> list[Any]:
        operations: list[Any] = getattr(PipelineStage, name)(stage, microbatch)
        for operation in operations:
            scope = f"boundary {stage.stage_index + offset}"
            setattr(operation.tensor, _MARK, (scope, pass_))
        return operations

    return operations_of


def boundary_of(arguments: Any) -> tuple[str, str] | None:
    """Return scope and pass of a marked tensor among an operator's arguments, or None."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and hasattr(leaf, _MARK):
            found: tuple[str, str] = getattr(leaf, _MARK)
            return found
    return None


class Stage(PipelineStage):
    """A `PipelineStage` that labels its messages for the ledger; arguments as in torch."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward of a micro-batch, or the half of it that makes the input's gradient."""
        # Where torch's halves are wrong, the first one is the whole, and the second nothing.
        full_backward = full_backward or not SPLITS_BACKWARD
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the half of a micro-batch's backward that makes the weights' gradients."""
        if SPLITS_BACKWARD:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    get_fwd_recv_ops = _marked("get_fwd_recv_ops", -1, "forward")
    get_fwd_send_ops = _marked("get_fwd_send_ops", 0, "forward")
    get_bwd_recv_ops = _marked("get_bwd_recv_ops", 0, "backward")
    get_bwd_send_ops = _marked("get_bwd_send_ops", -1, "backward")


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


def pack_messages(part: nn.Module, before: Boundary | None, after: Boundary | None) -> None:
    """Add hooks to a model part so that it receives and sends one tensor per boundary, in place."""
    # Eight small messages, of LaX's stream and latents, would each cost a latency.
    if before is not None:
        part.register_forward_pre_hook(lambda _, args: unpack(args[0], before))
    if after is not None:
        part.register_forward_hook(lambda _, args, output: pack(output, after))


def pack(output: Tensor | tuple[Tensor, ...], boundary: Boundary) -> Tensor:
    """Pack a stage's output into one message (b, rows, width), contiguous."""
    # The output is the stream in the blocks' layout (b, s, ...), for LaX followed by latents (b,
    # rows, r), which are sent if the boundary has some.
    x, *latents = output if isinstance(output, tuple) else (output,)
    if not boundary.latents:
        latents = []
        if x.ndim == 3 and x.shape[-1] == boundary.stream:
            return x.contiguous()
    stream = x.reshape(x.shape[0], x.shape[1] // boundary.tokens_per_row, boundary.stream)
    # Always copy: torch detaches a stage's output in place, which fails for a view.
    return torch.cat([stream, *latents], dim=-1)


def unpack(message: Tensor, boundary: Boundary) -> tuple[Tensor, ...]:
    """Undo `pack`: return the stream and the latents, contiguous; gradients are packed likewise."""
    parts = message.split([boundary.stream, *boundary.latents], dim=-1)
    stream, *latents = (part.contiguous() for part in parts)
    batch, rows = message.shape[:2]
    features = (boundary.lanes, -1) if boundary.lanes else (-1,)
    return stream.reshape(batch, rows * boundary.tokens_per_row, *features), *latents


@dataclass
class Pipeline:
    """This rank's stages and schedules; all ranks call the same methods with the same batches."""

    job_config: JobConfig
    args: LlamaArgs
    settings: TPSettings
    device: torch.device
    group: Any
    loss_fn: LossFunction  # the sum over tokens
    tokens: float | Tensor = 1.0  # divides the training loss: valid tokens of the global batch
    is_last_round: bool = True  # of those that a step accumulates; set before each batch
    parts: dict[int, nn.Module] = field(default_factory=dict)  # of the model, by stage
    schedule: PipelineSchedule = field(init=False)  # of training, calls ``loss``
    _evaluations: dict[tuple[int, ...], PipelineSchedule] = field(default_factory=dict)

    def loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return a micro-batch's share of the loss: its token sum divided by ``tokens``."""
        loss: Tensor = self.loss_fn(prediction, labels) / self.tokens
        return loss

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
        return len(layers_before_boundaries(self.job_config, self.args.n_layers)) + 1

    def build_stage(self, part: nn.Module, index: int, batch: int, seq_len: int) -> Stage:
        """Build a stage with static shapes, for micro-batches (batch, seq_len)."""
        # Without shapes torch runs the model once to infer them, with tensor-parallel collectives,
        # FSDP and compilation, before the first step.
        empty = partial(torch.empty, device="meta")
        dtype = TORCH_DTYPE_MAP[self.job_config.training.mixed_precision_param]
        messages = []
        for boundary in stage_boundaries(self.job_config, self.args, seq_len, self.settings):
            messages.append(empty((batch, *boundary.shape), dtype=dtype, requires_grad=True))
        tokens = empty((batch, seq_len), dtype=torch.int64)
        loss = empty((), dtype=torch.promote_types(dtype, torch.float32))
        stage = Stage(
            part,
            index,
            len(messages) + 1,
            self.device,
            input_args=[tokens, *messages][index],
            output_args=[*messages, loss][index],
            group=self.group,
        )
        stage.enable_reductions = lambda: synchronize_gradients([part], self.is_last_round)
        return stage

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, divisor: Tensor, **arguments: Any
    ) -> Tensor:
        """Run forward and backward of a batch (b, s), in micro-batches of the pipeline's own."""
        # The ``divisor`` is the valid tokens of the global batch. Upstream divides the loss that it
        # reports, but not the one that it backpropagates.
        self.tokens = divisor
        return self._summed(self.schedule.step, tokens, labels, arguments)

    def _summed(
        self, run: Callable[..., Any], tokens: Tensor, labels: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Run a schedule and return the sum of its losses; 0 without the last stage."""
        last = self.stages - 1 in self.parts
        losses: list[Tensor] = []
        run(
            *((tokens,) if 0 in self.parts else ()),
            **arguments,
            target=labels if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        if not last:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().to(self.device)  # FSDP puts them on the host

    def evaluate(self, tokens: Tensor, labels: Tensor, **arguments: Tensor) -> Tensor:
        """Return the summed loss of a batch (b, s) of any size; 0 without the last stage."""
        batch, seq_len = tokens.shape
        # The last batch of a validation set may be short.
        size = self.job_config.parallelism.pipeline_parallel_microbatch_size
        size = 1 if batch % size else size
        key = batch // size, size, seq_len
        if key not in self._evaluations:
            # Of a kind for any number of micro-batches, with the same stages per rank.
            kind: Callable[..., PipelineSchedule] = ScheduleLoopedBFS
            if isinstance(self.schedule, PipelineScheduleSingle):
                kind = ScheduleGPipe
            elif isinstance(self.schedule, ScheduleZBVZeroBubble):
                kind = ScheduleZBVZeroBubble
            # With stages of its own, because their receive buffers differ in size.
            stages = [self.build_stage(part, i, size, seq_len) for i, part in self.parts.items()]
            schedule = kind(
                stages if len(stages) > 1 else stages[0],
                n_microbatches=batch // size,
                loss_fn=self.loss_fn,
                scale_grads=False,
            )
            self._evaluations[key] = forward_only(schedule)
        return self._summed(self._evaluations[key].eval, tokens, labels, arguments)


def pipeline_llama(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[Pipeline, list[nn.Module], bool, bool]:
    """Split a model into pipeline stages; torchtitan's TrainSpec defines signature and results."""
    # Returns the pipeline, this rank's parts of the model, and whether they include the first and
    # the last stage.
    args, group = cast(LlamaArgs, model_args), parallel_dims.get_mesh("pp").get_group()
    settings = tp_settings(job_config, args, parallel_dims.tp)
    pipeline = Pipeline(job_config, args, settings, device, group, loss_fn)
    size = job_config.parallelism.pipeline_parallel_microbatch_size
    seq_len = job_config.training.seq_len // parallel_dims.cp

    # torchtitan also passes the stages' number, device and group, which `pipeline` knows.
    def build(part: nn.Module, index: int, stages: int, device: torch.device, group: Any) -> Stage:
        pipeline.parts[index] = part
        return pipeline.build_stage(part, index, size, seq_len)

    with stages_built_by(build):
        schedule, model_parts, has_first, has_last = pipeline_llm(
            model, parallel_dims, job_config, device, model_args, parallelize_fn, pipeline.loss
        )
    pipeline.schedule = schedule
    pipeline.parts = dict(zip(pipeline.parts, model_parts, strict=True))  # parallelized
    # None in front of the first stage and behind the last one.
    boundaries = [None, *stage_boundaries(job_config, args, seq_len, settings), None]
    for index, part in pipeline.parts.items():
        pack_messages(part, boundaries[index], boundaries[index + 1])
    return pipeline, model_parts, has_first, has_last


def stage_boundaries(
    job_config: JobConfig, args: LlamaArgs, seq_len: int, settings: TPSettings
) -> list[Boundary]:
    """Return all boundaries of a run's pipeline on one rank, for sequences of ``seq_len``.

    LaX also sends the seven latents that the next block mixes in, if there are blocks on both
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
    degree = job_config.parallelism.tensor_parallel_degree  # T
    plan = PLANS[settings.plan]
    latents = (args.rank_attention,) * 4 + (args.rank_ffn,) * 3
    if degree > 1 and plan.factors[0] == Shard(0):  # of A, along r
        latents = tuple(rank // degree for rank in latents)
    if args.lanes > 1:
        lanes = args.lanes // degree
        boundary = Boundary(seq_len, lanes * args.dim, (), lanes=lanes)
    elif degree > 1 and settings.comm == "sequence":
        tokens_per_row = degree if plan.shards_stream else 1
        boundary = Boundary(seq_len // degree, args.dim, latents, tokens_per_row)
    else:
        stream = args.dim // degree if plan.shards_stream else args.dim
        boundary = Boundary(seq_len, stream, latents)
    found = []
    for before in layers_before_boundaries(job_config, args.n_layers):
        mixes = args.model_family.carries_latents and 0 < before < args.n_layers
        found.append(boundary if mixes else replace(boundary, latents=()))
    return found
