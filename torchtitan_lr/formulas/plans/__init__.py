# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What each tensor-parallel plan sends, stores and keeps: one class a plan."""
