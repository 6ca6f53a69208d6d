"""Products of few tokens under sgl-kernel's names, of any sizes and any number of tokens.

| function          | a                         | b                                | result       |
|-------------------|---------------------------|----------------------------------|--------------|
| dsv3_router_gemm  | hidden_states [T, K]      | router_weights [E, K], row-major | [T, E], bf16 |
|                   |                           |                                  | or float32   |
| dsv3_fused_a_gemm | mat_a [T, K]              | mat_b [K, N], column-major       | [T, N], bf16 |

Operands are bfloat16, K a multiple of 8. Sums are float32, rounded once. On a CPU they are exact.
"""

import functools

import torch

from qinductor.kernels.router_triton import (
    Config,
    launch_product,
    long_sums,
    product_configs,
)
from qinductor.kernels.scaled_matmul import TAGS
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.kernels.triton_device import capability, has_triton
from qinductor.op import LIBRARY

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FEW = 16  # tokens up to which our own product is faster than the library's
LEAST = (8, 0)  # compute capability that has tensor cores for bf16
ROUTER, FUSED_A = "dsv3_router_gemm", "dsv3_fused_a_gemm"


def dsv3_router_gemm(
    hidden_states: torch.Tensor,
    router_weights: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """hidden_states @ router_weights.t(), [T, E].

    hidden_states   bfloat16 [T, K], rows contiguous, K a multiple of 8
    router_weights  bfloat16 [E, K], rows contiguous
    out_dtype       bfloat16 or float32
    Errors: RuntimeError for anything else.
    """
    out: torch.Tensor = torch.ops.qinductor.dsv3_router_gemm.default(
        hidden_states, router_weights, out_dtype
    )
    return out


def dsv3_fused_a_gemm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """mat_a @ mat_b, [T, N], in `output` if it is given.

    mat_a   bfloat16 [T, K], rows contiguous, K a multiple of 8
    mat_b   bfloat16 [K, N], columns contiguous: w.t() of a weight [N, K]
    output  bfloat16 [T, N], contiguous
    Errors: RuntimeError for anything else.
    """
    if output is None:
        found: torch.Tensor = torch.ops.qinductor.dsv3_fused_a_gemm.default(mat_a, mat_b)
        return found
    torch.ops.qinductor.dsv3_fused_a_gemm.out(mat_a, mat_b, output=output)
    return output


def product_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes x [T, K] times weight [N, K] transposed to the contiguous `out` [T, N]."""
    (m, k), n = x.shape, weight.shape[0]
    if not out.numel():
        return out
    if not k:
        return out.zero_()
    if not x.is_cuda:
        return out.copy_((x.to(FP64) @ weight.to(FP64).t()).to(FP32))
    if m <= FEW and _takes(x.device):
        config = Config.parse(product_configs(n, k, True, m)[0])
        return launch_product(x, weight, None, config, out)
    if out.dtype is BF16:
        return torch.mm(x, weight.t(), out=out)
    return out.copy_(long_sums(x, weight).sum(0))


@functools.cache
def _takes(device: torch.device) -> bool:
    return has_triton() and capability(device) >= LEAST


def _why_not(names: tuple[str, str], x: torch.Tensor, w: torch.Tensor, major: str) -> str | None:
    """Why x [T, K] and w [N, K] are no operands; `major` is how the second was to be laid out."""
    if x.dim() != 2 or w.dim() != 2:
        return f"{names[0]} is {x.dim()}-D, {names[1]} {w.dim()}-D; wanted 2-D tensors"
    if x.dtype is not BF16 or w.dtype is not BF16:
        return f"{names[0]} is {x.dtype}, {names[1]} {w.dtype}; wanted bfloat16"
    if x.shape[1] != w.shape[1]:
        return f"K is {x.shape[1]} of {names[0]}, {w.shape[1]} of {names[1]}; wanted one K"
    if x.shape[1] % 8:
        return f"K is {x.shape[1]}; wanted a multiple of 8"
    for name, tensor, wanted in ((names[0], x, "row-major"), (names[1], w, major)):
        if tensor.numel() and tensor.stride(1) != 1:
            strides = tensor.stride() if wanted == "row-major" else tensor.stride()[::-1]
            return f"{name} has strides {strides}; wanted a {wanted} tensor"
    return elsewhere(x, w)


LIBRARY.define(
    f"{ROUTER}(Tensor hidden_states, Tensor router_weights, ScalarType out_dtype) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(f"{FUSED_A}(Tensor mat_a, Tensor mat_b) -> Tensor", tags=TAGS)
LIBRARY.define(f"{FUSED_A}.out(Tensor mat_a, Tensor mat_b, *, Tensor(a!) output) -> ()", tags=TAGS)


@torch.library.impl(LIBRARY, ROUTER, "CompositeExplicitAutograd")
def _dsv3_router_gemm(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    reason = _why_not(("hidden_states", "router_weights"), x, weight, "row-major")
    if out_dtype is not BF16 and out_dtype is not FP32:
        reason = reason or f"out_dtype is {out_dtype}; wanted bfloat16 or float32"
    hold(ROUTER, reason)
    return product_into(x, weight, x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype))


def _why_not_fused(a: torch.Tensor, b: torch.Tensor) -> str | None:
    return _why_not(("mat_a", "mat_b"), a, b.t() if b.dim() == 2 else b, "column-major")


@torch.library.impl(LIBRARY, FUSED_A, "CompositeExplicitAutograd")
def _dsv3_fused_a_gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    hold(FUSED_A, _why_not_fused(a, b))
    return product_into(a, b.t(), a.new_empty((a.shape[0], b.shape[1])))


@torch.library.impl(LIBRARY, f"{FUSED_A}.out", "CompositeExplicitAutograd")
def _dsv3_fused_a_gemm_out(a: torch.Tensor, b: torch.Tensor, *, output: torch.Tensor) -> None:
    hold(FUSED_A, _why_not_fused(a, b))
    wanted = (a.shape[0], b.shape[1])
    if output.dtype is not BF16 or output.shape != wanted or not output.is_contiguous():
        got = f"output is {output.dtype}{list(output.shape)}, strides {output.stride()}"
        hold(FUSED_A, f"{got}; wanted bfloat16{list(wanted)}, contiguous")
    hold(FUSED_A, elsewhere(a, output))
    product_into(a, b.t(), output)
    torch.autograd.graph.increment_version(output)


@torch.library.register_fake(f"qinductor::{ROUTER}", lib=LIBRARY)
def _(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


@torch.library.register_fake(f"qinductor::{FUSED_A}", lib=LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.register_fake(f"qinductor::{FUSED_A}.out", lib=LIBRARY)
def _(a: torch.Tensor, b: torch.Tensor, *, output: torch.Tensor) -> None:
    pass
