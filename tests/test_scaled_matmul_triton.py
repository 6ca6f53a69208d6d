"""triton.scaled_mma interpreted on a CPU: bitwise on exact data, else to the oracle."""

import dataclasses
from collections.abc import Iterator

import interpreted
import pytest
import torch
from products import poisoned
from scaled_products import call, check, hold, layouts, made, many, only, packed

import qinductor
from qinductor.contracts import difference
from qinductor.kernels import scaled_matmul_triton as family
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, reference
from qinductor.kernels.scaled_matmul_cases import CASES, E4M3, E5M2, FP8, FP32, INT8, case, wide
from qinductor.kernels.scaled_matmul_triton_form import nibbles

qinductor.load()
PROVIDER = SCALED_MATMUL.providers["triton.scaled_mma"]
named = pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: chosen.name)
CONFIGS = (
    "m16.n64.k128.s1.w4.p4.swap",
    "m32.n128.k256.s3.w4.p2.swap.tma",
    "m64.n64.k64.s2.w4.p4",
    "m128.n128.k128.s1.w8.p3.tma",
    "m64.n128.k32.s1.w4.p3",
)
SMALL = {
    "rows": case(FP8, 1, 136, 320, 1, 320, bias=torch.bfloat16),
    "blocks": case(FP8, 1, 136, 320, 128, 128, group=128),
    "blocks of 32": case(FP8, 1, 72, 288, 32, 32, group=32),
    "int8": case("int8", 1, 136, 320, 1, 320, INT8, out=torch.float16),
    "nibbles": case("int4", 1, 72, 320, 1, 64, bias=FP32),
    "int8 nibbles": case("int4", 1, 72, 320, 1, 32, INT8, group=64),
}


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with interpreted.device(family):
        yield


@named
def test_the_cases_are_taken_and_packed_as_declared(chosen):
    assert PROVIDER.why_not(chosen.contract) is None
    packed(only("triton.scaled_mma"), chosen.contract, chosen.make()[2])  # checks itself


@named
def test_exact_data_bitwise(chosen):
    contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
    plan = only("triton.scaled_mma")
    tensors = packed(plan, contract, source)
    with poisoned():
        out = call(a, scale, tensors, contract, plan)
    check(out, contract, len(a))
    assert out.any()
    assert not difference(out, reference(contract, a, scale, source))


@named
def test_random_data_to_the_oracle(chosen):
    contract = chosen.contract
    a, scale, source = made(chosen, many(contract), exact=False)
    plan = only(f"triton.scaled_mma@{PROVIDER.configs(contract, len(a))[0]}")
    hold(contract, call(a, scale, packed(plan, contract, source), contract, plan), a, scale, source)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SMALL)
def test_every_config_and_number_of_rows(name, config):
    contract = SMALL[name].contract
    plan = only(f"triton.scaled_mma@{config}")
    for m in (1, 17, 130):
        a, scale, source = made(SMALL[name], m, exact=True)
        with poisoned():
            out = call(a, scale, packed(plan, contract, source), contract, plan)
        check(out, contract, m)
        assert not difference(out, reference(contract, a, scale, source))
    check(call(a[:0], scale[:0], packed(plan, contract, source), contract, plan), contract, 0)


@pytest.mark.parametrize("config", ["m16.n64.k128.s2.w4.p4.swap.tma", CONFIGS[2]])
@pytest.mark.parametrize("name", SMALL)
def test_strides(name, config):
    contract, (a, scale, source) = SMALL[name].contract, made(SMALL[name], 10, exact=True)
    plan = only(f"triton.scaled_mma@{config}")
    tensors, want = packed(plan, contract, source), reference(contract, a, scale, source)
    for layout, (x, s) in layouts(a, scale).items():
        assert not difference(x.contiguous(), a) and torch.equal(s, scale), layout
        assert not difference(call(x, s, tensors, contract, plan), want), layout


