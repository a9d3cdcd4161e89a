# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Everything that distributes a model before training; `parallelize` has the order of all steps."""
