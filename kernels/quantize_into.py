"""Quantises into tensors that are given, as in-place interfaces do."""

import functools
from collections.abc import Sequence

import torch

from qinductor.errors import QinductorError
from qinductor.kernels import quantize_triton
from qinductor.kernels.quantize import QUANTIZE, Quantize, reference


def quantize_into(
    contract: Quantize,
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    masked_m: torch.Tensor | None = None,
    config: str | None = None,
) -> None:
    """Writes [codes, scale, (zero), (sum)] of `reference(contract, inputs)` into given tensors.

    inputs    as the operator takes them
    into      shapes and dtypes of the results; all contiguous but for the scale, whose strides may
              be any, whatever `contract.layout` is; of packed ones all words are written
    masked_m  int32[E] on the device of the inputs: of batch e of inputs [E, T, ...] only the rows
              t < masked_m[e] are read and written
    config    of the kernel; None for its own choice
    Errors: QinductorError for tensors that do not fit together, and where no kernel takes the
    contract on the device.
    """
    _check(contract, inputs, into, masked_m)
    if not inputs[0].is_cuda:
        _by_reference(contract, inputs, into, masked_m)
        return
    if reason := _why_not(contract, inputs[0].device):
        raise QinductorError(f"cannot quantise {contract.summary}: {reason}")
    quantize_triton.launch(contract, inputs, into, config, masked_m)


@functools.cache
def _why_not(contract: Quantize, device: torch.device) -> str | None:
    provider = QUANTIZE.providers[quantize_triton.Triton.name]
    major, minor = torch.cuda.get_device_capability(device)
    if not provider.runs_on(f"sm_{major}{minor}"):
        return f"the device has compute capability {major}.{minor}; it takes 8.0 and more"
    return quantize_triton.Triton().missing() or provider.why_not(contract)


def _check(
    contract: Quantize,
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    masked_m: torch.Tensor | None,
) -> None:
    """QinductorError with what was given and what is wanted."""
    c = contract
    lead = tuple(inputs[0].shape[:-1])
    scale = ("scale", (*lead, c.columns) if c.group else (1,), c.scale, False)
    wanted = [("codes", (*lead, c.k), c.codes, True), scale]
    if c.zero is not None:
        wanted.append(("zero", scale[1], c.zero, True))
    if c.residual:
        wanted.append(("sum", (*lead, c.k), c.x, True))
    if len(into) != len(wanted):
        raise QinductorError(f"{len(into)} tensors to write into; wanted {len(wanted)}")
    for tensor, (name, shape, dtype, contiguous) in zip(into, wanted, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise QinductorError(
                f"{name} is {tensor.dtype}{list(tensor.shape)}; wanted {dtype}{list(shape)}"
            )
        if contiguous and not tensor.is_contiguous():
            raise QinductorError(f"{name} has strides {tensor.stride()}; wanted a contiguous one")
    if masked_m is None:
        return
    fits = masked_m.dtype is torch.int32 and tuple(masked_m.shape) == lead[:1]
    if not fits or len(lead) != 2:
        raise QinductorError(
            f"masked_m is {masked_m.dtype}{list(masked_m.shape)} for inputs of "
            f"{list(inputs[0].shape)}; wanted int32[E] for [E, T, ...]"
        )
    if not c.group and not c.static:
        raise QinductorError("masked_m and a dynamic scale of the whole tensor; wanted groups")


def _by_reference(
    contract: Quantize,
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    masked_m: torch.Tensor | None,
) -> None:
    for held, made in zip(into, reference(contract, inputs), strict=True):
        if masked_m is None or made.shape[:2] != inputs[0].shape[:2]:
            held.copy_(made)
        else:
            rows = torch.arange(made.shape[1], device=made.device) < masked_m[:, None]
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[made.itemsize]
            held.view(bits).copy_(torch.where(rows[..., None], made.view(bits), held.view(bits)))
