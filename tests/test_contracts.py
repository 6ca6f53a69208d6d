"""Contracts: what is printed is read back; `dequantize` against one element at a time."""

import dataclasses
import itertools

import pytest
import torch

from qinductor.contracts import (
    ARITHMETIC,
    FLOAT_CODES,
    INT_CODES,
    WeightFormat,
    dequantize,
    parse,
    render,
    short,
)
from qinductor.kernels.dequant_matmul import DequantMatmul

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = WeightFormat("int4", 5, 7, 1, 7, "q*s", BF16, None, BF16, BF16, BF16)
MATMUL = DequantMatmul(BASE, BF16, BF16, None, False)
BLOCKS = ((1, 7), (5, 7), (1, 3), (2, 3), (5, 1), (2, 7), (4, 4), (1, 1))
# (inner, compute, dtype)
DTYPES = (
    (BF16, BF16, BF16),
    (FP16, FP16, FP16),
    (FP32, FP32, FP32),
    (FP32, FP32, BF16),
    (BF16, FP32, FP16),
    (FP32, BF16, BF16),
    (FP32, torch.float64, FP32),
)


def formats() -> list[WeightFormat]:
    """Every code type and arithmetic, with blocks and dtypes that vary along."""
    found, turn = [], itertools.count()
    for codes, arithmetic in itertools.product([*INT_CODES, *FLOAT_CODES], ARITHMETIC):
        i = next(turn)
        (bn, bk), dtypes = BLOCKS[i % len(BLOCKS)], DTYPES[i % len(DTYPES)]
        scale = (BF16, FP32, torch.float8_e4m3fn)[i % 3] if "s" in arithmetic else None
        zero = (torch.int8, FP16, torch.uint8)[i % 3] if "z" in arithmetic else None
        found.append(WeightFormat(codes, 5, 7, bn, bk, arithmetic, scale, zero, *dtypes))
    return found


@pytest.mark.parametrize("form", formats(), ids=lambda form: f"{form.codes} {form.arithmetic}")
def test_what_is_printed_is_read_back(form):
    assert parse(WeightFormat, str(form)) == form
    for x, output, bias in itertools.product((BF16, FP32), (None, FP16), (False, True)):
        contract = DequantMatmul(form, x, x, output, bias)
        assert parse(DequantMatmul, str(contract)) == contract
        assert hash(parse(DequantMatmul, str(contract))) == hash(contract)


def test_contracts_that_differ_print_differently():
    changes = {
        "codes": "uint4", "n": 6, "k": 8, "bn": 5, "bk": 1, "arithmetic": "q/s", "scale": FP32,
        "zero": FP32, "inner": FP32, "compute": FP32, "dtype": FP32,
    }  # fmt: skip
    lines = {str(dataclasses.replace(BASE, **{name: value})) for name, value in changes.items()}
    assert len(lines | {str(BASE)}) == len(dataclasses.fields(WeightFormat)) + 1


def test_one_line_of_words():
    assert render(MATMUL) == (
        "weight.codes=int4 weight.n=5 weight.k=7 weight.bn=1 weight.bk=7 weight.arithmetic=q*s "
        "weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16 "
        "weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False"
    )


@pytest.mark.parametrize("word", str(MATMUL).split(" "))
def test_a_missing_field_is_named(word):
    rest = " ".join(other for other in str(MATMUL).split(" ") if other != word)
    with pytest.raises(ValueError, match=f"needs the field '{word.split('=')[0]}'"):
        parse(DequantMatmul, rest)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("weight.n=5", "weight.n=five"),
        ("weight.scale=bfloat16", "weight.scale=bfloat17"),
        ("weight.dtype=bfloat16", "weight.dtype=Tensor"),
        ("bias=False", "bias=maybe"),
        ("bias=False", "bias"),
    ],
)
def test_a_word_that_cannot_be_read_is_named(good, bad):
    with pytest.raises(ValueError, match=good.split("=")[0]):
        parse(DequantMatmul, str(MATMUL).replace(good, bad))


