# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs the randomized SVD's generators without other ranks."""

from torchtitan_lr.optim.tsr.sums import Answer, Result, Rounds, Sum


def solve_alone(rounds: Rounds[Result]) -> Result:
    """Run a generator on one device: every sum is complete, nothing is sharded."""
    answer: Answer = None
    try:
        while True:
            request = rounds.send(answer)
            answer = request.tensor if isinstance(request, Sum) else None
    except StopIteration as end:
        result: Result = end.value
        return result
