# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes that a replica sends over its network device, beside the formulas of TSR-Adam's traffic."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.support.faults.fleet import Fleet
from tests.support.faults.orders import PLAIN, REFRESH, Strike, notes
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.estimate.run import read_run
from torchtitan_lr.estimate.traffic import bytes_by_dim, optimizer_traffic, tsr_names

_STEPS = 3
"""Refreshes that are measured."""


@dataclass(frozen=True)
class Row:
    """Bytes that one replica sends.

    Attributes:
        what: In what.
        formula: Payload of its collectives by the formula; 0 where there is none.
        payload: Bytes of the tensors given to collectives.
        wire: Bytes that the device has sent: payload, headers, acknowledgements.
    """

    what: str
    formula: int
    payload: int
    wire: int


def formulas(arguments: Sequence[str], replicas: int) -> dict[str, int]:
    """Return the bytes that TSR-Adam gives to the replicas' sums, of a plain step and of a refresh.

    Args:
        arguments: The command line of a replica.
        replicas: Number of replicas.
    """
    plain = ("--fault_tolerance.no_enable",)
    degree = f"--parallelism.data_parallel_replicate_degree={replicas}"
    run = read_run(build_job_config([*arguments, *plain, degree]), replicas)
    everything = range(len(tsr_names(run, 0)))
    return {
        kind: sum(
            bytes_by_dim(optimizer_traffic(run, 0, due), run.wire_dtypes)["dp_replicate"].values()
        )
        for kind, due in ((PLAIN, ()), (REFRESH, everything))
    }


def measure(fleet: Fleet, expected: dict[str, int]) -> list[Row]:
    """Count what the last replica of a fleet sends, and what its heal costs the first.

    Args:
        fleet: Two replicas on two machines; it was not started.
        expected: Result of `formulas`.

    Raises:
        RunFailedError: The fleet does not go on.
    """
    last = len(fleet.setting.places) - 1
    fleet.start_lighthouse()
    for replica in range(last + 1):
        fleet.start(replica)
    fleet.wait_full()
    fleet.wait_steps(_STEPS * fleet.setting.interval)
    steps, joins, votes, pauses = (
        notes(fleet.orders, last, name)[1:] for name in ("step", "join", "vote", "pause")
    )
    rows = [
        _row(f"{kind} step, its sums", expected[kind], _of_kind(fleet, steps, kind))
        for kind in (PLAIN, REFRESH)
    ]
    rows += [
        Row(what, 0, 0, round(median(note["sent"] for note in alike)))
        for what, alike in (("quorum of the same members", joins), ("vote", votes))
    ]
    seconds = median(note["seconds"] for note in pauses)
    beats = round(median(note["sent"] for note in pauses) / seconds)
    rows.append(Row("heartbeat, per second", 0, 0, beats))
    fleet.kill(last)
    known = len(notes(fleet.orders, 0, "join"))
    fleet.start(last)
    fleet.wait(lambda: bool(notes(fleet.orders, last, "heal")), "heal")
    fleet.wait_steps(1)
    served = max(notes(fleet.orders, 0, "join")[known:], key=lambda note: note["sent"])
    size = notes(fleet.orders, last, "heal")[-1]["size"]
    rows.append(Row("quorum with a heal, by who serves it", 0, size, served["sent"]))
    return rows


def _of_kind(fleet: Fleet, steps: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the notes of a kind of steps; those that exchange data positions are longer."""
    interval = fleet.setting.interval
    alike = [note for note in steps if Strike("", "", kind).is_due(note["step"], interval)]
    least = min(len(note["calls"]) for note in alike)
    return [note for note in alike if len(note["calls"]) == least]


def _row(what: str, formula: int, alike: Sequence[dict[str, Any]]) -> Row:
    payload = round(median(sum(note["calls"]) for note in alike))
    return Row(what, formula, payload, round(median(note["sent"] for note in alike)))


def as_text(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    header = ("bytes sent by a replica", "formula", "payload", "on the wire", "wire/payload")
    return text_table(
        header,
        [
            [
                row.what,
                f"{row.formula:,}" if row.formula else "-",
                f"{row.payload:,}" if row.payload else "-",
                f"{row.wire:,}",
                f"{row.wire / row.payload:.3f}" if row.payload else "-",
            ]
            for row in rows
        ],
    )