@pytest.mark.parametrize("name", ["rows", "blocks", "nibbles"])
def test_devices_without_float8_multiply_it_as_float16(name, monkeypatch):
    chosen = SMALL[name]
    if name == "rows":
        weight = dataclasses.replace(chosen.contract.weight, codes="float8_e5m2")
        chosen = dataclasses.replace(
            chosen, contract=dataclasses.replace(chosen.contract, weight=weight)
        )
    contract, form = chosen.contract, family.device_form
    monkeypatch.setattr(family, "device_form", lambda contract, wide: form(contract, True))
    view = family._operands
    monkeypatch.setattr(family, "_operands", lambda a, w, wide, tiles: view(a, w, True, None))
    for exact in (True, False):
        a, scale, source = made(chosen, many(contract), exact)
        plan = only("triton.scaled_mma@" + CONFIGS[2])
        out = call(a, scale, packed(plan, contract, source), contract, plan)
        if exact:
            assert not difference(out, reference(contract, a, scale, source))
        else:
            hold(contract, out, a, scale, source)


def test_every_code_as_float16():
    """The value of each of 256 codes, nan and infinity too."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in (E4M3, E5M2):
        contract = case(str(dtype)[6:], 1, 256, 32, 1, 32, dtype, out=FP32).contract
        form = family.device_form(contract, True)
        assert form.wide and form.a == form.code
        one = torch.zeros(1, 32).to(dtype)
        one[0, 0] = 1
        w = torch.zeros(256, 32, dtype=torch.uint8)
        w[:, 0] = codes
        w = w.view(dtype)
        given = {"codes": w, "scale": torch.ones(256, 1)}
        out = _wide(contract, one, torch.ones(1, 1), given)
        assert torch.equal(out[0].nan_to_num(7), w[:, 0].float().nan_to_num(7))
        assert torch.equal(out[0].isnan(), w[:, 0].float().isnan())


def _wide(contract, a, scale, given):
    with pytest.MonkeyPatch.context() as patch:
        form, view = family.device_form, family._operands
        patch.setattr(family, "device_form", lambda contract, wide: form(contract, True))
        patch.setattr(family, "_operands", lambda a, w, wide, tiles: view(a, w, True, None))
        return family.launch(contract, a, scale, given, family.Config.parse(CONFIGS[2]))


def test_where_nibbles_lie():
    codes = torch.randint(-8, 8, (256, 128)).to(torch.int8)
    packed_codes = nibbles(codes, False)
    assert packed_codes.shape == (4, 2, 2048)
    for n, k in ((0, 0), (9, 1), (77, 66), (255, 127), (200, 45)):
        warp, pair, g = n % 64 // 16, n % 16 // 8, n % 8
        step, half, t, c = k % 64 // 32, k % 32 // 16, k % 16 // 4, k % 4
        place = ((((warp * 8 + g) * 4 + t) * 2 + step) * 2 + half) * 4 + c
        byte = int(packed_codes[n // 64, k // 64, place]) & 255
        nibble = byte >> 4 if pair else byte & 15
        assert (nibble ^ 8) - 8 == int(codes[n, k])


def test_sums_of_int32_scaled_in_one_launch():
    for chosen in CASES:
        contract, (a, scale, source) = chosen.contract, chosen.make(exact=True)
        if SCALED_MATMUL.providers["aten.int_mm"].why_not(contract) is None:
            given = PROVIDER.pack(contract, source)
            sums = torch._int_mm(a, source.weight.codes.t())
            out = family.scaled(contract, sums, scale, given)
            assert not difference(out, reference(contract, a, scale, source))


def test_sums_of_int8_are_exact_where_they_are_large():
    chosen = case("int8", 20, 64, 8192, 1, 8192, INT8, out=FP32)
    a, scale, source = chosen.make()
    a.fill_(-128)
    source.weight.codes.fill_(-128)
    for config in (CONFIGS[0], "m16.n64.k128.s4.w4.p4.swap"):
        plan = only(f"triton.scaled_mma@{config}")
        out = call(a, scale, packed(plan, chosen.contract, source), chosen.contract, plan)
        assert not difference(out, reference(chosen.contract, a, scale, source))


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_fp32_sums_of_many_slices(codes):
    """Where 128 are added in a row their roundings would make an error of 2e-7."""
    chosen = case(codes, 16, 256, 4096, 1, 32, INT8, group=32, out=FP32)
    contract, plan = chosen.contract, only("triton.scaled_mma@m16.n64.k128.s1.w4.p4.swap")
    a, scale, source = chosen.make()
    out = call(a, scale, packed(plan, contract, source), contract, plan).double()
    x, y = wide(contract, a, scale, source)
    exact = x.double() @ y.double().t()
    assert (out - exact).square().mean() < (1e-7**2) * exact.square().mean()
