# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Speed-up of a block by partial synchronization, in closed form (CAAT-Net, appendix C).

The time model has only matrix products and tensor-parallel reductions. The time of products shrinks
with the tensor-parallel degree T, that of reductions does not. One number describes the link's
speed: the operations of a rank in the time in which one payload element is reduced. Payloads are
counted once per reduction, as everywhere in this package.
"""

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.formulas.parameters import ModelShape


def gpt_block_operations(width: int, seq_len: int) -> int:
    """Return a GPT block's forward operations for one sequence (Eq. 29): 24sd² + 4s²d.

    Its feed-forward is two matrices of d × 4d.

    Args:
        width: Hidden size d.
        seq_len: Tokens s.
    """
    return 24 * seq_len * width**2 + 4 * seq_len**2 * width


def llama_block_operations(shape: ModelShape, seq_len: int) -> int:
    """Return our block's forward operations for one sequence: SwiGLU, grouped queries, ranks.

    Args:
        shape: Shape and family of the model.
        seq_len: Tokens s.
    """
    return layer_flops(shape, seq_len).total // FORWARD_AND_BACKWARD


def block_payload(width: int, seq_len: int, fraction: float) -> int:
    """Return the elements of a block's two partial reductions per pass (Eq. 30): 2·int(p·d)·s.

    Args:
        width: Hidden size d.
        seq_len: Tokens s.
        fraction: Synchronization factor p.
    """
    return 2 * int(fraction * width) * seq_len


def block_time(
    operations: int, payload: float, tp_degree: int, ratio: float, overlapped: bool = False
) -> float:
    """Return the time of one pass of a block, in operations of one rank (Eq. 31).

    Args:
        operations: Of the whole block, on all ranks together.
        payload: Elements reduced.
        tp_degree: T.
        ratio: Operations of a rank in the time of reducing one payload element.
        overlapped: Whether reductions overlap with products, so that only the longer counts.
    """
    _check(tp_degree, ratio)
    compute, communication = operations / tp_degree, payload * ratio
    return max(compute, communication) if overlapped else compute + communication


def speed_up(
    operations: int,
    payload: float,
    fraction: float,
    tp_degree: int,
    ratio: float,
    overlapped: bool = False,
) -> float:
    """Return the speed-up of a block over full synchronization (Eq. 32).

    With `gpt_block_operations` and without overlap this is (12d + 2s + RT) / (12d + 2s + pRT).

    Args:
        operations: Of the whole block.
        payload: Elements reduced at p = 1.
        fraction: Synchronization factor p.
        tp_degree: T.
        ratio: As in `block_time`, R.
        overlapped: As in `block_time`.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError("fraction", fraction, "a number from 0 to 1")
    whole = block_time(operations, payload, tp_degree, ratio, overlapped)
    return whole / block_time(operations, fraction * payload, tp_degree, ratio, overlapped)


def hiding_fraction(operations: int, payload: float, tp_degree: int, ratio: float) -> float:
    """Return the largest p at which overlapped reductions take no longer than products (Eq. 33).

    With `gpt_block_operations` this is min(1, (12d + 2s) / (RT)). A smaller p does not save time.

    Args:
        operations: Of the whole block.
        payload: Elements reduced at p = 1.
        tp_degree: T.
        ratio: As in `block_time`, R.
    """
    _check(tp_degree, ratio)
    return min(1.0, operations / (tp_degree * payload * ratio))


def _check(tp_degree: int, ratio: float) -> None:
    if tp_degree < 1:
        raise ConfigError("tp_degree", tp_degree, "a positive integer")
    if not ratio > 0:
        raise ConfigError("ratio", ratio, "a positive number of operations an element")
