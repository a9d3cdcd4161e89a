# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Generation: caches of keys and values, sampling, decoding of batches, streamed text."""
