# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs the randomized SVD's generators without other ranks."""

from torchtitan_lr.optim.tsr.svd import Answer, Result, Steps, Sum


def solve_alone(steps: Steps[Result]) -> Result:
    """Run a generator on one device: every sum is complete, nothing is sharded."""
    answer: Answer = None
    try:
        while True:
            request = steps.send(answer)
            answer = request.tensor if isinstance(request, Sum) else None
    except StopIteration as end:
        result: Result = end.value
        return result
