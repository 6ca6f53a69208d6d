"""Golden graphs: the joint graph before and after our pass, and the same models run for real.

EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden.py   writes the texts anew; read the diff.
"""

import pytest
import torch
from goldens import Golden
from models import CASES, FP32, Case, Random
from torch.nn.functional import linear

import qinductor
from qinductor.testing import OUTPUTS, product_oracle, rewritten


class TestGolden(Golden):
    """Spellings of int4, int8 and float8 weights."""

    def test_int4_low_first_dynamic(self) -> None:
        self.cpu("int4_low_first", dynamic=True)("""\
%0: s0 = placeholder
%1: bfloat16[s0, 128] = placeholder
%2: uint8[48, 64] = placeholder
%3: bfloat16[48, 4] = placeholder
%4: uint8[48, 64] = aten.bitwise_and.Scalar(%2, 15)
%5: uint8[48, 64] = aten.__rshift__.Scalar(%2, 4)
%6: uint8[48, 64, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[48, 128] = aten.view.default(%8, [48, 128])
%10: bfloat16[48, 128] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[48, 128] = aten.sub.Tensor(%10, 8)
%12: bfloat16[48, 4, 32] = aten.view.default(%11, [48, 4, 32])
%13: bfloat16[48, 4, 1] = aten.unsqueeze.default(%3, 2)
%14: bfloat16[48, 4, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[48, 128] = aten.view.default(%14, [48, 128])
%16: bfloat16[128, 48] = aten.permute.default(%15, [1, 0])
%17: bfloat16[s0, 48] = aten.mm.default(%1, %16)
output [%17]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 128] = placeholder
%2: uint8[48, 64] = placeholder
%3: bfloat16[48, 4] = placeholder
%4: uint8[48, 64] = placeholder packed_int4pack
%5: bfloat16[4, 48, 2] = placeholder packed_int4pack_scales
%6: int8[24, 128] = placeholder packed_halves
%7: bfloat16[48, 4] = placeholder packed_scale
%8: bfloat16[s0, 48] = qinductor.dequant_matmul.default(%1, [%4, %5, %6, %7])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm, onednn.dequant_strips
output [%8]
""")

    def test_int4_high_first(self) -> None:
        self.cpu("int4_high_first")("""\
%0: bfloat16[1, 8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 64] = aten.bitwise_and.Scalar(%1, 15)
%4: uint8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%5: uint8[48, 64, 1] = aten.unsqueeze.default(%4, 2)
%6: uint8[48, 64, 1] = aten.unsqueeze.default(%3, 2)
%7: uint8[48, 64, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[48, 128] = aten.view.default(%7, [48, 128])
%9: bfloat16[48, 128] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[48, 128] = aten.sub.Tensor(%9, 8)
%11: bfloat16[48, 4, 32] = aten.view.default(%10, [48, 4, 32])
%12: bfloat16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%13: bfloat16[48, 4, 32] = aten.mul.Tensor(%11, %12)
%14: bfloat16[48, 128] = aten.view.default(%13, [48, 128])
%15: bfloat16[128, 48] = aten.permute.default(%14, [1, 0])
%16: bfloat16[8, 128] = aten.view.default(%0, [8, 128])
%17: bfloat16[8, 48] = aten.mm.default(%16, %15)
%18: bfloat16[1, 8, 48] = aten.view.default(%17, [1, 8, 48])
output [%18]
---- 1 of 1 lowered
%0: bfloat16[1, 8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 64] = placeholder packed_int4pack
%4: bfloat16[4, 48, 2] = placeholder packed_int4pack_scales
%5: bfloat16[8, 128] = aten.view.default(%0, [8, 128])
%6: bfloat16[8, 48] = qinductor.dequant_matmul.default(%5, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
%7: bfloat16[1, 8, 48] = aten.view.default(%6, [1, 8, 48])
output [%7]
""")

    def test_int4_signed_shifts(self) -> None:
        self.cpu("int4_signed_shifts")("""\
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 64] = placeholder
%2: bfloat16[48, 2] = placeholder
%3: bfloat16[48] = placeholder
%4: int8[48, 64] = aten.__lshift__.Scalar(%1, 4)
%5: int8[48, 64] = aten.__rshift__.Scalar(%4, 4)
%6: int8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%7: int8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: int8[48, 64, 1] = aten.unsqueeze.default(%6, 2)
%9: int8[48, 64, 2] = aten.cat.default([%7, %8], -1)
%10: int8[48, 128] = aten.view.default(%9, [48, 128])
%11: bfloat16[48, 128] = prims.convert_element_type.default(%10, torch.bfloat16)
%12: bfloat16[48, 2, 64] = aten.view.default(%11, [48, 2, 64])
%13: bfloat16[48, 2, 1] = aten.unsqueeze.default(%2, 2)
%14: bfloat16[48, 2, 64] = aten.mul.Tensor(%12, %13)
%15: bfloat16[48, 128] = aten.view.default(%14, [48, 128])
%16: bfloat16[128, 48] = aten.permute.default(%15, [1, 0])
%17: bfloat16[8, 48] = aten.addmm.default(%3, %0, %16)
output [%17]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 64] = placeholder
%2: bfloat16[48, 2] = placeholder
%3: bfloat16[48] = placeholder
%4: uint8[48, 96] = placeholder packed_int4pack
%5: bfloat16[3, 48, 2] = placeholder packed_int4pack_scales
%6: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%4, %5])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=64 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=True
    aten.int4pack_mm
output [%6]
""")

    def test_int4_int32_words(self) -> None:
        self.cpu("int4_int32_words", m=1)("""\
%0: bfloat16[1, 128] = placeholder
%1: int32[48, 16] = placeholder
%2: bfloat16[48, 1] = placeholder
%3: uint8[48, 64] = aten.view.dtype(%1, torch.uint8)
%4: uint8[48, 64] = aten.alias.default(%3)
%5: uint8[48, 64] = aten.bitwise_and.Scalar(%4, 15)
%6: uint8[48, 64] = aten.__rshift__.Scalar(%4, 4)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[48, 64, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[48, 128] = aten.view.default(%9, [48, 128])
%11: int8[48, 128] = aten.view.dtype(%10, torch.int8)
%12: int8[48, 128] = aten.alias.default(%11)
%13: int8[48, 128] = aten.sub.Tensor(%12, 8)
%14: bfloat16[48, 128] = prims.convert_element_type.default(%13, torch.bfloat16)
%15: bfloat16[48, 128] = aten.mul.Tensor(%14, %2)
%16: bfloat16[128, 48] = aten.permute.default(%15, [1, 0])
%17: bfloat16[1, 48] = aten.mm.default(%0, %16)
output [%17]
---- 1 of 1 lowered
%0: bfloat16[1, 128] = placeholder
%1: int32[48, 16] = placeholder
%2: bfloat16[48, 1] = placeholder
%3: uint8[48, 64] = placeholder packed_int4pack
%4: bfloat16[1, 48, 2] = placeholder packed_int4pack_scales
%5: bfloat16[1, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%5]
""")

    def test_int4_gptq(self) -> None:
        self.cpu("int4_gptq")("""\
%0: float16[8, 128] = placeholder
%1: int32[16, 48] = placeholder
%2: int32[8] = placeholder
%3: int32[2, 6] = placeholder
%4: float16[2, 48] = placeholder
%5: int32[128] = placeholder
%6: int32[16, 1, 48] = aten.unsqueeze.default(%1, 1)
%7: int32[16, 8, 48] = aten.expand.default(%6, [-1, 8, -1])
%8: int32[1, 8, 1] = aten.view.default(%2, [1, 8, 1])
%9: int32[16, 8, 48] = aten.__rshift__.Tensor(%7, %8)
%10: int8[16, 8, 48] = prims.convert_element_type.default(%9, torch.int8)
%11: int8[16, 8, 48] = aten.bitwise_and.Scalar(%10, 15)
%12: int8[128, 48] = aten.view.default(%11, [128, 48])
%13: int32[2, 6, 1] = aten.unsqueeze.default(%3, 2)
%14: int32[2, 6, 8] = aten.expand.default(%13, [-1, -1, 8])
%15: int32[1, 1, 8] = aten.view.default(%2, [1, 1, 8])
%16: int32[2, 6, 8] = aten.__rshift__.Tensor(%14, %15)
%17: int8[2, 6, 8] = prims.convert_element_type.default(%16, torch.int8)
%18: int8[2, 6, 8] = aten.bitwise_and.Scalar(%17, 15)
%19: int8[2, 48] = aten.view.default(%18, [2, 48])
%20: float16[128, 48] = aten.index.Tensor(%4, [%5])
%21: int8[128, 48] = aten.index.Tensor(%19, [%5])
%22: int8[128, 48] = aten.sub.Tensor(%12, %21)
%23: float16[128, 48] = aten.mul.Tensor(%20, %22)
%24: float16[8, 48] = aten.mm.default(%0, %23)
output [%24]
---- 1 of 1 lowered
%0: float16[8, 128] = placeholder
%1: int32[16, 48] = placeholder
%2: int32[8] = placeholder
%3: int32[2, 6] = placeholder
%4: float16[2, 48] = placeholder
%5: int32[128] = placeholder
%6: int8[24, 128] = placeholder packed_halves
%7: float16[48, 2] = placeholder packed_scale
%8: int8[48, 2] = placeholder packed_zero
%9: float16[8, 48] = qinductor.dequant_matmul.default(%0, [%6, %7, %8])
    weight.codes=uint4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=64
      weight.arithmetic=(q-z)*s weight.scale=float16 weight.zero=int8 weight.inner=float16
      weight.compute=float16 weight.dtype=float16 x=float16 out=float16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%9]
""")

    def test_int4_zero(self) -> None:
        self.cpu("int4_zero")("""\
%0: bfloat16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 4] = placeholder
%4: uint8[48, 64] = aten.bitwise_and.Scalar(%1, 15)
%5: uint8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%6: uint8[48, 64, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[48, 128] = aten.view.default(%8, [48, 128])
%10: bfloat16[48, 128] = prims.convert_element_type.default(%9, torch.bfloat16)
%11: bfloat16[48, 4] = prims.convert_element_type.default(%3, torch.bfloat16)
%12: bfloat16[48, 4, 32] = aten.view.default(%10, [48, 4, 32])
%13: bfloat16[48, 4, 1] = aten.unsqueeze.default(%11, 2)
%14: bfloat16[48, 4, 32] = aten.sub.Tensor(%12, %13)
%15: bfloat16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%16: bfloat16[48, 4, 32] = aten.mul.Tensor(%14, %15)
%17: bfloat16[48, 128] = aten.view.default(%16, [48, 128])
%18: bfloat16[128, 48] = aten.permute.default(%17, [1, 0])
%19: bfloat16[8, 48] = aten.mm.default(%0, %18)
output [%19]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 4] = placeholder
%4: int8[24, 128] = placeholder packed_halves
%5: bfloat16[48, 4] = placeholder packed_scale
%6: uint8[48, 4] = placeholder packed_zero
%7: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=uint4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32
      weight.arithmetic=(q-z)*s weight.scale=bfloat16 weight.zero=uint8 weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_int4_packed_zero(self) -> None:
        self.cpu("int4_packed_zero")("""\
%0: bfloat16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 2] = placeholder
%4: bfloat16[48] = placeholder
%5: uint8[48, 64] = aten.bitwise_and.Scalar(%1, 15)
%6: uint8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[48, 64, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[48, 128] = aten.view.default(%9, [48, 128])
%11: bfloat16[48, 128] = prims.convert_element_type.default(%10, torch.bfloat16)
%12: uint8[48, 2] = aten.bitwise_and.Scalar(%3, 15)
%13: uint8[48, 2] = aten.__rshift__.Scalar(%3, 4)
%14: uint8[48, 2, 1] = aten.unsqueeze.default(%12, 2)
%15: uint8[48, 2, 1] = aten.unsqueeze.default(%13, 2)
%16: uint8[48, 2, 2] = aten.cat.default([%14, %15], -1)
%17: uint8[48, 4] = aten.view.default(%16, [48, 4])
%18: bfloat16[48, 4] = prims.convert_element_type.default(%17, torch.bfloat16)
%19: bfloat16[48, 4, 32] = aten.view.default(%11, [48, 4, 32])
%20: bfloat16[48, 4, 1] = aten.unsqueeze.default(%18, 2)
%21: bfloat16[48, 4, 32] = aten.sub.Tensor(%19, %20)
%22: bfloat16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%23: bfloat16[48, 4, 32] = aten.mul.Tensor(%21, %22)
%24: bfloat16[48, 128] = aten.view.default(%23, [48, 128])
%25: bfloat16[128, 48] = aten.permute.default(%24, [1, 0])
%26: bfloat16[8, 48] = aten.addmm.default(%4, %0, %25)
output [%26]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: uint8[48, 2] = placeholder
%4: bfloat16[48] = placeholder
%5: int8[24, 128] = placeholder packed_halves
%6: bfloat16[48, 4] = placeholder packed_scale
%7: uint8[48, 4] = placeholder packed_zero
%8: bfloat16[48] = placeholder packed_bias
%9: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%5, %6, %7, %8])
    weight.codes=uint4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32
      weight.arithmetic=(q-z)*s weight.scale=bfloat16 weight.zero=uint8 weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=True
    onednn.dequant_strips
