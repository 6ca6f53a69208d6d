"""What the Triton family of activation quantisers takes, and a kernel's constants."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.contracts import Hashed, short
from qinductor.kernels.quantize import Quantize

BF16, FP16, FP32, E8M0 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e8m0fnu
WIDE = (BF16, FP16, FP32)
# bits of mantissa, exponent bias, largest value
FLOAT8 = {torch.float8_e4m3fn: (3, 7, 448.0), torch.float8_e5m2: (2, 15, 57344.0)}
CODES = (*FLOAT8, torch.int8, torch.uint8)
LARGEST = 1 << 15  # elements of a group, or of a row that is normed: a program has all of them


@dataclasses.dataclass(frozen=True)
class Form(Hashed):
    """What is constant in a kernel for a contract; dtypes are Triton's.

    k, groups    columns and scales of a row
    x            dtype of the inputs; `second`: whether there is another one, gate's up or residual
    gated, activation, limit   of the source; a limit below 0 is none
    widen        whether gate and up are rounded to `product`, the dtype of their product, first
    norm, eps    of the source; `mean` is 1 / k in float32
    y, narrow    dtype of y, and whether rounding to it may change anything
    whole, static   whether one scale is that of all of y, and whether it is given
    compute, blank, least, inverse, qmax, floor, most, empty, power   how s is made; 0 for what
                 is not
    quotient, top, inner, guard, plus   how y / s is: `top` is qmax in `inner`, `guard` the largest
                 s of which 1/s is taken as 0, -1 for none
    clamps, low, high   of the quotient, where the conversion does not clamp as well
    mantissa, bias   of a float code, 0 of an integer
    codes        dtype of a float code
    saturates    whether what is beyond it becomes the largest float code
    beyond, last   bits of the first float32 that becomes `last`, the last code or nan or inf
    units, units_bits   a float32, and its bits, beside which floats are a code's subnormals
    truncate     of integers
    zero, zeros  whether there is a zero point, and its dtype
    scale        "e8m0", "bytes", "packed" or "" where `stored` is the dtype
    """

    k: int
    groups: int
    x: Any
    second: bool
    gated: bool
    activation: str
    limit: float
    widen: bool
    product: Any
    norm: str
    eps: float
    mean: float
    y: Any
    narrow: bool
    whole: bool
    static: bool
    compute: Any
    blank: float
    least: float
    inverse: float
    qmax: float
    floor: float
    most: float
    empty: float
    power: str
    quotient: str
    top: float
    inner: Any
    guard: float
    plus: bool
    clamps: bool
    low: float
    high: float
    mantissa: int
    bias: int
    codes: Any
    saturates: bool
    beyond: int
    last: int
    units: float
    units_bits: int
    truncate: bool
    zero: bool
    zeros: Any
    scale: str
    stored: Any

    __hash__ = Hashed.__hash__  # it is hashed at every launch


def kept(value: float | None, dtype: torch.dtype) -> float:
    """A number as a dtype keeps it; 0 for None."""
    return 0.0 if value is None else float(torch.tensor(value, dtype=dtype))


def bits(value: float) -> int:
    """Bits of a float32."""
    return int(torch.tensor(value, dtype=FP32).view(torch.int32))


@functools.cache
def overflows() -> bool:
    """Whether a cast to e4m3 gives nan beyond the largest code, as it did before torch 2.12."""
    return bool(torch.tensor([500.0]).to(torch.float8_e4m3fn).float().isnan())


@functools.cache
def device_form(contract: Quantize) -> Form:
    """The constants of the kernels for this contract."""
    import triton.language as tl

    c, source = contract, contract.source
    named = {
        BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32, torch.int8: tl.int8,
        torch.uint8: tl.uint8, torch.int32: tl.int32, torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
    }  # fmt: skip
    product = source.inner if source.activation and source.inner else c.x
    mantissa, bias, largest = FLOAT8.get(c.codes, (0, 0, 0.0))
    low, high = (kept(bound, c.inner) for bound in (c.low, c.high))
    saturates = mantissa > 0 and c.low is not None and -low == high == largest
    last, beyond, units = 0, 0, 1.0
    if mantissa:
        infinite = mantissa == 2 or overflows()
        last = {3: 0x7E, 2: 0x7B}[mantissa] + (infinite and not saturates)
        beyond = bits(464.0) + 1 if mantissa == 3 else bits(61440.0)
        beyond = bits(largest) if saturates or not infinite else beyond
        units = 2.0 ** (24 - bias - mantissa)
    return Form(
        c.k, c.groups, named[c.x], bool(source.gate) or c.residual, bool(source.gate),
        source.activation, -1.0 if source.limit is None else kept(source.limit, c.x),
        product != c.x, named[product], source.norm, source.eps or 0.0, kept(1 / c.k, FP32),
        named[source.y], source.y not in (product, FP32), not c.group, c.static,
        named[c.compute], kept(c.blank, c.compute), kept(c.least, c.compute),
        kept(1 / c.qmax, FP32) if c.inverse else 0.0, kept(c.qmax, FP32),
        kept(c.floor, c.compute), kept(c.most, c.compute), kept(c.empty, c.compute), c.power,
        c.quotient, kept(c.qmax, c.inner), named[c.inner],
        kept(c.floor, c.inner) if c.guard else -1.0, c.plus,
        c.low is not None and not saturates, low, high, mantissa, bias,
        named.get(c.codes), saturates or (mantissa == 3 and not overflows()), beyond, last,
        units, bits(units), c.truncate, c.zero is not None, named[c.zero or FP32],
        {E8M0: "e8m0", torch.uint8: "bytes", torch.int32: "packed"}.get(c.scale, ""),
        named.get(c.scale, tl.uint8),
    )  # fmt: skip


def unsupported(contract: Quantize) -> str | None:
    """None, or one sentence with what the contract has and what the kernels take."""
    return next(filter(None, (*_source(contract), *_scales(contract), *_codes(contract))), None)


def _source(c: Quantize) -> Sequence[str | None]:
    """What is wrong with the source."""
    source = c.source
    dtypes = [c.x, source.y, *([source.inner] if source.activation else ())]
    wrong = [short(dtype) for dtype in dtypes if dtype not in WIDE]
    row = c.k if source.norm else c.group
    return (
        f"the source has {wrong[0]}; it takes bf16, fp16 and fp32" if wrong else None,
        f"limit is {source.limit}; it takes none below 0" if (source.limit or 0) < 0 else None,
        f"gelu has the erf of CUDA {torch.version.cuda}, of other bits; it takes CUDA 13's"
        if source.activation == "gelu" and not (torch.version.cuda or "13").startswith("13")
        else None,
        "gelu_tanh in fp32, where a bit may differ from eager's; it takes bf16 and fp16"
        if source.activation == "gelu_tanh" and FP32 in (source.inner, c.x)
        else None,
        "k is 0; it takes no empty rows" if not c.k else None,
        "a norm and a gate; it takes one of them" if source.norm and source.gate else None,
        f"{row} elements have a scale or a norm of their own; it takes up to {LARGEST}"
        if row > LARGEST
        else None,
    )


def _scales(c: Quantize) -> Sequence[str | None]:
    """What is wrong with the scales."""
    exponents = (E8M0, torch.uint8, torch.int32)
    kinds = (*WIDE, *exponents)
    return (
        f"s is computed in {short(c.compute)}, y / s in {short(c.inner)}; it takes bf16, fp16, fp32"
        if c.compute not in WIDE or c.inner not in WIDE
        else None,
        f"s is stored in {short(c.scale)}; it takes {', '.join(map(short, kinds))}"
        if c.scale not in kinds
        else None,
        "one scale for the whole tensor, in words of four; it takes groups of a row"
        if c.scale is torch.int32 and not c.group
        else None,
        f"amax {c.blank} where it is not above 0; it takes numbers above 0"
        if c.blank is not None and not c.blank > 0
        else None,
        f"a power of two, or its exponent, from s in {short(c.compute)}; it takes fp32"
        if c.compute is not FP32 and (c.power or c.scale in exponents)
        else None,
        f"a given scale for groups of {c.group}; it takes one for the whole tensor"
        if c.static and c.group
        else None,
        "a given scale that is an exponent without its number; it takes e8m0"
        if c.static and c.scale in exponents[1:]
        else None,
        f"a given scale and quotient {c.quotient}; amax is not computed then"
        if c.static and c.quotient == "x*(q/a)"
        else None,
        "a given scale and a zero point that is not; it takes neither or both dynamic"
        if c.static and c.zero is not None
        else None,
    )


def _codes(c: Quantize) -> Sequence[str | None]:
    """What is wrong with the codes."""
    if c.codes not in CODES:
        return (f"codes are {short(c.codes)}; it takes {', '.join(map(short, CODES))}",)
    if c.codes in FLOAT8:
        return ("float codes and a zero point" if c.zero is not None else None,)
    if c.low is None or c.high is None:
        return ("integer codes without a clamp; the cast then depends on the device",)
    limits = torch.iinfo(c.codes)
    fits = limits.min <= c.low <= c.high <= limits.max and c.low == int(c.low)
    return (
        f"integer codes from {c.low} to {c.high}; it takes whole numbers that fit"
        if not fits or c.high != int(c.high)
        else None,
        f"zero points in layout {c.layout}; it takes row"
        if c.zero is not None and c.layout != "row"
        else None,
        f"zero points {short(c.zero)}; it takes up to 32 bits"
        if c.zero not in (None, *WIDE, torch.int8, torch.uint8, torch.int32)
        else None,
    )
