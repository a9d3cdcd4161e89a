# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The GPU set: what a GPU does differently, on the CPU in every run and on one GPU where it is.

``pytest -m gpu`` runs the GPU's half. Results are compared with fp64 on the CPU, or bit by bit in
whole numbers, so that the CPU's half can fail too. Branches that only an accelerator takes run on
the device ``meta``: its tensors have no values, so the host can read none, as on a GPU it must not.
"""
