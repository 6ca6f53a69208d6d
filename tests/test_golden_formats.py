"""Golden graphs of the formats that libraries have; each is as accurate as eager.

EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden_formats.py   writes the texts anew.
"""

from collections.abc import Callable

import pytest
import torch
from formats import FORMATS
from goldens import Golden
from models import BF16, Dequantised, Random, mm, transposed
from probing import KN

import qinductor
from qinductor.testing import product_oracle

N, K = 64, 96


def formatted(name: str) -> Dequantised:
    """A product with a weight of this format."""
    form = FORMATS[name]
    leaves = {f"leaf_{i}": leaf for i, leaf in enumerate(form.leaves(N, K))}
    product = transposed if form.axes == KN else mm
    return Dequantised(lambda m, _: form.f(*m.buffers()), product, **leaves).eval()


def activation(module: Dequantised, m: int = 8) -> torch.Tensor:
    return Random(1).normal(m, K, dtype=module.make(module, BF16).dtype)


class TestFormats(Golden):
    """One for each form of the catalogue."""

    def form(self, name: str) -> Callable[[str], None]:
        return self.graph(lambda: formatted(name), activation(formatted(name)))

    def test_gptq_of_three_bits(self) -> None:
        self.form("gptq of three bits")("""\
%0: float16[8, 96] = placeholder
%1: int32[9, 64] = placeholder
%2: float16[3, 64] = placeholder
%3: int64[3, 12] = get_attr _tensor_constant0
%4: int64[3, 12] = aten.lift_fresh_copy.default(%3)
%5: int32[3, 3, 1, 64] = aten.view.default(%1, [-1, 3, 1, 64])
%6: int32[3, 3, 12, 64] = aten.expand.default(%5, [-1, -1, 12, -1])
%7: int32[3, 12] = prims.convert_element_type.default(%4, torch.int32)
%8: int32[1, 3, 12] = aten.unsqueeze.default(%7, 0)
%9: int32[1, 3, 12, 1] = aten.unsqueeze.default(%8, 3)
%10: int32[3, 3, 12, 64] = aten.__rshift__.Tensor(%6, %9)
%11: int32[3, 3, 12, 64] = aten.bitwise_and.Scalar(%10, 7)
%12: int32[3, 12, 64] = aten.select.int(%11, 1, 0)
%13: int32[3, 64] = aten.select.int(%12, 1, 10)
%14: int32[3, 64] = aten.bitwise_and.Scalar(%13, 3)
%15: int32[3, 12, 64] = aten.select.int(%11, 1, 1)
%16: int32[3, 64] = aten.select.int(%15, 1, 0)
%17: int32[3, 64] = aten.__lshift__.Scalar(%16, 2)
%18: int32[3, 64] = aten.bitwise_and.Scalar(%17, 4)
%19: int32[3, 64] = aten.bitwise_or.Tensor(%14, %18)
%20: int32[3, 12, 64] = aten.select.int(%11, 1, 0)
%21: int32[3, 64] = aten.select.int(%20, 1, 10)
%22: int32[3, 64] = aten.copy.default(%21, %19)
%23: int32[3, 12, 64] = aten.select.int(%11, 1, 0)
%24: int32[3, 12, 64] = aten.select_scatter.default(%23, %22, 1, 10)
%25: int32[3, 3, 12, 64] = aten.select_scatter.default(%11, %24, 1, 0)
%26: int32[3, 12, 64] = aten.select.int(%25, 1, 1)
%27: int32[3, 64] = aten.select.int(%26, 1, 11)
%28: int32[3, 64] = aten.bitwise_and.Scalar(%27, 1)
%29: int32[3, 12, 64] = aten.select.int(%25, 1, 2)
%30: int32[3, 64] = aten.select.int(%29, 1, 0)
%31: int32[3, 64] = aten.__lshift__.Scalar(%30, 1)
%32: int32[3, 64] = aten.bitwise_and.Scalar(%31, 6)
%33: int32[3, 64] = aten.bitwise_or.Tensor(%28, %32)
%34: int32[3, 12, 64] = aten.select.int(%25, 1, 1)
%35: int32[3, 64] = aten.select.int(%34, 1, 11)
%36: int32[3, 64] = aten.copy.default(%35, %33)
%37: int32[3, 12, 64] = aten.select.int(%25, 1, 1)
%38: int32[3, 12, 64] = aten.select_scatter.default(%37, %36, 1, 11)
%39: int32[3, 3, 12, 64] = aten.select_scatter.default(%25, %38, 1, 1)
%40: int32[3, 12, 64] = aten.select.int(%39, 1, 0)
%41: int32[3, 11, 64] = aten.slice.Tensor(%40, 1, 0, 11)
%42: int32[3, 12, 64] = aten.select.int(%39, 1, 1)
%43: int32[3, 11, 64] = aten.slice.Tensor(%42, 1, 1, 12)
%44: int32[3, 12, 64] = aten.select.int(%39, 1, 2)
%45: int32[3, 10, 64] = aten.slice.Tensor(%44, 1, 1, 11)
%46: int32[3, 32, 64] = aten.cat.default([%41, %43, %45], 1)
%47: int32[96, 64] = aten.view.default(%46, [96, 64])
%48: int32[96, 64] = aten.sub.Tensor(%47, 4)
%49: float16[96, 64] = prims.convert_element_type.default(%48, torch.float16)
%50: float16[3, 1, 64] = aten.unsqueeze.default(%2, 1)
%51: float16[3, 32, 64] = aten.expand.default(%50, [3, 32, 64])
%52: float16[3, 32, 64] = aten.clone.default(%51, memory_format=torch.contiguous_format)
%53: float16[96, 64] = aten.view.default(%52, [96, 64])
%54: float16[96, 64] = aten.mul.Tensor(%49, %53)
%55: float16[8, 64] = aten.mm.default(%0, %54)
output [%55]
---- 1 of 1 lowered
%0: float16[8, 96] = placeholder
%1: int32[9, 64] = placeholder
%2: float16[3, 64] = placeholder
%3: uint8[8, 3, 96] = placeholder packed_planes
%4: float16[64, 3] = placeholder packed_scale
%5: float16[8, 64] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int3 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=float16 weight.zero=None weight.inner=float16 weight.compute=float16
      weight.dtype=float16 x=float16 out=float16 output_scale=None bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_gptq_with_act_order(self) -> None:
        self.form("gptq with act-order")("""\
%0: float16[8, 96] = placeholder
%1: int32[12, 64] = placeholder
%2: int32[3, 8] = placeholder
%3: float16[3, 64] = placeholder
%4: int64[96] = placeholder
%5: int32[8] = prims.iota.default(8, start=0, step=4, dtype=torch.int32, device=cpu,
  requires_grad=False)
%6: int32[3, 8, 1] = aten.unsqueeze.default(%2, 2)
%7: int32[3, 8, 8] = aten.__rshift__.Tensor(%6, %5)
%8: int32[3, 8, 8] = aten.bitwise_and.Scalar(%7, 15)
%9: int32[3, 64] = aten.view.default(%8, [3, 64])
%10: int32[3, 64] = aten.add.Tensor(%9, 1)
%11: int32[12, 1, 64] = aten.unsqueeze.default(%1, 1)
%12: int32[1, 8] = aten.unsqueeze.default(%5, 0)
%13: int32[1, 8, 1] = aten.unsqueeze.default(%12, 2)
%14: int32[12, 8, 64] = aten.__rshift__.Tensor(%11, %13)
%15: int32[12, 8, 64] = aten.bitwise_and.Scalar(%14, 15)
%16: int32[96, 64] = aten.view.default(%15, [-1, 64])
%17: int32[96, 64] = aten.index.Tensor(%10, [%4])
%18: int32[96, 64] = aten.sub.Tensor(%16, %17)
%19: float16[96, 64] = prims.convert_element_type.default(%18, torch.float16)
%20: float16[96, 64] = aten.index.Tensor(%3, [%4])
%21: float16[96, 64] = aten.mul.Tensor(%19, %20)
%22: float16[8, 64] = aten.mm.default(%0, %21)
output [%22]
---- 1 of 1 lowered
%0: float16[8, 96] = placeholder
%1: int32[12, 64] = placeholder
%2: int32[3, 8] = placeholder
%3: float16[3, 64] = placeholder
%4: int64[96] = placeholder
%5: int8[32, 96] = placeholder packed_halves
%6: float16[64, 3] = placeholder packed_scale
%7: int32[64, 3] = placeholder packed_zero
%8: int64[96] = placeholder packed_order
%9: float16[8, 64] = qinductor.dequant_matmul.default(%0, [%5, %6, %7, %8])
    weight.codes=uint4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=(q-z)*s weight.scale=float16 weight.zero=int32 weight.inner=float16
      weight.compute=float16 weight.dtype=float16 weight.permuted=True x=float16 out=float16
      output_scale=None bias=False
    onednn.dequant_strips
output [%9]
""")

    def test_awq(self) -> None:
        self.form("awq")("""\
%0: float16[8, 96] = placeholder
%1: int32[96, 8] = placeholder
%2: int32[3, 8] = placeholder
%3: float16[3, 64] = placeholder
%4: int64[8] = prims.iota.default(8, start=0, step=4, dtype=torch.int64, device=cpu,
  requires_grad=False)
%5: int64[64] = prims.iota.default(64, start=0, step=1, dtype=torch.int64, device=cpu,
  requires_grad=False)
%6: int64[8, 8] = aten.view.default(%5, [-1, 8])
%7: int64[8] = get_attr _tensor_constant0
%8: int64[8] = aten.lift_fresh_copy.default(%7)
%9: int64[8, 8] = aten.index.Tensor(%6, [None, %8])
%10: int64[64] = aten.view.default(%9, [64])
%11: int32[96, 8, 1] = aten.unsqueeze.default(%1, 2)
%12: int64[96, 8, 8] = aten.__rshift__.Tensor(%11, %4)
%13: int64[96, 64] = aten.view.default(%12, [96, 64])
%14: int32[3, 8, 1] = aten.unsqueeze.default(%2, 2)
%15: int64[3, 8, 8] = aten.__rshift__.Tensor(%14, %4)
%16: int64[3, 64] = aten.view.default(%15, [3, 64])
%17: int64[96, 64] = aten.index.Tensor(%13, [None, %10])
%18: int64[96, 64] = aten.bitwise_and.Scalar(%17, 15)
%19: int64[3, 64] = aten.index.Tensor(%16, [None, %10])
%20: int64[3, 64] = aten.bitwise_and.Scalar(%19, 15)
%21: int64[3, 1, 64] = aten.unsqueeze.default(%20, 1)
%22: int64[3, 32, 64] = aten.expand.default(%21, [3, 32, 64])
%23: int64[3, 32, 64] = aten.clone.default(%22, memory_format=torch.contiguous_format)
%24: int64[96, 64] = aten.view.default(%23, [96, 64])
%25: float16[3, 1, 64] = aten.unsqueeze.default(%3, 1)
%26: float16[3, 32, 64] = aten.expand.default(%25, [3, 32, 64])
%27: float16[3, 32, 64] = aten.clone.default(%26, memory_format=torch.contiguous_format)
%28: float16[96, 64] = aten.view.default(%27, [96, 64])
%29: int64[96, 64] = aten.sub.Tensor(%18, %24)
%30: float16[96, 64] = aten.mul.Tensor(%29, %28)
%31: float16[8, 64] = aten.mm.default(%0, %30)
output [%31]
---- 1 of 1 lowered
%0: float16[8, 96] = placeholder
%1: int32[96, 8] = placeholder
%2: int32[3, 8] = placeholder
%3: float16[3, 64] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: float16[64, 3] = placeholder packed_scale
%6: int64[64, 3] = placeholder packed_zero
%7: float16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=uint4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=(q-z)*s weight.scale=float16 weight.zero=int64 weight.inner=float16
      weight.compute=float16 weight.dtype=float16 x=float16 out=float16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_two_bits_in_blocks_of_rows(self) -> None:
        self.form("two bits in blocks of rows")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[16, 96] = placeholder
%2: bfloat16[1] = placeholder
%3: int8[64, 96] = aten.empty.memory_format([64, 96], dtype=torch.int8, device=cpu,
  pin_memory=False)
%4: uint8[16, 96] = aten.__rshift__.Scalar(%1, 0)
%5: uint8[16, 96] = aten.bitwise_and.Scalar(%4, 3)
%6: int8[16, 96] = prims.convert_element_type.default(%5, torch.int8)
%7: int8[16, 96] = aten.slice.Tensor(%3, 0, 0, 16)
%8: int8[16, 96] = aten.copy.default(%7, %6)
%9: int8[64, 96] = aten.slice_scatter.default(%3, %8, 0, 0, 16)
%10: uint8[16, 96] = aten.__rshift__.Scalar(%1, 2)
%11: uint8[16, 96] = aten.bitwise_and.Scalar(%10, 3)
%12: int8[16, 96] = prims.convert_element_type.default(%11, torch.int8)
%13: int8[16, 96] = aten.slice.Tensor(%9, 0, 16, 32)
%14: int8[16, 96] = aten.copy.default(%13, %12)
%15: int8[64, 96] = aten.slice_scatter.default(%9, %14, 0, 16, 32)
%16: uint8[16, 96] = aten.__rshift__.Scalar(%1, 4)
%17: uint8[16, 96] = aten.bitwise_and.Scalar(%16, 3)
%18: int8[16, 96] = prims.convert_element_type.default(%17, torch.int8)
%19: int8[16, 96] = aten.slice.Tensor(%15, 0, 32, 48)
%20: int8[16, 96] = aten.copy.default(%19, %18)
%21: int8[64, 96] = aten.slice_scatter.default(%15, %20, 0, 32, 48)
%22: uint8[16, 96] = aten.__rshift__.Scalar(%1, 6)
%23: uint8[16, 96] = aten.bitwise_and.Scalar(%22, 3)
%24: int8[16, 96] = prims.convert_element_type.default(%23, torch.int8)
%25: int8[16, 96] = aten.slice.Tensor(%21, 0, 48, 64)
%26: int8[16, 96] = aten.copy.default(%25, %24)
%27: int8[64, 96] = aten.slice_scatter.default(%21, %26, 0, 48, 64)
%28: int8[64, 96] = aten.sub.Tensor(%27, 1)
%29: bfloat16[64, 96] = prims.convert_element_type.default(%28, torch.bfloat16)
%30: bfloat16[64, 96] = aten.mul.Tensor(%29, %2)
%31: bfloat16[96, 64] = aten.permute.default(%30, [1, 0])
%32: bfloat16[8, 64] = aten.mm.default(%0, %31)
output [%32]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[16, 96] = placeholder
%2: bfloat16[1] = placeholder
%3: uint8[8, 2, 96] = placeholder packed_planes
%4: bfloat16[1, 1] = placeholder packed_scale
%5: float32[4] = placeholder packed_table
%6: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%3, %4, %5])
    weight.codes=table2 weight.n=64 weight.k=96 weight.bn=64 weight.bk=96 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 weight.table=float32 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%6]