output [%9]
""")

    def test_int4_float_zero(self) -> None:
        self.cpu("int4_float_zero")("""\
%0: float16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: float16[48, 4] = placeholder
%3: float16[48, 4] = placeholder
%4: uint8[48, 64] = aten.bitwise_and.Scalar(%1, 15)
%5: uint8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%6: uint8[48, 64, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 2] = aten.cat.default([%6, %7], -1)
%9: uint8[48, 128] = aten.view.default(%8, [48, 128])
%10: float16[48, 128] = prims.convert_element_type.default(%9, torch.float16)
%11: float16[48, 4, 32] = aten.view.default(%10, [48, 4, 32])
%12: float16[48, 4, 1] = aten.unsqueeze.default(%3, 2)
%13: float16[48, 4, 32] = aten.sub.Tensor(%11, %12)
%14: float16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%15: float16[48, 4, 32] = aten.mul.Tensor(%13, %14)
%16: float16[48, 128] = aten.view.default(%15, [48, 128])
%17: float16[128, 48] = aten.permute.default(%16, [1, 0])
%18: float16[8, 48] = aten.mm.default(%0, %17)
output [%18]
---- 1 of 1 lowered
%0: float16[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: float16[48, 4] = placeholder
%3: float16[48, 4] = placeholder
%4: int8[24, 128] = placeholder packed_halves
%5: float16[48, 4] = placeholder packed_scale
%6: float16[48, 4] = placeholder packed_zero
%7: float16[8, 48] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=uint4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32
      weight.arithmetic=(q-z)*s weight.scale=float16 weight.zero=float16 weight.inner=float16
      weight.compute=float16 weight.dtype=float16 x=float16 out=float16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%7]
