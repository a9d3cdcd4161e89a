# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ranks of this machine, run to their end."""

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torchtitan_lr.compat.elastic import Agent, Failure, RankLogs
from torchtitan_lr.launch.environment import Environment
from torchtitan_lr.launch.processes import Signals
from torchtitan_lr.launch.rendezvous import meeting
from torchtitan_lr.launch.run_state import AGAIN_THE_SAME


def run_ranks(
    environment: Environment,
    command: Sequence[str],  # the module that every rank runs, and its arguments
    log_folder: Path,
    variables: Mapping[str, str],  # beside this process's
    shown: Collection[int] = (),  # by their number in the run
    signals: Signals | None = None,  # without it they raise their exceptions here
) -> tuple[bool, Failure | None]:
    """Run the ranks of this machine; return whether rank 0 is one, and why they failed."""
    if "LOGLEVEL" not in os.environ:  # torchrun's words, which repeat what the caller says
        torchrun = logging.getLogger("torch.distributed.elastic")
        torchrun.addHandler(logging.NullHandler())
        torchrun.propagate = False
    ranks = 1 if environment.comm_mode else environment.ranks
    restarts = environment.max_restarts
    try:
        rendezvous, network = meeting(environment)
        given = {name: os.environ.get(name) or value for name, value in network.items()}
        logs = RankLogs(log_folder, shown, {**given, **variables})
        agent = Agent(command, ranks, rendezvous, logs, restarts, AGAIN_THE_SAME)
        if signals is not None:
            signals.watch(agent)
        result = agent.run()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if environment.nodes > 1:
            what = f"the machine of RDZV_ENDPOINT cannot be reached, or the run ended there; {what}"
        return False, Failure(None, None, what, log_folder)
    failure = None if result is None or not result.is_failed() else agent.failure
    if result is None:
        failure = Failure(None, None, "the machines are complete without this one", log_folder)
    # The others need not wait for this machine. Without a device that it lost they may go on.
    if failure is None or failure.status not in AGAIN_THE_SAME:
        with contextlib.suppress(Exception):
            rendezvous.shutdown()
    return agent.first_rank == 0, failure