""")

    def test_words_by_strided_writes(self) -> None:
        self.form("words, strided writes")("""\
%0: bfloat16[8, 96] = placeholder
%1: int32[64, 12] = placeholder
%2: bfloat16[64, 3] = placeholder
%3: int32[64, 96] = aten.full.default([64, 96], 0, dtype=torch.int32, layout=torch.strided,
  device=cpu, pin_memory=False)
%4: int32[64, 12] = aten.__rshift__.Scalar(%1, 0)
%5: int32[64, 12] = aten.bitwise_and.Scalar(%4, 15)
%6: int32[64, 12] = aten.slice.Tensor(%3, 1, 0, 9223372036854775807, 8)
%7: int32[64, 12] = aten.copy.default(%6, %5)
%8: int32[64, 96] = aten.slice_scatter.default(%3, %7, 1, 0, 9223372036854775807, 8)
%9: int32[64, 12] = aten.__rshift__.Scalar(%1, 4)
%10: int32[64, 12] = aten.bitwise_and.Scalar(%9, 15)
%11: int32[64, 12] = aten.slice.Tensor(%8, 1, 1, 9223372036854775807, 8)
%12: int32[64, 12] = aten.copy.default(%11, %10)
%13: int32[64, 96] = aten.slice_scatter.default(%8, %12, 1, 1, 9223372036854775807, 8)
%14: int32[64, 12] = aten.__rshift__.Scalar(%1, 8)
%15: int32[64, 12] = aten.bitwise_and.Scalar(%14, 15)
%16: int32[64, 12] = aten.slice.Tensor(%13, 1, 2, 9223372036854775807, 8)
%17: int32[64, 12] = aten.copy.default(%16, %15)
%18: int32[64, 96] = aten.slice_scatter.default(%13, %17, 1, 2, 9223372036854775807, 8)
%19: int32[64, 12] = aten.__rshift__.Scalar(%1, 12)
%20: int32[64, 12] = aten.bitwise_and.Scalar(%19, 15)
%21: int32[64, 12] = aten.slice.Tensor(%18, 1, 3, 9223372036854775807, 8)
%22: int32[64, 12] = aten.copy.default(%21, %20)
%23: int32[64, 96] = aten.slice_scatter.default(%18, %22, 1, 3, 9223372036854775807, 8)
%24: int32[64, 12] = aten.__rshift__.Scalar(%1, 16)
%25: int32[64, 12] = aten.bitwise_and.Scalar(%24, 15)
%26: int32[64, 12] = aten.slice.Tensor(%23, 1, 4, 9223372036854775807, 8)
%27: int32[64, 12] = aten.copy.default(%26, %25)
%28: int32[64, 96] = aten.slice_scatter.default(%23, %27, 1, 4, 9223372036854775807, 8)
%29: int32[64, 12] = aten.__rshift__.Scalar(%1, 20)
%30: int32[64, 12] = aten.bitwise_and.Scalar(%29, 15)
%31: int32[64, 12] = aten.slice.Tensor(%28, 1, 5, 9223372036854775807, 8)
%32: int32[64, 12] = aten.copy.default(%31, %30)
%33: int32[64, 96] = aten.slice_scatter.default(%28, %32, 1, 5, 9223372036854775807, 8)
%34: int32[64, 12] = aten.__rshift__.Scalar(%1, 24)
%35: int32[64, 12] = aten.bitwise_and.Scalar(%34, 15)
%36: int32[64, 12] = aten.slice.Tensor(%33, 1, 6, 9223372036854775807, 8)
%37: int32[64, 12] = aten.copy.default(%36, %35)
%38: int32[64, 96] = aten.slice_scatter.default(%33, %37, 1, 6, 9223372036854775807, 8)
%39: int32[64, 12] = aten.__rshift__.Scalar(%1, 28)
%40: int32[64, 12] = aten.bitwise_and.Scalar(%39, 15)
%41: int32[64, 12] = aten.slice.Tensor(%38, 1, 7, 9223372036854775807, 8)
%42: int32[64, 12] = aten.copy.default(%41, %40)
%43: int32[64, 96] = aten.slice_scatter.default(%38, %42, 1, 7, 9223372036854775807, 8)
%44: int8[64, 96] = prims.convert_element_type.default(%43, torch.int8)
%45: int8[64, 96] = aten.sub.Tensor(%44, 8)
%46: bfloat16[64, 96] = prims.convert_element_type.default(%45, torch.bfloat16)
%47: bfloat16[64, 3, 32] = aten.view.default(%46, [64, 3, 32])
%48: bfloat16[64, 3, 1] = aten.unsqueeze.default(%2, -1)
%49: bfloat16[64, 3, 32] = aten.mul.Tensor(%47, %48)
%50: bfloat16[64, 96] = aten.view.default(%49, [64, 96])
%51: bfloat16[96, 64] = aten.permute.default(%50, [1, 0])
%52: bfloat16[8, 64] = aten.mm.default(%0, %51)
output [%52]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: int32[64, 12] = placeholder
%2: bfloat16[64, 3] = placeholder
%3: uint8[64, 48] = placeholder packed_int4pack
%4: bfloat16[3, 64, 2] = placeholder packed_int4pack_scales
%5: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%5]
""")

    def test_three_bits_ten_a_word(self) -> None:
        self.form("three bits, ten a word")("""\
