# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How much faster partial synchronization makes a block, in closed form (CAAT-Net, appendix C).

Time is matrix products and tensor parallelism's reductions, nothing else. Products shrink with the
tensor-parallel degree T, a reduction's time does not. The link's speed enters as one number: how
many operations a rank does in the time in which one element of a payload is reduced. Payloads are
counted as everywhere in this package, once per reduction.
"""

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.formulas.parameters import ModelShape


def gpt_block_operations(width: int, seq_len: int) -> int:
    """Operations of a GPT block's forward pass for one sequence (Eq. 29): 24sd² + 4s²d.

    Its feed-forward is two matrices of d × 4d.

    Args:
        width: Hidden size d.
        seq_len: Tokens s.
    """
    return 24 * seq_len * width**2 + 4 * seq_len**2 * width


def llama_block_operations(shape: ModelShape, seq_len: int) -> int:
    """Operations of our block's forward pass for one sequence: SwiGLU, grouped queries, ranks.

    Args:
        shape: Shape and family of the model.
        seq_len: Tokens s.
    """
    return layer_flops(shape, seq_len).total // FORWARD_AND_BACKWARD


def block_payload(width: int, seq_len: int, fraction: float) -> int:
    """Elements that a block's two partial reductions sum in one pass (Eq. 30): 2·int(p·d)·s.

    Args:
        width: Hidden size d.
        seq_len: Tokens s.
        fraction: Synchronization factor p.
    """
    return 2 * int(fraction * width) * seq_len


def block_time(
    operations: int, payload: float, tp_degree: int, ratio: float, overlapped: bool = False
) -> float:
    """Time of one pass of a block, in operations of one rank (Eq. 31).

    Args:
        operations: Of the whole block, on all ranks together.
        payload: Elements reduced.
        tp_degree: T.
        ratio: Operations a rank does while one element of a payload is reduced.
        overlapped: Whether reductions run beside the products, so that the longer counts.
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
    """How many times faster a block is than with everything synchronized (Eq. 32).

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
    """Largest p at which overlapped reductions take no longer than the products (Eq. 33).

    With `gpt_block_operations` this is min(1, (12d + 2s) / (RT)): where p is that small, nothing
    is won by sharing less.

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
