"""Packed codes of every width, and the strips of every format: bitwise the specification's."""

import dataclasses
import itertools
import warnings

import pytest
import torch

import qinductor.kernels.dequant_matmul_onednn as onednn
import qinductor.kernels.dequant_matmul_onednn_loop as onednn_loop
from qinductor.contracts import FLOAT_CODES, WeightFormat, code_range, dequantize, difference
from qinductor.errors import Refused
from qinductor.kernels import packing
from qinductor.kernels.dequant_matmul import CASES, Case, DequantMatmul, Reference, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODES = [
    *(f"{kind}{bits}" for kind in ("int", "uint", "table") for bits in range(1, 9)),
    "float4_e2m1fn",
    *FLOAT_CODES,
]


def form_of(codes: str, n: int, k: int) -> WeightFormat:
    """A format of these codes alone."""
    table = BF16 if codes.startswith("table") else None
    return WeightFormat(codes, n, k, n, k, "q", None, None, BF16, BF16, BF16, table=table)


def every(form: WeightFormat) -> torch.Tensor:
    """Codes [n, k] in which each code comes up as often as there is room for it."""
    if form.codes in FLOAT_CODES:
        return torch.randn(form.n, form.k).to(form.storage)
    low, high = code_range(form.codes) or (0, (1 << form.bits) - 1)
    codes = torch.arange(form.n * form.k) * 7 % (high - low + 1) + low
    return codes.view(form.n, form.k).to(form.storage)


# Packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k", [(1, 1), (2, 3), (3, 2), (8, 5), (16, 16), (33, 65)])
@pytest.mark.parametrize("codes", CODES)
def test_packed_and_back(codes, n, k):
    form = form_of(codes, n, k)
    given = every(form)
    packed, (_, (shape, dtype)) = packing.pack(form, given), packing.operand(form)
    assert (packed.shape, packed.dtype) == (shape, dtype) and packed.is_contiguous()
    back = packing.unpack(form, packed)
    assert back.dtype == form.storage and torch.equal(back.float(), given.float())


@pytest.mark.parametrize("codes", CODES)
def test_memory_is_the_bits_of_the_codes(codes):
    form = form_of(codes, 64, 24)
    assert packing.pack(form, every(form)).nbytes == 64 * 24 * form.bits // 8