%0: bfloat16[8, 96] = placeholder
%1: int32[7, 96] = placeholder
%2: bfloat16[64, 1] = placeholder
%3: int32[7, 96] = aten.__rshift__.Scalar(%1, 27)
%4: int32[7, 96] = aten.bitwise_and.Scalar(%3, 7)
%5: int32[7, 96] = aten.__rshift__.Scalar(%1, 24)
%6: int32[7, 96] = aten.bitwise_and.Scalar(%5, 7)
%7: int32[7, 96] = aten.__rshift__.Scalar(%1, 21)
%8: int32[7, 96] = aten.bitwise_and.Scalar(%7, 7)
%9: int32[7, 96] = aten.__rshift__.Scalar(%1, 18)
%10: int32[7, 96] = aten.bitwise_and.Scalar(%9, 7)
%11: int32[7, 96] = aten.__rshift__.Scalar(%1, 15)
%12: int32[7, 96] = aten.bitwise_and.Scalar(%11, 7)
%13: int32[7, 96] = aten.__rshift__.Scalar(%1, 12)
%14: int32[7, 96] = aten.bitwise_and.Scalar(%13, 7)
%15: int32[7, 96] = aten.__rshift__.Scalar(%1, 9)
%16: int32[7, 96] = aten.bitwise_and.Scalar(%15, 7)
%17: int32[7, 96] = aten.__rshift__.Scalar(%1, 6)
%18: int32[7, 96] = aten.bitwise_and.Scalar(%17, 7)
%19: int32[7, 96] = aten.__rshift__.Scalar(%1, 3)
%20: int32[7, 96] = aten.bitwise_and.Scalar(%19, 7)
%21: int32[7, 96] = aten.__rshift__.Scalar(%1, 0)
%22: int32[7, 96] = aten.bitwise_and.Scalar(%21, 7)
%23: int32[70, 96] = aten.cat.default([%4, %6, %8, %10, %12, %14, %16, %18, %20, %22])
%24: int32[64, 96] = aten.slice.Tensor(%23, 0, 0, 64)
%25: bfloat16[64, 96] = prims.convert_element_type.default(%24, torch.bfloat16)
%26: bfloat16[64, 96] = aten.mul.Tensor(%25, %2)
%27: bfloat16[96, 64] = aten.permute.default(%26, [1, 0])
%28: bfloat16[8, 64] = aten.mm.default(%0, %27)
output [%28]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: int32[7, 96] = placeholder
%2: bfloat16[64, 1] = placeholder
%3: uint8[8, 3, 96] = placeholder packed_planes
%4: bfloat16[64, 1] = placeholder packed_scale
%5: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=uint3 weight.n=64 weight.k=96 weight.bn=1 weight.bk=96 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_q4_0(self) -> None:
        self.form("q4_0")("""\
%0: float16[8, 96] = placeholder
%1: uint8[64, 54] = placeholder
%2: uint8[64, 3, 18] = aten.view.default(%1, [64, -1, 18])
%3: uint8[64, 3, 2] = aten.slice.Tensor(%2, 2, 0, 2)
%4: uint8[64, 3, 2] = aten.clone.default(%3, memory_format=torch.contiguous_format)
%5: float16[64, 3, 1] = aten.view.dtype(%4, torch.float16)
%6: float16[64, 3, 1] = aten.alias.default(%5)
%7: uint8[64, 3, 16] = aten.slice.Tensor(%2, 2, 2, 9223372036854775807)
%8: uint8[64, 3, 16] = aten.bitwise_and.Scalar(%7, 15)
%9: uint8[64, 3, 16] = aten.slice.Tensor(%2, 2, 2, 9223372036854775807)
%10: uint8[64, 3, 16] = aten.__rshift__.Scalar(%9, 4)
%11: uint8[64, 3, 32] = aten.cat.default([%8, %10], -1)
%12: int8[64, 3, 32] = prims.convert_element_type.default(%11, torch.int8)
%13: int8[64, 3, 32] = aten.sub.Tensor(%12, 8)
%14: float16[64, 3, 32] = prims.convert_element_type.default(%13, torch.float16)
%15: float16[64, 3, 32] = aten.mul.Tensor(%6, %14)
%16: float16[64, 96] = aten.view.default(%15, [64, 96])
%17: float16[96, 64] = aten.permute.default(%16, [1, 0])
%18: float16[8, 64] = aten.mm.default(%0, %17)
output [%18]
---- 1 of 1 lowered
%0: float16[8, 96] = placeholder
%1: uint8[64, 54] = placeholder
%2: uint8[64, 48] = placeholder packed_int4pack
%3: float16[3, 64, 2] = placeholder packed_int4pack_scales
%4: float16[8, 64] = qinductor.dequant_matmul.default(%0, [%2, %3])
    weight.codes=int4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=float16 weight.zero=None weight.inner=float16 weight.compute=float16
      weight.dtype=float16 x=float16 out=float16 output_scale=None bias=False
    aten.int4pack_mm
output [%4]
""")

    def test_q8_0(self) -> None:
        self.form("q8_0")("""\
%0: float32[8, 96] = placeholder
%1: uint8[64, 102] = placeholder
%2: uint8[64, 3, 34] = aten.view.default(%1, [64, -1, 34])
%3: list = aten.split_with_sizes.default(%2, [2, 32], -1)
%4: uint8[64, 3, 2] = getitem(%3, 0)
%5: uint8[64, 3, 32] = getitem(%3, 1)
%6: float16[64, 3, 1] = aten.view.dtype(%4, torch.float16)
%7: float16[64, 3, 1] = aten.alias.default(%6)
%8: float32[64, 3, 1] = prims.convert_element_type.default(%7, torch.float32)
%9: int8[64, 3, 32] = aten.view.dtype(%5, torch.int8)
%10: int8[64, 3, 32] = aten.alias.default(%9)
%11: float32[64, 3, 32] = prims.convert_element_type.default(%10, torch.float32)
%12: float32[64, 3, 32] = aten.mul.Tensor(%8, %11)
%13: float32[64, 96] = aten.view.default(%12, [64, 96])
%14: float32[96, 64] = aten.permute.default(%13, [1, 0])
%15: float32[8, 64] = aten.mm.default(%0, %14)
output [%15]
---- 1 of 1 lowered
%0: float32[8, 96] = placeholder
%1: uint8[64, 102] = placeholder
%2: int8[64, 96] = placeholder packed_codes
%3: float16[64, 3] = placeholder packed_scale
%4: float32[8, 64] = qinductor.dequant_matmul.default(%0, [%2, %3])
    weight.codes=int8 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=float16 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 x=float32 out=float32 output_scale=None bias=False
    onednn.dequant_strips
output [%4]
""")

    def test_nf4_with_int8_scales(self) -> None:
        self.form("nf4 with int8 scales")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[3072] = placeholder
