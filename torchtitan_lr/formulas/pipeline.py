# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Traffic over the boundaries between pipeline stages."""

from collections.abc import Collection, Sequence

from torchtitan_lr.formulas.traffic import Traffic


def pipeline_traffic(
    boundaries: Sequence[int], local_stages: Collection[int], batch: int, microbatches: int
) -> list[Traffic]:
    """Return a rank's messages per pass: one per boundary, micro-batch and direction.

    Args:
        boundaries: Elements per sequence; boundary i lies between the stages i and i + 1.
        local_stages: The rank's stages. Neighbouring stages on one rank (the turn of a V-shaped
            schedule) send no message.
        batch: Sequences of a micro-batch.
        microbatches: Micro-batches of the pass.

    Returns:
        Rows with the scope ``boundary i`` on the mesh dimension ``pp``.
    """
    rows = []
    for index, of_a_sequence in enumerate(boundaries):
        sends = index in local_stages
        if sends == (index + 1 in local_stages):
            continue
        elements = microbatches * batch * of_a_sequence
        there, back = ("send", "recv") if sends else ("recv", "send")
        scope = f"boundary {index}"
        rows += [
            Traffic(scope, "forward", there, "activation", microbatches, elements, "pp"),
            Traffic(scope, "backward", back, "activation", microbatches, elements, "pp"),
        ]
    return rows