""")

    def test_int4_minimum(self) -> None:
        self.cpu("int4_minimum", dynamic=True)("""\
%0: s0 = placeholder
%1: bfloat16[s0, 128] = placeholder
%2: uint8[48, 64] = placeholder
%3: bfloat16[48, 4] = placeholder
%4: bfloat16[48, 4] = placeholder
%5: uint8[48, 64] = aten.bitwise_and.Scalar(%2, 15)
%6: uint8[48, 64] = aten.__rshift__.Scalar(%2, 4)
%7: uint8[48, 64, 1] = aten.unsqueeze.default(%5, 2)
%8: uint8[48, 64, 1] = aten.unsqueeze.default(%6, 2)
%9: uint8[48, 64, 2] = aten.cat.default([%7, %8], -1)
%10: uint8[48, 128] = aten.view.default(%9, [48, 128])
%11: bfloat16[48, 128] = prims.convert_element_type.default(%10, torch.bfloat16)
%12: bfloat16[48, 4, 32] = aten.view.default(%11, [48, 4, 32])
%13: bfloat16[48, 4, 1] = aten.unsqueeze.default(%3, 2)
%14: bfloat16[48, 4, 32] = aten.mul.Tensor(%12, %13)
%15: bfloat16[48, 4, 1] = aten.unsqueeze.default(%4, 2)
%16: bfloat16[48, 4, 32] = aten.add.Tensor(%14, %15)
%17: bfloat16[48, 128] = aten.view.default(%16, [48, 128])
%18: bfloat16[128, 48] = aten.permute.default(%17, [1, 0])
%19: bfloat16[s0, 48] = aten.mm.default(%1, %18)
output [%19]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 128] = placeholder
%2: uint8[48, 64] = placeholder
%3: bfloat16[48, 4] = placeholder
%4: bfloat16[48, 4] = placeholder
%5: int8[24, 128] = placeholder packed_halves
%6: bfloat16[48, 4] = placeholder packed_scale
%7: bfloat16[48, 4] = placeholder packed_zero
%8: bfloat16[s0, 48] = qinductor.dequant_matmul.default(%1, [%5, %6, %7])
    weight.codes=uint4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s+z
      weight.scale=bfloat16 weight.zero=bfloat16 weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
