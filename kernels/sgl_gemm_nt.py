"""Block-scaled float8 products under DeepGEMM's name, `fp8_gemm_nt`: d = a @ b.t(), in place.

| tensor  | shape                          | dtype, strides                     |
|---------|--------------------------------|------------------------------------|
| a       | [M, K]                         | float8_e4m3fn, rows contiguous     |
| its s   | [M, ceil(K / gk)]              | float32, any strides               |
| b       | [N, K]                         | float8_e4m3fn, rows contiguous     |
| its s   | [ceil(N / gn), ceil(K / gk)]   | float32, any strides               |
| d       | [M, N]                         | bfloat16, rows contiguous          |
"""

from collections.abc import Sequence

import torch

from qinductor.kernels.scaled_matmul import TAGS
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.kernels.sgl_matmul import contract, run
from qinductor.op import LIBRARY

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NAME = "fp8_gemm_nt"
RECIPES = ((1, 128, 128), (1, 1, 128), (1, 32, 32))  # rows of a, rows of b, columns that share one


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: str | None = None,
) -> None:
    """Writes the product of a and b transposed, each with scales of blocks, to d.

    a        float8_e4m3fn [M, K], rows contiguous; float32 [M, ceil(K / gk)], any strides
    b        float8_e4m3fn [N, K], rows contiguous; float32 [ceil(N / gn), ceil(K / gk)], likewise
    d        bfloat16 [M, N], rows contiguous
    recipe   (1, gn, gk): (1, 128, 128), which is the default, (1, 1, 128) or (1, 32, 32)
    recipe_a, recipe_b   (1, gk) and (gn, gk), in place of a recipe
    compiled_dims, disable_ue8m0_cast   taken, without a meaning here
    Errors: RuntimeError for anything else; NotImplementedError, a RuntimeError too, for c (a sum
    is not added to), alpha other than 1 and an epilogue.
    """
    if c is not None or epilogue is not None or alpha not in (None, 1):
        got = f"c {None if c is None else list(c.shape)}, alpha {alpha}, epilogue {epilogue}"
        raise NotImplementedError(f"{NAME}: got {got}; wanted none of them: d is a @ b.t()")
    chosen = _recipe(recipe, recipe_a, recipe_b)
    torch.ops.qinductor.fp8_gemm_nt.default(a[0], a[1], b[0], b[1], d, chosen)


def _recipe(
    whole: tuple[int, int, int] | None, a: tuple[int, int] | None, b: tuple[int, int] | None
) -> list[int]:
    got = f"{NAME}: recipe is {whole}, recipe_a {a}, recipe_b {b}"
    if (a is None) != (b is None) or (a is not None and whole is not None):
        raise RuntimeError(f"{got}; wanted recipe alone, or recipe_a with recipe_b")
    if a is not None and b is not None:
        if a[1] != b[1]:
            raise RuntimeError(f"{got}; wanted as many columns for both")
        whole = a[0], b[0], a[1]
    found = RECIPES[0] if whole is None else tuple(whole)
    if found not in RECIPES:
        raise RuntimeError(f"{got}; wanted one of {RECIPES}")
    return list(found)


LIBRARY.define(
    f"{NAME}(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) d, int[] recipe) -> ()",
    tags=TAGS,
)


def _why_not(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, d: torch.Tensor,
    gn: int, gk: int,
) -> str | None:  # fmt: skip
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        return f"a is {list(a.shape)}, b {list(b.shape)}; wanted [M, K] and [N, K]"
    if a.dtype is not E4M3 or b.dtype is not E4M3:
        return f"a is {a.dtype}, b {b.dtype}; wanted float8_e4m3fn"
    (m, k), n = a.shape, b.shape[0]
    for name, tensor, shape, dtype in (
        ("the scale of a", sa, (m, -(-k // gk)), FP32),
        ("the scale of b", sb, (-(-n // gn), -(-k // gk)), FP32),
        ("d", d, (m, n), BF16),
    ):
        if tensor.dtype is not dtype or tensor.shape != shape:
            got = f"{name} is {tensor.dtype}{list(tensor.shape)}"
            return f"{got}; wanted {dtype}{list(shape)} for the recipe {(1, gn, gk)}"
    for name, tensor in (("a", a), ("b", b), ("d", d)):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"{name} has strides {tensor.stride()}; wanted contiguous rows"
    if m > 1 and d.stride(0) < n:
        return f"d has strides {d.stride()}; wanted rows that do not overlap"
    return elsewhere(a, sa, b, sb, d)


@torch.library.impl(LIBRARY, NAME, "CompositeExplicitAutograd")
def _fp8_gemm_nt(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, d: torch.Tensor,
    recipe: Sequence[int],
) -> None:  # fmt: skip
    _, gn, gk = recipe
    hold(NAME, _why_not(a, sa, b, sb, d, gn, gk))
    (m, k), n = a.shape, b.shape[0]
    if not (m and n):
        return
    if k:
        run(contract(E4M3, E4M3, n, k, gk, (gn, gk), BF16), a, sa, b, sb, None, d)
    else:
        d.zero_()
    torch.autograd.graph.increment_version(d)


@torch.library.register_fake(f"qinductor::{NAME}", lib=LIBRARY)
def _(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, d: torch.Tensor,
    recipe: Sequence[int],
) -> None:  # fmt: skip
    pass
