# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What is done to a model before it trains; it knows nothing of training."""
