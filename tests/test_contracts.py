"""Contracts: what is printed is read back; `dequantize` against one element at a time."""

import dataclasses
import itertools

import pytest
import torch

from qinductor.contracts import (
    CODEBOOKS,
    FLOAT_CODES,
    QuantizedWeight,
    WeightFormat,
    code_range,
    dequantize,
    parse,
    render,
    short,
)
from qinductor.kernels.dequant_matmul import DequantMatmul

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = WeightFormat("int4", 5, 7, 1, 7, "q*s", BF16, None, BF16, BF16, BF16)
MATMUL = DequantMatmul(BASE, BF16, BF16, None, False)
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]
TABLES = [f"table{bits}" for bits in range(1, 9)]
CODES = [*INTEGERS, *FLOAT_CODES, *CODEBOOKS, *TABLES]
SCALES = ("", *(f"{i}{s}" for s in "st" for i in "*/"))
SCALES += tuple(a + b for a in SCALES[1:] for b in SCALES[1:] if a[1] != b[1])
ARITHMETIC = [
    "q-z",
    *("".join(parts) for parts in itertools.product(("q", "(q-z)"), SCALES, ("", "+z", "-z*s"))),
]
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


def form_of(codes: str, arithmetic: str, i: int, bn: int, bk: int) -> WeightFormat:
    """A format of 5 x 7 whose dtypes, table and order vary with i."""
    return WeightFormat(
        codes, 5, 7, bn, bk, arithmetic,
        (BF16, FP32, torch.float8_e4m3fn)[i % 3] if "s" in arithmetic else None,
        (torch.int8, FP16, torch.uint8)[i % 3] if "z" in arithmetic else None,
        *DTYPES[i % len(DTYPES)],
        outer=(FP32, BF16)[i % 2] if "t" in arithmetic else None,
        table=(BF16, FP32, FP16)[i % 3] if codes in TABLES else None,
        permuted=i % 4 == 1,
    )  # fmt: skip


def formats() -> list[WeightFormat]:
    """Every code type and every arithmetic, with blocks and dtypes that vary along."""
    pairs = [(codes, ARITHMETIC[i % len(ARITHMETIC)]) for i, codes in enumerate(CODES * 2)]
    pairs += [(CODES[i * 5 % len(CODES)], arithmetic) for i, arithmetic in enumerate(ARITHMETIC)]
    return [
        form_of(codes, arithmetic, i, *BLOCKS[i % len(BLOCKS)])
        for i, (codes, arithmetic) in enumerate(pairs)
    ]


@pytest.mark.parametrize("form", formats(), ids=str)
def test_what_is_printed_is_read_back(form):
    assert parse(WeightFormat, str(form)) == form
    for x, output, bias in itertools.product((BF16, FP32), (None, FP16), (False, True)):
        contract = DequantMatmul(form, x, x, output, bias)
        assert parse(DequantMatmul, str(contract)) == contract
        assert hash(parse(DequantMatmul, str(contract))) == hash(contract)


def test_contracts_that_differ_print_differently():
    changes = {
        "codes": "uint4", "n": 6, "k": 8, "bn": 5, "bk": 1, "arithmetic": "q/s", "scale": FP32,
        "zero": FP32, "inner": FP32, "compute": FP32, "dtype": FP32, "outer": FP32, "table": FP32,
        "permuted": True,
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
    widths = {"int1": 1, "uint3": 3, "int8": 8, "float8_e5m2": 8, "float4_e2m1fn": 4, "table6": 6}
    assert {c: dataclasses.replace(BASE, codes=c).bits for c in widths} == widths


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
    full = dataclasses.replace(
        BASE, codes="table3", arithmetic="q*s*t", table=FP16, outer=FP32, permuted=True
    )
    assert (
        DequantMatmul(full, BF16, BF16, None, False, 8).summary
        == "bf16 x 8 experts of table3[5,7] channel scale bf16 row scale fp32 table fp16 q*s*t "
        "permuted"
    )
    assert short(torch.float8_e4m3fn) == "float8_e4m3fn" and short(torch.float64) == "fp64"


def weight(form: WeightFormat, seed: int = 0) -> QuantizedWeight:
    """Random codes, scales (of both signs where none divides), zeros, table and order."""
    g = torch.Generator().manual_seed(seed)
    if form.codes in FLOAT_CODES:
        codes = (torch.randn(form.n, form.k, generator=g) * 30).to(FLOAT_CODES[form.codes])
    else:
        low, high = code_range(form.codes) or (0, (1 << form.bits) - 1)
        codes = torch.randint(low, high + 1, (form.n, form.k), generator=g).to(form.storage)

    def numbers(shape: tuple[int, ...], dtype: torch.dtype | None, divides: bool = False):
        values = torch.randn(shape, generator=g)
        return None if dtype is None else (values.abs() + 0.25 if divides else values).to(dtype)

    zero = None
    if form.zero is not None:
        zero = torch.rand(form.grid, generator=g) * 15
        zero = (zero if form.zero.is_floating_point else zero.floor()).to(form.zero)
    return QuantizedWeight(
        form,
        codes,
        numbers(form.grid, form.scale, "/s" in form.arithmetic),
        zero,
        numbers((form.n,), form.outer, "/t" in form.arithmetic),
        numbers((1 << form.bits,), form.table),
        torch.randperm(form.k, generator=g) if form.permuted else None,
    )


def element(form: WeightFormat, q: float, s: float, z: float, t: float) -> float:
    """One element, each operation in float64 and rounded at once (exact for these widths)."""

    def rounded(value: float, dtype: torch.dtype) -> float:
        return torch.tensor(value, dtype=torch.float64).to(dtype).item()

    def c(value: float) -> float:
        return rounded(value, form.compute)

    def i(value: float) -> float:
        return rounded(value, form.inner)

    text, value = form.arithmetic.removeprefix("q"), c(q)
    if text == "-z" or text.startswith("("):
        text, value = form.arithmetic.removeprefix("(q-z)").removeprefix("q-z"), c(i(i(q) - i(z)))
    while text[:1] in ("*", "/"):
        other = c({"s": s, "t": t}[text[1]])
        value = c(value * other if text[0] == "*" else value / other)
        text = text[2:]
    if text == "+z":
        value = c(value + c(z))
    elif text == "-z*s":
        value = c(value - c(c(z) * c(s)))
    else:
        assert not text
    return rounded(value, form.dtype)


def one_at_a_time(w: QuantizedWeight) -> torch.Tensor:
    """W from what the docstrings of `WeightFormat` and `QuantizedWeight` say of each element."""
    form, found = w.format, torch.empty(w.format.n, w.format.k, dtype=w.format.dtype)
    table = CODEBOOKS.get(form.codes, w.table)
    for n, position in itertools.product(range(form.n), range(form.k)):
        k = position if w.order is None else int(w.order[position])
        at = n // form.bn, position // form.bk
        q = float(w.codes[n, k])
        q = q if table is None else float(table[int(q)])
        s, z = (0.0 if grid is None else float(grid[at]) for grid in (w.scale, w.zero))
        t = 0.0 if w.outer is None else float(w.outer[n])
        found[n, k] = element(form, q, s, z, t)
    return found


def bits(w: torch.Tensor) -> list[int]:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.itemsize]
    return w.contiguous().view(kind).flatten().tolist()


