"""8-bit quantisers under the names that sgl-kernel gave them: results are written in place.

| function                       | input        | output_q     | output_s                          |
|--------------------------------|--------------|--------------|-----------------------------------|
| sgl_per_token_group_quant_8bit | [..., H]     | [..., H]     | [M, G] or [..., G]; int32 words   |
|   fuse_silu_and_mul            | [..., 2 H]   |              | of four UE8M0 exponents:          |
|   masked_m                     | [E, T, H]    | [E, T, H]    | [..., ceil(G / 4)]; any strides   |
| sgl_per_tensor_quant_fp8       | any          | as input     | 1                                 |
| sgl_per_token_quant_fp8        | [..., H]     | as input     | M scales                          |

M is the product of the leading sizes, G = H / group_size. A failed condition is a RuntimeError
that names it. Nothing waits for the device.
"""

import functools
import math

import torch

from qinductor.kernels.quantize import Quantize, Source
from qinductor.kernels.quantize_into import quantize_into
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.op import LIBRARY

FP16, BF16, FP32, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
GROUPS = (16, 32, 64, 128, 256)
LEAST = 1e-10  # no amax is smaller
RANGES = {E4M3: (-448.0, 448.0), INT8: (-128.0, 127.0)}


@functools.cache
def group_contract(
    k: int, x: torch.dtype, codes: torch.dtype, group: int, ue8m0: bool, silu: bool, packed: bool
) -> Quantize:
    """s = amax * (1 / qmax), amax at least 1e-10; codes x * (qmax / amax). With UE8M0 s is the next
    power of two, and codes are x * (1 / s). silu(gate) is rounded to the dtype of x, so is its
    product with up."""
    low, high = RANGES[codes]
    gated = Source(y=x, activation="silu", gate="halves", inner=x)
    return Quantize(
        k=k, x=x, source=gated if silu else Source(y=x), codes=codes, group=group,
        scale=INT32 if packed else FP32, qmax=high, compute=FP32, inner=FP32, low=low, high=high,
        inverse=True, least=LEAST, power="up" if ue8m0 else "",
        quotient="x*(1/s)" if ue8m0 else "x*(q/a)", truncate=codes is INT8,
    )  # fmt: skip


@functools.cache
def row_contract(k: int, x: torch.dtype) -> Quantize:
    """A scale for each row: s = amax * (1 / 448), codes x * (1 / s); of zeros s = 0, codes 0."""
    low, high = RANGES[E4M3]
    return Quantize(
        k=k, x=x, source=Source(y=x), codes=E4M3, group=k, scale=FP32, qmax=high, compute=FP32,
        inner=FP32, low=low, high=high, inverse=True, quotient="x*(1/s)", guard=True,
    )  # fmt: skip


@functools.cache
def tensor_contract(k: int, x: torch.dtype, static: bool) -> Quantize:
    """One scale, given or s = amax / 448; codes x * (1 / s); of zeros s = 0, codes 0."""
    low, high = RANGES[E4M3]
    return Quantize(
        k=k, x=x, source=Source(y=x), codes=E4M3, group=0, scale=FP32, qmax=high, compute=FP32,
        inner=FP32, low=low, high=high, static=static, quotient="x*(1/s)", guard=True,
    )  # fmt: skip