%2: int8[192] = placeholder
%3: float32[3] = placeholder
%4: float32[1] = placeholder
%5: float32[16] = placeholder
%6: int8[3, 64] = aten.view.default(%2, [3, -1])
%7: float32[3, 1] = aten.unsqueeze.default(%3, 1)
%8: float32[3, 64] = aten.mul.Tensor(%6, %7)
%9: float32[3, 64] = aten.add.Tensor(%8, %4)
%10: float32[64, 3] = aten.view.default(%9, [-1, 3])
%11: uint8[3072] = aten.bitwise_and.Scalar(%1, 15)
%12: uint8[3072] = aten.__rshift__.Scalar(%1, 4)
%13: uint8[3072, 1] = aten.unsqueeze.default(%12, 1)
%14: uint8[3072, 1] = aten.unsqueeze.default(%11, 1)
%15: uint8[3072, 2] = aten.cat.default([%13, %14], -1)
%16: uint8[6144] = aten.view.default(%15, [6144])
%17: int32[6144] = prims.convert_element_type.default(%16, torch.int32)
%18: float32[6144] = aten.index.Tensor(%5, [%17])
%19: float32[64, 96] = aten.view.default(%18, [-1, 96])
%20: float32[64, 3, 32] = aten.view.default(%19, [64, 3, 32])
%21: float32[64, 3, 1] = aten.unsqueeze.default(%10, -1)
%22: float32[64, 3, 32] = aten.mul.Tensor(%20, %21)
%23: float32[64, 96] = aten.view.default(%22, [64, 96])
%24: bfloat16[64, 96] = prims.convert_element_type.default(%23, torch.bfloat16)
%25: bfloat16[96, 64] = aten.permute.default(%24, [1, 0])
%26: bfloat16[8, 64] = aten.mm.default(%0, %25)
output [%26]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[3072] = placeholder
%2: int8[192] = placeholder
%3: float32[3] = placeholder
%4: float32[1] = placeholder
%5: float32[16] = placeholder
%6: int8[32, 96] = placeholder packed_halves
%7: float32[64, 3] = placeholder packed_scale
%8: float32[16] = placeholder packed_table
%9: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%6, %7, %8])
    weight.codes=table4 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=bfloat16 weight.table=float32 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%9]
