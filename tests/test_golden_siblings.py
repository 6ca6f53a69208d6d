"""Products of codes of one activation: the graph before and after they are computed as one."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from goldens import Golden, outcome
from models import BF16, FP32, Holder, Random
from scaled import codes, provided

from qinductor.op import Op, Plan
from qinductor.testing import rewritten

K = 128
PLAIN = {"patterns": {"quantize": "off"}}


def product(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    q, s = codes(x)
    return torch._scaled_mm(
        q, getattr(m, f"w{i}").t(), scale_a=s, scale_b=getattr(m, f"s{i}"), out_dtype=BF16
    )


def integers(m: Holder, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The second product's scales come first, and are read before the first one has its own."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    first, second = (torch._int_mm(q, w.t()).float() for w in (m.w0, m.w1))
    y = torch.tanh((second * s * m.s1).to(BF16).unflatten(0, x.shape[:2]))
    return (first * s * m.s0).to(BF16).unflatten(0, x.shape[:2]), y


def gated(m: Holder, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(product(m, x, 0)) * product(m, x, 1)
    return product(m, y, 2)


def gate_and_up() -> Holder:
    r, sizes = Random(), {"0": (64, K), "1": (64, K), "2": (32, 64)}
    w = {f"w{i}": r.float8(*shape) for i, shape in sizes.items()}
    return Holder(
        gated, **w, **{f"s{i}": r.scales(1, n, dtype=FP32) for i, (n, _) in sizes.items()}
    )


def two_integers() -> Holder:
    r, sizes = Random(), {"0": 48, "1": 16}
    w = {f"w{i}": r.integers(-128, 128, n, K, dtype=torch.int8) for i, n in sizes.items()}
    return Holder(integers, **w, **{f"s{i}": r.scales(1, n, dtype=FP32) for i, n in sizes.items()})


class TestGolden(Golden):
    """Every product takes as long as any other, where a plan is asked for."""

    def setUp(self) -> None:
        known = Op.plan

        def plan(*args: Any, **given: Any) -> Plan:
            return dataclasses.replace(known(*args, **given), us=(1.0,))

        self.enterContext(mock.patch.object(Op, "plan", plan))
        self.enterContext(provided())

    def of(self, make: Callable[[], Holder], *shape: int, **given: Any) -> Callable[[str], None]:
        found = rewritten(make, Random(1).normal(*shape, K), **given)
        return self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")

    def test_gate_and_up_of_two_quantisers(self) -> None:
        """The quantiser behind them reads both halves where they are."""
        self.of(gate_and_up, 8, target="sm_90")("""\
%0: bfloat16[8, 128]@cuda = placeholder
%1: float8_e4m3fn[64, 128]@cuda = placeholder
%2: float32[1, 64]@cuda = placeholder
%3: float8_e4m3fn[64, 128]@cuda = placeholder
%4: float32[1, 64]@cuda = placeholder
%5: float8_e4m3fn[32, 64]@cuda = placeholder
%6: float32[1, 32]@cuda = placeholder
%7: float32[8, 128]@cuda = prims.convert_element_type.default(%0, torch.float32)
%8: float32[8, 128]@cuda = aten.abs.default(%7)
%9: float32[8, 1]@cuda = aten.amax.default(%8, [-1], True)
%10: float32[8, 1]@cuda = aten.div.Tensor(%9, 448.0)
%11: float32[8, 128]@cuda = prims.convert_element_type.default(%0, torch.float32)
%12: float32[8, 128]@cuda = aten.div.Tensor(%11, %10)
%13: float32[8, 128]@cuda = aten.clamp_min.default(%12, -448.0)
%14: float32[8, 128]@cuda = aten.clamp_max.default(%13, 448.0)
%15: float8_e4m3fn[8, 128]@cuda = prims.convert_element_type.default(%14, torch.float8_e4m3fn)
%16: float8_e4m3fn[128, 64]@cuda = aten.permute.default(%1, [1, 0])
%17: bfloat16[8, 64]@cuda = aten._scaled_mm.default(%15, %16, %10, %2, None, None,
  torch.bfloat16)
