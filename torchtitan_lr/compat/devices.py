# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The number of GPUs; tested with torch 2.11, 2.13 and 2.15."""


def gpu_count() -> int:
    """Return how many GPUs of CUDA or ROCm this process can use."""
    import torch  # late: what is wrong in a file or a variable is told without it

    # ``torch.cuda.device_count`` asks NVML, which counts a lost GPU, too. If this is renamed, a
    # machine with GPUs raises an AttributeError.
    return torch._C._cuda_getDeviceCount() if torch.cuda.is_available() else 0
