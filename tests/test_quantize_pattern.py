"""Quantisers of activations in graphs: what they become, and that the result is eager's bits."""

import pytest
import torch
from goldens import Golden, outcome
from quantisers import (
    BF16,
    E4M3,
    FP32,
    Of,
    assert_same,
    by_group,
    by_token,
    compiled,
    found,
    gated,
    provided,
    refused,
    rms,
    rows,
    sites,
)

import qinductor
from qinductor.testing import rewritten


class Provided(Golden):
    """With a provider for every target."""

    def setUp(self) -> None:
        super().setUp()
        stack = provided()
        stack.__enter__()
        self.addCleanup(stack.__exit__, None, None, None)


class TestGolden(Provided):
    """Graphs before and after."""

    def test_token(self) -> None:
        self.graph(lambda: Of(by_token), rows())("""\
%0: bfloat16[8, 256] = placeholder
%1: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%2: float32[8, 256] = aten.abs.default(%1)
%3: float32[8, 1] = aten.amax.default(%2, [-1], True)
%4: float32[8, 1] = aten.clamp_min.default(%3, 1e-12)
%5: float32[8, 1] = aten.div.Tensor(%4, 448.0)
%6: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%7: float32[8, 256] = aten.div.Tensor(%6, %5)
%8: float32[8, 256] = aten.clamp_min.default(%7, -448)
%9: float32[8, 256] = aten.clamp_max.default(%8, 448)
%10: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%9, torch.float8_e4m3fn)
output [%10, %5]
---- 1 of 1 lowered
%0: bfloat16[8, 256] = placeholder
%1: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%2: float8_e4m3fn[8, 256] = getitem(%1, 0)
%3: float32[8, 1] = getitem(%1, 1)
output [%2, %3]
""")

    def test_token_symbolic_rows(self) -> None:
        x = rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.graph(lambda: Of(by_token), x)("""\
%0: s0 = placeholder
%1: bfloat16[s0, 256] = placeholder
%2: float32[s0, 256] = prims.convert_element_type.default(%1, torch.float32)
%3: float32[s0, 256] = aten.abs.default(%2)
%4: float32[s0, 1] = aten.amax.default(%3, [-1], True)
%5: float32[s0, 1] = aten.clamp_min.default(%4, 1e-12)
%6: float32[s0, 1] = aten.div.Tensor(%5, 448.0)
%7: float32[s0, 256] = prims.convert_element_type.default(%1, torch.float32)
%8: float32[s0, 256] = aten.div.Tensor(%7, %6)
%9: float32[s0, 256] = aten.clamp_min.default(%8, -448)
%10: float32[s0, 256] = aten.clamp_max.default(%9, 448)
%11: float8_e4m3fn[s0, 256] = prims.convert_element_type.default(%10, torch.float8_e4m3fn)
output [%11, %6]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 256] = placeholder
%2: list = qinductor.quantize.default([%1])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%3: float8_e4m3fn[s0, 256] = getitem(%2, 0)
%4: float32[s0, 1] = getitem(%2, 1)
output [%3, %4]
""")

    def test_token_of_rank_three(self) -> None:
        x = rows().view(2, 4, 256)
        torch._dynamo.mark_dynamic(x, 1)
        self.graph(lambda: Of(lambda x: by_token(x.view(-1, 256))), x)("""\
%0: s0 = placeholder
%1: bfloat16[2, s0, 256] = placeholder
%2: bfloat16[2*s0, 256] = aten.view.default(%1, [-1, 256])
%3: float32[2*s0, 256] = prims.convert_element_type.default(%2, torch.float32)
%4: float32[2*s0, 256] = aten.abs.default(%3)
%5: float32[2*s0, 1] = aten.amax.default(%4, [-1], True)
%6: float32[2*s0, 1] = aten.clamp_min.default(%5, 1e-12)
%7: float32[2*s0, 1] = aten.div.Tensor(%6, 448.0)
%8: float32[2*s0, 256] = prims.convert_element_type.default(%2, torch.float32)
%9: float32[2*s0, 256] = aten.div.Tensor(%8, %7)
%10: float32[2*s0, 256] = aten.clamp_min.default(%9, -448)
%11: float32[2*s0, 256] = aten.clamp_max.default(%10, 448)
%12: float8_e4m3fn[2*s0, 256] = prims.convert_element_type.default(%11, torch.float8_e4m3fn)
output [%12, %7]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[2, s0, 256] = placeholder
%2: list = qinductor.quantize.default([%1])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%3: float8_e4m3fn[2, s0, 256] = getitem(%2, 0)
%4: float8_e4m3fn[2*s0, 256] = aten.view.default(%3, [-1, 256])
%5: float32[2, s0, 1] = getitem(%2, 1)
%6: float32[2*s0, 1] = aten.view.default(%5, [-1, 1])
output [%4, %6]
""")

    def test_groups_of_silu_mul(self) -> None:
        self.graph(lambda: Of(lambda x: by_group(gated(x), True)), rows(k=512))("""\
%0: bfloat16[8, 512] = placeholder
%1: list = aten.split.Tensor(%0, 256, -1)
%2: bfloat16[8, 256] = getitem(%1, 0)
%3: bfloat16[8, 256] = getitem(%1, 1)
%4: float32[8, 256] = prims.convert_element_type.default(%2, torch.float32)
%5: float32[8, 256] = aten.neg.default(%4)
%6: float32[8, 256] = aten.exp.default(%5)
%7: float32[8, 256] = aten.add.Tensor(%6, 1)
%8: float32[8, 256] = aten.div.Tensor(%4, %7)
%9: bfloat16[8, 256] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[8, 256] = aten.mul.Tensor(%9, %3)
%11: float32[8, 256] = prims.convert_element_type.default(%10, torch.float32)
%12: float32[8, 2, 128] = aten.view.default(%11, [8, -1, 128])
%13: float32[8, 2, 128] = aten.abs.default(%12)
%14: float32[8, 2, 1] = aten.amax.default(%13, [-1], True)
%15: float32[8, 2, 1] = aten.clamp_min.default(%14, 0.0001)
%16: float32[8, 2, 1] = aten.div.Tensor(%15, 448.0)
%17: float32[8, 2, 1] = aten.log2.default(%16)
%18: float32[8, 2, 1] = aten.ceil.default(%17)
%19: float32[8, 2, 1] = aten.exp2.default(%18)
%20: float32[8, 2, 128] = aten.div.Tensor(%12, %19)
%21: float32[8, 2, 128] = aten.clamp_min.default(%20, -448.0)
%22: float32[8, 2, 128] = aten.clamp_max.default(%21, 448.0)
%23: float8_e4m3fn[8, 2, 128] = prims.convert_element_type.default(%22, torch.float8_e4m3fn)
%24: float8_e4m3fn[8, 256] = aten.view.default(%23, [8, 256])
%25: float32[8, 2] = aten.squeeze.dim(%19, -1)
output [%24, %25]
---- 1 of 1 lowered
%0: bfloat16[8, 512] = placeholder
%1: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 source.activation=silu source.gate=halves
      source.inner=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=0.0001 power=up
    test.anywhere
%2: float8_e4m3fn[8, 256] = getitem(%1, 0)
%3: float8_e4m3fn[8, 2, 128] = aten.view.default(%2, [8, 2, 128])
%4: float32[8, 2] = getitem(%1, 1)
%5: float8_e4m3fn[8, 256] = aten.view.default(%3, [8, 256])
output [%5, %4]
""")

    def test_two_copies_are_one_operator(self) -> None:
        self.graph(lambda: Of(lambda x: (*by_token(x), *by_token(x))), rows())("""\
%0: bfloat16[8, 256] = placeholder
%1: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%2: float32[8, 256] = aten.abs.default(%1)
%3: float32[8, 1] = aten.amax.default(%2, [-1], True)
%4: float32[8, 1] = aten.clamp_min.default(%3, 1e-12)
%5: float32[8, 1] = aten.div.Tensor(%4, 448.0)
%6: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%7: float32[8, 256] = aten.div.Tensor(%6, %5)
%8: float32[8, 256] = aten.clamp_min.default(%7, -448)
%9: float32[8, 256] = aten.clamp_max.default(%8, 448)
%10: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%9, torch.float8_e4m3fn)
%11: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%12: float32[8, 256] = aten.abs.default(%11)
%13: float32[8, 1] = aten.amax.default(%12, [-1], True)
%14: float32[8, 1] = aten.clamp_min.default(%13, 1e-12)
%15: float32[8, 1] = aten.div.Tensor(%14, 448.0)
%16: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%17: float32[8, 256] = aten.div.Tensor(%16, %15)
%18: float32[8, 256] = aten.clamp_min.default(%17, -448)
%19: float32[8, 256] = aten.clamp_max.default(%18, 448)
%20: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%19, torch.float8_e4m3fn)
output [%10, %5, %20, %15]
---- 2 of 2 lowered
%0: bfloat16[8, 256] = placeholder
%1: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%2: float8_e4m3fn[8, 256] = getitem(%1, 0)
%3: float8_e4m3fn[8, 256] = aten.clone.default(%2)
%4: float32[8, 1] = getitem(%1, 1)
%5: float32[8, 1] = aten.clone.default(%4)
output [%2, %4, %3, %5]
""")

    def test_other_users_keep_what_they_read(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            amax = x.float().abs().amax(-1, keepdim=True)
            s = amax.clamp(min=1e-12) / 448
            v = x.float() / s
            return v.clamp(-448, 448).to(E4M3), amax, v.sum(-1), x + 1

        self.graph(lambda: Of(function), rows())("""\
%0: bfloat16[8, 256] = placeholder
%1: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%2: float32[8, 256] = aten.abs.default(%1)
%3: float32[8, 1] = aten.amax.default(%2, [-1], True)
%4: float32[8, 1] = aten.clamp_min.default(%3, 1e-12)
%5: float32[8, 1] = aten.div.Tensor(%4, 448)
%6: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%7: float32[8, 256] = aten.div.Tensor(%6, %5)
%8: float32[8, 256] = aten.clamp_min.default(%7, -448)
%9: float32[8, 256] = aten.clamp_max.default(%8, 448)
%10: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%9, torch.float8_e4m3fn)
%11: float32[8] = aten.sum.dim_IntList(%7, [-1])
%12: bfloat16[8, 256] = aten.add.Tensor(%0, 1)
output [%10, %3, %11, %12]
---- 1 of 1 lowered
%0: bfloat16[8, 256] = placeholder
%1: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%2: float8_e4m3fn[8, 256] = getitem(%1, 0)
%3: float32[8, 1] = getitem(%1, 1)
%4: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%5: float32[8, 256] = aten.abs.default(%4)
%6: float32[8, 1] = aten.amax.default(%5, [-1], True)
%7: float32[8, 256] = prims.convert_element_type.default(%0, torch.float32)
%8: float32[8, 256] = aten.div.Tensor(%7, %3)
%9: float32[8] = aten.sum.dim_IntList(%8, [-1])
%10: bfloat16[8, 256] = aten.add.Tensor(%0, 1)
output [%2, %6, %9, %10]
""")

    def test_a_static_scale_is_an_operand(self) -> None:
        def function(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return (x.float() * (1.0 / m.s)).clamp(-448, 448).to(E4M3)

        self.graph(lambda: Of(function, s=torch.tensor(0.02)), rows())("""\
%0: float32[] = placeholder
%1: bfloat16[8, 256] = placeholder
%2: float32[8, 256] = prims.convert_element_type.default(%1, torch.float32)
%3: float32[] = aten.reciprocal.default(%0)
%4: float32[] = aten.mul.Tensor(%3, 1.0)
%5: float32[8, 256] = aten.mul.Tensor(%2, %4)
%6: float32[8, 256] = aten.clamp_min.default(%5, -448)
%7: float32[8, 256] = aten.clamp_max.default(%6, 448)
%8: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%7, torch.float8_e4m3fn)
output [%8]
---- 1 of 1 lowered
%0: float32[] = placeholder
%1: bfloat16[8, 256] = placeholder
%2: float32[1] = aten.view.default(%0, [1])
%3: list = qinductor.quantize.default([%1, %2])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=0 scale=float32 qmax=1.0
      compute=float32 inner=float32 low=-448.0 high=448.0 static=True
    test.anywhere
%4: float8_e4m3fn[8, 256] = getitem(%3, 0)
output [%4]
""")

    def test_a_static_scale_that_is_a_number(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return (gated(x).float() * 20).clamp(-448, 448).to(E4M3)

        self.graph(lambda: Of(function), rows(k=512))("""\
%0: bfloat16[8, 512] = placeholder
%1: list = aten.split.Tensor(%0, 256, -1)
%2: bfloat16[8, 256] = getitem(%1, 0)
%3: bfloat16[8, 256] = getitem(%1, 1)
%4: float32[8, 256] = prims.convert_element_type.default(%2, torch.float32)
%5: float32[8, 256] = aten.neg.default(%4)
%6: float32[8, 256] = aten.exp.default(%5)
%7: float32[8, 256] = aten.add.Tensor(%6, 1)
%8: float32[8, 256] = aten.div.Tensor(%4, %7)
%9: bfloat16[8, 256] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[8, 256] = aten.mul.Tensor(%9, %3)
%11: float32[8, 256] = prims.convert_element_type.default(%10, torch.float32)
%12: float32[8, 256] = aten.mul.Tensor(%11, 20)
%13: float32[8, 256] = aten.clamp_min.default(%12, -448)
%14: float32[8, 256] = aten.clamp_max.default(%13, 448)
%15: float8_e4m3fn[8, 256] = prims.convert_element_type.default(%14, torch.float8_e4m3fn)
output [%15]
---- 1 of 1 lowered
%0: bfloat16[8, 512] = placeholder
%1: float32[1] = aten.full.default([1], 20.0, dtype=torch.float32, device=cpu)
%2: list = qinductor.quantize.default([%0, %1])
    k=256 x=bfloat16 source.y=bfloat16 source.activation=silu source.gate=halves
      source.inner=bfloat16 codes=float8_e4m3fn group=0 scale=float32 qmax=1.0 compute=float32
      inner=float32 low=-448.0 high=448.0 static=True quotient=x*s
    test.anywhere
%3: float8_e4m3fn[8, 256] = getitem(%2, 0)
output [%3]
""")

    def test_scales_column_major(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, s = by_group(x)
            return q, s.t().contiguous().t()

        x = rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.graph(lambda: Of(function), x)("""\
%0: s0 = placeholder
%1: bfloat16[s0, 256] = placeholder
%2: float32[s0, 256] = prims.convert_element_type.default(%1, torch.float32)
%3: float32[s0, 2, 128] = aten.view.default(%2, [%0, -1, 128])
%4: float32[s0, 2, 128] = aten.abs.default(%3)
%5: float32[s0, 2, 1] = aten.amax.default(%4, [-1], True)
%6: float32[s0, 2, 1] = aten.clamp_min.default(%5, 0.0001)
%7: float32[s0, 2, 1] = aten.div.Tensor(%6, 448.0)
%8: float32[s0, 2, 128] = aten.div.Tensor(%3, %7)
%9: float32[s0, 2, 128] = aten.clamp_min.default(%8, -448.0)
%10: float32[s0, 2, 128] = aten.clamp_max.default(%9, 448.0)
%11: float8_e4m3fn[s0, 2, 128] = prims.convert_element_type.default(%10, torch.float8_e4m3fn)
%12: float8_e4m3fn[s0, 256] = aten.view.default(%11, [%0, 256])
%13: float32[s0, 2] = aten.squeeze.dim(%7, -1)
%14: float32[2, s0] = aten.permute.default(%13, [1, 0])
%15: float32[2, s0] = aten.clone.default(%14, memory_format=torch.contiguous_format)
%16: float32[s0, 2] = aten.permute.default(%15, [1, 0])
output [%12, %16]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 256] = placeholder
%2: list = qinductor.quantize.default([%1])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=0.0001 layout=column
    test.anywhere
%3: float8_e4m3fn[s0, 256] = getitem(%2, 0)
%4: float8_e4m3fn[s0, 2, 128] = aten.view.default(%3, [-1, 2, 128])
%5: float32[s0, 2] = getitem(%2, 1)
%6: float8_e4m3fn[s0, 256] = aten.view.default(%4, [%0, 256])
output [%6, %5]
""")

    def test_one_row_on_cuda_which_multiplies_by_the_reciprocal(self) -> None:
        found = rewritten(lambda: Of(by_token), rows(1), target="sm_90")
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 1 of 1 lowered
%0: bfloat16[1, 256]@cuda = placeholder
%1: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 inverse=True least=1e-12
    test.anywhere
%2: float8_e4m3fn[1, 256]@cuda = getitem(%1, 0)
%3: float32[1, 1]@cuda = getitem(%1, 1)
output [%2, %3]
""")


class TestNorm(Provided):
    """With norm_quantize."""

    def norm(self, function, *x, **buffers):
        options = {"patterns": {"norm_quantize": "on"}}
        found = rewritten(lambda: Of(function, **buffers), *x, options=options)
        return self.expects(f"{outcome(found.report)}\n{found.after}\n")

    def test_the_updated_residual_is_a_result(self) -> None:
        def function(m, x, residual):
            h = x + residual
            return (*by_token(rms(h, m.w)), *by_token(rms(h, m.w)), h)

        self.norm(function, rows(), rows(), w=torch.rand(256).to(BF16))("""\
---- 2 of 2 lowered
%0: bfloat16[256] = placeholder
%1: bfloat16[8, 256] = placeholder
%2: bfloat16[8, 256] = placeholder
%3: list = qinductor.quantize.default([%1, %2, %0])
    k=256 x=bfloat16 source.y=bfloat16 source.norm=add+rms source.eps=1e-06 codes=float8_e4m3fn
      group=256 scale=float32 qmax=448.0 compute=float32 inner=float32 low=-448.0 high=448.0
      least=1e-12
    test.anywhere
%4: float8_e4m3fn[8, 256] = getitem(%3, 0)
%5: float8_e4m3fn[8, 256] = aten.clone.default(%4)
%6: float32[8, 1] = getitem(%3, 1)
%7: float32[8, 1] = aten.clone.default(%6)
%8: bfloat16[8, 256] = getitem(%3, 2)
output [%4, %6, %5, %7, %8]
""")

    def test_another_norm_is_refused_and_stays_in_front(self) -> None:
        def function(m, x):
            return by_token(rms(x, 1 + m.w))

        self.norm(function, rows(), w=torch.rand(256).to(BF16))("""\
---- 1 of 2 lowered
what is quantised is made by no RMS norm x * rsqrt(mean(x^2) + eps) * w
%0: bfloat16[256] = placeholder
%1: bfloat16[8, 256] = placeholder
%2: bfloat16[256] = aten.add.Tensor(%0, 1)
%3: float32[8, 256] = prims.convert_element_type.default(%1, torch.float32)
%4: float32[8, 256] = aten.pow.Tensor_Scalar(%3, 2)
%5: float32[8, 1] = aten.mean.dim(%4, [-1], True)
%6: float32[8, 1] = aten.add.Tensor(%5, 1e-06)
%7: float32[8, 1] = aten.rsqrt.default(%6)
%8: float32[8, 256] = aten.mul.Tensor(%3, %7)
%9: bfloat16[8, 256] = prims.convert_element_type.default(%8, torch.bfloat16)
%10: bfloat16[8, 256] = aten.mul.Tensor(%2, %9)
%11: list = qinductor.quantize.default([%10])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-12
    test.anywhere
%12: float8_e4m3fn[8, 256] = getitem(%11, 0)
%13: float32[8, 1] = getitem(%11, 1)
output [%12, %13]
""")


def by_tensor(x):
    s = x.abs().amax().float().clamp(min=1e-12) / 448
    return (x.float() / s).to(E4M3), s


def by_group_of_silu(x):
    return by_group(gated(x), True)


def column(x):
    q, s = by_group(x)
    return q, s.t().contiguous().t()


def int8_asymmetric(x):
    low = x.amin(-1, keepdim=True).clamp(max=0)
    s = ((x.amax(-1, keepdim=True).clamp(min=0) - low) / 255).clamp(min=2.0**-126)
    z = (-128 - torch.round(low / s)).clamp(-128, 127)
    q = torch.round(x * (1 / s)) + z.to(torch.int8)
    return q.clamp(-128, 127).to(torch.int8), s, z.to(torch.int8)


RUN = (by_token, by_tensor, by_group, by_group_of_silu, column, int8_asymmetric)


@pytest.mark.parametrize("symbolic", (False, True), ids=("static", "symbolic"))
@pytest.mark.parametrize("function", RUN, ids=lambda f: f.__name__)
def test_compiled_results_are_eagers(function, symbolic):
    x = rows(k=512)
    if symbolic:
        torch._dynamo.mark_dynamic(x, 0)
    made, ours, report = compiled(function, x)
    assert report.lowered == len(report.sites) == 1, report
    assert_same(ours, function(x))
    if symbolic:
        graphs = len(qinductor.reports())
        with torch.no_grad():
            for m in (2, 3, 40):
                other = rows(m, 512)
                assert_same(made(other), function(other))
        assert len(qinductor.reports()) == graphs


@pytest.mark.parametrize("m", (1, 7))
def test_few_rows(m):
    x = rows(m, 2048)
    _, ours, report = compiled(by_token, x)
    assert report.lowered == 1, report
    assert_same(ours, by_token(x))


def test_two_symbols():
    x = rows(16, 512).view(4, 4, 512)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)

    def flat(x):
        q, s = by_token(x.view(-1, 512))
        return q.view(x.shape), s

    for function in (by_token, flat):
        made, ours, report = compiled(function, x)
        assert report.lowered == 1, report
        assert_same(ours, function(x))
        with torch.no_grad():
            other = rows(30, 512).view(5, 6, 512)
            assert_same(made(other), function(other))


def static(m, x):
    return (x.float() / m.s).clamp(-448, 448).to(E4M3), x.float() * m.t


def test_a_static_scale_is_read_at_every_call():
    x, s, t = rows(), torch.tensor(0.02), torch.tensor(2.0)
    made, ours, report = compiled(static, x, s=s, t=t)
    assert report.lowered == 1, report
    assert_same(ours, static(made, x))
    with torch.no_grad():
        for value in (0.5, 3e-4):
            made.s.fill_(value)
            assert_same(made(x), static(made, x))


def test_a_static_scale_behind_a_norm():
    def function(m, x):
        return (rms(x, m.w).float() / m.s).clamp(-448, 448).to(E4M3)

    (contract,) = found(function, rows(), w=torch.rand(256).to(BF16), s=torch.tensor(0.02))
    assert contract.static and contract.quotient == "x/s"


def test_a_scale_among_the_arguments():
    def function(x, s):
        return ((x.float() * s).clamp(-448, 448).to(E4M3),)

    x = rows()
    made, ours, report = compiled(function, x, torch.tensor(4.0))
    assert report.lowered == 1, report
    assert_same(ours, function(x, torch.tensor(4.0)))
    with torch.no_grad():
        assert_same(made(x, torch.tensor(0.25)), function(x, torch.tensor(0.25)))


@pytest.mark.parametrize("m", (1, 4))
def test_rows_of_single_numbers(m):
    """What one token's number stands for is a row that varies, as that of many is."""

    def function(module, i):
        return by_token(torch.nn.functional.embedding(i, module.w))

    def behind_a_norm(module, i):
        return by_token(rms(torch.nn.functional.embedding(i, module.w), module.w[3]))

    def of_a_product(module, i):
        return by_token(i[:, None].to(BF16) @ module.w[3:4])

    i, w = torch.arange(2, 2 + m), rows(16)
    made, ours, report = compiled(function, i, w=w)
    assert report.lowered == len(report.sites) == 1, report
    assert_same(ours, function(made, i))
    with torch.no_grad():
        assert_same(made(i + 7), function(made, i + 7))
    for other in (behind_a_norm, of_a_product):
        assert len(sites(other, i, w=w)[1]) == 1


def test_a_scale_that_is_looked_up():
    """One number among many is a number, and no activation."""

    def function(m, x, i):
        return ((x.float() * m.s[i]).clamp(-448, 448).to(E4M3),)

    reason = refused(function, rows(), torch.tensor([1]), s=torch.tensor([4.0, 0.5, 0.25]))
    assert reason == "the codes also depend on arg0_1, float32[3]"


def test_results_that_were_two_tensors_stay_two():
    def function(x):
        return (*by_token(x), *by_token(x))

    x = rows()
    _, ours, report = compiled(function, x)
    assert report.lowered == 2, report
    assert_same(ours, function(x))
    assert len({t.data_ptr() for t in ours}) == 4


def test_scales_that_are_computed_twice():
    def function(x):
        q, s = by_token(x)
        again = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return q, s, again.squeeze(-1) * 2

    x = rows()
    _, ours, report = compiled(function, x)
    assert report.lowered == 1, report
    assert_same(ours, function(x))


def test_two_quantisers_of_one_tensor():
    report, contracts = sites(lambda x: (*by_token(x), *by_group(x)), rows())
    assert report.lowered == 2 and {c.group for c in contracts} == {256, 128}
    _, ours, report = compiled(lambda x: (*by_token(x), *by_group(x)), rows())
    assert report.lowered == 2


def test_dead_results_do_not_matter():
    def function(x):
        q, s = by_token(x)
        unused = s * 2 + x.sum()
        del unused
        return (q,)

    (contract,) = found(function, rows())
    assert contract.group == 256


def test_gates_that_are_something_elses_too():
    def function(g, u):
        h = torch.nn.functional.silu(g) * u
        return (*by_token(h), h, g + 1)

    g, u = rows(), rows()
    _, ours, report = compiled(function, g, u)
    assert report.lowered == 1 and "silu" in report.sites[0].contract, report
    assert_same(ours[:2], function(g, u)[:2])
    torch.testing.assert_close(ours[2:], function(g, u)[2:], rtol=0.01, atol=0)


def test_a_write_in_between_is_refused():
    library = torch.library.Library("qinductor_test", "FRAGMENT")
    library.define("touch(Tensor(a!) x) -> ()")

    def touch(x: torch.Tensor) -> None:
        x.add_(1)

    library.impl("touch", touch, "CompositeExplicitAutograd")
    torch.library.register_fake("qinductor_test::touch", lambda x: None, lib=library)
    x, y = rows(), rows()

    def function(x, y):
        s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        torch.ops.qinductor_test.touch(y)
        return (x.float() / s).clamp(-448, 448).to(E4M3), s, y * 2

    _, ours, _ = compiled(function, x.clone(), y.clone())
    assert_same(ours, function(x.clone(), y.clone()))
    written = lambda x: function(x, x)  # noqa: E731
    _, ours, _ = compiled(written, x.clone())
    assert_same(ours, written(x.clone()))


def test_a_symbolic_row_is_refused():
    def function(x):
        return by_token(x)

    report, _ = sites(function, rows(), dynamic=True)
    assert "the last size of what is quantised must be a number" in report.sites[0].reason


def test_a_row_that_a_weight_makes_a_number():
    def function(m, x):
        return (*by_token(x), torch.nn.functional.linear(x, m.w))

    (contract,) = found(function, rows(), dynamic=True, w=torch.rand(8, 256).to(BF16))
    assert contract.k == 256
    (contract,) = found(
        lambda m, x: (*by_group(gated(x)), torch.nn.functional.linear(x, m.w)),
        rows(k=512), dynamic=True, w=torch.rand(8, 512).to(BF16),
    )  # fmt: skip
    assert (contract.k, contract.source.gate) == (256, "halves")


def test_rows_that_are_not_contiguous_are_refused():
    reason = refused(lambda x: by_token(x.t()), rows(256, 8).contiguous())
    assert "rows must be contiguous" in reason


def test_the_first_run_does_not_depend_on_the_rows_of_a_large_graph():
    for shape in ((4096, 1024), (2, 2048, 1024)):
        x = torch.randn(shape).to(BF16)
        (contract,) = found(by_token, x)
        assert contract.group == 1024
        assert found(by_tensor, x)[0].group == 0


def test_casts_that_quantise_nothing_are_no_candidates():
    for function in (
        lambda x: x.to(E4M3),
        lambda x: x.clamp(-448, 448).to(E4M3),
        lambda x: (x > 0).to(torch.int8),
        lambda x: (x.amax(-1) / 127).to(torch.int8),
    ):
        assert not sites(function, rows())[0].sites
    report, _ = sites(lambda m, x: ((m.w * 2).to(E4M3), x), rows(), w=torch.rand(8, 8))
    assert all(site.pattern != "quantize" for site in report.sites)


def test_dtypes_of_x():
    for dtype in (BF16, torch.float16, FP32):
        (contract,) = found(by_token, rows(dtype=dtype))
        assert contract.x == contract.source.y == dtype


def test_without_a_provider_the_graph_is_left():
    report = qinductor.explain(Of(by_token), rows())
    assert report.lowered == 0 and len(report.sites) == 1
    site = report.sites[0]
    assert "only the reference is there" in site.reason
    assert site.contract == "bf16 [256] -> float8_e4m3fn dynamic token scale fp32"


def test_the_report_has_contract_provider_and_cost():
    _, _, report = compiled(lambda x: by_token(x, 1.5e-11), rows())
    (site,) = report.sites
    assert site.pattern == "quantize" and site.provider == "test.anywhere"
    assert site.cost == {"bytes": "772*M", "flops": "2048*M"}
    assert site.evaluations[0] > 0 and site.reason is None


def test_equal_regions_are_identified_once():
    report, _ = sites(lambda x, y: (*by_token(x), *by_token(y)), rows(), rows())
    assert report.lowered == 2
    assert report.sites[1].evaluations == (0, 0)


def in_columns(q, s):
    strides = (1, (s.shape[0] + 3) // 4 * 4)
    return q, s.new_empty_strided(s.shape, strides).copy_(s)


FEW = {
    "one row of silu": (lambda x: by_token(gated(x)), (1, 512)),
    "a tensor of silu": (lambda x: by_tensor(gated(x)), (8, 512)),
    "a tensor of two": (
        lambda g, u: by_tensor(torch.nn.functional.silu(g) * u), (8, 256), (8, 256),
    ),
    "three rows in padded columns": (lambda x: in_columns(*by_token(gated(x))), (3, 512)),
    "one row of a zero point": (int8_asymmetric, (1, 512)),
    "a source of no kind": (lambda x: by_tensor(gated(x).roll(1, 0).abs() + 1), (2, 512)),
}  # fmt: skip


@pytest.mark.parametrize("symbolic", (False, True), ids=("static", "symbolic"))
@pytest.mark.parametrize("name", FEW)
def test_few_runs_are_enough(name, symbolic):
    """`sites` counts the runs."""
    function, *shapes = FEW[name]
    x = [rows(*shape) for shape in shapes]
    if symbolic and len(x[0]) > 1:
        for t in x:
            torch._dynamo.mark_dynamic(t, 0)
    report, _ = sites(function, *x)
    assert len(report.sites) == 1 and report.lowered == 1, str(report)


def test_a_contract_of_one_device_is_not_taken_for_another_s():
    """CUDA multiplies by 1 / 448 where a CPU divides."""
    for inverse, target in ((True, "sm_90"), (False, "cpu"), (True, "sm_90")):
        with provided():
            found = rewritten(lambda: Of(by_token), rows(1), target=target)
        assert found.report.lowered == 1, str(found.report)
        assert ("inverse=True" in str(found.after)) == inverse


def test_switched_off():
    _, ours, report = compiled(by_token, rows(), options={"patterns": {"quantize": "off"}})
    assert not report.sites and ours[0].dtype == E4M3


def test_required():
    with pytest.raises(Exception, match="sites of a required pattern were not lowered"):
        torch._dynamo.reset()
        options = {"patterns": {"quantize": "require"}}
        torch.compile(Of(by_token), backend="qinductor", options=options)(rows())