""")

    def test_nvfp4_multiplies_the_scale(self) -> None:
        self.form("nvfp4, multiplies the scale")("""\
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: int32[64, 96] = prims.convert_element_type.default(%10, torch.int32)
%12: float32[64, 96] = aten.index.Tensor(%4, [%11])
%13: float32[64, 6] = prims.convert_element_type.default(%2, torch.float32)
%14: float32[64, 6] = aten.mul.Tensor(%13, %3)
%15: float32[64, 6, 16] = aten.view.default(%12, [64, 6, 16])
%16: float32[64, 6, 1] = aten.unsqueeze.default(%14, -1)
%17: float32[64, 6, 16] = aten.mul.Tensor(%15, %16)
%18: float32[64, 96] = aten.view.default(%17, [64, 96])
%19: float32[96, 64] = aten.permute.default(%18, [1, 0])
%20: float32[8, 64] = aten.mm.default(%0, %19)
output [%20]
---- 1 of 1 lowered
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: int8[32, 96] = placeholder packed_halves
%6: float32[64, 6] = placeholder packed_scale
%7: float32[8, 64] = qinductor.dequant_matmul.default(%0, [%5, %6])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=16
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 x=float32 out=float32 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_nvfp4_divides_the_scale(self) -> None:
        self.form("nvfp4, divides the scale")("""\
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: int32[64, 96] = prims.convert_element_type.default(%10, torch.int32)
%12: float32[64, 96] = aten.index.Tensor(%4, [%11])
%13: float32[64, 6] = prims.convert_element_type.default(%2, torch.float32)
%14: float32[64, 6] = aten.div.Tensor(%13, %3)
%15: float32[64, 6, 16] = aten.view.default(%12, [64, 6, 16])
%16: float32[64, 6, 1] = aten.unsqueeze.default(%14, -1)
%17: float32[64, 6, 16] = aten.mul.Tensor(%15, %16)
%18: float32[64, 96] = aten.view.default(%17, [64, 96])
%19: float32[96, 64] = aten.permute.default(%18, [1, 0])
%20: float32[8, 64] = aten.mm.default(%0, %19)
output [%20]
---- 1 of 1 lowered
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: int8[32, 96] = placeholder packed_halves
%6: float32[64, 6] = placeholder packed_scale
%7: float32[8, 64] = qinductor.dequant_matmul.default(%0, [%5, %6])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=16
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 x=float32 out=float32 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_nvfp4_multiplies_last(self) -> None:
        self.form("nvfp4, multiplies last")("""\
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: int32[64, 96] = prims.convert_element_type.default(%10, torch.int32)
%12: float32[64, 96] = aten.index.Tensor(%4, [%11])
%13: float32[64, 6] = prims.convert_element_type.default(%2, torch.float32)
%14: float32[64, 6, 16] = aten.view.default(%12, [64, 6, 16])
%15: float32[64, 6, 1] = aten.unsqueeze.default(%13, -1)
%16: float32[64, 6, 16] = aten.mul.Tensor(%14, %15)
%17: float32[64, 96] = aten.view.default(%16, [64, 96])
%18: float32[64, 96] = aten.mul.Tensor(%17, %3)
%19: float32[96, 64] = aten.permute.default(%18, [1, 0])
%20: float32[8, 64] = aten.mm.default(%0, %19)
output [%20]
---- 1 of 1 lowered
%0: float32[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: float8_e4m3fn[64, 6] = placeholder
%3: float32[1] = placeholder
%4: float32[16] = placeholder
%5: int8[32, 96] = placeholder packed_halves
%6: float8_e4m3fn[64, 6] = placeholder packed_scale
%7: float32[64] = placeholder packed_outer
%8: float32[8, 64] = qinductor.dequant_matmul.default(%0, [%5, %6, %7])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=16
      weight.arithmetic=q*s*t weight.scale=float8_e4m3fn weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 weight.outer=float32 x=float32 out=float32
      output_scale=None bias=False
    onednn.dequant_strips
output [%8]
""")

    def test_table_and_sign(self) -> None:
        self.form("table and sign")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: bfloat16[64, 3] = placeholder
%3: float32[8] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: uint8[64, 96] = aten.bitwise_and.Scalar(%9, 8)
%11: bool[64, 96] = prims.convert_element_type.default(%10, torch.bool)
%12: float32[] = aten.scalar_tensor.default(1.0, dtype=torch.float32, layout=torch.strided,
  device=cpu)
%13: float32[] = aten.scalar_tensor.default(-1.0, dtype=torch.float32, layout=torch.strided,
  device=cpu)
%14: float32[64, 96] = aten.where.self(%11, %13, %12)
%15: bfloat16[8] = prims.convert_element_type.default(%3, torch.bfloat16)
%16: uint8[64, 96] = aten.bitwise_and.Scalar(%9, 7)
%17: int32[64, 96] = prims.convert_element_type.default(%16, torch.int32)
%18: bfloat16[64, 96] = aten.index.Tensor(%15, [%17])
%19: bfloat16[64, 96] = prims.convert_element_type.default(%14, torch.bfloat16)
%20: bfloat16[64, 96] = aten.mul.Tensor(%18, %19)
%21: bfloat16[64, 3, 32] = aten.view.default(%20, [64, 3, 32])
%22: bfloat16[64, 3, 1] = aten.unsqueeze.default(%2, -1)
%23: bfloat16[64, 3, 32] = aten.mul.Tensor(%21, %22)
%24: bfloat16[64, 96] = aten.view.default(%23, [64, 96])
%25: bfloat16[96, 64] = aten.permute.default(%24, [1, 0])
%26: bfloat16[8, 64] = aten.mm.default(%0, %25)
output [%26]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: bfloat16[64, 3] = placeholder
%3: float32[8] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%6]
""")

    def test_mxfp4_by_ldexp(self) -> None:
        self.form("mxfp4 by ldexp")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 3] = placeholder