output [%8]
""")

    def test_int4_channel_fp32(self) -> None:
        self.cpu("int4_channel_fp32")("""\
%0: float32[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: float32[48, 1] = placeholder
%3: uint8[48, 64] = aten.bitwise_and.Scalar(%1, 15)
%4: uint8[48, 64] = aten.__rshift__.Scalar(%1, 4)
%5: uint8[48, 64, 1] = aten.unsqueeze.default(%3, 2)
%6: uint8[48, 64, 1] = aten.unsqueeze.default(%4, 2)
%7: uint8[48, 64, 2] = aten.cat.default([%5, %6], -1)
%8: uint8[48, 128] = aten.view.default(%7, [48, 128])
%9: float32[48, 128] = prims.convert_element_type.default(%8, torch.float32)
%10: float32[48, 128] = aten.sub.Tensor(%9, 8)
%11: float32[48, 1, 128] = aten.view.default(%10, [48, 1, 128])
%12: float32[48, 1, 1] = aten.unsqueeze.default(%2, 2)
%13: float32[48, 1, 128] = aten.mul.Tensor(%11, %12)
%14: float32[48, 128] = aten.view.default(%13, [48, 128])
%15: float32[128, 48] = aten.permute.default(%14, [1, 0])
%16: float32[8, 48] = aten.mm.default(%0, %15)
output [%16]
---- 1 of 1 lowered
%0: float32[8, 128] = placeholder
%1: uint8[48, 64] = placeholder
%2: float32[48, 1] = placeholder
%3: int8[24, 128] = placeholder packed_halves
%4: float32[48, 1] = placeholder packed_scale
%5: float32[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 x=float32 out=float32 output_scale=None bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_int8_tensor(self) -> None:
        self.cpu("int8_tensor")("""\
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[] = placeholder
%3: bfloat16[48] = placeholder
%4: bfloat16[48, 128] = prims.convert_element_type.default(%1, torch.bfloat16)
%5: bfloat16[48, 128] = aten.mul.Tensor(%4, %2)
%6: bfloat16[128, 48] = aten.permute.default(%5, [1, 0])
%7: bfloat16[8, 48] = aten.addmm.default(%3, %0, %6)
output [%7]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[] = placeholder
%3: bfloat16[48] = placeholder
%4: int8[48, 128] = placeholder packed_codes
%5: bfloat16[1, 1] = placeholder packed_scale
%6: bfloat16[48] = placeholder packed_bias
%7: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=48 weight.bk=128 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=True
    onednn.dequant_strips
output [%7]
""")

    def test_int8_channel(self) -> None:
        self.cpu("int8_channel", dynamic=True)("""\
%0: s0 = placeholder
%1: float16[s0, 128] = placeholder
%2: int8[48, 128] = placeholder
%3: float16[48, 1] = placeholder
%4: float16[48, 128] = prims.convert_element_type.default(%2, torch.float16)
%5: float16[48, 128] = aten.mul.Tensor(%4, %3)
%6: float16[128, 48] = aten.permute.default(%5, [1, 0])
%7: float16[s0, 48] = aten.mm.default(%1, %6)
output [%7]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: float16[s0, 128] = placeholder
%2: int8[48, 128] = placeholder
%3: float16[48, 1] = placeholder
%4: int8[48, 128] = placeholder packed_codes
%5: float16[48] = placeholder packed_row_scale
%6: float16[48, 1] = placeholder packed_scale
%7: float16[s0, 48] = qinductor.dequant_matmul.default(%1, [%4, %5, %6])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float16 weight.zero=None weight.inner=float16 weight.compute=float16
      weight.dtype=float16 x=float16 out=float16 output_scale=None bias=False
    aten.int8pack_mm, onednn.dequant_strips
output [%7]
""")

    def test_int8_group(self) -> None:
        self.cpu("int8_group")("""\
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: bfloat16[48, 128] = prims.convert_element_type.default(%1, torch.bfloat16)
%4: bfloat16[48, 4, 32] = aten.view.default(%3, [48, 4, 32])
%5: bfloat16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%6: bfloat16[48, 4, 32] = aten.mul.Tensor(%4, %5)
%7: bfloat16[48, 128] = aten.view.default(%6, [48, 128])
%8: bfloat16[128, 48] = aten.permute.default(%7, [1, 0])
%9: bfloat16[8, 48] = aten.mm.default(%0, %8)
output [%9]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: int8[48, 128] = placeholder packed_codes
%4: bfloat16[48, 4] = placeholder packed_scale
%5: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_int8_input_channel(self) -> None:
        self.cpu("int8_input_channel")("""\
%0: float32[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: float32[1, 128] = placeholder
%3: float32[48, 128] = prims.convert_element_type.default(%1, torch.float32)
%4: float32[48, 128] = aten.mul.Tensor(%3, %2)
%5: float32[128, 48] = aten.permute.default(%4, [1, 0])
%6: float32[8, 48] = aten.mm.default(%0, %5)
output [%6]
---- 1 of 1 lowered
%0: float32[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: float32[1, 128] = placeholder
%3: int8[48, 128] = placeholder packed_codes
%4: float32[1, 128] = placeholder packed_scale
%5: float32[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=48 weight.bk=1 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 x=float32 out=float32 output_scale=None bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_int8_scale_after(self) -> None:
        self.cpu("int8_scale_after")("""\
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[48] = placeholder
%3: bfloat16[48, 128] = prims.convert_element_type.default(%1, torch.bfloat16)
%4: bfloat16[128, 48] = aten.permute.default(%3, [1, 0])
%5: bfloat16[8, 48] = aten.mm.default(%0, %4)
%6: bfloat16[8, 48] = aten.mul.Tensor(%5, %2)
output [%6]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: bfloat16[48] = placeholder
%3: int8[48, 128] = placeholder packed_codes
%4: bfloat16[48] = placeholder packed_row_scale
%5: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=48 weight.bk=128 weight.arithmetic=q
      weight.scale=None weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=bfloat16 bias=False
    aten.int8pack_mm
output [%5]
""")

    def test_int8_scale_after_rank3(self) -> None:
        self.cpu("int8_scale_after_rank3", dynamic=True)("""\
%0: s0 = placeholder
%1: bfloat16[1, s0, 128] = placeholder
%2: int8[48, 128] = placeholder
%3: bfloat16[48] = placeholder
%4: bfloat16[48, 128] = prims.convert_element_type.default(%2, torch.bfloat16)
%5: bfloat16[128, 48] = aten.permute.default(%4, [1, 0])
%6: bfloat16[s0, 128] = aten.view.default(%1, [%0, 128])
%7: bfloat16[s0, 48] = aten.mm.default(%6, %5)
%8: bfloat16[1, s0, 48] = aten.view.default(%7, [1, %0, 48])
%9: bfloat16[1, s0, 48] = aten.mul.Tensor(%8, %3)
output [%9]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[1, s0, 128] = placeholder
%2: int8[48, 128] = placeholder
%3: bfloat16[48] = placeholder
%4: int8[48, 128] = placeholder packed_codes
%5: bfloat16[48] = placeholder packed_row_scale
%6: bfloat16[48] = placeholder packed_output_scale
%7: bfloat16[s0, 128] = aten.view.default(%1, [%0, 128])
%8: bfloat16[s0, 48] = qinductor.dequant_matmul.default(%7, [%4, %5, %6])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=48 weight.bk=128 weight.arithmetic=q
      weight.scale=None weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=bfloat16 bias=False
    aten.int8pack_mm, onednn.dequant_strips
%9: bfloat16[1, s0, 48] = aten.view.default(%8, [1, %0, 48])
output [%9]
""")

    def test_e4m3_channel(self) -> None:
        self.cpu("e4m3_channel")("""\
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: bfloat16[48, 1] = placeholder
%3: bfloat16[48] = placeholder
%4: bfloat16[48, 128] = prims.convert_element_type.default(%1, torch.bfloat16)
%5: bfloat16[48, 128] = aten.mul.Tensor(%4, %2)
%6: bfloat16[128, 48] = aten.permute.default(%5, [1, 0])
%7: bfloat16[8, 48] = aten.addmm.default(%3, %0, %6)
output [%7]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: bfloat16[48, 1] = placeholder
%3: bfloat16[48] = placeholder
%4: float8_e4m3fn[48, 128] = placeholder packed_codes
%5: bfloat16[48, 1] = placeholder packed_scale
%6: bfloat16[48] = placeholder packed_bias
%7: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%4, %5, %6])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=128 weight.bn=1 weight.bk=128
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=True
    onednn.dequant_strips
output [%7]
""")

    def test_e4m3_group(self) -> None:
        self.cpu("e4m3_group")("""\
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: bfloat16[48, 128] = prims.convert_element_type.default(%1, torch.bfloat16)
%4: bfloat16[48, 4, 32] = aten.view.default(%3, [48, 4, 32])
%5: bfloat16[48, 4, 1] = aten.unsqueeze.default(%2, 2)
%6: bfloat16[48, 4, 32] = aten.mul.Tensor(%4, %5)
%7: bfloat16[48, 128] = aten.view.default(%6, [48, 128])
%8: bfloat16[128, 48] = aten.permute.default(%7, [1, 0])
%9: bfloat16[8, 48] = aten.mm.default(%0, %8)
output [%9]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: bfloat16[48, 4] = placeholder
%3: float8_e4m3fn[48, 128] = placeholder packed_codes
%4: bfloat16[48, 4] = placeholder packed_scale
%5: bfloat16[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=128 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_e4m3_sliced_blocks(self) -> None:
        self.cpu("e4m3_sliced_blocks")("""\
%0: bfloat16[8, 200] = placeholder
%1: float8_e4m3fn[144, 200] = placeholder
%2: float32[2, 2] = placeholder
%3: float32[2, 1, 2] = aten.unsqueeze.default(%2, 1)
%4: float32[2, 128, 2] = aten.expand.default(%3, [2, 128, 2])
%5: float32[2, 128, 2] = aten.clone.default(%4, memory_format=torch.contiguous_format)
%6: float32[256, 2] = aten.view.default(%5, [256, 2])
%7: float32[256, 2, 1] = aten.unsqueeze.default(%6, 2)
%8: float32[256, 2, 128] = aten.expand.default(%7, [256, 2, 128])
%9: float32[256, 2, 128] = aten.clone.default(%8, memory_format=torch.contiguous_format)
%10: float32[256, 256] = aten.view.default(%9, [256, 256])
%11: float32[144, 200] = prims.convert_element_type.default(%1, torch.float32)
%12: float32[144, 256] = aten.slice.Tensor(%10, 0, 0, 144)
%13: float32[144, 200] = aten.slice.Tensor(%12, 1, 0, 200)
%14: float32[144, 200] = aten.mul.Tensor(%11, %13)
%15: bfloat16[144, 200] = prims.convert_element_type.default(%14, torch.bfloat16)
%16: bfloat16[200, 144] = aten.permute.default(%15, [1, 0])
%17: bfloat16[8, 144] = aten.mm.default(%0, %16)
output [%17]
---- 1 of 1 lowered
%0: bfloat16[8, 200] = placeholder
%1: float8_e4m3fn[144, 200] = placeholder
%2: float32[2, 2] = placeholder
%3: float8_e4m3fn[144, 200] = placeholder packed_codes
%4: float32[2, 2] = placeholder packed_scale
%5: bfloat16[8, 144] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=144 weight.k=200 weight.bn=128 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_e4m3_padded_blocks(self) -> None:
        self.cpu("e4m3_padded_blocks")("""\
%0: bfloat16[8, 200] = placeholder
%1: float8_e4m3fn[144, 200] = placeholder
%2: float32[2, 2] = placeholder
%3: bfloat16[144, 200] = prims.convert_element_type.default(%1, torch.bfloat16)
%4: bfloat16[256, 256] = aten.constant_pad_nd.default(%3, [0, 56, 0, 112], 0.0)
%5: bfloat16[2, 128, 2, 128] = aten.view.default(%4, [2, 128, 2, 128])
%6: bfloat16[2, 2] = prims.convert_element_type.default(%2, torch.bfloat16)
%7: bfloat16[2, 1, 2, 1] = aten.view.default(%6, [2, 1, 2, 1])
%8: bfloat16[2, 128, 2, 128] = aten.mul.Tensor(%5, %7)
%9: bfloat16[256, 256] = aten.view.default(%8, [256, 256])
%10: bfloat16[144, 256] = aten.slice.Tensor(%9, 0, 0, 144)
%11: bfloat16[144, 200] = aten.slice.Tensor(%10, 1, 0, 200)
%12: bfloat16[200, 144] = aten.permute.default(%11, [1, 0])
%13: bfloat16[8, 144] = aten.mm.default(%0, %12)
output [%13]
---- 1 of 1 lowered
%0: bfloat16[8, 200] = placeholder
%1: float8_e4m3fn[144, 200] = placeholder
%2: float32[2, 2] = placeholder
%3: float8_e4m3fn[144, 200] = placeholder packed_codes
%4: bfloat16[2, 2] = placeholder packed_scale
%5: bfloat16[8, 144] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=144 weight.k=200 weight.bn=128 weight.bk=128
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_e5m2_divided(self) -> None:
        self.cpu("e5m2_divided")("""\
%0: float16[8, 128] = placeholder
%1: float8_e5m2[48, 128] = placeholder
%2: float16[] = placeholder
%3: float16[48, 128] = prims.convert_element_type.default(%1, torch.float16)
%4: float16[48, 128] = aten.div.Tensor(%3, %2)
%5: float16[128, 48] = aten.permute.default(%4, [1, 0])
%6: float16[8, 48] = aten.mm.default(%0, %5)
output [%6]
---- 1 of 1 lowered
%0: float16[8, 128] = placeholder
%1: float8_e5m2[48, 128] = placeholder
%2: float16[] = placeholder
%3: float8_e5m2[48, 128] = placeholder packed_codes
%4: float16[1, 1] = placeholder packed_scale
%5: float16[8, 48] = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=float8_e5m2 weight.n=48 weight.k=128 weight.bn=48 weight.bk=128
      weight.arithmetic=q/s weight.scale=float16 weight.zero=None weight.inner=float16
      weight.compute=float16 weight.dtype=float16 x=float16 out=float16 output_scale=None
      bias=False
    onednn.dequant_strips
output [%5]
""")

    def test_cuda_int4_low_first(self) -> None:
        self.cuda("int4_low_first")("""\
---- 1 of 1 lowered
%0: bfloat16[8, 128]@cuda = placeholder
%1: uint8[48, 64]@cuda = placeholder
%2: bfloat16[48, 4]@cuda = placeholder
%3: int32[6, 1, 32, 4]@cuda = placeholder packed_int4tiles
%4: bfloat16[4, 48, 2]@cuda = placeholder packed_int4tiles_scales
%5: bfloat16[8, 48]@cuda = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm_cuda
output [%5]
""")

    def test_cuda_int4_low_first_dynamic(self) -> None:
        self.cuda("int4_low_first", dynamic=True)("""\
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 128]@cuda = placeholder
%2: uint8[48, 64]@cuda = placeholder
%3: bfloat16[48, 4]@cuda = placeholder
%4: int32[6, 1, 32, 4]@cuda = placeholder packed_int4tiles
%5: bfloat16[4, 48, 2]@cuda = placeholder packed_int4tiles_scales
%6: int16[2, 2, 1024]@cuda = placeholder packed_fragments4
%7: int32[4, 64]@cuda = placeholder packed_fragments_scale
%8: bfloat16[s0, 48]@cuda = qinductor.dequant_matmul.default(%1, [%4, %5, %6, %7])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm_cuda, triton.mma
output [%8]
""")

    def test_cuda_int4_high_first(self) -> None:
        self.cuda("int4_high_first")("""\
---- 1 of 1 lowered
%0: bfloat16[1, 8, 128]@cuda = placeholder
%1: uint8[48, 64]@cuda = placeholder
%2: bfloat16[48, 4]@cuda = placeholder
%3: int32[6, 1, 32, 4]@cuda = placeholder packed_int4tiles
%4: bfloat16[4, 48, 2]@cuda = placeholder packed_int4tiles_scales
%5: bfloat16[8, 128]@cuda = aten.view.default(%0, [8, 128])
%6: bfloat16[8, 48]@cuda = qinductor.dequant_matmul.default(%5, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm_cuda
%7: bfloat16[1, 8, 48]@cuda = aten.view.default(%6, [1, 8, 48])
output [%7]
""")

    def test_cuda_int4_int32_words(self) -> None:
        self.cuda("int4_int32_words", m=1)("""\
---- 1 of 1 lowered
%0: bfloat16[1, 128]@cuda = placeholder
%1: int32[48, 16]@cuda = placeholder
%2: bfloat16[48, 1]@cuda = placeholder
%3: int32[6, 1, 32, 4]@cuda = placeholder packed_int4tiles
%4: bfloat16[1, 48, 2]@cuda = placeholder packed_int4tiles_scales
%5: bfloat16[1, 48]@cuda = qinductor.dequant_matmul.default(%0, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm_cuda
output [%5]
""")


ATEN_INT4 = "aten.int4pack_mm_cuda"


def test_cuda_refused() -> None:
    """What no provider for sm_90 takes: the graph stays as it was."""
    case = CASES["int4_channel_fp32"]
    found = rewritten(case.module, case.activation(8), target="sm_90")
    (site,) = found.report.sites
    assert not site.lowered and found.after == found.before
    for name in (ATEN_INT4, "triton.mma", "triton.dequant_cublas"):
        assert f"{name}: x is fp32" in site.reason


# A torch without CUDA traces no index_select on fake CUDA tensors.
@pytest.mark.parametrize("name", [name for name in CASES if name != "int4_gptq"])
def test_cuda_lowered(name: str) -> None:
    """On sm_90 all but fp32 is lowered, for 64 rows to the product that keeps W in registers."""
    case = CASES[name]
    for m in (1, 64):
        found = rewritten(case.module, case.activation(m), target="sm_90")
        (site,) = found.report.sites
        assert site.lowered == (case.x is not FP32), site.reason
        if site.lowered:
            few = m == 1 and site.provider.startswith(ATEN_INT4)
            assert few or site.provider.startswith("triton.mma@")


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """As accurate as eager for no row, one, few and many, through one graph for every M."""
    compare(CASES[name], graphs=1)


@pytest.mark.parametrize("name", ["int4_signed_shifts", "int8_scale_after_rank3", "e4m3_group"])
def test_specialised_values(name: str) -> None:
    """Dynamo's own choice: a graph for M = 0, one for M = 1, one for the others."""
    compare(CASES[name], graphs=3)


@pytest.mark.parametrize("name", ["int4_low_first", "int4_unsigned", "int8_channel"])
def test_centred_values(name: str) -> None:
    """Rows of x with mean zero, as layer norm makes them: what all of W's row shares cancels."""
    case = CASES[name]
    module = case.module()
    x = Random(1).normal(16, 8, case.k, dtype=FP32)
    x = (x - x.mean(-1, keepdim=True)).to(case.x)
    with torch.no_grad():
        compiled = torch.compile(module, backend="qinductor")
        ours, eager = (torch.cat([f(part) for part in x]) for f in (compiled, module))
    product_oracle(ours, eager, x.flatten(0, 1), case.weight(module))


def compare(case: Case, graphs: int) -> None:
    """Runs a module in eager mode and compiled, and counts the graphs."""
    mark = torch._dynamo.decorators.mark_unbacked if graphs == 1 else torch._dynamo.mark_dynamic
    module = case.module()
    w = case.weight(module)
    vectors = [getattr(module, name, None) for name in ("bias", "output_scale")]
    with torch.no_grad():
        compiled = torch.compile(module, backend="qinductor")
        for m in (7, 96, 1, 0):
            xs = [case.activation(m, seed) for seed in range(-(-OUTPUTS // (max(m, 1) * len(w))))]
            if m == 7:
                mark(xs[0], case.rank - 2)
            ours, eager = (torch.cat([f(x) for x in xs], -2) for f in (compiled, module))
            assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
            if m:
                product_oracle(ours, eager, torch.cat(xs, -2), w, *vectors)
    outcomes = [(report.lowered, report.notes) for report in qinductor.reports()]
    assert outcomes == [(1, [])] * graphs


class TestProductOracle:
    """Eager's own product passes; each fault is told with its metric, its place and both values."""

    @pytest.fixture
    def product(self) -> tuple[torch.Tensor, ...]:
        r = Random()
        x, w = r.normal(64, 256), r.normal(64, 256)
        return linear(x, w), x, w

    def test_eager(self, product: tuple[torch.Tensor, ...]) -> None:
        eager, x, w = product
        product_oracle(eager, eager, x, w)

    def test_rms(self, product: tuple[torch.Tensor, ...]) -> None:
        eager, x, w = product
        exact = x.double() @ w.double().T
        worse = (exact + 2.5 * (eager.double() - exact)).to(torch.bfloat16)
        with pytest.raises(
            AssertionError, match=r"rms error [\d.e-]+ is over its limit [\d.e-]+; "
        ):
            product_oracle(worse, eager, x, w)

    def test_largest(self, product: tuple[torch.Tensor, ...]) -> None:
        eager, x, w = product
        worse = eager.clone()
        worse[3, 5] += 0.7
        with pytest.raises(
            AssertionError, match=r"largest error .* worst at \[3, 5\]: ours .* eager"
        ):
            product_oracle(worse, eager, x, w)

    def test_exact(self) -> None:
        x, w = torch.ones(64, 8), torch.ones(64, 8)
        eager = linear(x, w)
        product_oracle(eager, eager, x, w)
        with pytest.raises(AssertionError, match="limit 0; .* ours 8.5, eager 8.0, float64 8.0"):
            product_oracle(eager + 0.5 * torch.eye(64), eager, x, w)

    def test_not_finite(self, product: tuple[torch.Tensor, ...]) -> None:
        eager, x, w = product
        broken = eager.clone()
        broken[1, 2] = torch.nan
        product_oracle(broken, broken, x, w)
        for ours, other in ((broken, eager), (eager, broken)):
            with pytest.raises(AssertionError, match=r"rms error inf .* worst at \[1, 2\]"):
                product_oracle(ours, other, x, w)

    def test_bias_and_scale(self, product: tuple[torch.Tensor, ...]) -> None:
        _, x, w = product
        bias, scale = Random(1).normal(64), Random(2).normal(64)
        product_oracle(*[linear(x, w) * scale + bias] * 2, x, w, bias, scale)
        with pytest.raises(AssertionError):
            product_oracle(linear(x, w), linear(x, w) * scale, x, w, scale=scale)

    def test_bad_operands(self, product: tuple[torch.Tensor, ...]) -> None:
        eager, x, w = product
        with pytest.raises(ValueError, match="at least 4096 outputs to measure over, got 64"):
            product_oracle(eager[:1], eager[:1], x[:1], w)
        with pytest.raises(AssertionError, match="ours is torch.float32"):
            product_oracle(eager.float(), eager, x, w)
