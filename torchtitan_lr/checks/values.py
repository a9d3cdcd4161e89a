# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of the values of a configuration, for a number of ranks and a device type."""

import math
import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints import folders
from torchtitan_lr.checkpoints.run_record import data_ranks, global_batch_size
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import configured_args, llama_args, model_shapes
from torchtitan_lr.titan import logger

COMPILED = 1.5  # share that a compiled block may save; the estimate counts blocks as uncompiled

_GIB = 2**30

_CGROUPS = Path("/sys/fs/cgroup")

BARE = 0.3 * _GIB  # bytes of a rank before it builds its model: the interpreter and torch


def check_training(config: Any, world_size: int, device_type: str) -> None:
    """Check the global batch, and what has to cover the run or fit its sequences."""
    training, total = config.training, config.lr_scheduler.total_steps
    degree, batch = data_ranks(config, world_size), training.global_batch_size
    unit = training.local_batch_size * degree
    if batch != -1 and (batch <= 0 or batch % unit):
        want = (
            f"a multiple of {unit} (training.local_batch_size {training.local_batch_size} "
            f"x {degree} data-parallel ranks) such as {max(1, round(batch / unit)) * unit}, or -1"
        )
        if batch > 0 and batch % degree == 0:
            fits = math.gcd(batch // degree, training.local_batch_size)
            want += f"; or the same batch with --training.local_batch_size={fits}"
        raise ConfigError("training.global_batch_size", batch, want)
    want = f"at least training.steps ({training.steps}): the schedule ends there"
    require(total is None or total >= training.steps, "lr_scheduler.total_steps", total, want)
    longest = training.seq_len
    fits = not config.validation.enable or config.validation.seq_len <= longest
    want = f"at most training.seq_len ({longest}): there are no rotary positions beyond it"
    require(fits, "validation.seq_len", config.validation.seq_len, want)


def check_folders(config: Any, world_size: int, device_type: str) -> None:
    """Check that the run's folders can be written: the first save may be hours away."""
    saves = config.checkpoint.folder
    for key, name in (("job.dump_folder", config.job.dump_folder), ("checkpoint.folder", saves)):
        require("://" not in name, key, name, "a folder of this machine or of a shared file system")
    # The dump folder is locked, and proved to be shared.
    fits = not Path(saves).is_absolute() and ".." not in Path(saves).parts
    require(fits, "checkpoint.folder", saves, "a folder within job.dump_folder")
    dump_folder = Path(config.job.dump_folder).absolute()
    written = [("job.dump_folder", dump_folder), ("job.dump_folder", dump_folder / "logs")]
    if config.checkpoint.enable:
        written.append(("checkpoint.folder", dump_folder / config.checkpoint.folder))
    for key, folder in written:
        nearest = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        lets = "lets you make" if os.path.isdir(nearest) else "does not block: it is a file"
        fits = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
        require(fits, key, str(folder), f"a folder that {nearest} {lets}")


def check_checkpoint(config: Any, world_size: int, device_type: str) -> None:
    """Check what ``[checkpoint]`` saves, and its load paths."""
    checkpoint = config.checkpoint
    fits = not checkpoint.last_save_in_hf or checkpoint.last_save_model_only
    want = "false, or checkpoint.last_save_model_only = true: safetensors hold only tensors"
    require(fits, "checkpoint.last_save_in_hf", True, want)
    parts = [name for name in folders.TRAINING_STATES if name != folders.TRAIN_STATE]
    parts += [folders.TRAIN_STATE] if checkpoint.initial_load_path else []
    for name in checkpoint.exclude_from_loading:
        want = f"some of {', '.join(parts)}"
        require(name in parts, "checkpoint.exclude_from_loading", name, want)
    if not checkpoint.enable:
        return
    every, unit = checkpoint.keep_every, checkpoint.interval
    want = f"0, or a multiple of checkpoint.interval ({unit}): other steps are not saved"
    require(every % unit == 0, "checkpoint.keep_every", every, want)
    mode = checkpoint.async_mode
    # Torch's process that would write from pinned memory imports the rank's module anew.
    want = "'disabled', or 'async', which copies to the host and writes in a thread"
    require(mode != "async_with_pinned_mem", "checkpoint.async_mode", mode, want)
    folder = Path(config.job.dump_folder) / checkpoint.folder
    step = checkpoint.load_step
    if step != -1 and not folders.is_complete(folders.step_folder(folder, step)):
        have = ", ".join(map(str, folders.complete_steps(folder)))
        want = f"one of {have}" if have else f"-1: {folder} has no checkpoint"
        raise ConfigError("checkpoint.load_step", step, want)
    path, in_hf = checkpoint.initial_load_path, checkpoint.initial_load_in_hf
    if path and not (os.path.exists(path) if in_hf else folders.is_dcp(path)):
        want = "the folder of one complete checkpoint such as outputs/checkpoint/step-100"
        for parent in (Path(path), Path(path).parent):
            if steps := folders.complete_steps(parent):
                want += f"; in {parent} are the steps {', '.join(map(str, steps))}"
                break
        raise ConfigError("checkpoint.initial_load_path", path, want)


def check_model(config: Any, world_size: int, device_type: str) -> None:
    """Check that the model exists and that its shape fits ``[low_rank]``."""
    import torchtitan_lr.training.register  # noqa: F401  (registers ours)
    from torchtitan_lr.titan.specs import REGISTERED_SPECS, get_train_spec

    names = sorted(REGISTERED_SPECS)
    name, flavor = config.model.name, config.model.flavor
    require(name in names, "model.name", name, one_of(names, name))
    flavors = get_train_spec(name).model_args
    require(flavor in flavors, "model.flavor", flavor, one_of(flavors, flavor))
    configured_args(config)


def check_vocabulary(config: Any, world_size: int, device_type: str) -> None:
    """Check that the tokenizer exists and fits the vocabulary, after `check_model`."""
    from torchtitan_lr.data.tokenizer import build_tokenizer, vocabulary

    model, rows = config.model, configured_args(config).vocab_size
    tokens = vocabulary(build_tokenizer(config.model.hf_assets_path))
    want = (
        f"a tokenizer of at most {rows} tokens for {model.name} {model.flavor}, or "
        f"model.vocab_size = {tokens}: this one has {tokens}"
    )
    require(tokens <= rows, "model.hf_assets_path", model.hf_assets_path, want)
    fitting = -(-tokens // 64) * 64  # as many as products on a GPU like
    if rows > fitting and not model.vocab_size:
        logger.warning(
            "%d of the vocabulary's %d rows have no token of %s, but count in parameters and "
            "FLOPs; --model.vocab_size=%d leaves them out",
            *(rows - tokens, rows, model.hf_assets_path, fitting),
        )


def check_corpora(config: Any, world_size: int, device_type: str) -> None:
    """Check that the corpora of a run are there and fit together; none of them is prepared."""
    from torchtitan_lr.data.prepare import used_sections, validation_sets, wanted
    from torchtitan_lr.data.sources import Reader

    sets, trained = validation_sets(config), set[Path]()
    for section in used_sections(config):  # what is trained on first
        files = set[Path]()
        for part in wanted(config, section):
            for source in part.sources:
                found = Reader(source).files
                if source.name == "local":
                    files.update(file.resolve() for file in found)
        if section == "training":
            trained = files
        elif sets[section].dataset == "local":
            shared = min(trained & files, default=None)
            advice = f"{section}.dataset = 'training' takes what is held out from it"
            want = f"files that are not trained on ({shared} is); {advice}"
            require(shared is None, f"{section}.dataset_path", sets[section].path, want)
    _check_hub_tokens(config, world_size)


def check_data(config: Any, world_size: int, device_type: str) -> None:
    """Check the tokens of a run after `check_corpora`; prepare them if that was not done."""
    from torchtitan_lr.data.prepare import ensure_prepared, open_rows, used_sections, wanted

    used = used_sections(config)
    # All that is missing is found before the first is prepared.
    found = iter(ensure_prepared(config, *used))
    rows_of_model = configured_args(config).vocab_size
    for section in used:
        where = "training" if section == "training" else "validation"
        own = list(islice(found, len(wanted(config, section))))
        for part in open_rows(config, section, own):
            part.corpus.check_ids(rows_of_model)
            if part.cut:
                logger.warning(
                    "%d pairs of %s are longer than %s.seq_len = %d and are cut; %d of them have "
                    "no room for an answer and are left out",
                    *(part.cut, part.corpus.folder, where, part.seq_len, part.left_out),
                )


def _check_hub_tokens(config: Any, world_size: int) -> None:
    """Refuse a streamed dataset whose size would depend on the number of ranks."""
    from torchtitan_lr.data.prepare import wanted

    training, batch = config.training, global_batch_size(config, world_size)
    limited = False
    for part in wanted(config):
        limited |= any(source.tokens for source in part.sources)
    if limited and not training.hf_tokens and batch > training.local_batch_size:
        tokens = (training.steps + 1) * batch * (training.seq_len + 1)
        want = f"{tokens:,} tokens ({tokens}), which all steps read on these ranks, or training."
        want += f"global_batch_size = {batch}: what is prepared does not depend on the ranks"
        require(training.global_batch_size > 0, "training.hf_tokens", 0, want)


def check_memory(config: Any, world_size: int, device_type: str) -> None:
    """Refuse a run on the CPU that needs more memory than its machine has, by the estimate."""
    # It would slow down, and then its kernel would kill any process.
    args, training = llama_args(config), config.training
    if device_type != "cpu" or not training.check_memory or args is None:
        return
    ranks = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE") or world_size))
    if config.comm.mode == "fake_backend":  # one process
        ranks = 1
    memory = machine_memory() * (COMPILED if config.compile.enable else 1) - ranks * BARE
    # Far more than any rank needs, for the many runs that need not be rehearsed, which takes
    # seconds: in fp32, weights four times, and of each token 60 activations as wide as the stream
    # in each block and three rows of logits.
    degree = config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len * ranks / degree
    by_token = 60 * args.n_layers * max(args.dim, args.ffn_dim) + 3 * args.vocab_size
    weights = sum(map(math.prod, model_shapes(args).values()))
    masks = 0.0  # documents have one (b, s/C, s), which the estimate leaves out
    if training.mask_documents:
        pairs = training.seq_len**2 / config.parallelism.context_parallel_degree
        masks = 4 * ranks * training.local_batch_size * pairs
    if 4 * (4 * weights * ranks + tokens * by_token) + masks < memory:
        return
    # Late: few runs need it.
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.memory import rank_memories

    run = read_run(config, world_size)
    peaks = [parts["peak"] for parts in rank_memories(run, on_gpu=False)]
    needed = ranks * sum(peaks) / run.pp + masks
    if needed > memory:
        want = f"less, or a smaller model or training.seq_len: {ranks} ranks need "
        want += f"{(needed + ranks * BARE) / _GIB:,.1f} GiB, this machine has "
        want += f"{machine_memory() / _GIB:,.1f}; training.check_memory = false starts anyway"
        raise ConfigError("training.local_batch_size", training.local_batch_size, want)


def machine_memory() -> int:
    """Return the bytes of memory that this process and others of its machine or container have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups: list[str] = []
    with suppress(OSError):  # Linux's: lines such as `0::/a/b`, before version 2 `4:memory:/a/b`
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    for line in groups:
        _, kind, group = line.split(":", 2)
        root, name = _CGROUPS / kind, "memory.limit_in_bytes" if kind else "memory.max"
        place = root / group.lstrip("/")
        for folder in (place, *place.parents):
            with suppress(OSError, ValueError):  # no limit; "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)
