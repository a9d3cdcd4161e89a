# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The work of a model's passes, recorded on tensors without data."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.compat.fake import FakeTensorMode
from torchtitan_lr.costs.described_run import Run
from torchtitan_lr.costs.kernels import KernelRecorder, Work, norm_in_one_kernel
from torchtitan_lr.costs.rank_memory import checkpointing_of, workload_of
from torchtitan_lr.costs.rehearsal import Prepare, Workload, build_prepared, fake_ranks
from torchtitan_lr.parallel.recompute import EAGER_MODES, wrapping_period


@dataclass(frozen=True)
class PassWork:
    """Work of a micro-batch on a rank, forward and backward with what checkpointing repeats."""

    # Work of a decoder block; the mean if checkpointing treats blocks differently
    block: tuple[Work, Work]
    ends: tuple[Work, Work]  # work of the embedding, the final norm, the head and the loss


_KNOWN: dict[str, PassWork] = {}


def work_of_run(run: Run, mode: str | None = None) -> PassWork:
    """Record the work of a run's micro-batch; blocks of a compiled model have fused kernels.

    A mode that only the compiler carries out is a straight line between two others.
    """
    section = run.config.activation_checkpoint
    mode = run.checkpointing if mode is None else mode
    if mode not in EAGER_MODES:
        least, most = (work_of_run(run, each) for each in ("full", "none"))
        share = section.memory_budget
        forward, backward, *ends = (
            a.plus(a, -share).plus(b, share)
            for a, b in zip((*least.block, *least.ends), (*most.block, *most.ends), strict=True)
        )
        return PassWork((forward, backward), (ends[0], ends[1]))
    compiled = run.config.compile
    fused = compiled.enable and "model" in compiled.components
    workload = workload_of(run)
    key = repr((workload, replace(section, mode=mode), fused))
    if key not in _KNOWN:
        period = wrapping_period(section, mode)
        prepare = checkpointing_of(run, mode)
        _KNOWN[key] = rehearse_work(workload, fused, prepare, period)
    return _KNOWN[key]


def rehearse_work(
    workload: Workload, fused: bool, prepare: Prepare | None = None, period: int = 1
) -> PassWork:
    """Run a short model forward and backward on tensors without data, and record its kernels.

    It has one and two blocks, or periods of ``selective_ac_option``.
    """
    short = [
        replace(workload, args=replace(workload.args, n_layers=n)) for n in (period, 2 * period)
    ]
    with fake_ranks(workload.tp_degree, workload.cp_degree) as mesh:
        one, two = (_record(each, mesh, prepare) for each in short)
    none, block, ends = Work(), [], []
    for backward in (False, True):
        blocks = two.work(backward, fused).plus(one.work(backward, fused), -1)
        block.append(none.plus(blocks, 1 / period))
        # The trainer compiles block by block: embedding, norm, head and loss run as written.
        less, more = one.work(backward, False), two.work(backward, False)
        ends.append(less.plus(less.plus(more, -1)))
    return PassWork((block[0], block[1]), (ends[0], ends[1]))


def _record(workload: Workload, mesh: DeviceMesh | None, prepare: Prepare | None) -> KernelRecorder:
    with FakeTensorMode():
        model = build_prepared(workload, mesh, prepare)
        tokens, arguments = workload.inputs()
        recorder = KernelRecorder()
        with recorder, norm_in_one_kernel(recorder):
            # The head computes the loss, as in training: its logits exist a chunk at a time.
            loss: Tensor = model(tokens, **arguments)
            recorder.backward = True
            loss.backward()
        return recorder
