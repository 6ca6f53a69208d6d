"""Provider of scaled_matmul in Triton, for sm_80 and up: triton.scaled_mma, for any M."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.kernels.scaled_matmul import FP32, SCALED_MATMUL, Operands, ScaledMatmul, cost
from qinductor.kernels.scaled_matmul_sums import signed
from qinductor.kernels.scaled_matmul_triton_form import (
    FLOAT8,
    INT8,
    PROMOTED,
    Packed,
    aligned,
    device_form,
    four,
    integral,
    padded,
    scales,
    slice_of,
    sums_of,
)
from qinductor.kernels.scaled_matmul_triton_groups import launch as launch_groups
from qinductor.kernels.scaled_matmul_triton_tiles import SHARED, Config, candidates, of_groups
from qinductor.kernels.triton_device import capability, shared_memory
from qinductor.rates import BANDWIDTH, RATE, M


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import scaled_matmul_triton_kernels

    return scaled_matmul_triton_kernels


class ScaledMMA(Packed):
    """Codes in shared memory, or of 4 bits in registers; scales on the sums."""

    name = "triton.scaled_mma"
    version = 1

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        # An H200's times of four shapes, to M = 128 within about a fifth.
        spent, rate = cost(contract), {0: 1.5, 64: 0.75, 32: 0.43}.get(slice_of(contract), 1.15)
        few = spent["bytes"] / 0.95 / BANDWIDTH
        rows = 2e-8 * M + 2.4e-10 * sympy.Min(M, 128, evaluate=False) ** 2
        return 3.5e-6 + rows + sympy.Max(few, spent["flops"] / rate / RATE, evaluate=False)

    def configs(self, contract: ScaledMatmul, m: int) -> Sequence[str]:
        return candidates(contract, m)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        a, scale, *zero = inputs
        chosen = Config.parse(config or self.configs(contract, a.shape[0])[0])
        given = dict(zip(_names(contract), packed, strict=True))
        return launch(contract, a, scale, given, chosen, zero=zero[0] if zero else None)

    def direct(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        source: Operands,
        config: str | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product with codes of 8 bits that are not packed, into `out` if it is given."""
        a, scale = inputs
        given = {"codes": source.weight.codes, "scale": source.weight.scale, "bias": source.bias}
        held = {name: tensor for name, tensor in given.items() if tensor is not None}
        chosen = Config.parse(config or self.configs(contract, a.shape[0])[0])
        return launch(contract, a, scale, held, chosen, out)

    def grouped(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        offsets: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        """a[T, K] of rows sorted by expert times stacked weights: [T, N]."""
        a, scale = inputs
        mean = -(-a.shape[0] // offsets.shape[0])
        chosen = Config.parse(config) if config else of_groups(contract, mean)[0]
        given = dict(zip(_names(contract), packed, strict=True))
        return launch_groups(contract, a, scale, offsets, given, chosen)

    def batched(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        """a[E, M, K] times stacked weights: [E, M, N]."""
        a, scale = inputs
        chosen = Config.parse(config) if config else of_groups(contract, a.shape[1])[0]
        given = dict(zip(_names(contract), packed, strict=True))
        rows = scale.flatten(0, 1) if contract.group else scale
        out = launch_groups(contract, a.flatten(0, 1), rows, None, given, chosen)
        return out.view(*a.shape[:2], -1)


PROVIDER = ScaledMMA()


@functools.cache
def _names(contract: ScaledMatmul) -> tuple[str, ...]:
    return tuple(PROVIDER.operands(contract))


def launch(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    config: Config,
    out: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product [M, N], into `out` if it is given.

    given  the packed tensors by name; codes [N, K] with contiguous rows, `scale` of any strides"""
    code, w = kernels or device(), contract.weight
    m = a.shape[0]
    a = signed(a if a.stride(1) == 1 else a.contiguous())
    wide = False
    if a.is_cuda:
        config = config.within(contract, shared_memory(a.device, SHARED))
        wide = capability(a.device) < FLOAT8
    form = device_form(contract, wide)
    config = dataclasses.replace(config, bk=max(config.bk, 64 if four(contract) else form.summed))
    if four(contract):
        codes, stride = given["nibbles"], padded(contract)[1]
        held: torch.Tensor | None = given["nibbles_scale"].t()
    else:
        codes, held = given["codes"], given.get("scale")
        stride = codes.stride(0)
    bs = min(slice_of(contract) or PROMOTED, config.bk)
    split = max(1, min(config.split, -(-w.k // config.bk)))
    tma = config.tma and not four(contract) and not wide and aligned(a, codes)
    left, right = _operands(a, codes, wide, (config.bm, config.bn, bs) if tma else None)
    if out is None:
        out = a.new_empty((m, w.n), dtype=contract.out)
    summed = torch.int32 if integral(contract) and not form.promote else FP32
    stride_out = out.stride(0) if split == 1 else w.n
    parts = out if split == 1 else a.new_empty((split, m, w.n), dtype=summed)
    sw = scales(held, parts)
    sa = scales(scale if contract.group else scale.reshape(1, 1).expand(m, 1), parts)
    zeros = _zeros(contract, zero, given, parts)
    bias = given.get("bias", parts)
    asm = not type(code.product).__name__.startswith("Interpreted")
    pdl = a.is_cuda and capability(a.device) >= (9, 0)
    tiles = -(-m // config.bm) * -(-w.n // config.bn)
    with torch.cuda.device_of(out):
        code.product[(tiles, split)](
            left, a.stride(0), right, stride, *sa, *sw, *zeros, bias, parts, stride_out, m, w.n,
            w.k, split,
            F=form, BM=config.bm, BN=config.bn, BK=config.bk, BS=bs, PARTS=split > 1,
            STAGES=config.stages, EVEN_K=w.k % config.bk == 0, SWAP=config.swap or four(contract),
            TMA=tma, PDL=pdl, ASM=asm, num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if split > 1:
            block = 256
            code.sum_parts[(m, -(-w.n // block))](
                parts, *sa[:2], *sw[:2], *zeros[:2], zeros[3], bias, out, out.stride(0), m, w.n,
                split, F=form, B=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out


def scaled(
    contract: ScaledMatmul,
    sums: torch.Tensor,
    scale: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    zero: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The result of contiguous int32 sums [M, N] where no scale changes along k, in one launch."""
    code, (m, n), block = kernels or device(), sums.shape, 1024
    out = sums.new_empty((m, n), dtype=contract.out)
    sw = scales(given.get("scale"), sums)
    sa = scales(scale if contract.group else scale.reshape(1, 1).expand(m, 1), sums)
    zeros = _zeros(contract, zero, given, sums)
    with torch.cuda.device_of(out):
        code.sum_parts[(m, -(-n // block))](
            sums, *sa[:2], *sw[:2], *zeros[:2], zeros[3], given.get("bias", sums), out, n, m, n, 1,
            F=device_form(contract, False), B=block, PDL=False, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _zeros(
    contract: ScaledMatmul,
    zero: torch.Tensor | None,
    given: Mapping[str, torch.Tensor],
    none: torch.Tensor,
) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """(zero points, their strides along rows and along k, sums of codes) as the kernels take
    them."""
    if zero is None:
        return none, 0, 0, none
    held, *strides = scales(zero if contract.group else zero.reshape(1, 1), none)
    (sums,) = (given[name] for name in sums_of(contract))
    return held, strides[0] if contract.group else 0, strides[1], sums


def _operands(
    a: torch.Tensor, codes: torch.Tensor, wide: bool, tiles: tuple[int, int, int] | None
) -> tuple[Any, Any]:
    """a and W as the kernels take them: tensors, or descriptors of tiles of these sizes."""
    if tiles is not None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        bm, bn, bs = tiles
        return (
            TensorDescriptor(a, list(a.shape), [a.stride(0), 1], [bm, bs]),
            TensorDescriptor(codes, list(codes.shape), [codes.stride(0), 1], [bn, bs]),
        )
    if wide:
        return a.view(torch.uint8), codes if codes.dtype is INT8 else codes.view(torch.uint8)
    return a, codes


SCALED_MATMUL.register(PROVIDER)
