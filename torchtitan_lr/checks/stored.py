# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of a configuration against the checkpoint that its run begins with.

The ranks ask the same of it (`checkpoints.record`); here it is refused before any of them starts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints import folders
from torchtitan_lr.checkpoints.record import (
    DamagedError,
    Record,
    Start,
    another_folder,
    check_start,
    read_step,
    start_of,
    way_on,
)
from torchtitan_lr.checkpoints.run_record import record_path
from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import configured_args


def _start_of(config: Any) -> Start | None:
    checkpoint = config.checkpoint
    return start_of(checkpoint, config.job.dump_folder, checkpoint.load_step)


def nothing_to_train(config: Any) -> str:
    """Return one line that says that the run in the dump folder has all its steps, else ""."""
    start, steps = _start_of(config), config.training.steps
    if start is None or not 0 < steps <= start.step:
        return ""
    return (
        f"already at step {start.step} of {steps}: nothing to train; choose more training.steps, "
        f"or another folder, as in {another_folder(config.job.dump_folder)}"
    )


def check_other_run(config: Any, world_size: int, device_type: str) -> None:
    """Check that a new run does not replace the record and the metrics of one with checkpoints."""
    checkpoint, dump_folder = config.checkpoint, config.job.dump_folder
    start = _start_of(config)
    if start is not None and start.step > 0:
        return
    try:
        recorded = read_json(record_path(config))["checkpoint"]["folder"]
    except (OSError, ValueError, LookupError, TypeError):
        recorded = None
    for name in (recorded, checkpoint.folder):
        if not isinstance(name, str):
            continue
        path, why = Path(dump_folder) / name, ""
        steps = [folders.step_folder(path, step) for step in folders.all_steps(path)]
        if any(folders.complete_steps(path)):  # step 0 is the start of a run
            if name != checkpoint.folder or not checkpoint.enable:
                why = f"{path} has checkpoints of one, which this start would not resume; "
            if not checkpoint.enable:
                why += "checkpoint.enable = true resumes it; "
        elif any(map(folders.has_contents, steps)):
            why = f"the checkpoints in {path} have no {folders.STEP_FILE}, "
            why += "so no start resumes them; "
        if why:
            want = f"a folder without a run: {why}for a new run choose another folder, as in "
            raise ConfigError("job.dump_folder", dump_folder, want + another_folder(dump_folder))


def check_stored(config: Any, world_size: int, device_type: str) -> None:
    """Check that the saved states to load are this run's, as far as no corpus is prepared."""
    # Late imports: `--help` imports this module and should not wait for numpy.
    from torchtitan_lr.training.fingerprint import identity_of, tokenizer_digest

    if (found := _record_of(config)) is None:
        return
    start, record = found
    digest = tokenizer_digest(config.model.hf_assets_path)
    here = identity_of(config, world_size, configured_args(config), digest)
    check_start(start, record, here, config.job.dump_folder)
    was, now = record.run.get("training", {}).get("dataset"), config.training.dataset
    known = not {was, now} & {None, "prepared"} and not config.training.mixture
    if known and was != now and start.step > 0 and "dataloader" not in start.left_out:
        # Before hours of preparation; `check_stored_data` compares what they give.
        want = f"{was!r} as in {start.folder}{way_on(start, 'dataloader')}"
        raise start.refusal(config.job.dump_folder, "training.dataset", now, want)
    if (steps := config.training.steps) < start.step:
        want = f"at least {start.step}, the step of {start.folder}"
        raise start.refusal(config.job.dump_folder, "training.steps", steps, want)


def check_stored_data(config: Any, world_size: int, device_type: str) -> None:
    """Check that a saved position is one in this run's data; call this after `check_data`."""
    from torchtitan_lr.data.dataloader import TrainingRows

    if (found := _record_of(config)) is not None and not found[0].model_only:
        here = {"dataloader": TrainingRows.of(config).identity}
        check_start(*found, here, config.job.dump_folder)


def _record_of(config: Any) -> tuple[Start, Record] | None:
    """Return what a run begins with, and its record; None without one."""
    start = _start_of(config)
    if start is None or start.in_hf:
        return None
    try:
        record = read_step(start.folder)
    except DamagedError as error:
        want = f"a whole one ({error})"
        raise start.refusal(config.job.dump_folder, "checkpoint", start.folder, want) from error
    if record.states.keys() == {"model"} and nothing_to_train(config):
        start = replace(start, model_only=True)  # as `checkpoint.last_save_model_only` leaves it
    return start, record
