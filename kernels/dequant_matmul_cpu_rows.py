"""Providers of dequant_matmul on a CPU, for few rows of x: torch's own row kernels."""

import functools
from collections.abc import Sequence

import torch

from qinductor.contracts import dequantize, short
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    DequantMatmul,
    Operands,
    int4_group,
    int4_scales,
)
from qinductor.op import Spec

aten = torch.ops.aten
_int4pack_mm = aten._weight_int4pack_mm_for_cpu.default
_int8pack_mm = aten._weight_int8pack_mm.default

# Largest M at which the row kernel beats strips and oneDNN: (elements of W up to which, M).
# One thread of a Xeon with AMX, torch 2.13, bf16: 384x384 to 2048x2048, M = 1 to 32.
ROW_KERNEL_M = {
    "int4": ((1 << 18, 15), (1 << 62, 12)),
    "int8": ((1 << 18, 14), (1 << 62, 12)),
}


DENSE_M = 4  # the same against a dense weight: 0.022 ms against 0.038 at 384x384, M = 4


def _limit(kind: str, contract: DequantMatmul, dense: bool) -> int:
    if dense:
        return DENSE_M
    elements = contract.weight.n * contract.weight.k
    return next(m for size, m in ROW_KERNEL_M[kind] if elements <= size)


def _row_scale(contract: DequantMatmul, source: Operands) -> torch.Tensor:
    """The scales of each output row, [N, blocks]: the weight's, or else the product's, or ones."""
    scale = source.weight.scale if source.output_scale is None else source.output_scale[:, None]
    if scale is None:
        scale = torch.ones(1, 1, dtype=contract.x, device=source.weight.codes.device)
    return scale.expand(contract.weight.n, -1)


def _check_finite(scale: torch.Tensor, source: Operands) -> None:
    """Refused where a scale or W is not finite: the kernels scale sums, and never form W."""
    w = source.weight
    if not scale.isfinite().all():  # what is added to K for a bias would be 0 * inf
        raise Refused("scales and bias must be finite; one is not")
    if not dequantize(w).isfinite().all():
        raise Refused(f"W must be finite in {short(w.format.dtype)}; an element overflows")


def _why_no_scale(contract: DequantMatmul) -> str | None:
    """What both row kernels ask of scales: one, in the dtype of x, each row its own."""
    w = contract.weight
    if w.permuted:
        return "blocks hold columns in another order than W's; it takes columns in their order"
    if contract.x not in (torch.bfloat16, torch.float16):
        return (
            f"x is {short(contract.x)}; it takes bf16 and fp16 (in fp32 it is less accurate than "
            "eager: 3 times the error at K = 4096)"
        )
    scale = w.scale if contract.output_scale is None else contract.output_scale
    if scale not in (None, contract.x):
        return f"the scale is {short(scale)}; it takes the dtype of x, {short(contract.x)}"
    if contract.output_scale is not None and contract.x == torch.float16:
        return (
            "the scale is fp16 after the product, which overflows in eager before it; it takes bf16"
        )
    if w.scale is not None and contract.output_scale is not None:
        return "the weight and the product both have a scale; it takes one"
    if w.scale is not None and w.bn not in (1, w.n):
        return f"blocks have {w.bn} rows; it takes 1 or all"
    return None


class Int4RowKernel:
    """`aten._weight_int4pack_mm_for_cpu`: (q - 8) * s + z, summed in fp32, for few rows of x.

    It rounds no W: 1.3 times eager's rms error on random weights, where the oracle allows 1.5, and
    more where codes repeat a pattern and their sum nearly cancels. A bias added to its rounded
    result would make that 1.6, so a bias becomes one more group of K: code 1, scale bias[n], x = 1.
    """

    name = "aten.int4pack_mm"
    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def why_not(self, contract: DequantMatmul) -> str | None:
        w = contract.weight
        if w.codes != "int4":
            return f"codes are {w.codes}; it takes int4 (with a zero it is less accurate)"
        if w.arithmetic not in ("q", "q*s"):
            return f"W is {w.arithmetic}; it takes q*s (its own zero is rounded to bf16)"
        if not int4_group(contract):
            return f"groups have {w.bk} of K = {w.k}; it takes multiples of 32 that divide K"
        if w.n % 16:
            return f"N is {w.n}; it takes multiples of 16"
        return _why_no_scale(contract)

    def limit(self, contract: DequantMatmul, dense: bool = False) -> int:
        return _limit("int4", contract, dense)

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        n, g = contract.weight.n, int4_group(contract)
        k = contract.weight.k + (g if contract.bias else 0)
        return {
            "int4pack": ((n, k // 2), torch.uint8),
            "int4pack_scales": ((k // g, n, 2), contract.x),
        }

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w, g = contract.weight, int4_group(contract)
        codes = source.weight.codes.int()
        scale = _row_scale(contract, source)
        scale = scale.repeat_interleave(w.k // g // scale.shape[1], 1)  # [N, K / g]
        if source.bias is not None:
            extra = torch.zeros(w.n, g, dtype=codes.dtype, device=codes.device)
            extra[:, 0] = 1
            codes = torch.cat([codes, extra], 1)
            scale = torch.cat([scale, source.bias[:, None]], 1)
        _check_finite(scale, source)
        packed = aten._convert_weight_to_int4pack_for_cpu((codes + 8).contiguous(), 1)
        return {"int4pack": packed, "int4pack_scales": int4_scales(scale)}

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        codes, scales = packed
        g = int4_group(contract)
        if contract.bias:
            x = torch.cat([x, _ones_column(x.shape[0], g, x.dtype)], 1)
        out: torch.Tensor = _int4pack_mm(x.contiguous(), codes, g, scales)
        return out


@functools.lru_cache(256)
def _ones_column(m: int, g: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, g] with ones in the first column, which multiply the bias, and zeros."""
    column = torch.zeros(m, g, dtype=dtype)
    column[:, 0] = 1
    return column


class Int8RowKernel:
    """`aten._weight_int8pack_mm`: codes times x in fp32, then a scale a row, for few rows of x."""

    name = "aten.int8pack_mm"
    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def why_not(self, contract: DequantMatmul) -> str | None:
        w = contract.weight
        if w.codes != "int8":
            return f"codes are {w.codes}; it takes int8"
        if w.arithmetic not in ("q", "q*s"):
            return f"W is {w.arithmetic}; it takes q*s"
        if w.bk != w.k:
            return f"blocks have {w.bk} of K = {w.k}; it takes one scale a row"
        if w.k % 16:  # its bf16 loop has no tail: it reads past the end
            return f"K is {w.k}; it takes multiples of 16"
        if contract.bias:
            return "a bias would be added after a rounding (1.7 times eager's error; 1.5 allowed)"
        return _why_no_scale(contract)

    def limit(self, contract: DequantMatmul, dense: bool = False) -> int:
        return _limit("int8", contract, dense)

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        w = contract.weight
        return {"codes": ((w.n, w.k), torch.int8), "row_scale": ((w.n,), contract.x)}

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        scale = _row_scale(contract, source).reshape(-1).contiguous()
        _check_finite(scale, source)
        return {"codes": source.weight.codes, "row_scale": scale}

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        codes, scale = packed
        out: torch.Tensor = _int8pack_mm(x.contiguous(), codes, scale)
        return out


for provider in (Int4RowKernel(), Int8RowKernel()):
    DEQUANT_MATMUL.register(provider)
