# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A configuration's checks, and processes without privileges."""

import ctypes
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

MAIN = ROOT / "train_configs" / "debug_cola.toml"
SHIPPED = "torchtitan_lr/data/assets/bpe4k"


def check(*argv, world=4, device="cpu", config_file=MAIN, data="find"):
    # The main job's folder may have a run, and its 16 sequences are for ranks that it fits.
    given = ["--job.dump_folder=./outputs/no_run", "--training.global_batch_size=-1"]
    config = build_job_config([f"--job.config_file={config_file}", *given, *argv])
    check_job_config(config, world, device, data)
    return config


def refusal(*argv, **kwargs):
    with pytest.raises(ConfigError) as info:
        check(*argv, **kwargs)
    text = str(info.value)
    assert "\n" not in text
    return text


def without_privileges(function):
    """Calls a function in a thread that file permissions bind, even if this process is root's."""

    def call():
        if sys.platform == "linux":
            # Of this thread alone. Version 3 of the call, no capability of any kind.
            nothing = ctypes.create_string_buffer(24)
            assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), nothing) == 0
        return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
