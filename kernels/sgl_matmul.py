"""Products of 8-bit codes under the names that sgl-kernel gave them.

| function                | a         | b                        | scales of a, of b         |
|-------------------------|-----------|--------------------------|---------------------------|
| fp8_scaled_mm,          | [M, K]    | [K, N], column-major     | M or 1; N or 1            |
|   int8_scaled_mm        |           |                          |                           |
| fp8_blockwise_scaled_mm | [M, K]    | [K, N], column-major     | [M, K/128]; [K/128, N/128]|

Scales are float32 multipliers. A failed condition is a RuntimeError that names it; nothing waits
for the device.
"""

import functools

import torch

from qinductor.contracts import QuantizedWeight, WeightFormat
from qinductor.kernels.scaled_matmul import TAGS, Operands, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_direct import scaled_product
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.op import LIBRARY

FP16, BF16, FP32, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODES = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", INT8: "int8"}


def run(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    weight_codes: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a[M, K] times the weight [N, K], to `out` if there is one, whose rows may be strided."""
    if a.is_cuda:
        return scaled_product(contract, a, scale, weight_codes, weight_scale, bias, out)
    weight = QuantizedWeight(contract.weight, weight_codes, weight_scale)
    found = reference(contract, a, scale, Operands(weight, bias))
    return found if out is None else out.copy_(found)


@functools.cache
def contract(
    a: torch.dtype, b: torch.dtype, n: int, k: int, group: int, blocks: tuple[int, int],
    out: torch.dtype, bias: torch.dtype | None = None,
) -> ScaledMatmul:  # fmt: skip
    """Of blocks (bn, bk) of b, and groups of a; the bias is added in one operation with sa."""
    weight = WeightFormat(
        codes=CODES[b], n=n, k=k, bn=min(blocks[0], n), bk=min(blocks[1], k), arithmetic="q*s",
        scale=FP32, zero=None, inner=FP32, compute=FP32, dtype=FP32,
    )  # fmt: skip
    return ScaledMatmul(
        weight=weight, a=a, group=min(group, k), scale=FP32, out=out, bias=bias,
        fast=a is not INT8 and min(group, k) in (0, k), fused=bias is not None,
    )  # fmt: skip


def fp8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(mat_a @ mat_b) * scales_b[n] * scales_a[m] + bias[n], [M, N].

    mat_a      float8_e4m3fn [M, K], rows contiguous, K a multiple of 16
    mat_b      float8_e4m3fn [K, N], columns contiguous: w.t() of a weight [N, K]; N a multiple of 8
    scales_a   float32, contiguous, M elements, or one
    scales_b   float32, contiguous, N elements, or one
    out_dtype  float16 or bfloat16
    bias       out_dtype [N], contiguous
    Errors: RuntimeError for anything else.
    """
    out: torch.Tensor = torch.ops.qinductor.fp8_scaled_mm.default(
        mat_a, mat_b, scales_a, scales_b, out_dtype, bias
    )
    return out


def int8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_scaled_mm` of int8 codes; their sums are exact."""
    out: torch.Tensor = torch.ops.qinductor.int8_scaled_mm.default(
        mat_a, mat_b, scales_a, scales_b, out_dtype, bias
    )
    return out


def fp8_blockwise_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product of codes with a scale for 128 columns of mat_a and 128 x 128 of mat_b, [M, N].

    mat_a      float8_e4m3fn [M, K], rows contiguous, K a multiple of 128
    mat_b      float8_e4m3fn [K, N], columns contiguous, N a multiple of 128
    scales_a   float32 [M, K / 128], stride(0) 1; contiguous where M or K / 128 is 1
    scales_b   float32 [K / 128, N / 128], stride(0) 1; contiguous where one of them is 1
    out_dtype  float16 or bfloat16
    Errors: RuntimeError for anything else.
    """
    out: torch.Tensor = torch.ops.qinductor.fp8_blockwise_scaled_mm.default(
        mat_a, mat_b, scales_a, scales_b, out_dtype
    )
    return out


def _why_not_operands(
    a: torch.Tensor, b: torch.Tensor, codes: torch.dtype, out: torch.dtype, k: int, n: int
) -> str | None:
    """Why a[M, K] and b[K, N], K and N multiples of k and n, are not two operands."""
    if a.dim() != 2 or b.dim() != 2:
        return f"mat_a is {a.dim()}-D, mat_b {b.dim()}-D; wanted 2-D tensors"
    if a.dtype is not codes or b.dtype is not codes:
        return f"mat_a is {a.dtype}, mat_b {b.dtype}; wanted {codes}"
    if a.shape[1] != b.shape[0]:
        return f"mat_a is {list(a.shape)}, mat_b {list(b.shape)}; wanted one inner size"
    if a.stride(1) != 1:
        return f"mat_a has strides {a.stride()}; wanted a row-major tensor"
    if b.stride(0) != 1:
        return f"mat_b has strides {b.stride()}; wanted a column-major tensor"
    if a.shape[1] % k or b.shape[1] % n:
        got = f"K is {a.shape[1]}, N {b.shape[1]}"
        return f"{got}; wanted multiples of {k} and {n}"
    if out is not FP16 and out is not BF16:
        return f"out_dtype is {out}; wanted float16 or bfloat16"
    return None


def _why_not_scales(a: torch.Tensor, n: int, sa: torch.Tensor, sb: torch.Tensor) -> str | None:
    for name, scales, count in (("scales_a", sa, a.shape[0]), ("scales_b", sb, n)):
        if scales.dtype is not FP32:
            return f"{name} is {scales.dtype}; wanted float32"
        if scales.numel() not in (1, count):
            return f"{name} has {scales.numel()} elements; wanted {count} or 1"
        if not scales.is_contiguous():
            return f"{name} has strides {scales.stride()}; wanted contiguous scales"
    return None


def _why_not_bias(bias: torch.Tensor | None, n: int, out: torch.dtype) -> str | None:
    if bias is None:
        return None
    if bias.dtype is not out:
        return f"bias is {bias.dtype}; wanted out_dtype, {out}"
    if bias.numel() != n or not bias.is_contiguous():
        got = f"bias is {list(bias.shape)}, strides {bias.stride()}"
        return f"{got}; wanted {n} contiguous elements"
    return None


def _why_not_blocks(name: str, scales: torch.Tensor, wanted: tuple[int, int]) -> str | None:
    if scales.dtype is not FP32:
        return f"{name} is {scales.dtype}; wanted float32"
    if scales.shape != wanted:
        return f"{name} is {list(scales.shape)}; wanted {list(wanted)}"
    if scales.stride(0) == 1 or (min(wanted) <= 1 and scales.is_contiguous()):
        return None
    return f"{name} has strides {scales.stride()}; wanted a column-major tensor, stride(0) 1"


def _row_scaled(
    name: str, codes: torch.dtype, a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor,
    sb: torch.Tensor, out: torch.dtype, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    reason = _why_not_operands(a, b, codes, out, 16, 8)
    reason = reason or _why_not_scales(a, b.shape[1], sa, sb)
    reason = reason or _why_not_bias(bias, b.shape[1], out)
    hold(name, reason or elsewhere(a, b, sa, sb, bias))
    (m, k), n = a.shape, b.shape[1]
    if not (m and n and k):
        found = a.new_zeros((m, n), dtype=out)
        return found if bias is None else found + bias.view(n)
    group = k if sa.numel() == m else 0
    blocks = (1 if sb.numel() == n else n, k)
    form = contract(codes, codes, n, k, group, blocks, out, None if bias is None else out)
    sa = sa.view(m, 1) if group else sa.view(1)
    return run(form, a, sa, b.t(), sb.view(-1, 1), None if bias is None else bias.view(n))


_OPERANDS = "Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype"
LIBRARY.define(f"fp8_scaled_mm({_OPERANDS}, Tensor? bias=None) -> Tensor", tags=TAGS)
LIBRARY.define(f"int8_scaled_mm({_OPERANDS}, Tensor? bias=None) -> Tensor", tags=TAGS)
LIBRARY.define(f"fp8_blockwise_scaled_mm({_OPERANDS}) -> Tensor", tags=TAGS)


@torch.library.impl(LIBRARY, "fp8_scaled_mm", "CompositeExplicitAutograd")
def _fp8_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return _row_scaled("fp8_scaled_mm", E4M3, a, b, sa, sb, out, bias)


@torch.library.impl(LIBRARY, "int8_scaled_mm", "CompositeExplicitAutograd")
def _int8_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return _row_scaled("int8_scaled_mm", INT8, a, b, sa, sb, out, bias)


@torch.library.impl(LIBRARY, "fp8_blockwise_scaled_mm", "CompositeExplicitAutograd")
def _fp8_blockwise_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    name = "fp8_blockwise_scaled_mm"
    hold(name, _why_not_operands(a, b, E4M3, out, 128, 128))
    (m, k), n = a.shape, b.shape[1]
    reason = _why_not_blocks("scales_a", sa, (m, k // 128))
    reason = reason or _why_not_blocks("scales_b", sb, (k // 128, n // 128))
    hold(name, reason or elsewhere(a, b, sa, sb))
    if not (m and n and k):
        return a.new_zeros((m, n), dtype=out)
    return run(contract(E4M3, E4M3, n, k, 128, (128, 128), out), a, sa, b.t(), sb.t())


for _name in ("fp8_scaled_mm", "int8_scaled_mm", "fp8_blockwise_scaled_mm"):

    @torch.library.register_fake(f"qinductor::{_name}", lib=LIBRARY)
    def _(
        a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out)
