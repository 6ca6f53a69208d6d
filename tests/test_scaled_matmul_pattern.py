"""Products of codes: the graph before and after our pass, and the same models run for real."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from goldens import Golden, outcome
from models import BF16, FP16, FP32, Holder, Random
from scaled import codes, provided

import qinductor
from qinductor.oracle import errors
from qinductor.testing import OUTPUTS, rewritten

N, K = 48, 128
M = 96  # rows of which a product has 4096 outputs and more


@pytest.fixture(autouse=True)
def one_provider():
    with provided(), torch.no_grad():
        yield


def by_rows(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q, s = codes(x)
    return torch._scaled_mm(q, m.w.t(), scale_a=s, scale_b=m.s.t(), out_dtype=BF16)


def float8_rows() -> Holder:
    r = Random()
    return Holder(by_rows, w=r.float8(N, K), s=r.scales(N, 1, dtype=FP32))


def integers(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q, s = codes(x.flatten(0, 1), torch.int8)
    y = torch._int_mm(q, m.w.t()).float() * s
    y = y.to(BF16) * m.s
    return (y.unflatten(0, x.shape[:2]) + m.b).to(BF16)


def int8_rows() -> Holder:
    r = Random()
    w = r.integers(-128, 128, N, K, dtype=torch.int8)
    return Holder(integers, w=w, s=r.scales(N, dtype=FP32), b=r.normal(N))


def blocks(m: Holder, x: torch.Tensor) -> torch.Tensor:
    """Both sides dequantised in fp32."""
    q, s = codes(x.unflatten(-1, (-1, 32)))
    w = m.w.float().unflatten(-1, (-1, 32)) * m.s.unsqueeze(-1)
    return ((q.float() * s).flatten(-2) @ w.flatten(-2).t()).to(BF16)


def float8_groups() -> Holder:
    r = Random()
    return Holder(blocks, w=r.float8(N, K), s=r.scales(N, K // 32, dtype=FP32))


def activation(*shape: int) -> torch.Tensor:
    return Random(1).normal(*shape, K)


PRODUCTS = {"patterns": {"quantize": "off"}}


class TestGolden(Golden):
    """What becomes of a product and of what follows its sums."""

    def of(
        self, make: Callable[[], Holder], *shape: int, dynamic: bool | None = None
    ) -> Callable[[str], None]:
        found = rewritten(make, activation(*shape), options=PRODUCTS, dynamic=dynamic)
        return self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")

    def test_float8_rows_dynamic(self) -> None:
        found = rewritten(
            float8_rows, activation(8), target="sm_90", options=PRODUCTS, dynamic=True
        )
        self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")("""\
%0: s0 = placeholder
%1: s1 = placeholder
%2: bfloat16[s0, s1]@cuda = placeholder
%3: float8_e4m3fn[48, 128]@cuda = placeholder
%4: float32[48, 1]@cuda = placeholder
%5: float32[s0, s1]@cuda = prims.convert_element_type.default(%2, torch.float32)
%6: float32[s0, s1]@cuda = aten.abs.default(%5)
%7: float32[s0, 1]@cuda = aten.amax.default(%6, [-1], True)
%8: float32[s0, 1]@cuda = aten.div.Tensor(%7, 448.0)
%9: float32[s0, s1]@cuda = prims.convert_element_type.default(%2, torch.float32)
%10: float32[s0, s1]@cuda = aten.div.Tensor(%9, %8)
%11: float32[s0, s1]@cuda = aten.clamp_min.default(%10, -448.0)
%12: float32[s0, s1]@cuda = aten.clamp_max.default(%11, 448.0)
%13: float8_e4m3fn[s0, s1]@cuda = prims.convert_element_type.default(%12, torch.float8_e4m3fn)
%14: float8_e4m3fn[128, 48]@cuda = aten.permute.default(%3, [1, 0])
%15: float32[1, 48]@cuda = aten.permute.default(%4, [1, 0])
%16: bfloat16[s0, 48]@cuda = aten._scaled_mm.default(%13, %14, %8, %15, None, None,
  torch.bfloat16)
