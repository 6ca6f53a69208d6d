"""Batched products of float8 codes under sgl-kernel's name, `bmm_fp8`.

| tensor           | shape, strides                                      | dtype                   |
|------------------|-----------------------------------------------------|-------------------------|
| A                | [b, m, k], k contiguous                             | float8_e4m3fn, _e5m2    |
| B                | [b, k, n], k or n contiguous                        | the same, not both e5m2 |
| A_scale, B_scale | one element, a multiplier                           | float32                 |
| result           | [b, m, n], contiguous                               | float16, bfloat16       |
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from qinductor.kernels import sgl_batched_cute
from qinductor.kernels.scaled_matmul import TAGS
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.kernels.triton_device import capability, has_triton
from qinductor.op import LIBRARY
from qinductor.triton_compile import compiled

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAME = "bmm_fp8"


# Tiles of fewer than 64 rows: wgmma, which takes those, may still read registers of converted
# codes when the next ones are written.
TILES = ((16, 16), (1 << 62, 32))  # (largest m, rows)
COLUMNS, STEP = 64, 128
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
LEAST = (8, 9)  # compute capability that has float8


def run_batched(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Writes A @ B * (sa * sb) to `out`. Sums are exact; on a GPU in float32, where Hopper's tensor
    cores keep 14 bits of those of 128 columns."""
    if not out.numel():
        return out
    if not a.shape[2]:
        return out.zero_()
    if a.is_cuda and _takes(a.device):
        if sgl_batched_cute.why_not(a, b, out) is None and sgl_batched_cute.launch(
            a, b, sa, sb, out
        ):
            return out
        return launch(a, b, sa, sb, out)
    sums = torch.bmm(a.to(FP64), b.to(FP64)).to(FP32)
    return out.copy_(sums * (sa.view(1) * sb.view(1)))


@functools.cache
def _takes(device: torch.device) -> bool:
    return has_triton() and capability(device) >= LEAST


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import sgl_batched_kernels

    return sgl_batched_kernels


@functools.cache
def _constants(a: torch.dtype, b: torch.dtype, rows: int) -> dict[str, Any]:
    import triton.language as tl

    kinds = {E4M3: tl.float8e4nv, E5M2: tl.float8e5}
    return {"A": kinds[a], "B": kinds[b], "BM": rows, "BN": COLUMNS, "BK": STEP}


