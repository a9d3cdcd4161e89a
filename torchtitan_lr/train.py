# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Entry point of every rank: check, train, record how it ended. `training.trainer` has the run.

Start it with ``torchtitan-lr train`` or with ``torchrun -m torchtitan_lr.train
--job.config_file FILE``.
"""

import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.launch.processes import begin_rank, exit_without_teardown

with collector_off():
    # Call this before the slow imports: torchrun may be killed during them. A process that a rank
    # spawns imports this module too, and has the rank as its parent.
    if __name__ == "__main__":
        begin_rank()

    import torch
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # Our models, also where `experimental.custom_import` names another module.
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.training.trainer import Trainer

from torchtitan_lr.agreement import done_by_first
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.compat.process_groups import write_flight_record
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.log import init_console
from torchtitan_lr.data.prepare import prepare_for_ranks
from torchtitan_lr.errors import ConfigError, LostDeviceError, describe_error, escaped
from torchtitan_lr.launch import placement, run_folder
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training.verdict import NonFiniteError


def main(argv: list[str] | None = None, trainer_class: type[Trainer] = Trainer) -> int:
    """Train with the configuration of the command line; return the status of how it ended."""
    begin_rank()  # of another module than this one
    init_console()
    began = time.time()
    with ExitStack() as until:
        try:
            config, signed = checked_config(sys.argv[1:] if argv is None else argv, until)
        except Exception as error:  # nothing is recorded: the folder may be another job's
            return run_folder.EXIT_STATUS[tell(error)[0]]
        return train(config, trainer_class, began, signed)


def checked_config(argv: list[str], until: ExitStack) -> tuple[Any, str]:
    """Return the configuration, which can run on these ranks, and the signature of its lock.

    Rank 0 holds the lock as long as ``until``, unless the launcher does.
    """
    config = build_job_config(argv)
    init_console(config.metrics.verbose)
    device_type = bind_device()
    ranks, devices = placement.launched_ranks(config.comm.mode), placement.gpu_count()
    # Without the launcher nobody says how many: only its own number is compared.
    own = int(os.environ.get("LOCAL_RANK", "0")) + 1 if devices else 0
    if (needed := placement.granted_gpus(own)) > devices:
        raise LostDeviceError("NGPU", needed, placement.fewer(devices))
    folder = config.job.dump_folder

    def check() -> str:
        if run_folder.is_held(folder):  # what a check would find changes while that job trains
            raise run_folder.taken(folder)
        check_job_config(config, ranks, device_type, data="find")
        return until.enter_context(run_folder.locked(folder))  # all ranks hear of a refusal

    def prepare(signed: str) -> dict[str, str]:
        run_folder.check_shared(folder, signed)
        return prepare_for_ranks(config)

    def check_tokens() -> None:
        check_job_config(config, ranks, device_type, data="prepared")

    return config, checked_once(check, prepare, check_tokens)


_stores: list[Any] = []  # on rank 0 the store's server lives with the object, and others read late


def checked_once(
    check: Callable[[], str],
    prepare: Callable[[str], dict[str, str]],
    check_tokens: Callable[[], None],
) -> str:
    """Check a run in one process, prepare it in one of each machine, raise refusals in all.

    On one machine the launcher has done it. On several, and below plain torchrun, rank 0 does: a
    thousand ranks would read the corpus and the checkpoint at the same moment. Then one rank of
    each machine finds the prepared tokens there, or prepares them, all machines at once: only the
    dump folder is shared. `check` returns the signature in its lock, and `prepare`, called with
    that, environment variables.
    """
    if run_folder.HELD_VARIABLE in os.environ:
        return os.environ[run_folder.HELD_VARIABLE]
    store, rank, ranks = next(torch.distributed.rendezvous("env://"))
    _stores.append(store)
    key = f"check/{ranks}"  # another number of ranks, after a machine is lost, is checked anew
    signed = done_by_first(store, key, rank == 0, ranks, check)
    machine = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    local, here = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    prepared = done_by_first(store, f"{key}/{machine}", local == 0, here, partial(prepare, signed))
    os.environ.update(prepared)
    done_by_first(store, f"{key}/tokens", rank == 0, ranks, check_tokens)
    return signed


def train(config: Any, trainer_class: type[Trainer], began: float, signed: str) -> int:
    """Train in a folder that is this job's, and record how the run ends; return its status."""
    folder = config.job.dump_folder
    record = partial(record_state, folder, signed, began)
    trainer: Trainer | None = None
    try:
        with inputs_decided(config):
            trainer = trainer_class(config)
        if os.environ.get("RANK", "0") == "0":
            trainer.checkpointer.before_save = partial(run_folder.check_ours, folder, signed)
        trainer.before_start = partial(record, run_folder.RUNNING)
        trainer.train()
        state, why = run_folder.FINISHED, ""
        if trainer.stopped_by:
            state, why = run_folder.STOPPED, f"{trainer.stopped_by} after step {trainer.step}"
        record(state, why, step=trainer.step)
    except Exception as error:
        state, why = tell(error)
        step = getattr(error, "step", None) or getattr(trainer, "step", None)
        record(state, why, getattr(error, "rank", None), step)
        if state == run_folder.FAILED:
            write_flight_record()
    status = run_folder.EXIT_STATUS[state]
    if trainer is not None:
        trainer.metrics_processor.exit_status = status
        # A run that has failed has told why; what fails in its wake is no news.
        with suppress(Exception) if status else nullcontext():
            trainer.close()
    if state != run_folder.FAILED:  # nobody has a hang to write of
        with suppress(OSError):  # another rank was first
            os.rmdir(os.path.join(folder, config.comm.save_traces_folder))
    if status == 0:
        torch.distributed.destroy_process_group()
    return status


