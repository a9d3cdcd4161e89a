# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The step of one token per row as one call of a C++ library, built on first use."""
