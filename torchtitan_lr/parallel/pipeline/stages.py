# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pipeline stages with known boundary shapes and one message per boundary.

By default torch runs the model once to infer the shapes at a boundary, which would run
tensor-parallel collectives, FSDP and compilation before the first step. Here the shapes follow from
the plan. LaX's stream and latents are sent as one tensor: eight small messages would each cost a
latency.

Sends and receives run outside the model, where no forward hook or autograd node identifies them.
The stage therefore marks the tensor of each message with an attribute, which the ledger reads.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dispatch import tree_leaves
from torchtitan_lr.compat.pipelining import SPLITS_BACKWARD, PipelineStage
from torchtitan_lr.parallel.plans import Boundary

_MARK = "_pipeline_boundary"


def _marked(name: str, offset: int, pass_: str) -> Any:
    """Return a method of torch's stage with marks on the tensors of its operations.

    Args:
        name: Of the method, which returns the ``torch.distributed.P2POp`` of a micro-batch.
        offset: Boundary i lies between the stages i and i + 1; stage i's is i + ``offset``.
        pass_: ``forward`` or ``backward``.
    """

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
    """A `PipelineStage` that labels its messages for the ledger; arguments as in torch.

    Where torch's halves of backward are wrong, the first one is the whole, and the second nothing.
    """

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward of a micro-batch, or the half of it that makes the input's gradient."""
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


def build_stage(
    part: nn.Module,
    index: int,
    boundaries: Sequence[Boundary],
    batch: int,
    seq_len: int,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
    head_loss: bool = False,
) -> Stage:
    """Build a stage with static shapes.

    Args:
        part: The stage's part of the model.
        index: Index of the stage, from 0.
        boundaries: All boundaries of the pipeline; boundary i lies between the stages i and i + 1.
        batch: Sequences b of a micro-batch.
        seq_len: Their length s.
        vocab_size: Width V of the logits.
        dtype: Of the activations.
        device: Of this rank.
        group: Process group of the pipeline.
        head_loss: Whether the last stage returns the loss instead of logits.
    """
    empty = partial(torch.empty, device="meta")
    messages = [
        empty((batch, *boundary.shape), dtype=dtype, requires_grad=True) for boundary in boundaries
    ]
    tokens = empty((batch, seq_len), dtype=torch.int64)
    output = empty((batch, seq_len, vocab_size), dtype=dtype)
    if head_loss:
        output = empty((), dtype=torch.promote_types(dtype, torch.float32))
    return Stage(
        part,
        index,
        len(messages) + 1,
        device,
        input_args=[tokens, *messages][index],
        output_args=[*messages, output][index],
        group=group,
    )


def pack_messages(part: nn.Module, before: Boundary | None, after: Boundary | None) -> None:
    """Add hooks to a model part so that it receives and sends one tensor per boundary, in place.

    Only fields of the boundaries that do not depend on the sequence length are used.

    Args:
        part: A `LlamaModel` with the layers of this stage; ``forward(x, *latents)``.
        before: The boundary from which it receives; None for the first stage.
        after: The boundary to which it sends; None for the last stage.
    """
    if before is not None:
        part.register_forward_pre_hook(lambda _, args: unpack(args[0], before))
    if after is not None:
        part.register_forward_hook(lambda _, args, output: pack(output, after))


def pack(output: Tensor | tuple[Tensor, ...], boundary: Boundary) -> Tensor:
    """Pack a stage's output into one message.

    Args:
        output: The residual stream in the blocks' layout (b, s, ...), for LaX followed by latents
            (b, rows, r).
        boundary: Shape of the boundary; decides whether the latents are sent.

    Returns:
        Tensor (b, rows, width), contiguous.
    """
    x, *latents = output if isinstance(output, tuple) else (output,)
    if not boundary.latents:
        latents = []
        if x.ndim == 3 and x.shape[-1] == boundary.stream:
            return x.contiguous()
    stream = x.reshape(x.shape[0], x.shape[1] // boundary.tokens_per_row, boundary.stream)
    # Always copy: torch detaches a stage's output in place, which fails for a view.
    return torch.cat([stream, *latents], dim=-1)


def unpack(message: Tensor, boundary: Boundary) -> tuple[Tensor, ...]:
    """Undo `pack`; in backward, the gradients are packed in the same way.

    Args:
        message: Tensor (b, rows, width).
        boundary: As in `pack`.

    Returns:
        The residual stream in the blocks' layout, and the latents (b, rows, r), contiguous.
    """
    parts = message.split([boundary.stream, *boundary.latents], dim=-1)
    stream, *latents = (part.contiguous() for part in parts)
    batch, rows = message.shape[:2]
    features = (boundary.lanes, -1) if boundary.lanes else (-1,)
    return stream.reshape(batch, rows * boundary.tokens_per_row, *features), *latents