@pytest.mark.parametrize(
    ("bn", "bk", "name"),
    [
        (64, 128, "tensor"),
        (1, 128, "channel"),
        (8, 128, "block-8xK"),
        (64, 1, "input-channel"),
        (1, 32, "group-32"),
        (1, 48, "group-48"),
        (16, 32, "block-16x32"),
        (64, 32, "block-64x32"),
    ],
)
def test_granularity(bn, bk, name):
    form = dataclasses.replace(BASE, n=64, k=128, bn=bn, bk=bk)
    assert form.granularity == name
    assert dataclasses.replace(form, arithmetic="q", scale=None).granularity == "no scale"


def test_the_grid_counts_ragged_blocks():
    assert [dataclasses.replace(BASE, bn=bn, bk=bk).grid for bn, bk in BLOCKS[:4]] == [
        (5, 1), (1, 1), (5, 3), (3, 3),
    ]  # fmt: skip
    assert [dataclasses.replace(BASE, codes=c).bits for c in ("int4", "uint4", "int8")] == [4, 4, 8]
    assert dataclasses.replace(BASE, codes="float8_e5m2").bits == 8


def test_summaries():
    group = dataclasses.replace(BASE, k=128, bk=32, zero=torch.int8, arithmetic="(q-z)*s")
    assert (
        DequantMatmul(group, BF16, BF16, None, True).summary
        == "bf16 x int4[5,128] group-32 scale bf16 zero int8 (q-z)*s +bias"
    )
    plain = dataclasses.replace(BASE, codes="int8", arithmetic="q", scale=None)
    assert (
        DequantMatmul(plain, FP16, FP16, FP16, False).summary
        == "fp16 x int8[5,7] channel scale fp16 after the product q"
    )
    assert DequantMatmul(plain, FP32, FP32, None, False).summary == "fp32 x int8[5,7] no scale q"
    assert short(torch.float8_e4m3fn) == "float8_e4m3fn" and short(torch.float64) == "fp64"


def weight(form: WeightFormat, seed: int = 0) -> list[torch.Tensor | None]:
    """Random codes, scales (of both signs) and zeros."""
    g = torch.Generator().manual_seed(seed)
    if form.codes in INT_CODES:
        low, high, _ = INT_CODES[form.codes]
        storage = torch.uint8 if form.codes == "uint8" else torch.int8
        codes = torch.randint(low, high + 1, (form.n, form.k), generator=g).to(storage)
    else:
        codes = (torch.randn(form.n, form.k, generator=g) * 30).to(FLOAT_CODES[form.codes])
    scale = None if form.scale is None else torch.randn(form.grid, generator=g).to(form.scale)
    if scale is not None and form.arithmetic.endswith("/s"):
        scale = (scale.float().abs() + 0.25).to(form.scale)
    zero = None
    if form.zero is not None:
        zero = torch.rand(form.grid, generator=g) * 15
        zero = (zero if form.zero.is_floating_point else zero.floor()).to(form.zero)
    return [codes, scale, zero]


def element(form: WeightFormat, q: float, s: float, z: float) -> float:
    """One element, each operation in float64 and rounded at once (exact for these widths)."""

    def rounded(value: float, dtype: torch.dtype) -> float:
        return torch.tensor(value, dtype=torch.float64).to(dtype).item()

    def c(value: float) -> float:
        return rounded(value, form.compute)

    def i(value: float) -> float:
        return rounded(value, form.inner)

    centred = c(i(i(q) - i(z)))
    value = {
        "q": lambda: c(q),
        "q-z": lambda: centred,
        "q*s": lambda: c(c(q) * c(s)),
        "q/s": lambda: c(c(q) / c(s)),
        "(q-z)*s": lambda: c(centred * c(s)),
        "(q-z)/s": lambda: c(centred / c(s)),
        "q*s-z*s": lambda: c(c(c(q) * c(s)) - c(c(z) * c(s))),
        "q*s+z": lambda: c(c(c(q) * c(s)) + c(z)),
    }[form.arithmetic]()
    return rounded(value, form.dtype)


