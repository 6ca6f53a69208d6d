"""Products of rows sorted by expert in the Triton family of scaled_matmul: all experts at once."""

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from qinductor.kernels.scaled_matmul import FP32, ScaledMatmul
from qinductor.kernels.scaled_matmul_triton_form import (
    FLOAT8,
    INT8,
    PROMOTED,
    aligned,
    device_form,
    four,
    padded,
    scales,
    slice_of,
)
from qinductor.kernels.scaled_matmul_triton_tiles import SHARED, Config, parts_of
from qinductor.kernels.triton_device import capability, shared_memory

SUMMED = 1024  # numbers that a program adds parts of


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import scaled_matmul_triton_groups_kernels

    return scaled_matmul_triton_groups_kernels


def launch(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor | None,
    given: Mapping[str, torch.Tensor],
    config: Config,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The product [T, N] of rows sorted by expert, of at least one row; those past the last offset
    are 0.

    contract  of one expert
    offsets   int32[E], contiguous; None: all experts have as many rows
    given     the packed tensors by name, [E, ...]"""
    code, w = kernels or device(), contract.weight
    rows, experts = a.shape[0], len(next(iter(given.values())))
    a = a if a.stride(1) == 1 else a.contiguous()
    wide = a.is_cuda and capability(a.device) < FLOAT8
    if a.is_cuda:
        config = config.within(contract, shared_memory(a.device, SHARED))
    # As float16 operands take twice the registers.
    bk = max(min(config.bk, 128 if wide else config.bk), 64 if four(contract) else 32)
    config = dataclasses.replace(config, bk=bk)
    form = device_form(contract, wide)
    bs = min(slice_of(contract) or PROMOTED, config.bk)
    split = 1 if contract.bias is not None else parts_of(config, rows, experts, w.n, w.k)
    out = a.new_empty((rows, w.n), dtype=contract.out)
    parts = out if split == 1 else a.new_empty((split, rows, w.n), dtype=FP32)
    tma = config.tma and not four(contract) and not wide and aligned(given["codes"][0])
    sa = scales(scale if contract.group else scale.reshape(1, 1).expand(rows, 1), parts)
    asm = not type(code.grouped).__name__.startswith("Interpreted")
    pdl = a.is_cuda and capability(a.device) >= (9, 0)
    swap = config.swap or four(contract)
    least = (config.bm // 4 if config.bm > 64 else 16) if swap else min(config.bm, 64)
    if offsets is None:
        tiles = experts * -(-(rows // experts) // config.bm)
    else:  # as many as can be, rows past the last offset included
        tiles = -(-rows // config.bm) + min(experts + 1, rows)
    ep = 0 if offsets is None else 1 << experts.bit_length()
    with torch.cuda.device_of(out):
        code.grouped[(tiles * -(-w.n // config.bn), split)](
            a.view(torch.uint8) if wide and a.dtype is not INT8 else a, a.stride(0), *sa,
            *_weight(contract, given, (config.bn, bs) if tma else None, wide, parts),
            given.get("bias", parts), parts if offsets is None else offsets, parts, rows, w.n,
            w.k, split, F=form, E=experts, EP=ep, BM=config.bm, LEAST=least, BN=config.bn,
            BK=config.bk, BS=bs, PARTS=split > 1, STAGES=config.stages,
            EVEN_K=w.k % config.bk == 0, SWAP=swap, TMA=tma, PDL=pdl, ASM=asm,
            num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if split > 1:
            code.sum_groups[(-(-out.numel() // SUMMED),)](
                parts, out, out.numel(), split, B=SUMMED, PDL=pdl, num_warps=4, launch_pdl=pdl,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _weight(
    contract: ScaledMatmul,
    given: Mapping[str, torch.Tensor],
    tile: tuple[int, int] | None,
    wide: bool,
    none: torch.Tensor,
) -> tuple[Any, ...]:
    """(W, its strides along rows and experts, scales, theirs along rows, k and experts) as the
    kernel takes them; `tile`: W as a descriptor of tiles of this size."""
    if four(contract):
        codes, stride = given["nibbles"], padded(contract)[1]
        held: torch.Tensor | None = given["nibbles_scale"].mT
    else:
        codes, held = given["codes"], given.get("scale")
        stride = codes.stride(1)
    sw = (none, 0, 0, 0) if held is None else (*scales(held[0], none), held.stride(0))
    apart = codes.stride(0)
    if tile is not None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows = codes.flatten(0, 1)
        held_as: Any = TensorDescriptor(rows, list(rows.shape), [stride, 1], list(tile))
        return held_as, stride, apart, *sw
    if wide and codes.dtype is not INT8:
        codes = codes.view(torch.uint8)
    return codes, stride, apart, *sw
