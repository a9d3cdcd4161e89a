# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pre-training of low-rank LLaMA models at scale, as an extension of torchtitan 0.2.2.

Importing the package loads nothing else. Importing ``torchtitan_lr.training.register``, which
``experimental.custom_import`` names by default, registers ``llama_full``, ``llama_svd``,
``llama_cola`` and ``llama_lax`` with torchtitan.
"""