%3: float32[16] = placeholder
%4: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%5: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%6: uint8[64, 48, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[64, 96] = aten.view.default(%8, [64, 96])
%10: int32[64, 96] = prims.convert_element_type.default(%9, torch.int32)
%11: float32[64, 96] = aten.index.Tensor(%3, [%10])
%12: float32[64, 3, 32] = aten.view.default(%11, [64, 3, 32])
%13: int32[64, 3] = prims.convert_element_type.default(%2, torch.int32)
%14: int32[64, 3] = aten.sub.Tensor(%13, 127)
%15: int32[64, 3, 1] = aten.unsqueeze.default(%14, 2)
%16: float32[64, 3, 32] = aten.ldexp.Tensor(%12, %15)
%17: float32[64, 96] = aten.view.default(%16, [64, 96])
%18: bfloat16[64, 96] = prims.convert_element_type.default(%17, torch.bfloat16)
%19: bfloat16[96, 64] = aten.permute.default(%18, [1, 0])
%20: bfloat16[8, 64] = aten.mm.default(%0, %19)
output [%20]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 3] = placeholder
%3: float32[16] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%6]
""")

    def test_mxfp4_by_pow(self) -> None:
        self.form("mxfp4 by pow")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 3] = placeholder
%3: float32[16] = placeholder
%4: bfloat16[16] = prims.convert_element_type.default(%3, torch.bfloat16)
%5: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%6: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%7: uint8[64, 48, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[64, 48, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[64, 48, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[64, 96] = aten.view.default(%9, [64, 96])
%11: int32[64, 96] = prims.convert_element_type.default(%10, torch.int32)
%12: bfloat16[64, 96] = aten.index.Tensor(%4, [%11])
%13: int32[64, 3] = prims.convert_element_type.default(%2, torch.int32)
%14: int32[64, 3] = aten.sub.Tensor(%13, 127)
%15: bfloat16[64, 3] = prims.convert_element_type.default(%14, torch.bfloat16)
%16: bfloat16[64, 3] = aten.pow.Scalar(2.0, %15)
%17: bfloat16[64, 3, 32] = aten.view.default(%12, [64, 3, 32])
%18: bfloat16[64, 3, 1] = aten.unsqueeze.default(%16, -1)
%19: bfloat16[64, 3, 32] = aten.mul.Tensor(%17, %18)
%20: bfloat16[64, 96] = aten.view.default(%19, [64, 96])
%21: bfloat16[96, 64] = aten.permute.default(%20, [1, 0])
%22: bfloat16[8, 64] = aten.mm.default(%0, %21)
output [%22]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 3] = placeholder
%3: float32[16] = placeholder
%4: int8[32, 96] = placeholder packed_halves
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5])
    weight.codes=float4_e2m1fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%6]
""")

    def test_mxfp8_by_e8m0(self) -> None:
        self.form("mxfp8 by e8m0")("""\
%0: bfloat16[8, 96] = placeholder
%1: float8_e4m3fn[64, 96] = placeholder
%2: float8_e8m0fnu[64, 3] = placeholder
%3: bfloat16[64, 96] = prims.convert_element_type.default(%1, torch.bfloat16)
%4: bfloat16[64, 3] = prims.convert_element_type.default(%2, torch.bfloat16)
%5: bfloat16[64, 3, 32] = aten.view.default(%3, [64, 3, 32])
%6: bfloat16[64, 3, 1] = aten.unsqueeze.default(%4, -1)
%7: bfloat16[64, 3, 32] = aten.mul.Tensor(%5, %6)
%8: bfloat16[64, 96] = aten.view.default(%7, [64, 96])
%9: bfloat16[96, 64] = aten.permute.default(%8, [1, 0])
%10: bfloat16[8, 64] = aten.mm.default(%0, %9)
output [%10]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: float8_e4m3fn[64, 96] = placeholder
%2: float8_e8m0fnu[64, 3] = placeholder
%3: float8_e4m3fn[64, 96] = placeholder packed_codes
%4: bfloat16[64, 3] = placeholder packed_scale
%5: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=64 weight.k=96 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_five_bits_in_two_tensors(self) -> None:
        self.form("five bits in two tensors")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 12] = placeholder
%3: bfloat16[64, 3] = placeholder
%4: uint8[64, 12, 1] = aten.unsqueeze.default(%2, -1)
%5: uint8[8] = prims.iota.default(8, start=0, step=1, dtype=torch.uint8, device=cpu,
  requires_grad=False)
%6: uint8[64, 12, 8] = aten.__rshift__.Tensor(%4, %5)
%7: uint8[64, 12, 8] = aten.bitwise_and.Scalar(%6, 1)
%8: uint8[64, 96] = aten.view.default(%7, [64, 96])
%9: uint8[64, 48] = aten.bitwise_and.Scalar(%1, 15)
%10: uint8[64, 48] = aten.__rshift__.Scalar(%1, 4)
%11: uint8[64, 48, 1] = aten.unsqueeze.default(%9, 2)
%12: uint8[64, 48, 1] = aten.unsqueeze.default(%10, 2)
%13: uint8[64, 48, 2] = aten.cat.default([%11, %12], -1)
%14: uint8[64, 96] = aten.view.default(%13, [64, 96])
%15: uint8[64, 96] = aten.__lshift__.Scalar(%8, 4)
%16: uint8[64, 96] = aten.bitwise_or.Tensor(%14, %15)
%17: bfloat16[64, 96] = prims.convert_element_type.default(%16, torch.bfloat16)
%18: bfloat16[64, 3, 32] = aten.view.default(%17, [64, 3, 32])
%19: bfloat16[64, 3, 1] = aten.unsqueeze.default(%3, -1)
%20: bfloat16[64, 3, 32] = aten.mul.Tensor(%18, %19)
%21: bfloat16[64, 96] = aten.view.default(%20, [64, 96])
%22: bfloat16[96, 64] = aten.permute.default(%21, [1, 0])
%23: bfloat16[8, 64] = aten.mm.default(%0, %22)
output [%23]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 48] = placeholder
%2: uint8[64, 12] = placeholder
%3: bfloat16[64, 3] = placeholder
%4: uint8[8, 5, 96] = placeholder packed_planes
%5: bfloat16[64, 3] = placeholder packed_scale
%6: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5])
    weight.codes=uint5 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
output [%6]
""")

    def test_table_of_200(self) -> None:
        self.form("table of 200")("""\
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 96] = placeholder
%2: bfloat16[200] = placeholder
%3: bfloat16[64, 3] = placeholder
%4: int32[64, 96] = prims.convert_element_type.default(%1, torch.int32)
%5: bfloat16[64, 96] = aten.index.Tensor(%2, [%4])
%6: bfloat16[64, 3, 32] = aten.view.default(%5, [64, 3, 32])
%7: bfloat16[64, 3, 1] = aten.unsqueeze.default(%3, -1)
%8: bfloat16[64, 3, 32] = aten.mul.Tensor(%6, %7)
%9: bfloat16[64, 96] = aten.view.default(%8, [64, 96])
%10: bfloat16[96, 64] = aten.permute.default(%9, [1, 0])
%11: bfloat16[8, 64] = aten.mm.default(%0, %10)
output [%11]
---- 1 of 1 lowered
%0: bfloat16[8, 96] = placeholder
%1: uint8[64, 96] = placeholder
%2: bfloat16[200] = placeholder
%3: bfloat16[64, 3] = placeholder
%4: uint8[64, 96] = placeholder packed_codes
%5: bfloat16[64, 3] = placeholder packed_scale
%6: float32[256] = placeholder packed_table
%7: bfloat16[8, 64] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=table8 weight.n=64 weight.k=96 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 weight.table=float32 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")


REACHED = [
    "gptq of three bits",
    "gptq with act-order",
    "awq",
    "two bits in blocks of rows",
    "words, strided writes",
    "three bits, ten a word",
    "q4_0",
    "q8_0",
    "nf4 with int8 scales",
    "nvfp4, multiplies the scale",
    "nvfp4, divides the scale",
    "nvfp4, multiplies last",
    "table and sign",
    "mxfp4 by ldexp",
    "mxfp4 by pow",
    "mxfp8 by e8m0",
    "five bits in two tensors",
    "table of 200",
]


@pytest.mark.parametrize("name", REACHED)
def test_format_values(name: str) -> None:
    """As accurate as eager."""
    module = formatted(name)
    xs = activation(module, 512).split(128)
    with torch.no_grad():
        compiled = torch.compile(module, backend="qinductor")
        ours, eager = (torch.cat([f(x) for x in xs]) for f in (compiled, module))
        w = module.make(module, BF16)
    product_oracle(ours, eager, torch.cat(xs), w.t() if FORMATS[name].axes == KN else w)
    assert [report.lowered for report in qinductor.reports()] == [1]
