# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of a configuration against the run that lies in its dump folder.

A checkpoint there is resumed. Another model or another corpus is refused before
any data are read, with the override that starts a new run; so is a run without a step to train.
"""

import itertools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import (
    MANIFEST,
    RESIDUALS,
    TRAIN_STATE,
    complete_steps,
    holds_training,
    is_dcp,
    is_finite,
    newest_step,
    step_folder,
)
from torchtitan_lr.checkpoints.run_record import (
    changed,
    described,
    left_out,
    read_record,
    record_path,
)
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.schema import vocabulary_rows
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.optim.entries import ENTRIES, imported

# Keys with which no run is resumed; 0, -1 and an empty text stand for another key's value.
_NEVER_RESUMED = ("model.name", "low_rank.rank", "training.dataset")


def resumed(config: Any) -> tuple[int, str]:
    """Return the step and the folder of the checkpoint that a run resumes; -1 and "" for none."""
    checkpoint = config.checkpoint
    folder = Path(config.job.dump_folder) / checkpoint.folder
    steps = complete_steps(folder)
    if not checkpoint.enable or not steps:
        return -1, ""
    step = newest_step(folder) if checkpoint.load_step == -1 else int(checkpoint.load_step)
    # `check_checkpoint` refuses a missing checkpoint.
    return (step, step_folder(folder, step)) if step in steps else (-1, "")


def nothing_to_train(config: Any) -> str:
    """Return one line that says that the run in the dump folder has all its steps, else ""."""
    step, steps = resumed(config)[0], config.training.steps
    if not 0 < steps <= step:
        return ""
    return (
        f"already at step {step} of {steps}: nothing to train; choose more training.steps, or "
        f"another folder, as in {_another_folder(config)}"
    )


def check_record(config: Any, world_size: int) -> None:
    """Compare with the run that would be resumed and its record; needs neither torch nor data."""
    step, folder = resumed(config)
    record = read_record(config)
    if step <= 0:  # imported weights, of step 0, have trained nothing
        _check_no_other_run(config, record)
        return
    with _cured(config):
        _check_numbers(config, folder)
        for name in left_out(config, step):
            if name not in ("model", TRAIN_STATE):
                continue
            want = f"other states: without {name} {folder} is not resumed"
            raise ConfigError("checkpoint.exclude_from_loading", name, want)
    line, steps = nothing_to_train(config), config.training.steps
    want = f"more than {step}: {line}"
    differences = changed(record, config, world_size)
    for key, (there, here) in differences.items():
        mixed = key == "training.dataset" and (
            config.training.mixture or config.training.allow_changed_corpus
        )
        never = key in _NEVER_RESUMED and not mixed and not {there, here} & {None, 0, -1, ""}
        # With more steps a run of another model still cannot be resumed.
        if never or (line and key.partition(".")[0] in ("model", "low_rank", "caat")):
            other = f"{there!r} as in {record_path(config)}, whose run would be resumed"
            with _cured(config):
                raise ConfigError(key, here, other)
    if differences and line:
        raise ConfigError("training.steps", steps, f"{want}; changed: {described(differences)}")
    # A run that was killed after its last step is resumed to validate.
    require(not line or steps == step, "training.steps", steps, want)


def _check_no_other_run(config: Any, record: dict[str, Any]) -> None:
    """Check that a new run does not replace the record and the metrics of one with checkpoints."""
    checkpoint, section = config.checkpoint, record.get("checkpoint")
    recorded = section.get("folder") if isinstance(section, dict) else None
    for name in (recorded, checkpoint.folder):
        if not isinstance(name, str) or (name == checkpoint.folder and checkpoint.enable):
            continue
        path = Path(config.job.dump_folder) / name
        if any(complete_steps(path)):  # step 0 is the start of a run
            want = f"a folder without a run: {path} has checkpoints of one, which this start would "
            want += "not resume; "
            if not checkpoint.enable:
                want += "checkpoint.enable = true resumes it; "
            want += f"for a new run choose another folder, as in {_another_folder(config)}"
            raise ConfigError("job.dump_folder", config.job.dump_folder, want)


def _check_numbers(config: Any, folder: str) -> None:
    """Compare the family, ranks, vocabulary and tokenizer that keys set with a checkpoint's.

    `check_stored_model` compares the whole model, but loads torchtitan for it, which takes seconds.
    """
    # Late imports, here and below: `--help` imports this module and should not wait for numpy.
    from torchtitan_lr.data.tokenizer import HUB
    from torchtitan_lr.training.fingerprint import TOKENIZER, tokenizer_digest

    try:
        stored = read_json(Path(folder) / MANIFEST)["model"]
        stored["model.vocab_size"] = stored.pop("model.flavor")["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # old, or damaged
        return
    low_rank, degree = config.low_rank, config.parallelism.tensor_parallel_degree
    here = {
        "model.name": config.model.name,
        "low_rank.rank_attention": low_rank.rank_attention or low_rank.rank,
        "low_rank.rank_ffn": low_rank.rank_ffn or low_rank.rank,
        "model.vocab_size": vocabulary_rows(config.model.vocab_size, degree, config.caat.lanes),
    }
    if not config.model.hf_assets_path.startswith(HUB):  # may be a download
        here[TOKENIZER] = tokenizer_digest(config.model.hf_assets_path)
    for key, there in stored.items():
        # 0 stands for the flavor's number, which only the model knows.
        if here.get(key) and here[key] != there:
            rank, got = key.startswith("low_rank."), operator.attrgetter(key)(config)
            key, got = ("low_rank.rank", low_rank.rank) if rank and not got else (key, got)
            want = f"{there!r} as in the checkpoint {folder}, which holds another model"
            raise ConfigError(key, got, want)


def check_stored_model(config: Any, world_size: int, device_type: str) -> None:
    """Check that the checkpoint to load holds this model; reads its manifest only."""
    from torchtitan_lr.checkpoints.manifest import UnverifiedError, read_manifest
    from torchtitan_lr.training.fingerprint import (
        TOKENIZER,
        check_fingerprint,
        model_fingerprint,
        tokenizer_digest,
    )

    checkpoint, own = config.checkpoint, resumed(config)[1]
    path = own or ("" if checkpoint.initial_load_in_hf else checkpoint.initial_load_path)
    if not checkpoint.enable or not path or not is_dcp(path):
        return
    try:
        manifest = read_manifest(path)
    except UnverifiedError as error:
        # The ranks read it as it is, or look for a verified one.
        if checkpoint.allow_unverified or (own and checkpoint.fall_back):
            return
        want = f"a whole one ({error})"
        if own:
            want += "; checkpoint.fall_back = true resumes from the newest older whole one"
        with _cured(config):
            raise ConfigError("checkpoint", path, want) from error
    here: dict[str, Any] = {}
    if (args := llama_args(config)) is not None:  # another package's model has no fingerprint
        digest = tokenizer_digest(config.model.hf_assets_path)
        here = model_fingerprint(args) | {TOKENIZER: digest}
    with _cured(config):
        may_differ = not own and checkpoint.initial_load_other_model
        check_fingerprint(manifest.model, here, path, may_differ, checkpoint.allow_unverified)


def check_resumable(config: Any, world_size: int, device_type: str) -> None:
    """Check that the run's own checkpoint has finite weights and holds more than the model.

    This reads its manifest and its table of contents. With ``checkpoint.fall_back`` the ranks go
    back to one that does.
    """
    step, folder = resumed(config)
    if step <= 0 or config.checkpoint.fall_back or nothing_to_train(config):
        return
    another, parent = _another_folder(config), Path(folder).parent
    if is_finite(folder):
        metadata = _stored_states(config)[1]
        damaged = metadata is None and is_dcp(folder)  # loading it reports how
        if damaged or (metadata and holds_training(metadata)):
            return
        want, steps = "it holds only the model", complete_steps(parent)
        instead = f"; in another folder, {another}, checkpoint.initial_load_path = {folder!r} "
        instead += "starts a run from its weights"
    else:
        want, steps = "its weights are not finite", [newest_step(parent)]
        instead = f"; for a new run choose another folder, as in {another}"
    if older := [number for number in steps if 0 < number < step]:
        instead = f"; checkpoint.load_step = {older[-1]} goes back to the step before{instead}"
    raise ConfigError("checkpoint", folder, f"one to resume ({want}){instead}")


def check_stored_optimizer(config: Any, world_size: int, device_type: str) -> None:
    """Check that the optimizer's state to load has the tensors of this optimizer.

    Its hyperparameters may differ: those of the configuration are used.
    """
    folder, metadata = _stored_states(config)
    prefix = "optimizer.state."
    stored = metadata.state_dict_metadata if metadata else {}
    sizes = {
        name.removeprefix(prefix): entry.size
        for name, entry in stored.items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    # If the model alone was saved, there is nothing to compare.
    if not sizes or "optimizer" in left_out(config, resumed(config)[0]):
        return
    section, marks = config.optimizer, {name.rpartition(".")[2] for name in sizes}
    own = ENTRIES[section.name]
    saved = next((entry for entry in ENTRIES.values() if entry.mark in marks), None)
    # States without a mark are taken for AdamW's, unless this optimizer's has none either.
    settings = {"name": saved.like if saved else "AdamW" if own.mark else own.like}
    if saved is not None and saved.stored is not None:
        settings |= imported(saved.stored)(sizes)
    for name, there in settings.items():
        here = getattr(section, name)
        fits = there == (own.like if name == "name" else here)
        want = f"{there!r} as in the checkpoint {folder}, whose optimizer has another state"
        want += "; checkpoint.exclude_from_loading = ['optimizer'] starts without it"
        with _cured(config, "optimizer"):
            require(fits, f"optimizer.{name}", here, want)


def check_stored_states(config: Any, world_size: int, device_type: str) -> None:
    """Check that residuals and position in the data belong to these ranks, this corpus and order.

    This reads one value of the checkpoint and the record of the corpus.
    """
    from torchtitan_lr.data.dataloader import TrainingRows

    folder, metadata = _stored_states(config)
    if metadata is None:
        return
    excluded = left_out(config, resumed(config)[0])
    if RESIDUALS not in excluded:
        with _cured(config, RESIDUALS):
            _check_residuals(config, world_size, metadata, folder)
    with _cured(config):
        has_position = any(name.startswith("dataloader.") for name in metadata.state_dict_metadata)
        if has_position and "dataloader" not in excluded:
            TrainingRows.of(config).check_checkpoint(folder, metadata)


def _stored_states(config: Any) -> tuple[str, Any]:
    """Return the checkpoint whose states besides the model will be loaded, if any.

    Returns:
        Its folder and its table of contents; None instead if loading it will report its damage.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_lr.checkpoints.safe_metadata import DamagedError, read_metadata

    checkpoint, (step, folder) = config.checkpoint, resumed(config)
    if step == -1 and checkpoint.enable and not checkpoint.initial_load_model_only:
        folder = checkpoint.initial_load_path or ""
    if not folder or step == 0:  # of imported weights, of step 0, only the model is loaded
        return "", None
    try:
        return folder, read_metadata(folder)
    except (DamagedError, CheckpointException):
        return folder, None