@contextmanager
def inputs_decided(config: Any) -> Iterator[None]:
    """Decide ``activation_checkpoint.keep_inputs`` by this rank's GPU while its model is built."""
    section = config.activation_checkpoint
    configured = section.keep_inputs
    if configured == "auto" and torch.cuda.is_available() and llama_args(config) is not None:
        try:
            section.keep_inputs = _fitting_inputs(config)
        except Exception as error:  # an estimate ends no run
            logger.warning("activation_checkpoint.keep_inputs is off: no estimate: %r", error)
    yield
    section.keep_inputs = configured


def _fitting_inputs(config: Any) -> str:
    # Late, and before the ranks' process groups: it acts as a rank of one that does not exist.
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.memory import with_kept_inputs

    run = read_run(config, placement.launched_ranks(config.comm.mode))
    own = int(os.environ.get("LOCAL_RANK", "0"))  # not yet the current device
    memory = torch.cuda.get_device_properties(own).total_memory
    decided: str = with_kept_inputs(run, memory).config.activation_checkpoint.keep_inputs
    return decided


def tell(error: Exception) -> tuple[str, str]:
    """Print why this rank fails, and leave it for torchrun's report; return the state and why."""
    state = run_folder.DIVERGED if isinstance(error, NonFiniteError) else run_folder.FAILED
    why = describe_error(error)
    if isinstance(error, ConfigError):
        is_lost = isinstance(error, LostDeviceError)
        state, why = run_folder.LOST if is_lost else run_folder.REFUSED, str(error)
    elif why is None:  # only a bug raises it
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    elif state == run_folder.FAILED:
        logging.getLogger(__name__).info(why, exc_info=True)  # its place is in details.log
    why = why.removeprefix("error: ")
    # On every rank: torchrun ends the others as soon as any rank fails.
    print(escaped(f"error: {why}"), file=sys.stderr, flush=True)
    with suppress(OSError):  # a full disk
        get_error_handler().record_exception(error)
    return state, why


def record_state(
    folder: str,
    signed: str,
    began: float,
    state: str,
    error: str = "",
    rank: int | None = None,
    step: int | None = None,
) -> None:
    """Record the run's state: rank 0, and of a failure a rank that is among the first."""
    here = int(os.environ.get("RANK", "0"))
    fails = state in run_folder.FAILURES
    if here == 0 or fails:
        rank = here if state == run_folder.FAILED and rank is None else rank
        # A folder that is no longer this run's ends it, unless another error has.
        with suppress(ConfigError) if fails else nullcontext():
            run_folder.check_ours(folder, signed)
            run_folder.write_state(folder, state, error, rank, step, began)


if __name__ == "__main__":
    exit_without_teardown(main())
