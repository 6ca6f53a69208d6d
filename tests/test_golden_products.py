"""Golden graphs of what a weight may be multiplied by, and of what else may read it.

EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden_products.py   writes the texts anew.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from goldens import Golden
from models import BF16, Holder, Random, grouped, nibbles
from torch.nn.functional import embedding, linear

import qinductor

N, K = 64, 96


def int4(r: Random, groups: int = 3) -> dict[str, torch.Tensor]:
    return {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, groups)}


def weight(m: Holder) -> torch.Tensor:
    return grouped(nibbles(m.codes).to(BF16) - 8, m.scale)


def split(m: Holder, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value by one weight that is dequantised at once."""
    return tuple(linear(x, part) for part in weight(m).split([32, 16, 16]))


def einsum(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bmk,nk->bmn", x, weight(m))


def rank_4(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return linear(x, weight(m), m.bias)


def on_the_left(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight(m), x.t())


def batched(m: Holder, x: torch.Tensor) -> torch.Tensor:
    """Channels first, as a convolution of one pixel has it."""
    return torch.matmul(weight(m), x)


def expanded(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight(m).t().expand(x.shape[0], -1, -1))


def expanded_with_bias(m: Holder, x: torch.Tensor) -> torch.Tensor:
    w = weight(m).t().expand(x.shape[0], -1, -1)
    return torch.baddbmm(m.bias, x, w)


def tied(m: Holder, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    w = weight(m)
    return linear(x + embedding(tokens, w), w)


def gathered(m: Holder, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    w = weight(m)
    return linear(x + w[tokens], w)


def two_products(m: Holder, x: torch.Tensor) -> torch.Tensor:
    w = weight(m)
    return linear(linear(x, w), w.t())


def two_scales(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return linear(x, weight(m) * m.all)


def act_order(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return linear(x, (nibbles(m.codes).to(BF16) - 8) * m.scale.index_select(1, m.order))


# name: (function, what its module holds, its arguments)
PRODUCTS: dict[str, tuple[Callable, Callable, Callable]] = {
    "split": (split, int4, lambda r: [r.normal(8, K)]),
    "einsum": (einsum, int4, lambda r: [r.normal(2, 4, K)]),
    "rank_4": (rank_4, lambda r: int4(r) | {"bias": r.normal(N)}, lambda r: [r.normal(2, 2, 2, K)]),
    "on_the_left": (on_the_left, int4, lambda r: [r.normal(8, K)]),
    "batched": (batched, int4, lambda r: [r.normal(2, K, 8)]),
    "expanded": (expanded, int4, lambda r: [r.normal(2, 8, K)]),
    "expanded_with_bias": (
        expanded_with_bias,
        lambda r: int4(r) | {"bias": r.normal(1, 1, N)},
        lambda r: [r.normal(2, 8, K)],
    ),
    "tied": (tied, int4, lambda r: [r.normal(8, K), r.integers(0, N, 8, dtype=torch.int64)]),
    "gathered": (
        gathered,
        int4,
        lambda r: [r.normal(8, K), r.integers(0, N, 8, dtype=torch.int64)],
    ),
    "two_products": (two_products, int4, lambda r: [r.normal(8, K)]),
    "two_scales": (two_scales, lambda r: int4(r) | {"all": r.scales()}, lambda r: [r.normal(8, K)]),
    "act_order": (
        act_order,
        lambda r: int4(r) | {"order": torch.randperm(K, generator=r.generator) // 32},
        lambda r: [r.normal(8, K)],
    ),
}


def holder(name: str) -> Holder:
    function, tensors, _ = PRODUCTS[name]
    return Holder(function, **tensors(Random())).eval()


def arguments(name: str) -> list[Any]:
    return PRODUCTS[name][2](Random(1))


class TestProducts(Golden):
    """What a weight may be multiplied by, and in which form."""

    def product(self, name: str, dynamic: bool | None = None) -> Callable[[str], None]:
        return self.graph(lambda: holder(name), *arguments(name), dynamic=dynamic)

    def test_split(self) -> None:
        self.product("split")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%4: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%5: uint8[64, 48, 1] = aten.unsqueeze.default(%3, 2)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[64, 96] = aten.view.default(%7, [64, 96])
%9: bfloat16[64, 96] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[64, 96] = aten.sub.Tensor(%9, 8)
%11: bfloat16[64, 3, 32] = aten.view.default(%10, [64, 3, 32])
%12: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%13: bfloat16[64, 3, 32] = aten.mul.Tensor(%11, %12)
%14: bfloat16[64, 96] = aten.view.default(%13, [64, 96])
%15: list = aten.split_with_sizes.default(%14, [32, 16, 16])
%16: bfloat16[32, 96] = getitem(%15, 0)
%17: bfloat16[16, 96] = getitem(%15, 1)
%18: bfloat16[16, 96] = getitem(%15, 2)
%19: bfloat16[96, 32] = aten.permute.default(%16, [1, 0])
%20: bfloat16[8, 32] = aten.mm.default(%2, %19)
%21: bfloat16[96, 16] = aten.permute.default(%17, [1, 0])
%22: bfloat16[8, 16] = aten.mm.default(%2, %21)
%23: bfloat16[96, 16] = aten.permute.default(%18, [1, 0])
%24: bfloat16[8, 16] = aten.mm.default(%2, %23)
output [%20, %22, %24]
---- 3 of 3 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[32, 48] = placeholder packed_int4pack
%4: bfloat16[3, 32, 2] = placeholder packed_int4pack_scales
%5: uint8[16, 48] = placeholder packed_int4pack
%6: bfloat16[3, 16, 2] = placeholder packed_int4pack_scales
%7: uint8[16, 48] = placeholder packed_int4pack
%8: bfloat16[3, 16, 2] = placeholder packed_int4pack_scales
%9: bfloat16[8, 32] = qinductor.dequant_matmul.default(%2, [%3, %4])
    weight.codes=int4 weight.n=32 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
%10: bfloat16[8, 16] = qinductor.dequant_matmul.default(%2, [%5, %6])
    weight.codes=int4 weight.n=16 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
%11: bfloat16[8, 16] = qinductor.dequant_matmul.default(%2, [%7, %8])
    weight.codes=int4 weight.n=16 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%9, %10, %11]
""")

    def test_einsum(self) -> None:
        self.product("einsum", dynamic=True)("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: s0 = placeholder
%3: s1 = placeholder
%4: bfloat16[s0, s1, 96] = placeholder
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: bfloat16[64, 96] = prims.convert_element_type.default(%10, torch.bfloat16)
%12: bfloat16[64, 96] = aten.sub.Tensor(%11, 8)
%13: bfloat16[64, 3, 32] = aten.view.default(%12, [64, 3, 32])
%14: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%15: bfloat16[64, 3, 32] = aten.mul.Tensor(%13, %14)
%16: bfloat16[64, 96] = aten.view.default(%15, [64, 96])
%17: bfloat16[s0, s1, 96, 1] = aten.unsqueeze.default(%4, 3)
%18: bfloat16[s0, s1, 1, 96] = aten.permute.default(%17, [0, 1, 3, 2])
%19: bfloat16[64, 96, 1] = aten.unsqueeze.default(%16, 2)
%20: bfloat16[64, 96, 1, 1] = aten.unsqueeze.default(%19, 3)
%21: bfloat16[1, 1, 64, 96] = aten.permute.default(%20, [2, 3, 0, 1])
%22: s0*s1 = mul(%2, %3)
%23: bfloat16[s0, s1, 96, 1] = aten.permute.default(%18, [0, 1, 3, 2])
%24: bfloat16[1, s0*s1, 96] = aten.view.default(%23, [1, %22, 96])
%25: bfloat16[96, 64, 1, 1] = aten.permute.default(%21, [3, 2, 0, 1])
%26: bfloat16[1, 96, 64] = aten.view.default(%25, [1, 96, 64])
%27: bfloat16[1, s0*s1, 64] = aten.bmm.default(%24, %26)
%28: bfloat16[s0, s1, 1, 64] = aten.view.default(%27, [%2, %3, 1, 64])
%29: bfloat16[s0, s1, 64, 1] = aten.permute.default(%28, [0, 1, 3, 2])
%30: bfloat16[s0, s1, 64] = aten.view.default(%29, [%2, %3, 64])
output [%30]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: s0 = placeholder
%3: s1 = placeholder
%4: bfloat16[s0, s1, 96] = placeholder
%5: uint8[64, 48] = placeholder packed_int4pack
%6: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%7: int8[32, 96] = placeholder packed_halves
%8: bfloat16[64, 3] = placeholder packed_scale
%9: bfloat16[s0, s1, 96, 1] = aten.unsqueeze.default(%4, 3)
%10: bfloat16[s0, s1, 1, 96] = aten.permute.default(%9, [0, 1, 3, 2])
%11: s0*s1 = mul(%2, %3)
%12: bfloat16[s0, s1, 96, 1] = aten.permute.default(%10, [0, 1, 3, 2])
%13: bfloat16[1, s0*s1, 96] = aten.view.default(%12, [1, %11, 96])
%14: s0*s1 = aten.sym_size.int(%13, 1)
%15: bfloat16[s0*s1, 96] = aten.reshape.default(%13, [-1, 96])
%16: bfloat16[s0*s1, 64] = qinductor.dequant_matmul.default(%15, [%5, %6, %7, %8])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm, onednn.dequant_strips
%17: bfloat16[1, s0*s1, 64] = aten.view.default(%16, [1, %14, 64])
%18: bfloat16[s0, s1, 1, 64] = aten.view.default(%17, [%2, %3, 1, 64])
%19: bfloat16[s0, s1, 64, 1] = aten.permute.default(%18, [0, 1, 3, 2])
%20: bfloat16[s0, s1, 64] = aten.view.default(%19, [%2, %3, 64])
output [%20]
""")

    def test_rank_4(self) -> None:
        self.product("rank_4")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[64] = placeholder
%3: bfloat16[2, 2, 2, 96] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%14: bfloat16[64, 3, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[64, 96] = aten.view.default(%14, [64, 96])
%16: bfloat16[8, 96] = aten.view.default(%3, [8, 96])
%17: bfloat16[96, 64] = aten.permute.default(%15, [1, 0])
%18: bfloat16[8, 64] = aten.addmm.default(%2, %16, %17)
%19: bfloat16[2, 2, 2, 64] = aten.view.default(%18, [2, 2, 2, 64])
output [%19]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[64] = placeholder
%3: bfloat16[2, 2, 2, 96] = placeholder
%4: uint8[64, 64] = placeholder packed_int4pack
%5: bfloat16[4, 64, 2] = placeholder packed_int4pack_scales
%6: bfloat16[8, 96] = aten.view.default(%3, [8, 96])
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%6, [%4, %5])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=True
    aten.int4pack_mm
%8: bfloat16[2, 2, 2, 64] = aten.view.default(%7, [2, 2, 2, 64])
output [%8]
""")

    def test_on_the_left(self) -> None:
        self.product("on_the_left")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%4: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%5: uint8[64, 48, 1] = aten.unsqueeze.default(%3, 2)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[64, 96] = aten.view.default(%7, [64, 96])
%9: bfloat16[64, 96] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[64, 96] = aten.sub.Tensor(%9, 8)
%11: bfloat16[64, 3, 32] = aten.view.default(%10, [64, 3, 32])
%12: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%13: bfloat16[64, 3, 32] = aten.mul.Tensor(%11, %12)
%14: bfloat16[64, 96] = aten.view.default(%13, [64, 96])
%15: bfloat16[96, 8] = aten.permute.default(%2, [1, 0])
%16: bfloat16[64, 8] = aten.mm.default(%14, %15)
output [%16]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[64, 48] = placeholder packed_int4pack
%4: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%5: bfloat16[96, 8] = aten.permute.default(%2, [1, 0])
%6: bfloat16[8, 96] = aten.permute.default(%5, [1, 0])
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%6, [%3, %4])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
%8: bfloat16[64, 8] = aten.permute.default(%7, [1, 0])
%9: bfloat16[64, 8] = aten.clone.default(%8, memory_format=torch.contiguous_format)
output [%9]
""")

    def test_batched(self) -> None:
        self.product("batched", dynamic=True)("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: s0 = placeholder
%3: s1 = placeholder
%4: bfloat16[s0, 96, s1] = placeholder
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: bfloat16[64, 96] = prims.convert_element_type.default(%10, torch.bfloat16)
%12: bfloat16[64, 96] = aten.sub.Tensor(%11, 8)
%13: bfloat16[64, 3, 32] = aten.view.default(%12, [64, 3, 32])
%14: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%15: bfloat16[64, 3, 32] = aten.mul.Tensor(%13, %14)
%16: bfloat16[64, 96] = aten.view.default(%15, [64, 96])
%17: bfloat16[s0, 64, 96] = aten.expand.default(%16, [%2, 64, 96])
%18: bfloat16[s0, 64, 96] = aten.view.default(%17, [%2, 64, 96])
%19: bfloat16[s0, 96, s1] = aten.expand.default(%4, [%2, 96, %3])
%20: bfloat16[s0, 96, s1] = aten.view.default(%19, [%2, 96, %3])
%21: bfloat16[s0, 64, s1] = aten.bmm.default(%18, %20)
%22: bfloat16[s0, 64, s1] = aten.view.default(%21, [%2, 64, %3])
output [%22]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: s0 = placeholder
%3: s1 = placeholder
%4: bfloat16[s0, 96, s1] = placeholder
%5: uint8[64, 48] = placeholder packed_int4pack
%6: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%7: int8[32, 96] = placeholder packed_halves
%8: bfloat16[64, 3] = placeholder packed_scale
%9: bfloat16[s0, 96, s1] = aten.expand.default(%4, [%2, 96, %3])
%10: bfloat16[s0, 96, s1] = aten.view.default(%9, [%2, 96, %3])
%11: bfloat16[s0, s1, 96] = aten.permute.default(%10, [0, 2, 1])
%12: s0 = aten.sym_size.int(%11, 0)
%13: s1 = aten.sym_size.int(%11, 1)
%14: bfloat16[s0*s1, 96] = aten.reshape.default(%11, [-1, 96])
%15: bfloat16[s0*s1, 64] = qinductor.dequant_matmul.default(%14, [%5, %6, %7, %8])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm, onednn.dequant_strips
%16: bfloat16[s0, s1, 64] = aten.view.default(%15, [%12, %13, 64])
%17: bfloat16[s0, 64, s1] = aten.permute.default(%16, [0, 2, 1])
%18: bfloat16[s0, 64, s1] = aten.clone.default(%17, memory_format=torch.contiguous_format)
%19: bfloat16[s0, 64, s1] = aten.view.default(%18, [%2, 64, %3])
output [%19]
""")

    def test_expanded(self) -> None:
        self.product("expanded")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[2, 8, 96] = placeholder
%3: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%4: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%5: uint8[64, 48, 1] = aten.unsqueeze.default(%3, 2)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[64, 96] = aten.view.default(%7, [64, 96])
%9: bfloat16[64, 96] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[64, 96] = aten.sub.Tensor(%9, 8)
%11: bfloat16[64, 3, 32] = aten.view.default(%10, [64, 3, 32])
%12: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%13: bfloat16[64, 3, 32] = aten.mul.Tensor(%11, %12)
%14: bfloat16[64, 96] = aten.view.default(%13, [64, 96])
%15: bfloat16[96, 64] = aten.permute.default(%14, [1, 0])
%16: bfloat16[2, 96, 64] = aten.expand.default(%15, [2, -1, -1])
%17: bfloat16[2, 8, 64] = aten.bmm.default(%2, %16)
output [%17]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[2, 8, 96] = placeholder
%3: int8[32, 96] = placeholder packed_halves
%4: bfloat16[64, 3] = placeholder packed_scale
%5: bfloat16[16, 96] = aten.reshape.default(%2, [-1, 96])
%6: bfloat16[16, 64] = qinductor.dequant_matmul.default(%5, [%3, %4])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
%7: bfloat16[2, 8, 64] = aten.view.default(%6, [2, 8, 64])
output [%7]
""")

    def test_expanded_with_bias(self) -> None:
        self.product("expanded_with_bias")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[2, 8, 96] = placeholder
%3: bfloat16[1, 1, 64] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%14: bfloat16[64, 3, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[64, 96] = aten.view.default(%14, [64, 96])
%16: bfloat16[96, 64] = aten.permute.default(%15, [1, 0])
%17: bfloat16[2, 96, 64] = aten.expand.default(%16, [2, -1, -1])
%18: bfloat16[2, 8, 64] = aten.baddbmm.default(%3, %2, %17)
output [%18]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[2, 8, 96] = placeholder
%3: bfloat16[1, 1, 64] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[64] = placeholder packed_bias
%7: bfloat16[16, 96] = aten.reshape.default(%2, [-1, 96])
%8: bfloat16[16, 64] = qinductor.dequant_matmul.default(%7, [%4, %5, %6])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=True
    onednn.dequant_strips
%9: bfloat16[2, 8, 64] = aten.view.default(%8, [2, 8, 64])
output [%9]
""")

    def test_tied(self) -> None:
        self.product("tied")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[8] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%14: bfloat16[64, 3, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[64, 96] = aten.view.default(%14, [64, 96])
%16: bfloat16[8, 96] = aten.embedding.default(%15, %2)
%17: bfloat16[8, 96] = aten.add.Tensor(%3, %16)
%18: bfloat16[96, 64] = aten.permute.default(%15, [1, 0])
%19: bfloat16[8, 64] = aten.mm.default(%17, %18)
output [%19]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[8] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = placeholder packed_int4pack
%5: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%6: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%7: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 1] = aten.unsqueeze.default(%7, 2)
%10: uint8[64, 48, 2] = aten.cat.default([%8, %9], -1)
%11: uint8[64, 96] = aten.view.default(%10, [64, 96])
%12: bfloat16[64, 96] = prims.convert_element_type.default(%11, torch.bfloat16)
%13: bfloat16[64, 96] = aten.sub.Tensor(%12, 8)
%14: bfloat16[64, 3, 32] = aten.view.default(%13, [64, 3, 32])
%15: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%16: bfloat16[64, 3, 32] = aten.mul.Tensor(%14, %15)
%17: bfloat16[64, 96] = aten.view.default(%16, [64, 96])
%18: bfloat16[8, 96] = aten.embedding.default(%17, %2)
%19: bfloat16[8, 96] = aten.add.Tensor(%3, %18)
%20: bfloat16[8, 64] = qinductor.dequant_matmul.default(%19, [%4, %5])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%20]
""")

    def test_gathered(self) -> None:
        self.product("gathered")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[8] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%14: bfloat16[64, 3, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[64, 96] = aten.view.default(%14, [64, 96])
%16: bfloat16[8, 96] = aten.index.Tensor(%15, [%2])
%17: bfloat16[8, 96] = aten.add.Tensor(%3, %16)
%18: bfloat16[96, 64] = aten.permute.default(%15, [1, 0])
%19: bfloat16[8, 64] = aten.mm.default(%17, %18)
output [%19]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[8] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = placeholder packed_int4pack
%5: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%6: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%7: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 1] = aten.unsqueeze.default(%7, 2)
%10: uint8[64, 48, 2] = aten.cat.default([%8, %9], -1)
%11: uint8[64, 96] = aten.view.default(%10, [64, 96])
%12: bfloat16[64, 96] = prims.convert_element_type.default(%11, torch.bfloat16)
%13: bfloat16[64, 96] = aten.sub.Tensor(%12, 8)
%14: bfloat16[64, 3, 32] = aten.view.default(%13, [64, 3, 32])
%15: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%16: bfloat16[64, 3, 32] = aten.mul.Tensor(%14, %15)
%17: bfloat16[64, 96] = aten.view.default(%16, [64, 96])
%18: bfloat16[8, 96] = aten.index.Tensor(%17, [%2])
%19: bfloat16[8, 96] = aten.add.Tensor(%3, %18)
%20: bfloat16[8, 64] = qinductor.dequant_matmul.default(%19, [%4, %5])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%20]
""")

    def test_two_products(self) -> None:
        self.product("two_products")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%4: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%5: uint8[64, 48, 1] = aten.unsqueeze.default(%3, 2)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[64, 96] = aten.view.default(%7, [64, 96])
%9: bfloat16[64, 96] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[64, 96] = aten.sub.Tensor(%9, 8)
%11: bfloat16[64, 3, 32] = aten.view.default(%10, [64, 3, 32])
%12: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%13: bfloat16[64, 3, 32] = aten.mul.Tensor(%11, %12)
%14: bfloat16[64, 96] = aten.view.default(%13, [64, 96])
%15: bfloat16[96, 64] = aten.permute.default(%14, [1, 0])
%16: bfloat16[8, 64] = aten.mm.default(%2, %15)
%17: bfloat16[96, 64] = aten.permute.default(%14, [1, 0])
%18: bfloat16[64, 96] = aten.permute.default(%17, [1, 0])
%19: bfloat16[8, 96] = aten.mm.default(%16, %18)
output [%19]
---- 2 of 2 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[8, 96] = placeholder
%3: uint8[64, 48] = placeholder packed_int4pack
%4: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%5: int8[48, 64] = placeholder packed_halves
%6: bfloat16[3, 64] = placeholder packed_scale
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%2, [%3, %4])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
%8: bfloat16[8, 96] = qinductor.dequant_matmul.default(%7, [%5, %6])
    weight.codes=int4 weight.n=96 weight.k=64 weight.bn=32 weight.bk=1 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
output [%8]
""")

    def test_two_scales(self) -> None:
        self.product("two_scales")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: bfloat16[64, 3, 1] = aten.unsqueeze.default(%1, 2)
%14: bfloat16[64, 3, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[64, 96] = aten.view.default(%14, [64, 96])
%16: bfloat16[64, 96] = aten.mul.Tensor(%15, %2)
%17: bfloat16[96, 64] = aten.permute.default(%16, [1, 0])
%18: bfloat16[8, 64] = aten.mm.default(%3, %17)
output [%18]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: bfloat16[] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[64] = placeholder packed_outer
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%3, [%4, %5, %6])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s*t
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 weight.outer=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_act_order(self) -> None:
        self.product("act_order")("""\
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[96] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%0, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%0, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[64, 96] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[64, 96] = aten.sub.Tensor(%10, 8)
%12: bfloat16[64, 96] = aten.index.Tensor(%1, [None, %2])
%13: bfloat16[64, 96] = aten.mul.Tensor(%11, %12)
%14: bfloat16[96, 64] = aten.permute.default(%13, [1, 0])
%15: bfloat16[8, 64] = aten.mm.default(%3, %14)
output [%15]
---- 1 of 1 lowered
%0: uint8[64, 48] = placeholder
%1: bfloat16[64, 3] = placeholder
%2: int64[96] = placeholder
%3: bfloat16[8, 96] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: int64[96] = placeholder packed_order
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%3, [%4, %5, %6])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 weight.permuted=True x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_values(name: str, dynamic: bool) -> None:
    """Eager's, for two sizes of the first axis."""
    module = holder(name)
    other, found = (
        copy.deepcopy(module),
        torch.compile(module, backend="qinductor", dynamic=dynamic),
    )
    with torch.no_grad():
        for times in (1, 3):
            given = [torch.cat([x] * times) for x in arguments(name)]
            ours, eager = found(*given), other(*given)
            for a, b in zip(
                *((v if isinstance(v, tuple) else (v,)) for v in (ours, eager)), strict=True
            ):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
                assert (a - b).abs().max() <= 0.01 * b.abs().max()
    assert all(site.lowered for report in qinductor.reports() for site in report.sites)