def test_every_pair_of_4_bit_codes_has_its_own_byte():
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).t().to(torch.int8)
    signed, unsigned = form_of("int4", 2, 256), form_of("uint4", 2, 256)
    halves = packing.pack(signed, codes)
    assert sorted(halves.flatten().tolist()) == list(range(-128, 128))
    assert torch.equal(halves, packing.pack(unsigned, (codes + 8).to(torch.uint8)))
    pair = torch.tensor([[-3], [5]], dtype=torch.int8)
    assert packing.pack(form_of("int4", 2, 1), pair).item() == -3 * 16 + 5 + 8


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_planes_are_as_documented(bits):
    """Each bit of each code, found where the docstring says it is."""
    form = form_of(f"uint{bits}", 16, 3)
    codes, rows = every(form), 2
    planes = packing.pack(form, codes)
    for j, i, k in itertools.product(range(8), range(rows), range(3)):
        code, left, first = int(codes[j * rows + i, k]), bits, 0
        for width in (4, 2, 1):
            if not bits & width:
                continue
            left -= width
            byte = int(planes[i, first + j % width, k])
            assert (
                byte >> width * (j // width) & (1 << width) - 1 == code >> left & (1 << width) - 1
            )
            first += width


@pytest.mark.parametrize("chosen", CASES, ids=lambda case: case.name)
def test_the_reference_restores_all_that_was_proved(chosen):
    _, source = chosen.make()
    provider = Reference()
    packed = provider.pack(chosen.contract, source)
    assert list(packed) == list(provider.operands(chosen.contract))
    whole = provider.whole(chosen.contract, list(packed.values()))
    for ours, given in ((whole, source), (whole.weight, source.weight)):
        for name, value in vars(given).items():
            back = getattr(ours, name)
            if isinstance(value, torch.Tensor):
                assert back.dtype == value.dtype and torch.equal(back.float(), value.float()), name
            elif name != "weight":
                assert back == value
    assert not difference(dequantize(whole.weight), dequantize(source.weight))


# Strips ---------------------------------------------------------------------------------------

# What no case has, of every arithmetic and rounding that the loop must get right.
CORNERS = (
    *(case(codes, 1, 33, 65, 1, 65) for codes in ("uint4", "int1", "table4")),
    *(case(f"table{bits}", 1, 24, 64, 1, 32) for bits in (1, 6)),
    case("int8", 1, 20, 70, 20, 32),
    case("float8_e4m3fn", 1, 72, 40, 32, 32, scale=FP32, compute=FP32),
    case("float8_e5m2", 1, 16, 32, 1, 32, arithmetic="(q-z)*s", zero=torch.int8),
    case("float8_e4m3fnuz", 1, 16, 32, 1, 32),
    case("float8_e5m2fnuz", 1, 16, 32, 1, 32, scale=torch.float8_e8m0fnu),
    case("table4", 1, 32, 64, 1, 64, arithmetic="(q-z)*s", zero=torch.int8),
    case("table4", 1, 32, 64, 1, 64, table=FP32),
    case("table4", 1, 32, 64, 1, 64, table=FP16),
    case("int8", 1, 32, 64, 1, 64, scale=FP32),
    case("int8", 1, 32, 64, 1, 64, FP16, arithmetic="q*t", outer=FP32),
    case("int8", 1, 32, 64, 1, 64, FP32, scale=BF16, compute=BF16),
    case("int8", 1, 32, 64, 1, 64, compute=FP32, inner=FP16, arithmetic="(q-z)/s", zero=FP16),
    case("uint4", 1, 32, 64, 1, 16, arithmetic="q/s/t", outer=FP32, scale=FP32),
    case("uint4", 1, 32, 64, 1, 16, arithmetic="q*t+z", zero=FP32, outer=FP32, compute=FP32),
    case("uint2", 1, 32, 64, 8, 16, arithmetic="q-z", zero=torch.int8, permuted=True),
    case("uint1", 1, 32, 64, 1, 32, arithmetic="q*s*t-z*s", zero=torch.uint8, outer=BF16),
)


def strips(contract: DequantMatmul, seed: int = 0) -> tuple[onednn.Bound, list[torch.Tensor]]:
    """The strips of a contract, which no check has let fall back, and packed tensors."""
    if onednn_loop.emulated(contract.weight) and torch.__version__ < "2.12":
        pytest.skip("Inductor of torch 2.11 leaves roundings out; the reference serves")
    provider = onednn.DequantStrips()
    packed = list(provider.pack(contract, Case("", 1, contract).make(seed)[1]).values())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs on its reference")
        x = torch.randn(2, contract.weight.k).to(contract.x)
        provider.run(contract, x, packed)
    bound = provider._bound[contract]
    assert bound is not None
    return bound, packed


@pytest.mark.parametrize("chosen", (*CASES, *CORNERS), ids=lambda case: case.name)
def test_the_loop_serves_every_format(chosen):
    """Bitwise, and for weights other than the one that the first call was checked with."""
    bound, _ = strips(chosen.contract)
    for seed in (1, 2):
        source = chosen.make(seed)[1]
        packed = list(onednn.DequantStrips().pack(chosen.contract, source).values())
        w = dequantize(source.weight)
        order = source.weight.order
        w = w if order is None else w[:, order]
        assert not any(bound.differences(w, packed))


@pytest.mark.parametrize(
    "chosen",
    [CASES[4], CORNERS[1], case("uint2", 1, 83, 70, 1, 32, bias=True)],
    ids=lambda case: case.name,
)
def test_strips_of_any_size_are_bitwise(chosen, monkeypatch):
    for rows in (1, 3, 8):
        monkeypatch.setattr(onednn, "STRIP", 8 * rows * chosen.contract.weight.k)
        strips(chosen.contract)


def test_one_loop_serves_weights_of_other_sizes():
    onednn_loop.loop.cache_clear()
    for n, k in ((64, 64), (64, 192), (72, 96), (40, 320)):
        strips(case("uint2", 1, n, k, 1, 32).contract)
    assert onednn_loop.loop.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("changes", "emulated"),
    [
        ({}, False),
        ({"arithmetic": "q*s+z", "zero": BF16}, True),
        ({"arithmetic": "q*s+z", "zero": BF16, "compute": FP32}, False),
        ({"arithmetic": "q*s*t", "outer": BF16}, True),
        ({"arithmetic": "(q-z)*s", "zero": torch.int8}, False),
        ({"arithmetic": "(q-z)*s", "zero": BF16}, True),
        ({"arithmetic": "(q-z)*s", "zero": BF16, "compute": FP32}, True),
        ({"arithmetic": "(q-z)*s", "zero": BF16, "compute": FP32, "inner": FP32}, False),
        ({"codes": "float8_e4m3fn", "arithmetic": "(q-z)*s", "zero": torch.int8}, True),
        ({"codes": "table4", "table": BF16}, False),
        ({"codes": "table4", "table": FP32}, True),
        ({"scale": FP32}, True),
        ({"scale": torch.float8_e4m3fn}, False),
        ({"dtype": FP32}, True),
    ],
)
def test_every_rounding_is_emulated_that_fp32_would_leave_out(changes, emulated):
    form = dataclasses.replace(case("uint4", 1, 32, 64, 1, 32).contract.weight, **changes)
    assert onednn_loop.emulated(form) is emulated


def test_a_zero_that_is_rounded_is_packed_where_the_loop_rounds_too():
    once = case("uint8", 4, 64, 64, 1, 64, arithmetic="(q-z)*s", zero=torch.int16)
    twice = case("uint8", 4, 64, 64, 1, 64, arithmetic="(q-z)*s*t", zero=torch.int16, outer=BF16)
    for chosen in (once, twice):
        _, source = chosen.make()
        source.weight.zero.fill_(3000)
        if chosen is once:
            with pytest.raises(Refused, match="q - z must be exact in torch.bfloat16, up to 256"):
                onednn.DequantStrips().pack(chosen.contract, source)
        else:
            packed = list(onednn.DequantStrips().pack(chosen.contract, source).values())
            bound, _ = strips(chosen.contract)
            assert not any(bound.differences(dequantize(source.weight), packed))


def test_a_loop_that_cannot_be_compiled_leaves_the_reference(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(onednn, "loop", broken)
    x, source = CASES[0].make()
    provider = onednn.DequantStrips()
    packed = list(provider.pack(CASES[0].contract, source).values())
    with pytest.warns(UserWarning, match="runs on its reference: no compiler"):
        out = provider.run(CASES[0].contract, x, packed)
    assert not difference(out, Reference().run(CASES[0].contract, x, packed))
