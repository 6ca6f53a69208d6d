"""Products of experts with int4 weights under sgl-kernel's name, `cutlass_w4a8_moe_mm`.

| tensor          | shape                                           | dtype             |
|-----------------|-------------------------------------------------|-------------------|
| d               | [T, N], rows contiguous                         | float16, bfloat16 |
| a               | [T, K], rows grouped by expert                  | float8_e4m3fn     |
| b               | [E, N, K / 2], even columns in the lower halves | int8              |
| a_scales        | [1] or more, of which the first is taken        | float32           |
| b_scales        | [E, K / 512, 4 N] if K is a multiple of 512:    | bfloat16          |
|                 |   [.., kk, 4 n + j] of columns 128 (4 kk + j);  |                   |
|                 |   else [E, K / 128, N]                          |                   |
| experts_offsets | [E]: first row of each expert                   | int32             |
| problem_sizes   | [E, 3]: (N, rows, K) of each expert             | int32             |
"""

import torch

from qinductor.kernels.scaled_matmul import TAGS
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.kernels.sgl_moe_matmul_triton import launch, missing
from qinductor.op import LIBRARY

FP16, BF16, FP32, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
E4M3, INT32, INT64 = torch.float8_e4m3fn, torch.int32, torch.int64
NAME = "cutlass_w4a8_moe_mm"
CHUNK = 128  # columns that share a scale


def cutlass_w4a8_moe_mm(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    experts_offsets: torch.Tensor,
    problem_sizes: torch.Tensor,
    a_strides: torch.Tensor,
    b_strides: torch.Tensor,
    d_strides: torch.Tensor,
    s_strides: torch.Tensor,
    chunk_size: int = 128,
    topk: int = 8,
) -> None:
    """Writes a[rows of e] @ (b[e] * scales[e]).t() * a_scales[0] to the same rows of d, for each e.

    d          float16 or bfloat16 [T, N], rows contiguous; rows of no expert are left
    a          float8_e4m3fn [T, K], rows grouped by expert, K a multiple of 128
    b          int8 [E, N, K / 2], contiguous: two's complement int4, the even column in the lower
               half of a byte
    a_scales   float32, 1-D: the first is taken
    b_scales   bfloat16, contiguous: [E, K / 512, 4 N], 4 n + j of columns 128 (4 kk + j), if K is a
               multiple of 512, else [E, K / 128, N]
    experts_offsets   int32 [E], the first row of each expert
    problem_sizes     int32 [E, 3], of which the middle one counts: rows of the expert, 0 or more
    a_strides, b_strides, d_strides, s_strides   int64 [E, 3], without a meaning here
    chunk_size        128
    topk              taken, without a meaning here
    Sums of 128 columns are added up with their scales in float32. Nothing waits for the device.
    Errors: RuntimeError for anything else, and for a GPU without float8.
    """
    torch.ops.qinductor.cutlass_w4a8_moe_mm.default(
        d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides,
        d_strides, s_strides, chunk_size, topk,
    )  # fmt: skip


LIBRARY.define(
    f"{NAME}(Tensor(a!) d, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
    "Tensor experts_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, "
    "Tensor d_strides, Tensor s_strides, int chunk_size=128, int topk=8) -> ()",
    tags=TAGS,
)


def scales_by_row(b_scales: torch.Tensor, n: int) -> torch.Tensor:
    """[E, N, K / 128] of either layout."""
    if b_scales.shape[2] == n:
        return b_scales.mT
    experts, parts, _ = b_scales.shape
    return b_scales.view(experts, parts, n, 4).transpose(1, 2).reshape(experts, n, parts * 4)


def reference(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor,
    b_scales: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor,
) -> None:  # fmt: skip
    """The product, expert by expert."""
    scales = scales_by_row(b_scales, b.shape[1])
    for expert, (first, m) in enumerate(zip(offsets.tolist(), sizes[:, 1].tolist(), strict=True)):
        rows = slice(max(first, 0), max(first, 0) + max(m, 0))
        x = a[rows].float()
        if not len(x):
            continue
        w = torch.stack([(b[expert] << 4) >> 4, b[expert] >> 4], -1).flatten(1).float()
        total = x.new_zeros(len(x), len(w))
        for group, scale in enumerate(scales[expert].float().unbind(-1)):
            columns = slice(group * CHUNK, (group + 1) * CHUNK)
            total += (x[:, columns] @ w[:, columns].t()) * scale
        d[rows] = (total * a_scale[0]).to(d.dtype)


