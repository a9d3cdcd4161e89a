# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
