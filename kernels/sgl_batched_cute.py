"""`bmm_fp8` in CuTe DSL, for Hopper: the kernel of cute.scaled_mma with an axis of batches."""

import dataclasses
import functools

import torch

from qinductor.contracts import WeightFormat
from qinductor.kernels import cute_cache
from qinductor.kernels.scaled_matmul import FP32, ScaledMatmul
from qinductor.kernels.scaled_matmul_cute import (
    PROGRAMS,
    Made,
    attempted,
    heuristic,
    is_aligned,
    kernel,
    multiprocessors,
    tiles,
)
from qinductor.kernels.scaled_matmul_cute_form import Config, form_of
from qinductor.kernels.triton_device import capability

CODES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


def why_not(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> str | None:
    """Why A [b, m, k] and B [b, k, n] are not what TMA and wgmma take; None if they are."""
    if capability(a.device) != (9, 0):
        return "the GPU is not of sm_90"
    if (lacking := cute_cache.missing()) is not None:
        return lacking
    k, n = b.shape[1:]
    if n % 8 or k % 16:
        return f"n is {n}, k {k}; it takes n in multiples of 8 and k of 16"
    w = b.mT
    for name, tensor in (("A", a), ("B", w)):
        steps = tensor.stride()[:2]
        if tensor.stride(2) != 1 or any(step % 16 for step in steps) or tensor.data_ptr() % 16:
            return f"{name} has strides {tensor.stride()}; it takes k contiguous, rows of 16 bytes"
    if out.dtype is FP32 or not is_aligned(out):
        return f"the result is {out.dtype}, at {out.data_ptr() % 16} past a multiple of 16 bytes"
    return None


@functools.cache
def _contract(
    a: torch.dtype, w: torch.dtype, n: int, k: int, out: torch.dtype, batches: int
) -> ScaledMatmul:
    """One scale for all of A and one for all of B. Up to 128 columns no sum need leave the tensor
    cores."""
    form = WeightFormat(CODES[w], n, k, n, k, "q*s", FP32, None, FP32, FP32, FP32)
    return ScaledMatmul(form, a, 0, FP32, out, fast=k <= 128, experts=batches)


@functools.lru_cache(4096)
def chosen(contract: ScaledMatmul, m: int) -> Config:
    """The config for m rows of each batch: K in parts only where that fills the device."""
    one = dataclasses.replace(contract, experts=0)
    if contract.experts * contract.weight.n * m >= PROGRAMS * 64 * 64:
        return tiles(one, m)[0]
    return heuristic(one, m)


@functools.cache
def _prepared(contract: ScaledMatmul, config: Config, device: torch.device) -> Made | None:
    return attempted(
        f"bmm_fp8@{config}",
        lambda: (kernel(form_of(contract), config), multiprocessors(device) * config.blocks),
    )


def launch(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.Tensor
) -> bool:
    """Writes A @ B * sa * sb to `out`; False, after a warning, where no kernel can be made."""
    batches, m, k = a.shape
    contract = _contract(a.dtype, b.dtype, b.shape[2], k, out.dtype, batches)
    made = _prepared(contract, chosen(contract, m), a.device)
    if made is None:
        return False
    run, programs = made
    scale = sb.view(1, 1, 1).expand(batches, 1, 1)
    with torch.cuda.device_of(out):
        # B may be what the kernel before this one wrote: none of it is fetched before that ends.
        run(a, sa.view(1), b.mT, scale, None, out, programs, 0)
    return True