output [%16]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: 128 = placeholder
%2: bfloat16[s0, 128]@cuda = placeholder
%3: float8_e4m3fn[48, 128]@cuda = placeholder
%4: float32[48, 1]@cuda = placeholder
%5: float8_e4m3fn[48, 128]@cuda = placeholder packed_codes
%6: float32[48, 1]@cuda = placeholder packed_scale
%7: float32[s0, 128]@cuda = prims.convert_element_type.default(%2, torch.float32)
%8: float32[s0, 128]@cuda = aten.abs.default(%7)
%9: float32[s0, 1]@cuda = aten.amax.default(%8, [-1], True)
%10: float32[s0, 1]@cuda = aten.div.Tensor(%9, 448.0)
%11: float32[s0, 128]@cuda = prims.convert_element_type.default(%2, torch.float32)
%12: float32[s0, 128]@cuda = aten.div.Tensor(%11, %10)
%13: float32[s0, 128]@cuda = aten.clamp_min.default(%12, -448.0)
%14: float32[s0, 128]@cuda = aten.clamp_max.default(%13, 448.0)
%15: float8_e4m3fn[s0, 128]@cuda = prims.convert_element_type.default(%14, torch.float8_e4m3fn)
%16: bfloat16[s0, 48]@cuda = qinductor.scaled_matmul.default(%15, %10, [%5, %6])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=128 weight.bn=1 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16
    test
output [%16]
""")

    def test_int8_with_bias_after_a_view(self) -> None:
        self.of(int8_rows, 2, 4)("""\
