"""scaled_matmul with zero points of the activation: on a CPU, and in Triton's interpreter."""

import dataclasses
from collections.abc import Iterator

import interpreted
import pytest
import torch
from products import poisoned
from scaled_products import call, check, hold, layouts, made, many, only, packed

import qinductor
from qinductor.contracts import difference, parse, short
from qinductor.kernels import scaled_matmul_triton as family
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_cases import (
    ASYMMETRIC,
    E4M3,
    FP8,
    FP32,
    INT8,
    INT32,
    UINT8,
    Case,
    case,
    zeros,
)
from qinductor.kernels.scaled_matmul_direct import scaled_product
from qinductor.op import Op
from qinductor.trial import ScaledWeight

qinductor.load()
PROVIDERS = SCALED_MATMUL.providers
TRITON = "triton.scaled_mma"
HERE = [
    (name, chosen)
    for name in ("aten.int_mm", "aten.mm_in_blocks", TRITON)
    for chosen in ASYMMETRIC
    if PROVIDERS[name].why_not(chosen.contract) is None
]
here = pytest.mark.parametrize(
    ("name", "chosen"), HERE, ids=[f"{name} {chosen.name}" for name, chosen in HERE]
)
CONFIGS = (
    "m16.n64.k128.s1.w4.p4.swap",
    "m32.n128.k256.s3.w4.p2.swap.tma",
    "m64.n64.k64.s2.w4.p4",
    "m128.n128.k128.s1.w8.p3.tma",
    "m64.n128.k32.s1.w4.p3",
)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with interpreted.device(family):
        yield


def test_every_case_is_taken_by_both_families():
    for name in ("aten.mm_in_blocks", TRITON):
        assert {id(c) for n, c in HERE if n == name} == {id(c) for c in ASYMMETRIC}
    assert any(name == "aten.int_mm" for name, _ in HERE)


