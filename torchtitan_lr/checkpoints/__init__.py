# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What lies in a checkpoint's folder, and whether it is whole."""
