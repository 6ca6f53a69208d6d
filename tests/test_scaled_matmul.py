"""scaled_matmul: the operator, its providers on a CPU, and what each provider refuses."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from products import poisoned
from scaled_products import call, check, hold, layouts, made, many, only, packed

import qinductor
from qinductor.contracts import difference, parse
from qinductor.errors import Refused
from qinductor.kernels import scaled_matmul_torch as native
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    CASES,
    E4M3,
    E5M2,
    E8M0,
    FP8,
    FP16,
    FP32,
    INT8,
    WIDE8,
    case,
)
from qinductor.kernels.scaled_matmul_direct import scaled_product
from qinductor.op import Op

qinductor.load()
PROVIDERS = SCALED_MATMUL.providers
HERE = [
    (name, chosen)
    for name, provider in PROVIDERS.items()
    if provider.runs_on("cpu") and not provider.reference
    for chosen in CASES
    if provider.why_not(chosen.contract) is None
]
here = pytest.mark.parametrize(
    ("name", "chosen"), HERE, ids=[f"{name} {chosen.name}" for name, chosen in HERE]
)


def test_every_case_runs_here_and_every_provider_has_cases():
    taken = {name for name, _ in HERE}
    some = {"aten.scaled_mm"} if native.on_cpu() else set()
    assert taken == {"aten.int_mm", "aten.mm_dense", "aten.mm_in_blocks", *some}
    assert {id(c) for name, c in HERE if name == "aten.mm_in_blocks"} == {id(c) for c in CASES}


@here
def test_exact_data_bitwise(name, chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    tensors = packed(only(name), contract, source)
    with poisoned():
        out = call(a, scale, tensors, contract, only(name))
    check(out, contract, len(a))
    assert out.any()
    assert not difference(out, reference(contract, a, scale, source))


@here
def test_random_data_to_the_oracle(name, chosen):
    contract = chosen.contract
    a, scale, source = made(chosen, many(contract), exact=False)
    tensors = packed(only(name), contract, source)
    hold(contract, call(a, scale, tensors, contract, only(name)), a, scale, source)


@here
def test_strides(name, chosen):
    contract, (a, scale, source) = chosen.contract, made(chosen, 10, exact=True)
    tensors, want = packed(only(name), contract, source), reference(contract, a, scale, source)
    for layout, (x, s) in layouts(a, scale).items():
        assert not difference(call(x, s, tensors, contract, only(name)), want), layout


@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: chosen.name)
def test_opcheck(chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make()
    plan = Op.plan(SCALED_MATMUL, contract, "cpu", None)
    arguments = a, scale, packed(plan, contract, source), str(contract), str(plan)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if contract.a is INT8 and contract.scale is FP32:
        tests.append("test_schema")  # compares inputs by torch.allclose, which float8 has not
    operator = torch.ops.qinductor.scaled_matmul.default
    torch.library.opcheck(operator, arguments, test_utils=tests)
    assert parse(ScaledMatmul, str(contract)) == contract


@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: chosen.name)
def test_weights_as_they_are(chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    held = source.weight.scale
    if contract.weight.bits < 8:
        with pytest.raises(ValueError, match="codes are int4; wanted 8 bits"):
            scaled_product(contract, a, scale, source.weight.codes, held, source.bias)
        return
    want = reference(contract, a, scale, source)
    given = contract, a, scale, source.weight.codes, held, source.bias
    assert not difference(scaled_product(*given), want)
    out = want.new_zeros((len(a), 2 * contract.weight.n))[:, : contract.weight.n]
    assert scaled_product(*given, out=out) is out and torch.equal(out, want)
    assert scaled_product(contract, a[:0], scale[:0], *given[3:]).shape == (0, contract.weight.n)


def test_a_plan_for_every_gpu():
    for chosen in CASES:
        for target in ("sm_80", "sm_89", "sm_90", "sm_100"):
            plan = Op.plan(SCALED_MATMUL, chosen.contract, target, None)
            assert not any(p.reference for p in plan.providers(SCALED_MATMUL))


# Refusals -------------------------------------------------------------------------------------

ROW = case(FP8, 1, 64, 128, 1, 128).contract
TENSOR = case(FP8, 1, 64, 128, 64, 128, group=0).contract
BLOCK = case(FP8, 1, 128, 512, 128, 128, group=128).contract
INT = case("int8", 1, 64, 128, 1, 128, INT8).contract


def like(contract: ScaledMatmul, **fields: object) -> ScaledMatmul:
    """The contract with other fields; those of the weight are `w_<name>`."""
    weight = {name[2:]: value for name, value in fields.items() if name.startswith("w_")}
    own = {name: value for name, value in fields.items() if not name.startswith("w_")}
    changed = dataclasses.replace(contract.weight, **weight)
    return dataclasses.replace(contract, weight=changed, **own)


@pytest.mark.parametrize(
    ("name", "contract", "why"),
    [
        ("aten.scaled_mm", INT, "int8 times int8; it takes float8"),
        ("aten.scaled_mm", like(TENSOR, a=E5M2, w_codes=WIDE8), "both codes are float8_e5m2"),
        ("aten.scaled_mm", like(ROW, w_arithmetic="q/s"), "W is q/s"),
        ("aten.scaled_mm", like(ROW, w_permuted=True), "permuted"),
        ("aten.scaled_mm", like(ROW, scale=BF16), "scales are bf16 and fp32"),
        ("aten.scaled_mm", like(ROW, w_scale=E8M0), "scales are fp32 and float8_e8m0fnu"),
        ("aten.scaled_mm", like(ROW, w_n=72), "W is 72x128; it takes multiples of 16"),
        ("aten.scaled_mm", like(ROW, w_k=136, w_bk=136, group=136), "W is 64x136"),
        ("aten.scaled_mm", like(ROW, bias=FP32), "the bias is fp32, the result bf16"),
        ("aten.scaled_mm", like(TENSOR, out=FP32, bias=FP32), "the bias is fp32"),
        ("aten.scaled_mm", BLOCK, "scales change along K"),
        ("aten.scaled_mm", like(ROW, out=FP16), "rows have scales and the result is fp16"),
        ("aten.scaled_mm", like(ROW, w_codes=WIDE8), "rows have scales and W is float8_e5m2"),
        ("aten.scaled_mm", like(TENSOR, out=E4M3), "the result is float8_e4m3fn"),
        (
            "aten.scaled_mm_blocks", like(ROW, w_k=256, w_bk=256, group=256),
            "scales are token and channel; it takes 1x128",
        ),
        ("aten.scaled_mm_blocks", like(BLOCK, group=64), "scales are group-64"),
        ("aten.scaled_mm_blocks", like(BLOCK, w_bn=1), "scales are group-128 and group-128"),
        ("aten.scaled_mm_blocks", like(BLOCK, w_codes=WIDE8), "it takes float8_e4m3fn with"),
        ("aten.scaled_mm_blocks", like(BLOCK, bias=BF16), "it takes no bias"),
        ("aten.scaled_mm_blocks", like(BLOCK, w_k=320), "K is 320; it takes multiples of 512"),
        ("aten.int_mm", ROW, "float8_e4m3fn times float8_e4m3fn"),
        ("aten.int_mm", like(INT, w_arithmetic="q/s"), "W is q/s"),
        ("aten.int_mm", like(INT, group=64), "scales change along K"),
        ("aten.int_mm", like(INT, w_n=68), "W is 68x128; it takes multiples of 8"),
        ("aten.int_mm", like(INT, w_k=1 << 17, w_bk=1 << 17, group=1 << 17), "K is 131072"),
        ("aten.mm_in_blocks", like(ROW, w_codes="uint8"), "float8_e4m3fn times uint8"),
        ("aten.mm_in_blocks", like(ROW, w_arithmetic="q/s"), "W is q/s"),
        ("aten.mm_in_blocks", like(ROW, w_n=0), "W is 0x128; it takes no empty one"),
        ("triton.scaled_mma", like(ROW, w_n=0), "W is 0x128; it takes no empty one"),
        ("triton.scaled_mma", like(ROW, w_codes="int8"), "float8_e4m3fn times int8"),
        ("triton.scaled_mma", like(ROW, w_codes="uint4"), "float8_e4m3fn times uint4"),
        ("triton.scaled_mma", like(ROW, w_arithmetic="q/s"), "W is q/s"),
        ("triton.scaled_mma", like(ROW, w_permuted=True), "permuted"),
        ("triton.scaled_mma", like(ROW, scale=torch.float64), "scales are fp64 and fp32"),
        ("triton.scaled_mma", like(ROW, out=E4M3), "the result is float8_e4m3fn"),
        ("triton.scaled_mma", like(ROW, bias=torch.float64), "the bias fp64"),
        ("triton.scaled_mma", like(BLOCK, group=16), "16 columns share a scale"),
        (
            "triton.scaled_mma", like(BLOCK, w_k=384, group=96),
            "a has a scale for 96 columns, W for 128",
        ),
        (
            "triton.scaled_mma", like(INT, w_k=1 << 17, w_bk=1 << 17, group=1 << 17),
            "K is 131072; it takes up to 131071",
        ),
    ],
)  # fmt: skip
def test_why_not(name, contract, why):
    for right in (ROW, TENSOR, BLOCK, INT):
        if PROVIDERS[name].why_not(right) is None:
            break
    else:
        pytest.fail(f"{name} takes none of the contracts that these differ from")
    assert why in (PROVIDERS[name].why_not(contract) or "")


def test_what_torch_lacks_is_a_reason(monkeypatch):
    blocks = PROVIDERS["aten.scaled_mm_blocks"]
    monkeypatch.setattr(native.torch.version, "cuda", "12.8")
    assert "cuBLAS of CUDA 12.8 has no scales of blocks" in blocks.missing()
    monkeypatch.setattr(native.torch.version, "cuda", "12.9")
    assert blocks.missing() is None
    monkeypatch.setattr(native.torch, "ops", SimpleNamespace(aten=SimpleNamespace()))
    assert "has no _scaled_mm_v2" in blocks.missing()


def test_codes_that_are_no_numbers_are_refused_where_they_would_become_some():
    chosen = case(FP8, 1, 64, 128, 1, 128)
    _, _, source = chosen.make()
    source.weight.codes.view(torch.uint8)[3, 4] = 255
    with pytest.raises(Refused, match="a code is no finite number"):
        PROVIDERS["aten.mm_in_blocks"].pack(chosen.contract, source)


def test_scales_of_blocks_as_cublas_takes_them():
    chosen = case(FP8, 1, 256, 512, 128, 128, group=128)
    _, _, source = chosen.make()
    held = PROVIDERS["aten.scaled_mm_blocks"].pack(chosen.contract, source)["scale_of_blocks"]
    assert held.is_contiguous() and torch.equal(held, source.weight.scale)


def test_float8_by_bits():
    for dtype in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
        finite = codes.float().isfinite()
        assert torch.equal(native._float(codes)[finite], codes.float()[finite])