def _check_residuals(config: Any, world_size: int, metadata: Any, folder: str) -> None:
    """Compare the residuals of compressed gradients with those of this run's ranks."""
    section = config.grad_compression
    if section.codec == "none" or llama_args(config) is None:
        return
    from torchtitan_lr.compression.residuals import check_residuals
    from torchtitan_lr.compression.settings import is_compressed, residual_name
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.step_traffic import exchanged_units

    run = read_run(config, world_size)
    shapes, names = [], []
    units = zip(exchanged_units(run), run.stages[0].values(), strict=True)
    for (_, unit), parameters in units:
        if not unit.compressed or unit.ranks == 1:  # a rank alone exchanges nothing
            continue
        shapes.append((world_size, unit.ranks, unit.compressed))
        for name in parameters:
            if is_compressed(name, math.prod(run.global_shapes[name]), run.compression):
                names.append(residual_name(name, name in run.by_columns))
    if shapes:
        check_residuals(shapes, names, folder, metadata)


@contextmanager
def _cured(config: Any, state: str = "") -> Iterator[None]:
    """Append the override that starts a new run to an error about the run in the dump folder.

    Before it goes what leaves out ``state`` once more, if the run has left it out already.
    """
    try:
        yield
    except ConfigError as error:
        step, folder = resumed(config)
        if not folder:
            raise
        again = f"; checkpoint.load_step = {step} leaves out {state} again"
        want = error.want + again * (state in config.checkpoint.exclude_from_loading)
        want += "; for a new run choose another folder, as in "
        raise ConfigError(error.key, error.got, want + _another_folder(config)) from error


def _another_folder(config: Any) -> str:
    """Return the override with a dump folder beside this one that does not exist."""
    folder = config.job.dump_folder.rstrip("/")
    names = (f"{folder}-{number}" for number in itertools.count(2))
    return f"--job.dump_folder={next(name for name in names if not Path(name).exists())}"
