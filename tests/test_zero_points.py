"""Products of asymmetric activations in graphs: lowered and run, or refused with the reason."""

import re
from collections.abc import Callable

import pytest
import torch
from goldens import Golden, outcome
from models import BF16, FP32, Holder, Random
from scaled import provided
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed
from torch.nn.functional import linear

import qinductor
from qinductor.oracle import errors
from qinductor.testing import OUTPUTS, rewritten

INT8, UINT8, INT32 = torch.int8, torch.uint8, torch.int32
RANGES = {INT8: (-128, 127), UINT8: (0, 255)}
N, K, M = 48, 128, 96
ops = torch.ops.quantized_decomposed
OFF = {"quantize": "off"}
ON = {"scaled_matmul_requantised": "on", **OFF}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def asymmetric(
    x: torch.Tensor, dtype: torch.dtype = INT8, zero: torch.dtype = INT8, dims: tuple = (-1,),
    power: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(codes, scale, zero point) of x, one for all that is reduced over."""
    low, high = RANGES[dtype]
    wide = x.float()
    least, most = wide.amin(dims, True).clamp(max=0), wide.amax(dims, True).clamp(min=0)
    s = ((most - least) / 255).clamp(min=1e-9)
    s = torch.exp2(torch.ceil(torch.log2(s))) if power else s
    z = (low - (least / s).round()).clamp(low, high)
    q = ((wide / s).round() + z).clamp(low, high).to(dtype)
    return q, s, z.to(zero)


def of(function: Callable, weight: str = "int8", dtype: torch.dtype = FP32) -> Holder:
    """A module with a weight W and its parts; `function(m, x)`."""
    r = Random()
    if weight == "int8":
        w, s = r.integers(-128, 128, N, K, dtype=INT8), r.scales(N, 1, dtype=dtype)
    else:  # int4 in groups of 32
        w, s = r.integers(-8, 8, N, K, dtype=INT8), r.scales(N, K // 32, dtype=dtype)
    return Holder(
        function, w=w, s=s, b=r.normal(N, dtype=dtype), sums=w.sum(1, dtype=INT32),
        z=r.integers(-9, 9, 1, K, dtype=INT8), one=torch.tensor(3.0), odd=torch.tensor([2.5]),
    )  # fmt: skip


def weight(m: Holder) -> torch.Tensor:
    """W, dequantised in the dtype of its scales."""
    if m.s.shape[1] == 1:
        return m.w.to(m.s.dtype) * m.s
    return (m.w.to(m.s.dtype).unflatten(-1, (-1, 32)) * m.s.unsqueeze(-1)).flatten(-2)


def fake(quantise: Callable, dequantise: Callable) -> Callable:
    """x quantised and dequantised, times W."""

    def function(m: Holder, x: torch.Tensor) -> torch.Tensor:
        return linear(dequantise(m, *quantise(x)).flatten(-2 if x.dim() == 4 else -1), weight(m))

    return function


def plain(m: Holder, q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (q.float() - z.float()) * s


def kinds(**fields) -> Callable:
    return lambda x: asymmetric(x, **fields)


def groups(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return asymmetric(x.unflatten(-1, (-1, 32)))


def static(x: torch.Tensor, dtype: torch.dtype, s: float, z: int) -> torch.Tensor:
    return ((x.float() / s).round() + z).clamp(*RANGES[dtype]).to(dtype)


def per_tensor(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q = ops.quantize_per_tensor.default(x, 0.031, 127, 0, 255, UINT8)
    return linear(ops.dequantize_per_tensor.default(q, 0.031, 127, 0, 255, UINT8), weight(m), m.b)


def per_tensor_of_tensors(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q, s, z = asymmetric(x, dims=(0, 1, 2)[: x.dim()], zero=torch.int64)
    return linear(ops.dequantize_per_tensor.tensor(q, s, z, -128, 127, INT8), weight(m))


def per_token(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q, s, z = asymmetric(x, zero=INT32)
    return linear(ops.dequantize_per_token.default(q, s, z, -128, 127, INT8, FP32), weight(m))


def sums(shift: Callable, **fields) -> Callable:
    """`_int_mm`; shift(m, sums, z) takes off the zero points."""

    def function(m: Holder, x: torch.Tensor) -> torch.Tensor:
        q, s, z = asymmetric(x.flatten(0, -2), **fields)
        y = shift(m, torch._int_mm(q, m.w.t()), z).float() * s * m.s.t()
        return (y.unflatten(0, x.shape[:-1]) + m.b).to(BF16)

    def exact(m: Holder, x: torch.Tensor) -> torch.Tensor:
        q, s, z = (t.double() for t in asymmetric(x.flatten(0, -2), **fields))
        y = (q - z) @ m.w.double().t() * s * m.s.double().t()
        return y.unflatten(0, x.shape[:-1]) + m.b.double()

    function.exact = exact
    return function


# name -> (what the graph computes, the contract)
FORMS: dict[str, tuple[Callable, str]] = {
    "int8 tokens": (fake(kinds(), plain), "int8 token scale fp32 zero int8 x int8"),
    "int32": (fake(kinds(zero=INT32), plain), "int8 token scale fp32 zero fp32"),
    "int64": (
        fake(kinds(zero=torch.int64), lambda m, q, s, z: (q - z).float() * s),
        "int8 token scale fp32 zero int64"),
    "truncated": (
        fake(kinds(), lambda m, q, s, z: (q.float() - (z * 0.9).trunc()) * s),
        "int8 token scale fp32 zero fp32"),
    "rounded floats": (fake(kinds(zero=FP32), plain), "int8 token scale fp32 zero fp32"),
    "uint8": (fake(kinds(dtype=UINT8, zero=UINT8), plain), "uint8 token scale fp32 zero uint8"),
    "in all": (fake(kinds(dims=(0, 1)), plain), "int8 tensor scale fp32 zero int8"),
    "in all, no axes": (
        fake(lambda x: asymmetric(x, dims=(0, 1)),
             lambda m, q, s, z: (q.float() - z[0, 0]) * s[0, 0]),
        "int8 tensor scale fp32 zero int8"),
    "groups": (
        fake(groups, lambda m, q, s, z: plain(m, q, s, z).flatten(-2)),
        "int8 group-32 scale fp32 zero int8"),
    "subtracted as integers": (
        fake(kinds(), lambda m, q, s, z: (q.to(torch.int16) - z.to(torch.int16)).float() * s),
        "int8 token scale fp32 zero int8"),
    "bf16 difference": (
        fake(kinds(), lambda m, q, s, z: (q.to(BF16) - z.to(BF16)).float() * s),
        "int8 token scale fp32 zero int8"),
    "a number for tokens": (
        fake(kinds(dtype=UINT8), lambda m, q, s, z: (q.float() - 128) * s),
        "uint8 token scale fp32 zero int32"),
    "no zero point of uint8": (
        fake(kinds(dtype=UINT8), lambda m, q, s, z: q.float() * s),
        "uint8 token scale fp32 zero int32"),
    "numbers": (
        fake(lambda x: (static(x, UINT8, 0.03, 100),), lambda m, q: (q.float() - 100) * 0.03),
        "uint8 tensor scale fp32 zero int32"),
    "a scale that is a number": (
        fake(lambda x: (static(x, INT8, 0.03, 0),), lambda m, q: q.float() * 0.03),
        "int8 tensor scale fp32 x int8"),
    "scales after the product": (
        lambda m, x: (lambda q, s, z: linear(q.float() - z, weight(m)) * s)(*asymmetric(x)),
        "int8 token scale fp32 zero int8"),
    "quantize_per_tensor": (per_tensor, r"uint8 tensor scale fp32 zero int32 .* \+bias"),
    "quantize_per_tensor of tensors": (
        per_tensor_of_tensors, "int8 tensor scale fp32 zero int64"),
    "quantize_per_token": (per_token, "int8 token scale fp32 zero int32"),
    "sums": (
        sums(lambda m, y, z: y - z * m.sums, zero=INT32),
        r"int8 token scale fp32 zero int32 x int8.* -> bf16 \+bias"),
    "sums in floats": (
        sums(lambda m, y, z: y.float() - z.float() * m.sums.float()),
        "int8 token scale fp32 zero int8"),
    "sums that are computed": (
        sums(lambda m, y, z: y - z.to(INT32) * m.w.sum(1, dtype=INT32)),
        "int8 token scale fp32 zero int8"),
    "sums in all": (
        sums(lambda m, y, z: y - z * m.sums, zero=INT32, dims=(0, 1)),
        "int8 tensor scale fp32 zero int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", [(M,), (4, M // 4)], ids=["2 axes", "3 axes"])
def test_run_and_compared_with_eager(name: str, shape: tuple[int, ...]) -> None:
    function, contract = FORMS[name]
    module = of(function)
    x = torch.randn(*shape, K, generator=torch.Generator().manual_seed(5)) * 2 + 0.5
    x[..., 3] *= 8  # an outlier in each row: most codes lie next to the zero point
    if "in all" in name:
        x = x.flatten(0, -2)  # it reduces two axes
    run = torch.compile(module, backend="qinductor", options={"patterns": OFF})
    ours, eager = run(x), module(x)
    report = qinductor.last_report().to_dict()["sites"]
    assert [site["lowered"] for site in report] == [True], report
    assert re.search(contract, report[0]["contract"]), report[0]["contract"]
    exact = getattr(function, "exact", _exact)(module, x)
    assert ours.numel() >= OUTPUTS and ours.stride() == eager.stride()
    assert errors(ours, eager, exact).over() is None


def _exact(module: Holder, x: torch.Tensor) -> torch.Tensor:
    """The float64 product of the operands that the graph multiplies, if nothing follows it."""

    class Exact(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is linear:
                x, w, *bias = (t.double() for t in args)
                return linear(x, w, *bias)
            return function(*args, **(kwargs or {}))

    with Exact():
        return module(x).double()


# Refusals, and what is lowered only where it is asked for -----------------------------------------


def lie(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Named as if it dequantised, yet zero points are added."""
    return (codes.float() + zero) * scale


LIBRARY = torch.library.Library("test_zero_points", "DEF")
LIBRARY.define("lie(Tensor codes, Tensor scale, Tensor zero) -> Tensor")
LIBRARY.impl("lie", lie, "CompositeExplicitAutograd")


def after_scaling(m: Holder, q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return q.float() * s - z * s


REFUSED: dict[str, tuple[Callable, str]] = {
    "for each column": (
        fake(kinds(), lambda m, q, s, z: (q.float() - m.z) * s),
        r"x must have a zero point for each row, group or in all; int8\[1, 128\] is neither"),
    "added": (
        fake(kinds(), lambda m, q, s, z: (q.float() + z) * s),
        r"x must be codes less their zero points; int8\[96, 1\] is added to them"),
    "no whole number": (
        fake(kinds(), lambda m, q, s, z: (q.float() - z * 0.3) * s),
        r"zero points of x must be whole numbers, rounded or integers; float32\[96, 1\] \(mul"),
    "a stored one that may be any number": (
        fake(kinds(), lambda m, q, s, z: (q.float() - m.odd) * s),
        r"zero points of x must be whole numbers, rounded or integers; float32\[1\]"),
    "a number that is not whole": (
        fake(kinds(), lambda m, q, s, z: (q.float() - 2.5) * s),
        "zero points of x must be whole numbers; 2.5 is subtracted"),
    "after the scale": (
        fake(kinds(), after_scaling),
        r"x must be scaled after float32\[96, 1\] is subtracted from its codes"),
    "twice": (
        fake(kinds(), lambda m, q, s, z: (q.float() - z - 3) * s),
        r"x must have one zero point; 3 and int8\[96, 1\] are subtracted"),
    "tokens have one, and all one scale": (
        fake(kinds(), lambda m, q, s, z: (q.float() - z) * s.amax()),
        r"x must have a zero point for each scale; int8\[96, 1\] and float32\[\] lie otherwise"),
    "tokens have one, and groups scales": (
        fake(kinds(), lambda m, q, s, z: ((q.float() - z).unflatten(-1, (4, 32))
             * s.expand(M, 4).unsqueeze(-1)).flatten(-2)),
        r"x must have a zero point for each scale; int8\[96, 1\] and float32\[96, 4, 1\] lie"),
    "float8 codes": (
        fake(lambda x: ((x / 9).to(torch.float8_e4m3fn), x.amax(-1, True)),
             lambda m, q, s: (q.float() - 3) * s),
        "x must have no zero point; 3 is subtracted from float8 codes"),
    "an operator that does something else": (
        fake(kinds(), lambda m, q, s, z: torch.ops.test_zero_points.lie(q, s, z)),
        "x must be its codes less zero points times their scale; it is"),
    "other sums": (
        sums(lambda m, y, z: y - z.to(INT32) * (m.sums + 1)),
        "zero points of x must multiply the sums of the weight's codes; of row 0"),
    "sums added": (
        sums(lambda m, y, z: y + z.to(INT32) * m.sums),
        r"the sums must be multiplied by one scale of x .*_int_mm has \[\], then aten.add.Tensor"),
    "sums times no whole number": (
        sums(lambda m, y, z: y.float() - (z * 0.3) * m.sums),
        "zero points of x must be whole numbers, rounded or integers"),
    "tokens' sums, and one scale": (
        lambda m, x: (lambda q, s, z: ((torch._int_mm(q, m.w.t()) - z.to(INT32) * m.sums).float()
                                       * s.amax() * m.s.t()).to(BF16))(*asymmetric(x)),
        "x must have a zero point for each scale; int8 tensor scale fp32 zero int8"),
}  # fmt: skip


def first(module: Holder, x: torch.Tensor, **patterns: str):
    """The report's first site of a product of codes, on a GPU."""
    options = {"patterns": {**OFF, **patterns}, "target": "sm_90"}
    sites = qinductor.explain(module, x, options=options).sites
    return next(site for site in sites if site.pattern.startswith("scaled_matmul"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, reason = REFUSED[name]
    site = first(of(function), Random(1).normal(M, K, dtype=FP32))
    assert not site.lowered and re.search(reason, site.reason or ""), site.reason


def test_a_quantiser_that_a_library_computes_is_refused() -> None:
    x = Random(1).normal(M, K, dtype=FP32)
    sites = qinductor.explain(of(per_tensor), x, options={"target": "sm_90"}).sites
    found = {site.pattern: site for site in sites}
    assert found["scaled_matmul"].lowered and not found["quantize"].lowered
    assert "quantized_decomposed.quantize_per_tensor.default takes" in found["quantize"].reason


def test_zero_points_of_another_row_are_those_that_are_taken() -> None:
    """They are some tensor's, whatever that is."""
    function = fake(kinds(), lambda m, q, s, z: plain(m, q, s, z.flip(0)))
    module, x = of(function), Random(1).normal(M, K, dtype=FP32)
    run = torch.compile(module, backend="qinductor", options={"patterns": OFF})
    assert errors(run(x), module(x), _exact(module, x)).over() is None
    assert [s["lowered"] for s in qinductor.last_report().to_dict()["sites"]] == [True]


def by_bf16(**fields) -> Holder:
    """8-bit tokens times 4-bit groups, dequantised in bf16."""

    def dequantised(m, q, s, z):
        return (q.to(BF16) - z.to(BF16)) * s.to(BF16)

    return of(fake(kinds(**fields), dequantised), "int4", BF16)


def test_rounded_operands_are_lowered_where_that_is_asked_for() -> None:
    module, x = by_bf16(), Random(1).normal(M, K)
    site = first(module, x)
    assert not site.lowered and "rms error" in site.reason
    assert site.contract.startswith("int8 token scale bf16 zero int8 x int4[48,128] group-32")
    assert first(module, x, scaled_matmul_requantised="on").lowered
    run = torch.compile(module, backend="qinductor", options={"patterns": ON})
    ours, eager, exact = run(x), module(x), _exact(module, x)
    assert errors(ours, eager, exact).over(rms=3) is None
    assert [s["lowered"] for s in qinductor.last_report().to_dict()["sites"]] == [True]


def test_operands_that_are_not_rounded_are_lowered() -> None:
    """Codes less zero points have 8 bits, and powers of two keep them."""
    module = by_bf16(power=True)
    module.s = torch.exp2(torch.log2(module.s.float()).round()).to(BF16)
    assert first(module, Random(1).normal(M, K)).lowered


def test_zero_points_that_may_be_far_away_are_tried() -> None:
    """In bf16 a difference is rounded from 256 on; int8 has no zero points that make such."""

    def difference(m, q, s, z):
        return (q.to(BF16) - z.to(BF16)).float() * s

    x = Random(1).normal(M, K, dtype=FP32)
    assert first(of(fake(kinds(zero=INT8), difference)), x).lowered
    assert "rms error" in first(of(fake(kinds(zero=INT32), difference)), x).reason


def test_sums_are_compared_at_every_weight() -> None:
    """A weight that is written to without its sums is no longer one whose zero points are known."""
    module = of(sums(lambda m, y, z: y - z.to(INT32) * m.sums))
    run, x = torch.compile(module, backend="qinductor", options={"patterns": OFF}), torch.ones(M, K)
    run(x)
    assert [s["lowered"] for s in qinductor.last_report().to_dict()["sites"]] == [True]
    module.w[0, :5] += 1
    assert torch.equal(run(x), module(x))


class TestGolden(Golden):
    """What becomes of a product with zero points."""

    def test_int8_tokens_dynamic(self) -> None:
        with provided():
            found = rewritten(
                lambda: of(FORMS["int8 tokens"][0]), Random(1).normal(8, K, dtype=FP32),
                target="sm_90", options={"patterns": OFF}, dynamic=True,
            )  # fmt: skip
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 1 of 1 lowered
%0: s0 = placeholder
%1: float32[s0, 128]@cuda = placeholder
%2: float32[48, 1]@cuda = placeholder
%3: int8[48, 128]@cuda = placeholder
%4: int8[48, 128]@cuda = placeholder packed_codes
%5: float32[48, 1]@cuda = placeholder packed_scale
%6: float32[s0, 1]@cuda = aten.amin.default(%1, [-1], True)
%7: float32[s0, 1]@cuda = aten.clamp_max.default(%6, 0)
%8: float32[s0, 1]@cuda = aten.amax.default(%1, [-1], True)
%9: float32[s0, 1]@cuda = aten.clamp_min.default(%8, 0)
%10: float32[s0, 1]@cuda = aten.sub.Tensor(%9, %7)
%11: float32[s0, 1]@cuda = aten.div.Tensor(%10, 255)
%12: float32[s0, 1]@cuda = aten.clamp_min.default(%11, 1e-09)
%13: float32[s0, 1]@cuda = aten.div.Tensor(%7, %12)
%14: float32[s0, 1]@cuda = aten.round.default(%13)
%15: float32[s0, 1]@cuda = aten.sub.Tensor(-128, %14)
%16: float32[s0, 1]@cuda = aten.clamp_min.default(%15, -128)
%17: float32[s0, 1]@cuda = aten.clamp_max.default(%16, 127)
%18: float32[s0, 128]@cuda = aten.div.Tensor(%1, %12)
%19: float32[s0, 128]@cuda = aten.round.default(%18)
%20: float32[s0, 128]@cuda = aten.add.Tensor(%19, %17)
%21: float32[s0, 128]@cuda = aten.clamp_min.default(%20, -128)
%22: float32[s0, 128]@cuda = aten.clamp_max.default(%21, 127)
%23: int8[s0, 128]@cuda = prims.convert_element_type.default(%22, torch.int8)
%24: int8[s0, 1]@cuda = prims.convert_element_type.default(%17, torch.int8)
%25: float32[s0, 48]@cuda = qinductor.scaled_matmul_zero.default(%23, %12, %24, [%4, %5])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=float32 zero=int8
    test
output [%25]
""")

    def test_numbers(self) -> None:
        with provided():
            x = Random(1).normal(8, K, dtype=FP32)
            found = rewritten(lambda: of(per_tensor), x, options={"patterns": OFF})
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 1 of 1 lowered
%0: float32[8, 128] = placeholder
%1: float32[48, 1] = placeholder
%2: int8[48, 128] = placeholder
%3: float32[48] = placeholder
%4: int8[48, 128] = placeholder packed_codes
%5: float32[48, 1] = placeholder packed_scale
%6: float32[48] = placeholder packed_bias
%7: uint8[8, 128] = quantized_decomposed.quantize_per_tensor.default(%0, 0.031, 127, 0, 255,
  torch.uint8)
%8: float32[1] = aten.full.default([1], 0.031, dtype=torch.float32, device=cpu)
%9: int32[1] = aten.full.default([1], 127, dtype=torch.int32, device=cpu)
%10: float32[8, 48] = qinductor.scaled_matmul_zero.default(%7, %8, %9, [%4, %5, %6])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=uint8 group=0 scale=float32 out=float32 bias=float32 zero=int32
    test
output [%10]
""")

    def test_a_refused_number_leaves_the_graph_as_it_was(self) -> None:
        function = fake(kinds(), lambda m, q, s, z: (q.float() - 3) * s)
        found = rewritten(
            lambda: of(lambda m, x: function(m, x) * m.s.t()), Random(1).normal(8, K, dtype=FP32),
            options={"patterns": {**OFF, "dequant_matmul": "off"}},
        )  # fmt: skip
        assert "the weight must be scaled once" in str(found.report)
        assert found.before == found.after
