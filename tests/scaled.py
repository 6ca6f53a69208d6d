"""What tests of products of codes share: modules, and a provider that stands for the kernels."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from models import BF16, FP32, Holder, Random

import qinductor
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Reference

qinductor.load()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N, K = 256, 256


class Provider(Reference):
    """Runs the specification, and counts as a kernel."""

    name = "test"
    reference = False


TEST = Provider()


@contextlib.contextmanager
def provided() -> Iterator[None]:
    """Products of codes are run by `TEST` and by no other provider, whatever the target."""
    both = {p.name: p for p in (SCALED_MATMUL.specification, TEST)}
    with mock.patch.object(SCALED_MATMUL, "providers", both):
        yield


def codes(
    x: torch.Tensor, dtype: torch.dtype = E4M3, dims: tuple[int, ...] = (-1,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x and their scales, one for all that is reduced over."""
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 127
    s = x.float().abs().amax(dims, keepdim=True) / largest
    q = (x.float() / s).clamp(-largest, largest)
    return (q if dtype.is_floating_point else q.round()).to(dtype), s


def scaled(
    x: str = "token",
    weight: str = "channel",
    dtype: torch.dtype = E4M3,
    codes_dtype: torch.dtype = E4M3,
    out: torch.dtype | None = BF16,
    bias: torch.dtype | None = None,
    fast: bool = False,
    result: bool = False,
) -> Holder:
    """x, quantised, times a weight by `_scaled_mm`."""

    def function(m: Holder, given: torch.Tensor) -> torch.Tensor:
        if x == "group":
            q, s = codes(given.unflatten(-1, (-1, 128)), dtype)
            s = s.squeeze(-1).t().clone(memory_format=torch.contiguous_format).t()
            q = q.flatten(-2)
        else:
            q, s = codes(given, dtype, (-1,) if x == "token" else (0, 1))
        return torch._scaled_mm(
            q, m.w.t(), scale_a=s, scale_b=m.s, bias=m.b, out_dtype=out, use_fast_accum=fast,
            scale_result=m.one if result else None,
        )  # fmt: skip

    r = Random()
    shape = {"channel": (1, N), "tensor": (1, 1), "block": (2, 2), "group": (2, N)}[weight]
    return Holder(
        function, w=r.float8(N, K, dtype=codes_dtype), s=r.scales(*shape, dtype=FP32),
        b=None if bias is None else r.normal(N, dtype=bias), one=torch.ones(()),
    )  # fmt: skip


def integers(epilogue: Callable, **tensors: torch.Tensor) -> Holder:
    """x, quantised to int8 by rows, times a weight; `epilogue(m, sums, scale)` scales the sums."""

    def function(m: Holder, x: torch.Tensor) -> torch.Tensor:
        q, s = codes(x, torch.int8)
        return epilogue(m, torch._int_mm(q, m.w.t()), s)

    r = Random()
    w = r.integers(-128, 128, N, K, dtype=torch.int8)
    return Holder(function, w=w, s=r.scales(N, dtype=FP32), **tensors)