def bits(w: torch.Tensor) -> list[int]:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.itemsize]
    return w.contiguous().view(kind).flatten().tolist()


@pytest.mark.parametrize("bn, bk", BLOCKS)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_dequantize_equals_one_element_at_a_time(arithmetic, bn, bk):
    for i, dtypes in enumerate(DTYPES):
        codes = [*INT_CODES, *FLOAT_CODES][(i + bn + bk) % 8]
        scale = (BF16, FP32, FP16)[i % 3] if "s" in arithmetic else None
        zero = (torch.int8, FP16, BF16)[i % 3] if "z" in arithmetic else None
        form = WeightFormat(codes, 5, 7, bn, bk, arithmetic, scale, zero, *dtypes)
        q, s, z = weight(form, i)
        before = [t if t is None else t.clone() for t in (q, s, z)]
        got = dequantize(form, q, s, z)
        want = torch.empty(5, 7, dtype=form.dtype)
        for n, k in itertools.product(range(5), range(7)):
            at = n // bn, k // bk
            values = [0.0 if t is None else float(t[at]) for t in (s, z)]
            want[n, k] = element(form, float(q[n, k]), *values)
        assert bits(got) == bits(want), f"{form}\ngot {got}\nwanted {want}"
        assert got.is_contiguous() and got.shape == (5, 7)
        for t, old in zip((q, s, z), before, strict=True):
            assert t is None or torch.equal(t.float(), old.float()), "an operand was written to"


@pytest.mark.parametrize("form", formats(), ids=lambda form: f"{form.codes} {form.arithmetic}")
def test_strips_from_a_block_border_are_the_whole_s(form):
    q, s, z = weight(form)
    whole = dequantize(form, q, s, z)
    for start, stop in itertools.combinations([*range(0, 5, form.bn), 5], 2):
        blocks = slice(start // form.bn, -(-stop // form.bn))
        parts = [t if t is None else t[blocks] for t in (s, z)]
        strip = dequantize(form, q[start:stop], *parts)
        assert bits(strip) == bits(whole[start:stop]), f"rows {start} to {stop} of {form}"


def test_the_order_of_rounding_is_told_apart():
    """s is 0.10009765625; 2 * s is exact in bf16, while 3 * s = 0.30029296875 rounds up."""
    codes, scale = torch.tensor([[3]], dtype=torch.int8), torch.tensor([[0.1]], dtype=BF16)
    zero = torch.tensor([[1]], dtype=torch.int8)
    form = WeightFormat("int4", 1, 1, 1, 1, "(q-z)*s", BF16, torch.int8, BF16, BF16, BF16)
    other = dataclasses.replace(form, arithmetic="q*s-z*s")
    assert dequantize(form, codes, scale, zero).item() == 0.2001953125
    assert dequantize(other, codes, scale, zero).item() == 0.201171875
    # The same operations in fp32 round once, at the end.
    exact = dataclasses.replace(other, compute=FP32)
    assert dequantize(exact, codes, scale, zero).item() == 0.2001953125
    # A zero that bf16 cannot hold: q - z in fp32 is exact, in bf16 it is not.
    wide = dataclasses.replace(form, codes="int8", zero=FP32, scale=FP32, compute=FP32, dtype=FP32)
    fine = dataclasses.replace(wide, inner=FP32)
    one, zero = torch.ones(1, 1), torch.tensor([[0.001953125]])
    codes = torch.tensor([[100]], dtype=torch.int8)
    assert dequantize(wide, codes, one, zero).item() == 100
    assert dequantize(fine, codes, one, zero).item() == 99.998046875