@here
def test_exact_data_bitwise(name, chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    zero = zeros(contract, len(a))
    tensors = packed(only(name), contract, source)
    with poisoned():
        out = call(a, scale, tensors, contract, only(name), *zero)
    check(out, contract, len(a))
    assert out.any()
    assert not difference(out, reference(contract, a, scale, source, *zero))
    assert call(a[:0], scale[:0], tensors, contract, only(name), zero[0][:0]).shape[0] == 0


@here
def test_random_data_to_the_oracle(name, chosen):
    contract = chosen.contract
    a, scale, source = made(chosen, many(contract), exact=False)
    zero, tensors = zeros(contract, len(a)), packed(only(name), contract, source)
    out = call(a, scale, tensors, contract, only(name), *zero)
    hold(contract, out, a, scale, source, *zero)


@here
def test_codes_next_to_their_zero_points(name, chosen):
    """As outliers make them: sums of the codes are much larger than what is left of them."""
    contract = chosen.contract
    a, scale, source = made(chosen, many(contract), exact=False)
    (zero,) = zeros(contract, len(a))
    low, high = (0, 255) if contract.a is UINT8 else (-128, 127)
    near = zero.reshape(-1, 1) if contract.group else zero
    near = zero.repeat_interleave(contract.group, 1)[:, : a.shape[1]] if contract.group else near
    apart = torch.randint(-2, 3, a.shape, generator=torch.Generator().manual_seed(3))
    a = (near.to(torch.int32) + apart).clamp(low, high).to(contract.a)
    source.weight.codes.clamp_(min=0)
    out = call(a, scale, packed(only(name), contract, source), contract, only(name), zero)
    hold(contract, out, a, scale, source, zero)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chosen", ASYMMETRIC, ids=lambda chosen: chosen.name)
def test_every_config_and_number_of_rows(chosen, config):
    contract, plan = chosen.contract, only(f"{TRITON}@{config}")
    for m in (1, 17, 70):
        a, scale, source = made(chosen, m, exact=True)
        zero = zeros(contract, m)
        with poisoned():
            out = call(a, scale, packed(plan, contract, source), contract, plan, *zero)
        assert not difference(out, reference(contract, a, scale, source, *zero))


@pytest.mark.parametrize("config", CONFIGS)
def test_what_lies_behind_zero_points_is_not_read(config):
    """Columns of a step past K have none."""
    chosen = case("int4", 3, 72, 384, 1, 128, UINT8, group=64, zero=FP32)
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    (zero,) = zeros(contract, 3)
    held = torch.full((2 * zero.numel(),), torch.nan)[: zero.numel()].view_as(zero).copy_(zero)
    plan = only(f"{TRITON}@{config}")
    out = call(a, scale, packed(plan, contract, source), contract, plan, held)
    assert not difference(out, reference(contract, a, scale, source, zero))


FAR = [
    case("int8", 20, 48, 96, 1, 96, INT8, zero=INT32, out=FP32),
    case("int4", 20, 64, 128, 1, 64, UINT8, zero=torch.int64, out=FP32),
    case("int8", 20, 48, 128, 1, 64, INT8, group=64, zero=FP32, out=FP32),
]


@pytest.mark.parametrize("name", ["aten.mm_in_blocks", TRITON])
@pytest.mark.parametrize("chosen", FAR, ids=lambda chosen: chosen.name)
def test_zero_points_out_of_the_range_of_codes(name, chosen):
    """Those within it stay exact beside them; nan spoils its row."""
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    (zero,) = zeros(contract, len(a))
    zero[4], zero[5], zero[6] = 1000, -70000, 256
    tensors = packed(only(name), contract, source)
    out = call(a, scale, tensors, contract, only(name), zero)
    assert not difference(out, reference(contract, a, scale, source, zero))
    if zero.is_floating_point():
        zero[7] = float("nan")
        again = call(a, scale, tensors, contract, only(name), zero)
        assert again[7].isnan().all() and torch.equal(again[:7], out[:7])


@here
def test_strides_and_one_for_all(name, chosen):
    contract, (a, scale, source) = chosen.contract, made(chosen, 10, exact=True)
    (zero,) = zeros(contract, len(a))
    tensors = packed(only(name), contract, source)
    want = reference(contract, a, scale, source, zero)
    for layout, (x, s) in layouts(a, scale).items():
        z = zero.t().contiguous().t() if zero.dim() == 2 else zero
        assert not difference(call(x, s, tensors, contract, only(name), z), want), layout
    one = zero.flatten()[:1]
    want = reference(contract, a, scale, source, one.expand_as(scale))
    assert not difference(call(a, scale, tensors, contract, only(name), one), want)


@pytest.mark.parametrize("chosen", ASYMMETRIC, ids=lambda chosen: chosen.name)
def test_opcheck(chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make()
    plan = Op.plan(SCALED_MATMUL, contract, "cpu", None)
    zero = zeros(contract, len(a))
    arguments = a, scale, *zero, packed(plan, contract, source), str(contract), str(plan)
    operator = torch.ops.qinductor.scaled_matmul_zero.default
    torch.library.opcheck(operator, arguments)
    assert parse(ScaledMatmul, str(contract)) == contract
    assert f"zero {short(contract.zero)} x" in contract.summary


def test_a_plan_for_every_gpu():
    for chosen in ASYMMETRIC:
        for target in ("sm_80", "sm_89", "sm_90", "sm_100"):
            plan = Op.plan(SCALED_MATMUL, chosen.contract, target, None)
            assert not any(p.reference for p in plan.providers(SCALED_MATMUL))


def test_zero_points_that_are_not_those_of_the_contract():
    chosen = ASYMMETRIC[0]
    contract, (a, scale, source) = chosen.contract, chosen.make()
    plan = only("aten.int_mm")
    tensors = packed(plan, contract, source)
    with pytest.raises(ValueError, match="zero int8 x .*, and 0 zero points"):
        call(a, scale, tensors, contract, plan)
    with pytest.raises(ValueError, match="no zero points are taken here"):
        scaled_product(contract, a, scale, source.weight.codes, source.weight.scale)


def test_sums_of_int32_scaled_in_one_launch():
    for name, chosen in HERE:
        if name != "aten.int_mm":
            continue
        contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
        zero = zeros(contract, len(a))
        provider = PROVIDERS[name]
        given, codes = provider.pack(contract, source), source.weight.codes
        signed = (a ^ 128).view(INT8) if a.dtype is UINT8 else a
        sums = torch._int_mm(signed, codes.t())
        zero = [z.expand_as(scale) for z in zero]
        out = family.scaled(contract, sums, scale, given, *zero)
        assert not difference(out, reference(contract, a, scale, source, *zero))


def test_sums_are_exact_where_they_are_largest():
    chosen = case("int8", 20, 64, 4096, 1, 4096, UINT8, out=FP32, zero=INT32)
    a, scale, source = chosen.make()
    a.fill_(255)
    source.weight.codes.fill_(-128)
    zero = torch.zeros(20, 1, dtype=INT32)
    for route in ("aten.int_mm", f"{TRITON}@{CONFIGS[0]}", f"{TRITON}@m16.n64.k128.s4.w4.p4.swap"):
        tensors = packed(only(route), chosen.contract, source)
        out = call(a, scale, tensors, chosen.contract, only(route), zero)
        assert not difference(out, reference(chosen.contract, a, scale, source, zero))


ROW = ASYMMETRIC[0].contract


def like(weight: dict | None = None, **fields: object) -> ScaledMatmul:
    changed = dataclasses.replace(ROW.weight, **(weight or {}))
    return dataclasses.replace(ROW, weight=changed, **fields)


LONG = like({"k": 65800, "bk": 65800}, group=65800)


@pytest.mark.parametrize(
    ("name", "contract", "why"),
    [
        ("aten.scaled_mm", case(FP8, 1, 64, 128, 1, 128, zero=INT8).contract, "zero points"),
        ("aten.scaled_mm_blocks", ROW, "a has zero points; it takes none"),
        ("aten.int_mm", like(zero=torch.float64), "zero points are fp64; it takes integers"),
        ("aten.int_mm", like(a=UINT8, zero=None), "uint8 codes have no zero point"),
        ("aten.int_mm", LONG, "K is 65800; it takes up to 65793"),
        ("aten.mm_in_blocks", like(a=E4M3), "float8_e4m3fn times int8 and zero points"),
        ("aten.mm_in_blocks", like(zero=E4M3), "zero points are float8_e4m3fn; it takes"),
        ("aten.mm_in_blocks", like(a=UINT8, zero=None), "uint8 codes have no zero point"),
        ("aten.mm_in_blocks", LONG, "of int8 K up to 65793"),
        (TRITON, like({"codes": "int4"}, a=E4M3), "float8_e4m3fn and zero points; it takes those"),
        (TRITON, like(zero=torch.float64), "zero points are fp64; it takes integers"),
        (TRITON, like(a=UINT8, zero=None), "uint8 codes have no zero point"),
        (TRITON, LONG, "K is 65800; it takes up to 65793"),
    ],
)
def test_why_not(name, contract, why):
    assert why in (PROVIDERS[name].why_not(contract) or "")


def test_tuned_with_zero_points():
    for contract in (ROW, Case("", 1, ASYMMETRIC[2].contract).contract):
        weight = ScaledWeight(SCALED_MATMUL, contract, "cpu")
        for name in ("aten.int_mm", "aten.mm_in_blocks"):
            weight.check(name, 3)
            for run in weight.calls(name, 3)[:1]:
                run()