%18: float32[8, 64]@cuda = prims.convert_element_type.default(%17, torch.float32)
%19: float32[8, 64]@cuda = aten.neg.default(%18)
%20: float32[8, 64]@cuda = aten.exp.default(%19)
%21: float32[8, 64]@cuda = aten.add.Tensor(%20, 1)
%22: float32[8, 64]@cuda = aten.div.Tensor(%18, %21)
%23: bfloat16[8, 64]@cuda = prims.convert_element_type.default(%22, torch.bfloat16)
%24: float32[8, 128]@cuda = prims.convert_element_type.default(%0, torch.float32)
%25: float32[8, 128]@cuda = aten.abs.default(%24)
%26: float32[8, 1]@cuda = aten.amax.default(%25, [-1], True)
%27: float32[8, 1]@cuda = aten.div.Tensor(%26, 448.0)
%28: float32[8, 128]@cuda = prims.convert_element_type.default(%0, torch.float32)
%29: float32[8, 128]@cuda = aten.div.Tensor(%28, %27)
%30: float32[8, 128]@cuda = aten.clamp_min.default(%29, -448.0)
%31: float32[8, 128]@cuda = aten.clamp_max.default(%30, 448.0)
%32: float8_e4m3fn[8, 128]@cuda = prims.convert_element_type.default(%31, torch.float8_e4m3fn)
%33: float8_e4m3fn[128, 64]@cuda = aten.permute.default(%3, [1, 0])
%34: bfloat16[8, 64]@cuda = aten._scaled_mm.default(%32, %33, %27, %4, None, None,
  torch.bfloat16)
%35: bfloat16[8, 64]@cuda = aten.mul.Tensor(%23, %34)
%36: float32[8, 64]@cuda = prims.convert_element_type.default(%35, torch.float32)
%37: float32[8, 64]@cuda = aten.abs.default(%36)
%38: float32[8, 1]@cuda = aten.amax.default(%37, [-1], True)
%39: float32[8, 1]@cuda = aten.div.Tensor(%38, 448.0)
%40: float32[8, 64]@cuda = prims.convert_element_type.default(%35, torch.float32)
%41: float32[8, 64]@cuda = aten.div.Tensor(%40, %39)
%42: float32[8, 64]@cuda = aten.clamp_min.default(%41, -448.0)
%43: float32[8, 64]@cuda = aten.clamp_max.default(%42, 448.0)
%44: float8_e4m3fn[8, 64]@cuda = prims.convert_element_type.default(%43, torch.float8_e4m3fn)
%45: float8_e4m3fn[64, 32]@cuda = aten.permute.default(%5, [1, 0])
%46: bfloat16[8, 32]@cuda = aten._scaled_mm.default(%44, %45, %39, %6, None, None,
  torch.bfloat16)
output [%46]
---- 5 of 5 lowered
%0: bfloat16[8, 128]@cuda = placeholder
%1: float8_e4m3fn[64, 128]@cuda = placeholder
%2: float32[1, 64]@cuda = placeholder
%3: float8_e4m3fn[64, 128]@cuda = placeholder
%4: float32[1, 64]@cuda = placeholder
%5: float8_e4m3fn[32, 64]@cuda = placeholder
%6: float32[1, 32]@cuda = placeholder
%7: float8_e4m3fn[128, 128]@cuda = placeholder packed_codes
%8: float32[128, 1]@cuda = placeholder packed_scale
%9: float8_e4m3fn[32, 64]@cuda = placeholder packed_codes
%10: float32[32, 1]@cuda = placeholder packed_scale
%11: list = qinductor.quantize.default([%0])
    k=128 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 inverse=True
    triton.quantize
%12: float8_e4m3fn[8, 128]@cuda = getitem(%11, 0)
%13: float32[8, 1]@cuda = getitem(%11, 1)
%14: bfloat16[8, 128]@cuda = qinductor.scaled_matmul.default(%12, %13, [%7, %8])
    weight.codes=float8_e4m3fn weight.n=128 weight.k=128 weight.bn=1 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16
    test
%15: list = qinductor.quantize.default([%14])
    k=64 x=bfloat16 source.y=bfloat16 source.activation=silu source.gate=halves
      source.inner=bfloat16 codes=float8_e4m3fn group=64 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 inverse=True
    triton.quantize
%16: float8_e4m3fn[8, 64]@cuda = getitem(%15, 0)
%17: float32[8, 1]@cuda = getitem(%15, 1)
%18: bfloat16[8, 32]@cuda = qinductor.scaled_matmul.default(%16, %17, [%9, %10])
    weight.codes=float8_e4m3fn weight.n=32 weight.k=64 weight.bn=1 weight.bk=64
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=64 scale=float32
      out=bfloat16
    test
output [%18]
""")

    def test_results_in_another_order_dynamic(self) -> None:
        self.of(two_integers, 2, 4, options=PLAIN, dynamic=True)("""\