def launch(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.Tensor,
    kernels: ModuleType | None = None,
) -> torch.Tensor:  # fmt: skip
    """`run_batched` in Triton, of sizes that are not 0."""
    (batches, m, k), n = a.shape, b.shape[2]
    rows = next(rows for limit, rows in TILES if m <= limit)
    grid = (batches * -(-m // rows) * -(-n // COLUMNS),)
    with torch.cuda.device_of(a):
        (kernels or device()).product[grid](
            a.view(torch.uint8), b.view(torch.uint8), sa, sb, out, m, n, k, a.stride(0),
            a.stride(1), *b.stride(), **_constants(a.dtype, b.dtype, rows), **OPTIONS,
        )  # fmt: skip
    return out


def compiles() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of the kernel for each pair of codes, in both orders of B."""
    for pair in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        for order in ("b_k", "b_n"):
            for target in (90, 100):
                name = f"bmm_fp8 {pair[0]} {pair[1]} {order} sm_{target}"
                yield name, functools.partial(_check, pair, order, target)


def _check(pair: tuple[torch.dtype, torch.dtype], order: str, target: int) -> None:
    pointers = {"a_ptr": "*u8", "b_ptr": "*u8", "sa_ptr": "*fp32", "sb_ptr": "*fp32"}
    sizes = dict.fromkeys(("N", "K", "a_batch", "a_row", "b_batch", "b_k", "b_n"), "i32:16")
    types = {**pointers, "out_ptr": "*bf16", "M": "i32", **sizes}
    for _, rows in TILES:
        constants = {**_constants(*pair, rows), order: 1}
        made = compiled(device().product, types, constants, target, **OPTIONS)
        late = "wgmma" in made.ptx
        if made.spills or made.shared > 227 << 10 or late:
            got = f"{made.spills} bytes spill, {made.shared} of shared memory, wgmma: {late}"
            raise RuntimeError(f"{rows} rows, sm_{target}: {got}")


def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A @ B * (A_scale * B_scale), [b, m, n], in `out` if it is given.

    A      float8_e4m3fn or float8_e5m2 [b, m, k], k contiguous
    B      float8_e4m3fn or float8_e5m2 [b, k, n], not both e5m2; k or n contiguous
    A_scale, B_scale   float32, one element
    dtype  float16 or bfloat16, that of `out`
    out    [b, m, n], contiguous
    Errors: RuntimeError for anything else.
    """
    if out is None:
        found: torch.Tensor = torch.ops.qinductor.bmm_fp8.default(A, B, A_scale, B_scale, dtype)
        return found
    torch.ops.qinductor.bmm_fp8.out(A, B, A_scale, B_scale, dtype, out=out)
    return out


_PAIR = "Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype"

LIBRARY.define(f"{NAME}({_PAIR}) -> Tensor", tags=TAGS)
LIBRARY.define(f"{NAME}.out({_PAIR}, *, Tensor(a!) out) -> ()", tags=TAGS)


def _why_not_batched(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype
) -> str | None:
    if a.dim() != 3 or b.dim() != 3:
        return f"A is {a.dim()}-D, B {b.dim()}-D; wanted 3-D tensors"
    if a.dtype not in (E4M3, E5M2) or b.dtype not in (E4M3, E5M2) or a.dtype is b.dtype is E5M2:
        got = f"A is {a.dtype}, B {b.dtype}"
        return f"{got}; wanted float8_e4m3fn or float8_e5m2, not both float8_e5m2"
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return f"A is {list(a.shape)}, B {list(b.shape)}; wanted [b, m, k] and [b, k, n]"
    if dtype is not FP16 and dtype is not BF16:
        return f"dtype is {dtype}; wanted float16 or bfloat16"
    if a.stride(2) != 1:
        return f"A has strides {a.stride()}; wanted k contiguous"
    if 1 not in b.stride()[1:]:
        return f"B has strides {b.stride()}; wanted one of k and n contiguous"
    for name, scale in (("A_scale", sa), ("B_scale", sb)):
        if scale.dtype is not FP32 or scale.numel() != 1:
            return f"{name} is {scale.dtype}{list(scale.shape)}; wanted one float32"
    return elsewhere(a, b, sa, sb)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _bmm_fp8(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    hold(NAME, _why_not_batched(a, b, sa, sb, dtype))
    out = a.new_empty((*a.shape[:2], b.shape[2]), dtype=dtype)
    return run_batched(a, b, sa, sb, out)


@torch.library.impl(LIBRARY, f"{NAME}.out", "CompositeExplicitAutograd")
def _bmm_fp8_out(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype,
    *, out: torch.Tensor,
) -> None:  # fmt: skip
    reason = _why_not_batched(a, b, sa, sb, dtype)
    wanted = (*a.shape[:2], b.shape[-1])
    if out.dtype is not dtype or out.shape != wanted or not out.is_contiguous():
        got = f"out is {out.dtype}{list(out.shape)}, strides {out.stride()}"
        reason = reason or f"{got}; wanted {dtype}{list(wanted)}, contiguous"
    hold(NAME, reason or elsewhere(a, out))
    run_batched(a, b, sa, sb, out)
    torch.autograd.graph.increment_version(out)


@torch.library.register_fake(f"qinductor::{NAME}", lib=LIBRARY)
def _(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]), dtype=dtype)


@torch.library.register_fake(f"qinductor::{NAME}.out", lib=LIBRARY)
def _(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype,
    *, out: torch.Tensor,
) -> None:  # fmt: skip
    pass
