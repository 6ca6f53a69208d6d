"""What the Triton families ask of a GPU, once for each."""

import functools
import importlib.util

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def shared_memory(device: torch.device, most: int) -> int:
    """Bytes of shared memory that a program's tiles may take: `most`, if there are as many; sm_86
    and sm_89 have 99 KiB."""
    properties = torch.cuda.get_device_properties(device)
    return min(most, getattr(properties, "shared_memory_per_block_optin", most) * 9 // 10)
