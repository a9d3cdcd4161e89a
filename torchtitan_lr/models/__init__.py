# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Models on one device: four families of LLaMA in one code path."""
