"""What the functions of sgl-kernel's names share: a failed condition as an error."""

import torch


def elsewhere(first: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why the tensors are not on one device; None counts for nothing."""
    for tensor in others:
        if tensor is not None and tensor.device != first.device:
            return f"tensors are on {first.device} and {tensor.device}; wanted one device"
    return None


def hold(name: str, reason: str | None) -> None:
    """RuntimeError if there is a reason why the function `name` cannot run."""
    if reason is not None:
        raise RuntimeError(f"{name}: {reason}")