%0: s0 = placeholder
%1: s1 = placeholder
%2: bfloat16[s0, s1, 128] = placeholder
%3: int8[48, 128] = placeholder
%4: int8[16, 128] = placeholder
%5: float32[1, 16] = placeholder
%6: float32[1, 48] = placeholder
%7: s0*s1 = mul(%0, %1)
%8: bfloat16[s0*s1, 128] = aten.view.default(%2, [%7, 128])
%9: float32[s0*s1, 128] = prims.convert_element_type.default(%8, torch.float32)
%10: float32[s0*s1, 128] = aten.abs.default(%9)
%11: float32[s0*s1, 1] = aten.amax.default(%10, [-1], True)
%12: float32[s0*s1, 1] = aten.div.Tensor(%11, 127)
%13: float32[s0*s1, 128] = prims.convert_element_type.default(%8, torch.float32)
%14: float32[s0*s1, 128] = aten.div.Tensor(%13, %12)
%15: float32[s0*s1, 128] = aten.clamp_min.default(%14, -127)
%16: float32[s0*s1, 128] = aten.clamp_max.default(%15, 127)
%17: float32[s0*s1, 128] = aten.round.default(%16)
%18: int8[s0*s1, 128] = prims.convert_element_type.default(%17, torch.int8)
%19: int8[128, 48] = aten.permute.default(%3, [1, 0])
%20: int32[s0*s1, 48] = aten._int_mm.default(%18, %19)
%21: float32[s0*s1, 48] = prims.convert_element_type.default(%20, torch.float32)
%22: int8[128, 16] = aten.permute.default(%4, [1, 0])
%23: int32[s0*s1, 16] = aten._int_mm.default(%18, %22)
%24: float32[s0*s1, 16] = prims.convert_element_type.default(%23, torch.float32)
%25: float32[s0*s1, 16] = aten.mul.Tensor(%24, %12)
%26: float32[s0*s1, 16] = aten.mul.Tensor(%25, %5)
%27: bfloat16[s0*s1, 16] = prims.convert_element_type.default(%26, torch.bfloat16)
%28: bfloat16[s0, s1, 16] = aten.view.default(%27, [%0, %1, 16])
%29: bfloat16[s0, s1, 16] = aten.tanh.default(%28)
%30: float32[s0*s1, 48] = aten.mul.Tensor(%21, %12)
%31: float32[s0*s1, 48] = aten.mul.Tensor(%30, %6)
%32: bfloat16[s0*s1, 48] = prims.convert_element_type.default(%31, torch.bfloat16)
%33: bfloat16[s0, s1, 48] = aten.view.default(%32, [%0, %1, 48])
output [%33, %29]
---- 2 of 2 lowered
%0: s0 = placeholder
%1: s1 = placeholder
%2: bfloat16[s0, s1, 128] = placeholder
%3: int8[48, 128] = placeholder
%4: int8[16, 128] = placeholder
%5: float32[1, 16] = placeholder
%6: float32[1, 48] = placeholder
%7: int8[64, 128] = placeholder packed_codes
%8: float32[64, 1] = placeholder packed_scale
%9: s0*s1 = mul(%0, %1)
%10: bfloat16[s0*s1, 128] = aten.view.default(%2, [%9, 128])
%11: float32[s0*s1, 128] = prims.convert_element_type.default(%10, torch.float32)
%12: float32[s0*s1, 128] = aten.abs.default(%11)
%13: float32[s0*s1, 1] = aten.amax.default(%12, [-1], True)
%14: float32[s0*s1, 1] = aten.div.Tensor(%13, 127)
%15: float32[s0*s1, 128] = prims.convert_element_type.default(%10, torch.float32)
%16: float32[s0*s1, 128] = aten.div.Tensor(%15, %14)
%17: float32[s0*s1, 128] = aten.clamp_min.default(%16, -127)
%18: float32[s0*s1, 128] = aten.clamp_max.default(%17, 127)
%19: float32[s0*s1, 128] = aten.round.default(%18)
%20: int8[s0*s1, 128] = prims.convert_element_type.default(%19, torch.int8)
%21: bfloat16[s0*s1, 64] = qinductor.scaled_matmul.default(%20, %14, [%7, %8])
    weight.codes=int8 weight.n=64 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=bfloat16
    test
%22: bfloat16[s0*s1, 16] = aten.slice.Tensor(%21, 1, 0, 16)
%23: bfloat16[s0*s1, 16] = aten.clone.default(%22, memory_format=torch.contiguous_format)
%24: bfloat16[s0, s1, 16] = aten.view.default(%23, [%0, %1, 16])
%25: bfloat16[s0, s1, 16] = aten.tanh.default(%24)
%26: bfloat16[s0*s1, 48] = aten.slice.Tensor(%21, 1, 16, 64)
%27: bfloat16[s0*s1, 48] = aten.clone.default(%26, memory_format=torch.contiguous_format)
%28: bfloat16[s0, s1, 48] = aten.view.default(%27, [%0, %1, 48])
output [%28, %25]
""")