%0: bfloat16[2, 4, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: float32[48] = placeholder
%3: bfloat16[48] = placeholder
%4: bfloat16[8, 128] = aten.view.default(%0, [8, 128])
%5: float32[8, 128] = prims.convert_element_type.default(%4, torch.float32)
%6: float32[8, 128] = aten.abs.default(%5)
%7: float32[8, 1] = aten.amax.default(%6, [-1], True)
%8: float32[8, 1] = aten.div.Tensor(%7, 127)
%9: float32[8, 128] = prims.convert_element_type.default(%4, torch.float32)
%10: float32[8, 128] = aten.div.Tensor(%9, %8)
%11: float32[8, 128] = aten.clamp_min.default(%10, -127)
%12: float32[8, 128] = aten.clamp_max.default(%11, 127)
%13: float32[8, 128] = aten.round.default(%12)
%14: int8[8, 128] = prims.convert_element_type.default(%13, torch.int8)
%15: int8[128, 48] = aten.permute.default(%1, [1, 0])
%16: int32[8, 48] = aten._int_mm.default(%14, %15)
%17: float32[8, 48] = prims.convert_element_type.default(%16, torch.float32)
%18: float32[8, 48] = aten.mul.Tensor(%17, %8)
%19: bfloat16[8, 48] = prims.convert_element_type.default(%18, torch.bfloat16)
%20: float32[8, 48] = aten.mul.Tensor(%19, %2)
%21: float32[2, 4, 48] = aten.view.default(%20, [2, 4, 48])
%22: float32[2, 4, 48] = aten.add.Tensor(%21, %3)
%23: bfloat16[2, 4, 48] = prims.convert_element_type.default(%22, torch.bfloat16)
output [%23]
---- 1 of 1 lowered
%0: bfloat16[2, 4, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: float32[48] = placeholder
%3: bfloat16[48] = placeholder
%4: int8[48, 128] = placeholder packed_codes
%5: float32[48, 1] = placeholder packed_scale
%6: bfloat16[48] = placeholder packed_bias
%7: bfloat16[8, 128] = aten.view.default(%0, [8, 128])
%8: float32[8, 128] = prims.convert_element_type.default(%7, torch.float32)
%9: float32[8, 128] = aten.abs.default(%8)
%10: float32[8, 1] = aten.amax.default(%9, [-1], True)
%11: float32[8, 1] = aten.div.Tensor(%10, 127)
%12: float32[8, 128] = prims.convert_element_type.default(%7, torch.float32)
%13: float32[8, 128] = aten.div.Tensor(%12, %11)
%14: float32[8, 128] = aten.clamp_min.default(%13, -127)
%15: float32[8, 128] = aten.clamp_max.default(%14, 127)
%16: float32[8, 128] = aten.round.default(%15)
%17: int8[8, 128] = prims.convert_element_type.default(%16, torch.int8)
%18: bfloat16[8, 48] = qinductor.scaled_matmul.default(%17, %11, [%4, %5, %6])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=bfloat16 bias=bfloat16
    test
%19: bfloat16[2, 4, 48] = aten.view.default(%18, [2, 4, 48])
output [%19]
""")

    def test_int8_with_bias_after_a_view_dynamic(self) -> None:
        self.of(int8_rows, 2, 4, dynamic=True)("""\
%0: s0 = placeholder
%1: s1 = placeholder
%2: bfloat16[s0, s1, 128] = placeholder
%3: int8[48, 128] = placeholder
%4: float32[48] = placeholder
%5: bfloat16[48] = placeholder
%6: s0*s1 = mul(%0, %1)
%7: bfloat16[s0*s1, 128] = aten.view.default(%2, [%6, 128])
%8: float32[s0*s1, 128] = prims.convert_element_type.default(%7, torch.float32)
%9: float32[s0*s1, 128] = aten.abs.default(%8)
%10: float32[s0*s1, 1] = aten.amax.default(%9, [-1], True)
%11: float32[s0*s1, 1] = aten.div.Tensor(%10, 127)
%12: float32[s0*s1, 128] = prims.convert_element_type.default(%7, torch.float32)
%13: float32[s0*s1, 128] = aten.div.Tensor(%12, %11)
%14: float32[s0*s1, 128] = aten.clamp_min.default(%13, -127)
%15: float32[s0*s1, 128] = aten.clamp_max.default(%14, 127)
%16: float32[s0*s1, 128] = aten.round.default(%15)
%17: int8[s0*s1, 128] = prims.convert_element_type.default(%16, torch.int8)
%18: int8[128, 48] = aten.permute.default(%3, [1, 0])
%19: int32[s0*s1, 48] = aten._int_mm.default(%17, %18)
%20: float32[s0*s1, 48] = prims.convert_element_type.default(%19, torch.float32)
%21: float32[s0*s1, 48] = aten.mul.Tensor(%20, %11)
%22: bfloat16[s0*s1, 48] = prims.convert_element_type.default(%21, torch.bfloat16)
%23: float32[s0*s1, 48] = aten.mul.Tensor(%22, %4)
%24: float32[s0, s1, 48] = aten.view.default(%23, [%0, %1, 48])
%25: float32[s0, s1, 48] = aten.add.Tensor(%24, %5)
%26: bfloat16[s0, s1, 48] = prims.convert_element_type.default(%25, torch.bfloat16)
output [%26]
---- 1 of 1 lowered
%0: s0 = placeholder
%1: s1 = placeholder
%2: bfloat16[s0, s1, 128] = placeholder
%3: int8[48, 128] = placeholder
%4: float32[48] = placeholder
%5: bfloat16[48] = placeholder
%6: int8[48, 128] = placeholder packed_codes
%7: float32[48, 1] = placeholder packed_scale
%8: bfloat16[48] = placeholder packed_bias
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
%21: bfloat16[s0*s1, 48] = qinductor.scaled_matmul.default(%20, %14, [%6, %7, %8])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=bfloat16 bias=bfloat16
    test
%22: bfloat16[s0, s1, 48] = aten.view.default(%21, [%0, %1, 48])
output [%22]
""")

    def test_float8_groups_of_both_sides(self) -> None:
        self.of(float8_groups, 8)("""\
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: float32[48, 4] = placeholder
%3: bfloat16[8, 4, 32] = aten.view.default(%0, [8, 4, 32])
%4: float32[8, 4, 32] = prims.convert_element_type.default(%3, torch.float32)
%5: float32[8, 4, 32] = aten.abs.default(%4)
%6: float32[8, 4, 1] = aten.amax.default(%5, [-1], True)
%7: float32[8, 4, 1] = aten.div.Tensor(%6, 448.0)
%8: float32[8, 4, 32] = prims.convert_element_type.default(%3, torch.float32)
%9: float32[8, 4, 32] = aten.div.Tensor(%8, %7)
%10: float32[8, 4, 32] = aten.clamp_min.default(%9, -448.0)
%11: float32[8, 4, 32] = aten.clamp_max.default(%10, 448.0)
%12: float8_e4m3fn[8, 4, 32] = prims.convert_element_type.default(%11, torch.float8_e4m3fn)
%13: float32[48, 128] = prims.convert_element_type.default(%1, torch.float32)
%14: float32[48, 4, 32] = aten.view.default(%13, [48, 4, 32])
%15: float32[48, 4, 1] = aten.unsqueeze.default(%2, -1)
%16: float32[48, 4, 32] = aten.mul.Tensor(%14, %15)
%17: float32[8, 4, 32] = prims.convert_element_type.default(%12, torch.float32)
%18: float32[8, 4, 32] = aten.mul.Tensor(%17, %7)
%19: float32[8, 128] = aten.view.default(%18, [8, 128])
%20: float32[48, 128] = aten.view.default(%16, [48, 128])
%21: float32[128, 48] = aten.permute.default(%20, [1, 0])
%22: float32[8, 48] = aten.mm.default(%19, %21)
%23: bfloat16[8, 48] = prims.convert_element_type.default(%22, torch.bfloat16)
output [%23]
---- 1 of 1 lowered
%0: bfloat16[8, 128] = placeholder
%1: float8_e4m3fn[48, 128] = placeholder
%2: float32[48, 4] = placeholder
%3: float8_e4m3fn[48, 128] = placeholder packed_codes
%4: float32[48, 4] = placeholder packed_scale
%5: bfloat16[8, 4, 32] = aten.view.default(%0, [8, 4, 32])
%6: float32[8, 4, 32] = prims.convert_element_type.default(%5, torch.float32)
%7: float32[8, 4, 32] = aten.abs.default(%6)
%8: float32[8, 4, 1] = aten.amax.default(%7, [-1], True)
%9: float32[8, 4, 1] = aten.div.Tensor(%8, 448.0)
%10: float32[8, 4, 32] = prims.convert_element_type.default(%5, torch.float32)
%11: float32[8, 4, 32] = aten.div.Tensor(%10, %9)
%12: float32[8, 4, 32] = aten.clamp_min.default(%11, -448.0)
%13: float32[8, 4, 32] = aten.clamp_max.default(%12, 448.0)
%14: float8_e4m3fn[8, 4, 32] = prims.convert_element_type.default(%13, torch.float8_e4m3fn)
%15: float8_e4m3fn[8, 128] = aten.reshape.default(%14, [-1, 128])
%16: float32[8, 4] = aten.reshape.default(%9, [-1, 4])
%17: bfloat16[8, 48] = qinductor.scaled_matmul.default(%15, %16, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=128 weight.bn=1 weight.bk=32
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=32 scale=float32
      out=bfloat16
    test
output [%17]
""")


# The same for real: codes come in as arguments, so that nothing but the product is judged.


def scaled_mm(m, q, s):
    return torch._scaled_mm(q, m.w.t(), scale_a=s, scale_b=m.s, out_dtype=m.out, bias=m.b)


def sums(m, q, s):
    y = torch._int_mm(q.flatten(0, -2), m.w.t()).unflatten(0, q.shape[:-1])
    y = y.float() * s * m.s
    return (y if m.b is None else y + m.b).to(m.out)


def dequantised(m, q, s):
    return ((q.float() * s) @ (m.w.float() * m.s.t()).t()).to(m.out)


FORMS = {"scaled_mm": scaled_mm, "int_mm": sums, "dequantised": dequantised}


def layer(form: str, out: torch.dtype = BF16, bias: bool = False, seed: int = 0) -> Holder:
    r = Random(seed)
    w = r.integers(-128, 128, N, K, dtype=torch.int8) if form == "int_mm" else r.float8(N, K)
    module = Holder(FORMS[form], w=w, s=r.scales(1, N, dtype=FP32), b=r.normal(N) if bias else None)
    module.out = out
    return module


def given(module: Holder, *shape: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    r = Random(seed)
    if module.w.dtype == torch.int8:
        q = r.integers(-128, 128, *shape, K, dtype=torch.int8)
    else:
        q = r.float8(*shape, K)
    return q, r.scales(*shape, 1, dtype=FP32)


def exact(module: Holder, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    if module.function is dequantised:
        q, w = (q.float() * s).double(), (module.w.float() * module.s.t()).double()
        return q @ w.t()
    y = q.double() @ module.w.double().t() * s.double() * module.s.double()
    return y if module.b is None else y + module.b.double()


def by_torch_2_11(module: Holder, q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """What `_scaled_mm` gives, which on a CPU takes no scales of rows before torch 2.13."""
    y = (q.float() @ module.w.float().t()) * s * module.s
    return (y if module.b is None else y + module.b).to(module.out)


def agree(module: Holder, compiled: Callable, q: torch.Tensor, s: torch.Tensor) -> None:
    """The compiled result is as near to the exact one as eager's."""
    ours = compiled(q, s)
    takes_rows = module.function is not scaled_mm or torch.__version__ >= (2, 13)
    eager = module(q, s) if takes_rows else by_torch_2_11(module, q, s)
    assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    if ours.numel() < OUTPUTS:
        torch.testing.assert_close(ours, eager)
        return
    found = errors(ours, eager, exact(module, q, s))
    assert found.over() is None, found


def compiled(module: Holder, dynamic: bool | None = None) -> Callable:
    return torch.compile(module, backend="qinductor", dynamic=dynamic)


def lowered() -> list[int]:
    return [report.lowered for report in qinductor.reports()]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("form", ["scaled_mm", "int_mm"])
def test_results(form: str, out: torch.dtype, bias: bool, dynamic: bool) -> None:
    module = layer(form, out, bias)
    run = compiled(module, dynamic)
    for rows in (M, M + 17, 1):
        agree(module, run, *given(module, rows))
    assert set(lowered()) == {1}
    # Of a symbolic M, Dynamo makes one graph for one row and one for the rest.
    assert len(lowered()) == (2 if dynamic else 3)


@pytest.mark.parametrize("form", ["int_mm", "dequantised"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_of_two_axes(form: str, dynamic: bool) -> None:
    module = layer(form)
    run = compiled(module, dynamic)
    for shape in ((2, M // 2), (3, M), (1, 1)):
        agree(module, run, *given(module, *shape))
    assert set(lowered()) == {1}


@pytest.mark.parametrize("form", FORMS)
def test_layers_share_a_graph(form: str) -> None:
    first, second = layer(form, seed=0), layer(form, seed=1)
    run = torch.compile(Holder.forward, backend="qinductor")
    for module in (first, second, first):
        q, s = given(module, M)
        agree(module, lambda q, s, module=module: run(module, q, s), q, s)
    assert lowered() == [1]


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_change(form: str) -> None:
    """In place, and by new tensors."""
    module, other = layer(form), layer(form, seed=5)
    run = compiled(module)
    q, s = given(module, M)
    agree(module, run, q, s)
    before = run(q, s)
    module.load_state_dict(other.state_dict())
    agree(module, run, q, s)
    assert not torch.equal(run(q, s), before)
    module.load_state_dict({k: v.clone() for k, v in layer(form).state_dict().items()}, assign=True)
    agree(module, run, q, s)
    assert torch.equal(run(q, s), before)
    assert lowered() == [1]


@pytest.mark.parametrize("form", FORMS)
def test_what_was_packed_goes_with_the_model(form: str) -> None:
    module = layer(form)
    storages = [weakref.ref(t.untyped_storage()) for t in (module.w, module.s)]
    run = compiled(module)
    q, s = given(module, M)
    agree(module, run, q, s)
    torch._dynamo.reset()
    del module, run
    gc.collect()
    assert [storage() for storage in storages] == [None, None]


def test_codes_are_not_copied() -> None:
    """8-bit codes are packed as they are, in the memory of the model's own."""
    module = layer("scaled_mm")
    run = compiled(module)
    agree(module, run, *given(module, M))
    report = qinductor.last_report()
    assert report.lowered == 1 and report.packed_bytes == 4 * N


def test_a_format_that_differs_at_run_time() -> None:
    """An int4 weight in the container of an int8 one: one more variant of the graph."""
    module, q, s = layer("dequantised"), *given(layer("int_mm"), M)
    module.w = Random().integers(-128, 128, N, K, dtype=torch.int8)
    run = compiled(module)
    agree(module, run, q, s)
    module.w = Random().integers(-8, 8, N, K, dtype=torch.int8)
    agree(module, run, q, s)
    (report,) = qinductor.reports()
    assert report.variants == 2
    assert ["int4" in site.contract for site in report.sites] == [False, True]


# Products of dequantised operands.


def halves(m, q, s):
    return (q.to(BF16) * s.to(BF16)) @ (m.w.to(BF16) * m.s.to(BF16).t()).t()


def site_of(module: Holder, options: dict | None = None) -> list[qinductor.Site]:
    q, s = given(module, M)
    run = torch.compile(module, backend="qinductor", options=options)
    torch.testing.assert_close(run(q, s).float(), module(q, s).float(), rtol=0.1, atol=0.2)
    return qinductor.last_report().sites


def test_rounded_operands_are_left_as_they_are() -> None:
    """The distances of both are in the reason; the weight alone is lowered."""
    module = layer("dequantised")
    module.function = halves
    first, second = site_of(module)
    assert (first.pattern, first.lowered, second.pattern, second.lowered) == (
        "scaled_matmul", False, "dequant_matmul", True,
    )  # fmt: skip
    assert "rms error " in first.reason and "scaled_matmul_requantised" in first.reason
    assert first.contract.endswith("channel scale bf16 -> bf16")


def test_rounded_operands_by_name() -> None:
    module = layer("dequantised")
    module.function = halves
    (site,) = site_of(module, {"patterns": {"scaled_matmul_requantised": "on"}})
    assert site.lowered and site.pattern == "scaled_matmul_requantised"


def test_operands_that_are_exact() -> None:
    """Scales that are powers of two: nothing is rounded. Other ones at run time are."""

    def powers(m, q, s):
        return halves(m, q, torch.exp2(torch.ceil(torch.log2(s))))

    module, r = layer("int_mm"), Random(3)
    module.function = powers
    module.s = torch.exp2(r.integers(-8, -3, 1, N, dtype=torch.int8).float())
    run = torch.compile(module, backend="qinductor")
    q, s = given(module, M)
    run(q, s)
    (site,) = qinductor.last_report().sites
    assert site.lowered and site.pattern == "scaled_matmul"
    module.s = r.scales(1, N, dtype=FP32)
    torch.testing.assert_close(run(q, s), module(q, s), rtol=0.02, atol=0.05)
    report = qinductor.last_report()
    assert report.variants == 2
    assert [s.pattern for s in report.sites if s.lowered] == ["scaled_matmul", "dequant_matmul"]


def test_weights_that_were_freed() -> None:
    """Codes that a product takes as they are stay; a weight that was freed is taken from what it
    was packed to."""
    kept = layer("scaled_mm")
    run = torch.compile(kept, backend="qinductor", options={"weights": "replace"})
    q, s = given(kept, M)
    agree(kept, run, q, s)
    assert lowered() == [1] and qinductor.last_report().freed_bytes == 0

    def alone(m, q, s):
        return q @ (m.w.to(BF16) * m.s.to(BF16).t()).t()

    module = layer("dequantised")
    eager = halves(module, q, s)
    options = {"weights": "replace", "patterns": {"scaled_matmul_requantised": "on"}}
    module.function = alone
    torch.compile(module, backend="qinductor", options=options)(q.to(BF16), s)
    assert qinductor.last_report().freed_bytes >= N * K
    torch._dynamo.reset()
    module.function = halves
    ours = torch.compile(module, backend="qinductor", options=options)(q, s)
    assert [site.pattern for site in qinductor.last_report().sites if site.lowered] == [
        "scaled_matmul_requantised"
    ]
    torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.1)


def test_numbers_that_are_symbolic() -> None:
    """A number that is no tensor ends what follows the sums, and is no scale of x."""

    def after(m, q, s, times):
        return torch._int_mm(q, m.w.t()).float() * s * m.s * times

    def before(m, q, s, times):
        return ((q.float() * times * s) @ (m.w.float() * m.s.t()).t()).to(BF16)

    for function, lowers in ((after, 1), (before, 0)):
        torch._dynamo.reset()
        module = layer("int_mm")
        module.function = function
        run = torch.compile(module, backend="qinductor")
        q, s = given(module, M)
        for times in (2, 3, 4):  # Dynamo makes it symbolic at the second
            torch.testing.assert_close(run(q, s, times), module(q, s, times))
        sites = [s for s in qinductor.last_report().sites if s.pattern == "scaled_matmul"]
        assert sum(site.lowered for site in sites) == lowers
        assert not qinductor.last_report().notes
