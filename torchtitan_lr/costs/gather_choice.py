# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The two ways of context parallelism, side by side: keys and values gathered, or latents."""

from dataclasses import replace
from typing import Any

from torchtitan_lr.costs.context_messages import kv_width, latent_flops
from torchtitan_lr.costs.described_run import Run, blocks_of
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.messages import element_size
from torchtitan_lr.costs.step_time import collective_seconds, compute_seconds
from torchtitan_lr.costs.step_traffic import run_context_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.plans import check_gather

GIB = 2**30


def gather_report(run: Run, pp_rank: int, hardware: Hardware) -> dict[str, Any]:
    """Return the costs of each ``parallelism.cp_gather`` that the run could have, and the faster.

    Of a rank and step, beyond attention itself; ``flops`` are for other ranks' keys and values.
    """
    costs: dict[str, dict[str, float]] = {}
    for gather in ("kv", "latents"):
        try:
            check_gather(gather, run.args, run.settings, run.tp)
        except ConfigError:
            continue
        count = run.microbatches * run.accumulation
        size, send_seconds = 0, 0.0
        for row in run_context_traffic(run, pp_rank, gather):
            row = replace(row, calls=count * row.calls, elements=count * row.elements)
            itemsize = element_size(row, run.wire_dtypes)
            size += row.elements * itemsize
            send_seconds += collective_seconds(row, itemsize, run.mesh["cp"], hardware)
        flops = 0
        if gather == "latents":
            of_block = latent_flops(run.args, run.settings, run.tp, run.cp, run.tokens)
            flops = count * blocks_of(run.units_of(pp_rank)) * sum(of_block)
        product_seconds = compute_seconds(flops, hardware)
        costs[gather] = {
            "bytes": size,
            "send_seconds": send_seconds,
            "flops": flops,
            "product_seconds": product_seconds,
            "seconds": send_seconds + product_seconds,  # neither overlaps with anything else
        }
    return {
        "ranks": run.cp,
        "costs": costs,
        "faster": min(costs, key=lambda name: costs[name]["seconds"]),
        "rank": run.args.rank_attention,
        "kv_width": kv_width(run.args, run.settings, run.tp),
    }


def gather_lines(report: dict[str, Any]) -> list[str]:
    """Format what `gather_report` returns."""
    lines = []
    for name, cost in report["costs"].items():
        line = f"context parallelism over {report['ranks']} ranks, {name}: "
        line += f"{cost['bytes'] / GIB:,.3f} GiB in {cost['send_seconds']:.4g} s"
        if cost["flops"]:
            line += f", and {cost['flops'] / 1e12:,.3g} TFLOP in {cost['product_seconds']:.4g} s"
        lines.append(f"{line} (per step, modelled)")
    if "latents" in report["costs"]:
        lines.append(f"  gathering {report['faster']} takes less time on this machine")
        rank, width = report["rank"], report["kv_width"]
        if rank >= width:
            lines[-1] = (
                f"  latents never pay here: their rank, {rank}, is not below the {width} features "
                "of the keys on a tensor-parallel rank"
            )
    return lines