def _why_not_shapes(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor,
    b_scales: torch.Tensor,
) -> str | None:  # fmt: skip
    for name, tensor, rank in (
        ("d", d, 2), ("a", a, 2), ("b", b, 3), ("a_scales", a_scales, 1), ("b_scales", b_scales, 3),
    ):  # fmt: skip
        if tensor.dim() != rank:
            return f"{name} is {tensor.dim()}-D; wanted {rank}-D"
    for name, tensor, dtypes in (
        ("d", d, (FP16, BF16)), ("a", a, (E4M3,)), ("b", b, (INT8,)),
        ("a_scales", a_scales, (FP32,)), ("b_scales", b_scales, (BF16,)),
    ):  # fmt: skip
        if tensor.dtype not in dtypes:
            return f"{name} is {tensor.dtype}; wanted {' or '.join(map(str, dtypes))}"
    (t, k), (experts, n, half) = a.shape, b.shape
    if half * 2 != k:
        return f"a is {list(a.shape)}, b {list(b.shape)}; wanted [T, K] and [E, N, K / 2]"
    if k % CHUNK or not k:
        return f"K is {k}; wanted a multiple of {CHUNK}, not 0"
    if d.shape != (t, n):
        return f"d is {list(d.shape)}; wanted {[t, n]}"
    wanted = (experts, k // 512, 4 * n) if k % 512 == 0 else (experts, k // CHUNK, n)
    if b_scales.shape != wanted:
        return f"b_scales is {list(b_scales.shape)}; wanted {list(wanted)} for N = {n}, K = {k}"
    return None if a_scales.numel() else "a_scales is empty; wanted one scale or more"


def _why_not(
    tensors: tuple[torch.Tensor, ...], strides: tuple[torch.Tensor, ...], chunk: int
) -> str | None:
    d, a, b, a_scales, b_scales, offsets, sizes = tensors
    if chunk != CHUNK:
        return f"chunk_size is {chunk}; wanted {CHUNK}"
    if reason := _why_not_shapes(d, a, b, a_scales, b_scales):
        return reason
    experts = b.shape[0]
    for name, tensor, shape, dtype in (
        ("experts_offsets", offsets, (experts,), INT32),
        ("problem_sizes", sizes, (experts, 3), INT32),
        *(
            (f"{name}_strides", tensor, (experts, 3), INT64)
            for name, tensor in zip("abds", strides, strict=True)
        ),
    ):
        if tensor.dtype is not dtype or tensor.shape != shape:
            got = f"{name} is {tensor.dtype}{list(tensor.shape)}"
            return f"{got}; wanted {dtype}{list(shape)} for {experts} experts"
    for name, tensor in (("b", b), ("b_scales", b_scales)):
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}; wanted a contiguous tensor"
    apart = d.shape[0] < 2 or d.stride(0) >= d.shape[1]
    if d.shape[1] > 1 and d.stride(1) != 1 or not apart:
        return f"d has strides {d.stride()}; wanted contiguous rows that do not overlap"
    return elsewhere(*tensors)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _cutlass_w4a8_moe_mm(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor,
    b_scales: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, a_strides: torch.Tensor,
    b_strides: torch.Tensor, d_strides: torch.Tensor, s_strides: torch.Tensor,
    chunk_size: int = 128, topk: int = 8,
) -> None:  # fmt: skip
    tensors = d, a, b, a_scales, b_scales, offsets, sizes
    hold(NAME, _why_not(tensors, (a_strides, b_strides, d_strides, s_strides), chunk_size))
    if not (d.numel() and b.shape[0]):
        return
    if a.is_cuda:
        hold(NAME, missing(a.device))
        launch(d, a, b, a_scales, b_scales, offsets.contiguous(), sizes.contiguous())
    else:
        reference(*tensors)
    torch.autograd.graph.increment_version(d)


@torch.library.register_fake(f"qinductor::{NAME}", lib=LIBRARY)
def _(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor,
    b_scales: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, a_strides: torch.Tensor,
    b_strides: torch.Tensor, d_strides: torch.Tensor, s_strides: torch.Tensor,
    chunk_size: int = 128, topk: int = 8,
) -> None:  # fmt: skip
    pass