def check(form: WeightFormat, seed: int) -> None:
    given = weight(form, seed)
    tensors = [value for value in vars(given).values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    got, want = dequantize(given), one_at_a_time(given)
    assert bits(got) == bits(want), f"{form}\ngot {got}\nwanted {want}"
    assert got.is_contiguous() and got.shape == (5, 7)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float(), old.float()), "an operand was written to"


@pytest.mark.parametrize("bn, bk", BLOCKS)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_dequantize_equals_one_element_at_a_time(arithmetic, bn, bk):
    for i in range(3):
        check(form_of(CODES[(i * 7 + bn + bk) % len(CODES)], arithmetic, i + bn, bn, bk), i)


@pytest.mark.parametrize("codes", CODES)
def test_every_code_is_the_value_it_should_be(codes):
    for i in range(4):
        check(form_of(codes, "q*s", i, *BLOCKS[i]), i)


@pytest.mark.parametrize("bad", ["", "q*", "q*s*s", "q*t/t", "q-s", "(q)*s", "q*z", "q*s-z", "s*q"])
def test_an_arithmetic_that_does_not_exist(bad):
    with pytest.raises(ValueError, match="no arithmetic"):
        dataclasses.replace(BASE, arithmetic=bad)


def test_a_zero_without_brackets_is_taken_as_it_is_read():
    """q-z*s is q - (z * s)."""
    form = WeightFormat("int4", 1, 1, 1, 1, "q-z*s", FP32, FP32, FP32, FP32, FP32)
    numbers = (torch.full((1, 1), value) for value in (3.0, 0.5))
    codes = torch.tensor([[2]], dtype=torch.int8)
    assert dequantize(QuantizedWeight(form, codes, *numbers)).item() == 2 - 0.5 * 3


@pytest.mark.parametrize("bad", ["int0", "int9", "uint16", "table9", "table", "float4", "int44"])
def test_codes_that_do_not_exist(bad):
    with pytest.raises(ValueError, match="no code type"):
        dataclasses.replace(BASE, codes=bad)


@pytest.mark.parametrize("form", formats(), ids=str)
def test_rows_from_a_block_border_are_the_whole_s(form):
    given = weight(form)
    whole = dequantize(given)
    for start, stop in itertools.combinations([*range(0, 5, form.bn), 5], 2):
        part = given.rows(start, stop - start)
        assert part.format.n == stop - start and part.codes.shape == (stop - start, 7)
        assert bits(dequantize(part)) == bits(whole[start:stop]), f"rows {start} to {stop}"


def test_the_order_of_rounding_is_told_apart():
    """s is 0.10009765625; 2 * s is exact in bf16, while 3 * s = 0.30029296875 rounds up."""
    codes, scale = torch.tensor([[3]], dtype=torch.int8), torch.tensor([[0.1]], dtype=BF16)
    zero = torch.tensor([[1]], dtype=torch.int8)
    form = WeightFormat("int4", 1, 1, 1, 1, "(q-z)*s", BF16, torch.int8, BF16, BF16, BF16)
    other = dataclasses.replace(form, arithmetic="q*s-z*s")
    assert dequantize(QuantizedWeight(form, codes, scale, zero)).item() == 0.2001953125
    assert dequantize(QuantizedWeight(other, codes, scale, zero)).item() == 0.201171875
    # The same operations in fp32 round once, at the end.
    exact = dataclasses.replace(other, compute=FP32)
    assert dequantize(QuantizedWeight(exact, codes, scale, zero)).item() == 0.2001953125
    # A zero that bf16 cannot hold: q - z in fp32 is exact, in bf16 it is not.
    wide = dataclasses.replace(form, codes="int8", zero=FP32, scale=FP32, compute=FP32, dtype=FP32)
    fine = dataclasses.replace(wide, inner=FP32)
    one, zero = torch.ones(1, 1), torch.tensor([[0.001953125]])
    codes = torch.tensor([[100]], dtype=torch.int8)
    assert dequantize(QuantizedWeight(wide, codes, one, zero)).item() == 100
    assert dequantize(QuantizedWeight(fine, codes, one, zero)).item() == 99.998046875
