# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Experiments on top of the package, which imports none of them (torchtitan's convention).

A run names one by ``job.custom_config_module``; see `torchtitan_lr.config.build.extension_of`.
"""