def sgl_per_token_group_quant_8bit(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:
    """Writes codes and scales of groups of columns into output_q and output_s.

    input              float16 or bfloat16 [..., H], contiguous; [..., 2 H] to be fused
    output_q           float8_e4m3fn or int8 [..., H], contiguous
    output_s           float32 [M, G] or [..., G]; int32 [.., ceil(G / 4)]: four exponents a word,
                       group g in byte g % 4. Any strides: rows, columns, padded columns
    group_size         16, 32, 64, 128 or 256
    eps                1e-10
    fp8_min, fp8_max   -448 and 448, or -128 and 127 for int8, which is truncated toward zero
    scale_ue8m0        scales are rounded up to powers of two, in every layout; int32 needs it
    fuse_silu_and_mul  silu(gate) * up is quantised, gate the first half of each row
    masked_m           int32[E], input [E, T, ...], output_s [E, T, G]: rows t < masked_m[e] alone
                       are written
    enable_v2          taken and ignored: one implementation serves both versions
    Errors: RuntimeError for anything else, and for empty tensors.
    """
    torch.ops.qinductor.sgl_per_token_group_quant_8bit.default(
        input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0,
        fuse_silu_and_mul, masked_m, enable_v2,
    )  # fmt: skip


sgl_per_token_group_quant_fp8 = sgl_per_token_group_quant_8bit
sgl_per_token_group_quant_int8 = sgl_per_token_group_quant_8bit


def sgl_per_tensor_quant_fp8(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, is_static: bool
) -> None:
    """Writes codes of a whole tensor into output_q, and its scale into output_s unless it is given.

    input      float32, float16 or bfloat16, any shape, contiguous
    output_q   float8_e4m3fn, shape of the input, contiguous
    output_s   one float32; read if is_static, else overwritten with amax / 448
    A scale of 0 makes all codes 0. Errors: RuntimeError for anything else.
    """
    torch.ops.qinductor.sgl_per_tensor_quant_fp8.default(input, output_q, output_s, is_static)


def sgl_per_token_quant_fp8(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor
) -> None:
    """Writes codes of each row into output_q, and its scale amax * (1 / 448) into output_s.

    input      float32, float16 or bfloat16 [..., H], contiguous, H a multiple of 4
    output_q   float8_e4m3fn, shape of the input, contiguous
    output_s   float32, contiguous, as many elements as there are rows
    A row of zeros has scale 0 and codes 0. Errors: RuntimeError for anything else.
    """
    torch.ops.qinductor.sgl_per_token_quant_fp8.default(input, output_q, output_s)


def _why_not_equal(x: torch.Tensor, q: torch.Tensor) -> str | None:
    """Why codes q of x, a float8_e4m3fn for each element, cannot be written."""
    if x.dtype not in (FP32, FP16, BF16):
        return f"input is {x.dtype}; wanted float32, float16 or bfloat16"
    if q.dtype is not E4M3:
        return f"output_q is {q.dtype}; wanted float8_e4m3fn"
    if x.shape != q.shape:
        return f"input is {list(x.shape)}, output_q {list(q.shape)}; wanted equal shapes"
    return _why_not_contiguous(x, q)


def _why_not_contiguous(x: torch.Tensor, q: torch.Tensor) -> str | None:
    if x.is_contiguous() and q.is_contiguous():
        return None
    return f"input has strides {x.stride()}, output_q {q.stride()}; wanted contiguous tensors"


def _why_not_numbers(
    q: torch.Tensor, group: int, eps: float, limits: tuple[float, float]
) -> str | None:
    if q.dtype not in RANGES:
        return f"output_q is {q.dtype}; wanted float8_e4m3fn or int8"
    if limits != RANGES[q.dtype]:
        return f"fp8_min, fp8_max are {limits}; wanted {RANGES[q.dtype]} for {q.dtype}"
    if not abs(eps - LEAST) <= 1e-13:
        return f"eps is {eps}; wanted {LEAST}"
    return None if group in GROUPS else f"group_size is {group}; wanted one of {GROUPS}"


def _why_not_groups(
    x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, group: int, ue8m0: bool, silu: bool
) -> str | None:
    if x.dtype is not BF16 and x.dtype is not FP16:
        return f"input is {x.dtype}; wanted float16 or bfloat16"
    if not (x.dim() and x.numel()):
        return f"input is {list(x.shape)}; wanted rows that are not empty"
    *lead, h = q.shape or (0,)
    if x.shape != (*lead, 2 * h if silu else h):
        last = "twice as many columns" if silu else "equal shapes"
        return f"input is {list(x.shape)}, output_q {list(q.shape)}; wanted {last}"
    if h % group:
        return f"rows have {h} elements; wanted a multiple of group_size, {group}"
    packed = s.dtype is INT32
    if not (packed or s.dtype is FP32):
        return f"output_s is {s.dtype}; wanted float32, or int32 words of UE8M0 exponents"
    if packed and not ue8m0:
        return "output_s is int32, which holds UE8M0 exponents; wanted scale_ue8m0=True"
    width = -(-h // group // 4) if packed else h // group
    full, flat = (*lead, width), (q.numel() // h, width)
    if s.shape not in (full, flat):
        return f"output_s is {list(s.shape)}; wanted {list(full)} or {list(flat)}"
    return _why_not_contiguous(x, q)


def _why_not_masked(q: torch.Tensor, s: torch.Tensor, masked_m: torch.Tensor) -> str | None:
    if q.dim() != 3 or s.dim() != 3:
        got = f"input is {q.dim()}-D, output_s {s.dim()}-D"
        return f"{got}; wanted [experts, tokens, ...] for both where masked_m is given"
    if masked_m.dtype is not INT32 or masked_m.shape != q.shape[:1]:
        got = f"{masked_m.dtype}{list(masked_m.shape)}"
        return f"masked_m is {got}; wanted int32[{q.shape[0]}], one for each expert"
    return None


_GROUP = "sgl_per_token_group_quant_8bit"
_TENSOR = "sgl_per_tensor_quant_fp8"
_TOKEN = "sgl_per_token_quant_fp8"
_RESULTS = "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s"
_OPTIONS = (
    "int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0=False, "
    "bool fuse_silu_and_mul=False, Tensor? masked_m=None, bool? enable_v2=None"
)
LIBRARY.define(f"{_GROUP}{_RESULTS}, {_OPTIONS}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"{_TENSOR}(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, bool is_static) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(f"{_TOKEN}{_RESULTS}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(LIBRARY, _GROUP, "CompositeExplicitAutograd")
def _group(
    x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, group: int, eps: float, low: float,
    high: float, ue8m0: bool = False, silu: bool = False, masked_m: torch.Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:  # fmt: skip
    reason = _why_not_numbers(q, group, eps, (low, high))
    reason = reason or _why_not_groups(x, q, s, group, ue8m0, silu)
    if masked_m is not None:
        reason = reason or _why_not_masked(q, s, masked_m)
    hold(_GROUP, reason or elsewhere(x, q, s, masked_m))
    h = q.shape[-1]
    contract = group_contract(h, x.dtype, q.dtype, group, ue8m0, silu, s.dtype is INT32)
    rows, codes, scales = x, q, s
    if s.dim() == 1:
        rows, codes, scales = x[None], q[None], s[None]
    elif x.dim() != s.dim():  # a scale's row for each row of all leading sizes
        rows, codes = x.view(-1, x.shape[-1]), q.view(-1, h)
    elif s.dim() > 3:
        rows, codes = (t.view(-1, *t.shape[-2:]) for t in (x, q))
        scales = s.flatten(0, -3)  # a copy where no one stride leads from batch to batch
    quantize_into(contract, (rows,), (codes, scales), masked_m)
    if scales.data_ptr() != s.data_ptr():
        s.copy_(scales.view(s.shape))
    torch.autograd.graph.increment_version((q, s))


@torch.library.impl(LIBRARY, _TENSOR, "CompositeExplicitAutograd")
def _tensor(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, is_static: bool) -> None:
    reason = _why_not_equal(x, q)
    if s.dtype is not FP32 or s.numel() != 1:
        reason = reason or f"output_s is {s.dtype}{list(s.shape)}; wanted one float32"
    hold(_TENSOR, reason or elsewhere(x, q, s))
    if x.numel():
        k = x.shape[-1] if x.dim() else 1
        scale = s.view(1)
        inputs = (x.view(-1, k), scale) if is_static else (x.view(-1, k),)
        results = q.view(-1, k), torch.empty_like(scale) if is_static else scale
        quantize_into(tensor_contract(k, x.dtype, is_static), inputs, results)
    elif not is_static:
        s.zero_()
    torch.autograd.graph.increment_version((q,) if is_static else (q, s))


@torch.library.impl(LIBRARY, _TOKEN, "CompositeExplicitAutograd")
def _token(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> None:
    reason = _why_not_equal(x, q)
    if x.dim() < 2 or x.shape[-1] % 4:
        reason = reason or f"input is {list(x.shape)}; wanted rows of a multiple of 4 elements"
    rows = math.prod(x.shape[:-1])
    if s.dtype is not FP32 or s.numel() != rows or not s.is_contiguous():
        got = f"{s.dtype}{list(s.shape)}, strides {s.stride()}"
        reason = reason or f"output_s is {got}; wanted {rows} contiguous float32"
    hold(_TOKEN, reason or elsewhere(x, q, s))
    k = x.shape[-1]
    if x.numel():
        results = q.view(rows, k), s.view(rows, 1)
        quantize_into(row_contract(k, x.dtype), (x.view(rows, k),), results)
    else:
        s.zero_()
    torch.autograd.graph.increment_version((q, s))


for _name in (_GROUP, _TENSOR, _TOKEN):
    torch.library.register_fake(f"qinductor::{_name}", lambda *args: None, lib=LIBRARY)
