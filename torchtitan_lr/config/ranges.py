# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The values that a key allows, beside its field: ``rank: Annotated[int, POSITIVE] = 1``.

What depends on another key, on the model or on the ranks is checked in ``torchtitan_lr.checks``.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from operator import not_
from typing import Annotated, Any, NamedTuple, get_origin

from torchtitan_lr.errors import ConfigError


class Range(NamedTuple):
    """The values of a key."""

    holds: Callable[[Any], bool]  # whether the key allows a value; must be false for NaN
    want: str  # describes the allowed values in the refusal


def at_least(least: int, want: str = "") -> Range:
    """Return the integers from ``least`` on."""
    return Range(lambda n: n >= least, want or f"an integer of at least {least}")


def positive(want: str) -> Range:
    """Return the positive finite numbers."""
    return Range(lambda x: 0 < x < math.inf, want)


POSITIVE = Range(lambda n: n > 0, "a positive number")
NATURAL = at_least(0, "0 or a positive integer")
SEED = Range(lambda n: 0 <= n < 2**63, "an integer from 0 to 2**63 - 1")

_SHARE = Range(lambda x: x is None or 0 <= x <= 1, "a number from 0 to 1")
DECAY = Range(lambda x: 0 <= x < 1, "a number in [0, 1) such as 0.9")
FINITE = Range(lambda x: 0 <= x < math.inf, "a number of at least 0")
_SECONDS = Range(lambda n: 0 < n <= 10**9, "a positive number of at most 10**9 seconds (30 years)")

OF_TORCHTITAN: dict[str, Range] = {
    **dict.fromkeys(
        (
            *("training.seq_len", "training.local_batch_size", "training.steps"),
            *("training.gc_freq", "checkpoint.interval", "metrics.log_freq"),
            *("validation.seq_len", "validation.local_batch_size", "validation.freq"),
        ),
        POSITIVE,
    ),
    "validation.steps": Range(
        lambda n: n == -1 or n > 0, "a positive integer, or -1 for the whole set"
    ),
    "optimizer.lr": positive("a positive number such as 0.001"),
    "optimizer.beta1": DECAY,
    "optimizer.eps": positive("a number such as 1e-8"),
    "lr_scheduler.total_steps": Range(lambda n: n is None or n > 0, "a positive integer"),
    "lr_scheduler.warmup_steps": NATURAL,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "comm.init_timeout_seconds": _SECONDS,
    "comm.train_timeout_seconds": _SECONDS,
    "checkpoint.keep_latest_k": Range(
        lambda n: n == 0 or n >= 2,
        "0 (keep all) or at least 2: the newest may still be in the process of being saved",
    ),
    "checkpoint.load_step": at_least(-1, "a step, or -1 for the newest"),
    # A key that is not supported allows one value.
    "checkpoint.initial_load_in_hf_quantized": Range(not_, "false: not supported"),
    "checkpoint.create_seed_checkpoint": Range(not_, "false: all layouts draw the same weights"),
    "comm.mode": Range(lambda mode: mode != "local_tensor", "'default' or 'fake_backend'"),
    "experimental.custom_args_module": Range(not_, "nothing: leave it out"),
    "memory_estimation.enable": Range(not_, "false: not supported"),
    "model.converters": Range(not_, "an empty list: no float8 or MX here"),
    "model.tokenizer_path": Range(not_, "nothing: use model.hf_assets_path"),
    "optimizer.early_step_in_backward": Range(not_, "false"),
    "parallelism.disable_loss_parallel": Range(
        not_, "false: ranks compute the exact loss from their parts of the vocabulary"
    ),
    "parallelism.enable_async_tensor_parallel": Range(
        not_, "false: the plans are untested with it (it fuses products and collectives on CUDA)"
    ),
    **dict.fromkeys(
        [f"parallelism.{name}_parallel_degree" for name in ("expert", "expert_tensor")],
        Range(lambda n: n == 1, "1: no model here has experts"),
    ),
    "parallelism.context_parallel_load_balancer": Range(
        lambda name: name == "headtail", "'headtail': each rank has an early and a late chunk"
    ),
    "parallelism.context_parallel_rotate_method": Range(
        lambda name: name == "allgather", "'allgather': keys and values are gathered"
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": at_least(0, "0 or more"),
    "parallelism.pipeline_parallel_last_stage_less_layers": at_least(0, "0 or more"),
    "parallelism.pipeline_parallel_layers_per_stage": Range(
        lambda n: n is None or n > 0, "a positive number"
    ),
    "activation_checkpoint.memory_budget": _SHARE,
    "activation_checkpoint.selective_ac_option": Range(
        lambda text: text == "op" or (text.isdecimal() and int(text) > 0),
        "'op', or every how many blocks, as text, such as '2'",
    ),
    "activation_checkpoint.determinism_check": Range(
        lambda name: name in ("default", "none"), "'default' or 'none'"
    ),
}
"""The ranges of torchtitan's own keys; their fields are torchtitan's and cannot be annotated."""


def check_ranges(values: dict[str, Any], config_cls: Any, unread: tuple[str, ...]) -> None:
    """Raise for the first value out of its key's range, of keys not beginning as in ``unread``."""
    sections: dict[str, Any] = {section.name: section.type for section in fields(config_cls)}
    for section, table in values.items():
        types: dict[str, Any] = {option.name: option.type for option in fields(sections[section])}
        for name, value in table.items():
            key, annotation = f"{section}.{name}", types[name]
            if key.startswith(unread):  # sweeps set them for all methods
                continue
            own = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
            for allowed in (*own, OF_TORCHTITAN.get(key)):
                if isinstance(allowed, Range) and not allowed.holds(value):
                    raise ConfigError(key, value, allowed.want)
